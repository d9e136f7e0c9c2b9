"""Tile sizes of the GPU engines, as data, each with the reason it was chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OnePassConfig:
    """How the one-pass engine runs up to ``max_row_steps`` row-steps M = R * S.

    Attributes:
        max_row_steps: largest M this is for.
        block_m: row-steps a tile; at least M where the embeddings stay in registers.
        block_v: candidates a tile, for a rank of up to 256 in two bytes.
        chunks: parts of the vocabulary that are guessed apart.
        lanes: tokens a guessing program looks at side by side.
        num_warps: warps a program.
        stages: software pipelining of the loop over tiles.
        programs_per_sm: programs resident on a multiprocessor.
        prefetch: tiles of W2 that a program asks L2 for while it guesses.
    """

    max_row_steps: int
    block_m: int
    block_v: int
    chunks: int
    lanes: int
    num_warps: int
    stages: int
    programs_per_sm: int
    prefetch: int


CANDIDATES = 128

HOPPER = (
    OnePassConfig(16, 16, 64, 32, 4096, 8, 4, 1, 8),
    OnePassConfig(64, 64, 128, 8, 4096, 8, 2, 1, 4),
    OnePassConfig(1 << 30, 64, 128, 4, 4096, 8, 1, 2, 2),
)
