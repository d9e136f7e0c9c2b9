"""The one-pass engine's kernels: all phases in one cooperative launch, or one launch a phase."""

import triton
import triton.language as tl

from fused_markov.kernels.chain import chain_all
from fused_markov.kernels.check import check_all, num_parts
from fused_markov.kernels.grid import grid_barrier, prefetch_l2
from fused_markov.kernels.guess import guess_all
from fused_markov.kernels.settle import settle_all

LINE = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def _prefetch_weights(io, pid, programs, cfg: tl.constexpr):
    """Ask L2 for this program's first tiles of W2, to arrive while it guesses."""
    BYTES: tl.constexpr = cfg.WEIGHT.primitive_bitwidth // 8
    LINES: tl.constexpr = cfg.BLOCK_V * cfg.RANK * BYTES // LINE
    tiles = tl.cdiv(io.vocab, cfg.BLOCK_V)
    end = io.vocab.to(tl.int64) * cfg.RANK
    at = tl.arange(0, LINES).to(tl.int64) * (LINE // BYTES)
    COUNT: tl.constexpr = cfg.PREFETCH
    for i in tl.static_range(COUNT):
        tile = pid + i * programs
        if tile < tiles:
            where = tile.to(tl.int64) * cfg.BLOCK_V * cfg.RANK + at
            prefetch_l2(io.w2 + tl.minimum(where, end - 1))


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def fused_kernel(io, scratch, cfg: tl.constexpr):
    """A whole decode step in one cooperative launch."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    WIDTH: tl.constexpr = cfg.PASSES + 1
    # Counters alternate between two sets from launch to launch: one is used, the other cleared.
    parity = tl.load(scratch.launches) % 2
    counters = scratch.num_active + parity * WIDTH
    if cfg.PREFETCH > 0:
        _prefetch_weights(io, pid, programs, cfg)
    guess_all(io, scratch, pid, programs, cfg)
    grid_barrier(scratch.arrivals)
    if pid == 0:
        other = scratch.num_active + (1 - parity) * WIDTH
        for i in tl.static_range(WIDTH):
            tl.store(other + i, 0)
        tl.store(scratch.launches, parity + 1)
    chain_all(io, scratch, pid, programs, counters, cfg)
    grid_barrier(scratch.arrivals)
    passes = parity * 0
    count = tl.load(counters)
    while count > 0:
        check_all(io, scratch, pid, programs, count, cfg)
        grid_barrier(scratch.arrivals)
        passes += 1
        parts = num_parts(io, programs, cfg)
        settle_all(io, scratch, pid, programs, parts, counters + passes, cfg)
        grid_barrier(scratch.arrivals)
        count = tl.load(counters + passes)
    if pid == 0:
        tl.store(scratch.passes, passes.to(tl.int64))


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def guess_kernel(io, scratch, cfg: tl.constexpr):
    pid = tl.program_id(0)
    WIDTH: tl.constexpr = cfg.PASSES + 1
    if pid == 0:
        for i in tl.static_range(WIDTH):
            tl.store(scratch.num_active + i, 0)
        tl.store(scratch.passes, tl.full([], 0, tl.int64))
    guess_all(io, scratch, pid, tl.num_programs(0), cfg)


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def chain_kernel(io, scratch, cfg: tl.constexpr):
    chain_all(io, scratch, tl.program_id(0), tl.num_programs(0), scratch.num_active, cfg)


@triton.jit(
    do_not_specialize=["io", "scratch", "index"], do_not_specialize_on_alignment=["scratch"]
)
def check_kernel(io, scratch, index, cfg: tl.constexpr):
    """Pass number ``index``; idle where nothing is left to check."""
    pid = tl.program_id(0)
    count = tl.load(scratch.num_active + index)
    if count > 0:
        check_all(io, scratch, pid, tl.num_programs(0), count, cfg)
        if pid == 0:
            tl.store(scratch.passes, (index + 1).to(tl.int64))


@triton.jit(
    do_not_specialize=["io", "scratch", "index", "checkers"],
    do_not_specialize_on_alignment=["scratch"],
)
def settle_kernel(io, scratch, index, checkers, cfg: tl.constexpr):
    """After pass number ``index``, which ``checkers`` programs made."""
    count = tl.load(scratch.num_active + index)
    if count > 0:
        counter = scratch.num_active + index + 1
        parts = num_parts(io, checkers, cfg)
        settle_all(io, scratch, tl.program_id(0), tl.num_programs(0), parts, counter, cfg)
