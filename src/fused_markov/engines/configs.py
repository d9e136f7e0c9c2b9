"""Tile sizes of the GPU engines, as data, each with the reason it was chosen."""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = 128


@dataclass(frozen=True)
class OnePassConfig:
    """How the one-pass engine runs up to ``max_row_steps`` row-steps M = R * S.

    Attributes:
        max_row_steps: largest M this is for.
        chunks: parts of the vocabulary that are guessed apart.
        guess_m: row-steps that a guessing program looks at side by side.
        lanes: tokens that it looks at side by side.
        guess_warps: warps of a guessing program.
        predecessors: predecessors whose links a program finds at once.
        link_warps: warps of a linking program.
        prefetch: bytes of W2 asked of L2 while linking.
        block_m: row-steps of a check's tile.
        block_v: candidates of a check's tile, for 512 bytes a row of W2.
        block_k: part of the rank multiplied at a time.
        stages: software pipelining over the rank.
        check_warps: warps of a checking program.
        programs_per_sm: checking programs resident on a multiprocessor.
        check_registers: most registers of a thread of theirs, so that they fit.
    """

    max_row_steps: int
    chunks: int
    guess_m: int
    lanes: int
    guess_warps: int
    predecessors: int
    link_warps: int
    prefetch: int
    block_m: int
    block_v: int
    block_k: int
    stages: int
    check_warps: int
    programs_per_sm: int
    check_registers: int


@dataclass(frozen=True)
class PerStepConfig:
    """How the per-step engine runs up to ``max_rows`` rows; fields as in `OnePassConfig`."""

    max_rows: int
    block_m: int
    block_v: int
    block_k: int
    stages: int
    num_warps: int
    programs_per_sm: int


MB = 1 << 20

HOPPER = (
    OnePassConfig(16, 32, 1, 4096, 4, 16, 4, 24 * MB, 16, 128, 64, 3, 4, 3, 168),
    OnePassConfig(64, 32, 4, 1024, 4, 32, 4, 24 * MB, 64, 128, 64, 3, 4, 3, 168),
    OnePassConfig(1 << 30, 32, 8, 512, 4, 64, 4, 24 * MB, 64, 128, 64, 3, 4, 3, 168),
)

PER_STEP = (
    PerStepConfig(16, 16, 128, 64, 3, 4, 2),
    PerStepConfig(1 << 30, 64, 128, 64, 3, 8, 1),
)
