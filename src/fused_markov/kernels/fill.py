"""-inf into the cache columns that no candidate maps to."""

import triton
import triton.language as tl

from fused_markov.kernels.rows import as_scalar, cache_offset, load_slot

WIDTH = tl.constexpr(1024)


@triton.jit
def fill_unmapped(io, r, s, cfg: tl.constexpr):
    """Of one row-step: the holes below the target vocabulary, then the columns past it."""
    slot = load_slot(io, r, s, True)
    if slot >= 0:
        row = io.cache + cache_offset(io, slot, s, cfg)
        lowest = tl.full([WIDTH], float("-inf"), tl.float32).to(cfg.CACHE)
        for first in range(0, io.num_fill, WIDTH):
            i = as_scalar(first) + tl.arange(0, WIDTH)
            mask = i < io.num_fill
            hole = tl.load(io.holes + i, mask=mask & (i < io.num_holes), other=0)
            column = tl.where(i < io.num_holes, hole, io.fill_from + i - io.num_holes)
            tl.store(row + column, lowest, mask=mask)
