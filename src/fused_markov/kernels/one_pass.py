"""The one-pass engine's kernels: guess; link and walk, or chain; check and settle until all is
settled.
"""

import triton
import triton.language as tl

from fused_markov.kernels.chain import chain_row
from fused_markov.kernels.check import check_all
from fused_markov.kernels.grid import grid_barrier
from fused_markov.kernels.guess import guess_all
from fused_markov.kernels.link import link_item
from fused_markov.kernels.rows import as_scalar, load_anchor, load_slot
from fused_markov.kernels.settle import settle_all
from fused_markov.kernels.shape import shape_all
from fused_markov.kernels.walk import walk_row


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def guess_kernel(io, scratch, cfg: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        WIDTH: tl.constexpr = cfg.PASSES + 1
        for i in tl.static_range(WIDTH):
            tl.store(scratch.num_active + i, 0)
        nothing = tl.full([], 0, tl.int64)
        tl.store(scratch.passes, nothing)
        # A launch before may have had another number of programs.
        tl.store(scratch.arrivals, nothing)
    guess_all(io, scratch, pid, tl.num_programs(0), cfg)


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def link_kernel(io, scratch, cfg: tl.constexpr):
    """Links of all rows; the program that finishes a row's last one walks the row."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    parts: tl.constexpr = cfg.CANDIDATES // cfg.PREDECESSORS
    per_row: tl.constexpr = cfg.STEPS * parts
    for item in range(pid, io.rows * per_row, programs):
        m, part = as_scalar(item) // parts, item % parts
        r = m // cfg.STEPS
        slot = load_slot(io, r, m % cfg.STEPS, True)
        if slot >= 0:
            link_item(io, scratch, m, slot, part, cfg)
        tl.debug_barrier()
        if tl.atomic_add(scratch.links_left + r, 1, sem="acq_rel", scope="gpu") == per_row - 1:
            tl.debug_barrier()
            tl.store(scratch.links_left + r, 0)
            walk_row(io, scratch, r, cfg)


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def chain_kernel(io, scratch, cfg: tl.constexpr):
    """In place of links and walk: each row's chain of guesses, a program a row."""
    r = tl.program_id(0)
    anchor = load_anchor(io, r, r >= 0)
    AHEAD: tl.constexpr = cfg.CHAIN_AHEAD
    PIECE: tl.constexpr = cfg.CHAIN_K
    STAGES: tl.constexpr = cfg.CHAIN_STAGES
    counter = scratch.num_active
    chain_row(io, scratch, r, r * 0, anchor, r >= 0, counter, AHEAD, PIECE, STAGES, cfg)


@triton.jit(do_not_specialize=["io", "scratch"], do_not_specialize_on_alignment=["scratch"])
def passes_kernel(io, w2_tiles, scratch, cfg: tl.constexpr):
    """Passes over W2 until every row is settled; a cooperative launch."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    passes = as_scalar(0)
    count = tl.load(scratch.num_active)
    while count > 0:
        check_all(io, w2_tiles, scratch, pid, programs, count, cfg)
        grid_barrier(scratch.arrivals)
        passes += 1
        if cfg.SHAPED:
            shape_all(io, scratch, pid, programs, cfg)
            grid_barrier(scratch.arrivals)
        settle_all(io, scratch, pid, programs, count, scratch.num_active + passes, cfg)
        grid_barrier(scratch.arrivals)
        count = tl.load(scratch.num_active + passes)
    if pid == 0:
        tl.store(scratch.passes, passes.to(tl.int64))


@triton.jit(
    do_not_specialize=["io", "scratch", "index"], do_not_specialize_on_alignment=["scratch"]
)
def check_kernel(io, w2_tiles, scratch, index, cfg: tl.constexpr):
    """Pass number ``index``; idle where nothing is left to check."""
    pid = tl.program_id(0)
    count = tl.load(scratch.num_active + index)
    if count > 0:
        check_all(io, w2_tiles, scratch, pid, tl.num_programs(0), count, cfg)
        if pid == 0:
            tl.store(scratch.passes, (index + 1).to(tl.int64))


@triton.jit(
    do_not_specialize=["io", "scratch", "index"], do_not_specialize_on_alignment=["scratch"]
)
def settle_kernel(io, scratch, index, cfg: tl.constexpr):
    count = tl.load(scratch.num_active + index)
    if count > 0:
        counter = scratch.num_active + index + 1
        settle_all(io, scratch, tl.program_id(0), tl.num_programs(0), count, counter, cfg)


@triton.jit(
    do_not_specialize=["io", "scratch", "index"], do_not_specialize_on_alignment=["scratch"]
)
def shape_kernel(io, scratch, index, cfg: tl.constexpr):
    """Between a check and its settling, where those are launched apart."""
    if tl.load(scratch.num_active + index) > 0:
        shape_all(io, scratch, tl.program_id(0), tl.num_programs(0), cfg)
