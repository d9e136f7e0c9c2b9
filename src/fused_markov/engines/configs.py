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


# Chosen on one H200 (docs/performance.md), V=129280, rank 256, S=5, bf16, T=1.
ONE_PASS = (
    # Up to 16 row-steps. Links want many small work items; a check's tile of 16 rows wastes the
    # least. Three programs a multiprocessor beat four (fewer registers) and two (8 warps). Asking
    # L2 for W2 while linking cost the link launch more than it saved the check.
    OnePassConfig(
        max_row_steps=16,
        chunks=32,
        guess_m=1,
        lanes=4096,
        guess_warps=4,
        predecessors=16,
        link_warps=4,
        prefetch=0,
        block_m=16,
        block_v=128,
        block_k=64,
        stages=3,
        check_warps=4,
        programs_per_sm=3,
        check_registers=168,
    ),
    # Up to 64 row-steps. Eight warps of 128 registers keep a 64-row tile out of local memory:
    # 64 us where four of 168 took 100. 32 chunks guess in 11 us, 16 in 20.
    OnePassConfig(
        max_row_steps=64,
        chunks=32,
        guess_m=4,
        lanes=1024,
        guess_warps=4,
        predecessors=32,
        link_warps=4,
        prefetch=0,
        block_m=64,
        block_v=128,
        block_k=64,
        stages=3,
        check_warps=8,
        programs_per_sm=2,
        check_registers=128,
    ),
    # Any number. Half as wide a tile lets four programs share a multiprocessor and hide each
    # other's latency: 198 us against 207 (wide, 8 warps), 257 (128 rows) and 335 (wide, 4 warps).
    OnePassConfig(
        max_row_steps=1 << 30,
        chunks=32,
        guess_m=8,
        lanes=512,
        guess_warps=4,
        predecessors=64,
        link_warps=4,
        prefetch=0,
        block_m=64,
        block_v=64,
        block_k=64,
        stages=3,
        check_warps=4,
        programs_per_sm=4,
        check_registers=128,
    ),
)

# Not yet measured: the one-pass tiles that did best, two programs a multiprocessor or one.
PER_STEP = (
    PerStepConfig(
        max_rows=16,
        block_m=16,
        block_v=128,
        block_k=64,
        stages=3,
        num_warps=4,
        programs_per_sm=2,
    ),
    PerStepConfig(
        max_rows=1 << 30,
        block_m=64,
        block_v=128,
        block_k=64,
        stages=3,
        num_warps=8,
        programs_per_sm=1,
    ),
)
