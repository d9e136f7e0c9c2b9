"""Tile sizes for AMD GPUs, as data, each with its reason.

Nothing here was measured: there was no AMD GPU. The reasons are bytes, occupancy, and what Triton
3.6 reports of its code for gfx942 at V=129280, rank 256, S=5, bf16, T=1 with a cache
(`benchmarks/amd_table.py` finds it again; docs/amd.md).

- One matrix instruction, 16x16, for all tiles (`Chip.options`): its length decides in which order
  products are added, and a row's bits must not depend on the tile.
- One stage everywhere. The backend turns two into a second copy of the tile in registers and LDS:
  236 VGPRs instead of 188 for 16 rows, so that only one program fits and hides less. What hides
  latency instead is the neighbour on the same compute unit: two programs of 32 KiB of W2 each are
  64 KiB in flight, and 304 compute units need 14 KiB each to keep 5.3 TB/s busy over 0.8 us.
- No limit on registers: what the compiler takes by itself spills nothing into memory.
"""

from __future__ import annotations

from dataclasses import replace

from fused_markov.engines.configs import OnePassConfig, PerStepConfig

# gfx942: 64 KiB of LDS, 512 VGPRs a lane and SIMD, waves of 64.
ONE_PASS_GFX942 = (
    # Up to 16 row-steps. 64 chunks are 320 guessing programs at R=1, one for each of the 304
    # compute units, and a chunk of 2020 tokens is one look of 2048 lanes. Two waves of 8 tokens a
    # lane read base and write cache 16 bytes at a time; with four waves it would be 8.
    OnePassConfig(
        max_row_steps=16,
        chunks=64,
        guess_m=1,
        lanes=2048,
        guess_warps=4,
        predecessors=16,
        link_warps=4,
        chain_warps=4,
        link_stages=1,
        block_m=16,
        block_v=64,
        stages=1,
        check_warps=2,
        programs_per_sm=2,
        check_registers=0,
    ),
    # Any number. A tile of 64 rows takes 53 vector instructions a token where one of 16 takes 65;
    # 32 candidates let two programs share 64 KiB of LDS. Eight waves would be four a SIMD instead
    # of two, but they would read base and write cache 8 bytes at a time.
    OnePassConfig(
        max_row_steps=1 << 30,
        chunks=32,
        guess_m=8,
        lanes=512,
        guess_warps=4,
        predecessors=16,
        link_warps=4,
        chain_warps=4,
        link_stages=1,
        block_m=64,
        block_v=32,
        stages=1,
        check_warps=4,
        programs_per_sm=2,
        check_registers=0,
    ),
)

# The same tiles, as the same code runs in both.
PER_STEP_GFX942 = (
    PerStepConfig(max_rows=16, block_m=16, block_v=64, stages=1, num_warps=2, programs_per_sm=2),
    PerStepConfig(
        max_rows=1 << 30, block_m=64, block_v=32, stages=1, num_warps=4, programs_per_sm=2
    ),
)

# gfx950: the same registers, and LDS for four programs of two waves where gfx942 has it for two.
ONE_PASS_GFX950 = (replace(ONE_PASS_GFX942[0], programs_per_sm=4), ONE_PASS_GFX942[1])
PER_STEP_GFX950 = (replace(PER_STEP_GFX942[0], programs_per_sm=4), PER_STEP_GFX942[1])

# gfx1100: waves of 32, so twice as many for a check's lanes. Its matrix unit wants both halves of a
# wave to hold the same rows: whole rows of W1 would be 128 VGPRs and spill, so that a check takes
# the rank in pieces (`Chip.row_bytes`). A multiprocessor is two compute units.
ONE_PASS_GFX1100 = tuple(
    replace(config, check_warps=2 * config.check_warps, programs_per_sm=3)
    for config in ONE_PASS_GFX942
)
PER_STEP_GFX1100 = tuple(
    replace(config, num_warps=2 * config.num_warps, programs_per_sm=3) for config in PER_STEP_GFX942
)

AMD_CONFIGS = {
    "gfx942": (ONE_PASS_GFX942, PER_STEP_GFX942),
    "gfx950": (ONE_PASS_GFX950, PER_STEP_GFX950),
    "gfx1100": (ONE_PASS_GFX1100, PER_STEP_GFX1100),
}
