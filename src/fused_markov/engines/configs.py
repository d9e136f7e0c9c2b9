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
        predecessors: predecessors whose links a program finds at once; 0: no links, chains.
        link_warps: warps of a program that links.
        chain_warps: warps of a program that follows a chain.
        link_stages: parts of the rank that either loads ahead.
        block_m: row-steps of a check's tile.
        block_v: candidates of a check's tile, for 512 bytes a row of W2.
        stages: tiles in flight.
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
    chain_warps: int
    link_stages: int
    block_m: int
    block_v: int
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
    stages: int
    num_warps: int
    programs_per_sm: int


# Chosen on one H200 (docs/performance.md), V=129280, rank 256, S=5, bf16, T=1.
ONE_PASS = (
    # Up to 8 row-steps, mostly one request: a check's tile of 8 rows wastes the least.
    OnePassConfig(
        max_row_steps=8,
        chunks=64,
        guess_m=1,
        lanes=2048,
        guess_warps=4,
        predecessors=16,
        link_warps=4,
        chain_warps=8,
        link_stages=3,
        block_m=8,
        block_v=64,
        stages=3,
        check_warps=4,
        programs_per_sm=2,
        check_registers=240,
    ),
    # Up to 16 row-steps. Links want many small work items. Two programs a multiprocessor with two
    # tiles of 32 KiB each on their way fill the memory's pipe.
    OnePassConfig(
        max_row_steps=16,
        chunks=64,
        guess_m=1,
        lanes=2048,
        guess_warps=4,
        predecessors=16,
        link_warps=4,
        chain_warps=8,
        link_stages=3,
        block_m=16,
        block_v=64,
        stages=3,
        check_warps=4,
        programs_per_sm=2,
        check_registers=240,
    ),
    # Up to 64 row-steps: one block of rows, which stays on chip with two tiles.
    OnePassConfig(
        max_row_steps=64,
        chunks=32,
        guess_m=2,
        lanes=512,
        guess_warps=4,
        predecessors=32,
        link_warps=4,
        chain_warps=8,
        link_stages=3,
        block_m=64,
        block_v=64,
        stages=2,
        check_warps=4,
        programs_per_sm=2,
        check_registers=240,
    ),
    # Any number. So many links cost more than one program a row that follows its chain.
    OnePassConfig(
        max_row_steps=1 << 30,
        chunks=16,
        guess_m=4,
        lanes=512,
        guess_warps=4,
        predecessors=0,
        link_warps=4,
        chain_warps=8,
        link_stages=3,
        block_m=64,
        block_v=64,
        stages=2,
        check_warps=4,
        programs_per_sm=2,
        check_registers=240,
    ),
)

# The one-pass tiles that did best.
PER_STEP = (
    PerStepConfig(
        max_rows=16,
        block_m=16,
        block_v=64,
        stages=3,
        num_warps=4,
        programs_per_sm=2,
    ),
    PerStepConfig(
        max_rows=1 << 30,
        block_m=64,
        block_v=64,
        stages=2,
        num_warps=4,
        programs_per_sm=2,
    ),
)
