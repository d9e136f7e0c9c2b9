"""The per-step engine's kernels: one launch a draft step over the vocabulary, and a small last one.

A step's programs first take the winners that the step before left in parts, so that no launch in
between is needed; nothing of a step is known to the host, and one compiled kernel serves them all.
"""

import triton
import triton.language as tl

from fused_markov.kernels.bans import ban_offset
from fused_markov.kernels.check import check_tiles
from fused_markov.kernels.fill import fill_unmapped
from fused_markov.kernels.rows import (
    LOWEST_NEED,
    NO_ID,
    as_scalar,
    base_offset,
    cache_offset,
    load_anchor,
    load_noise,
    load_slot,
    winner_of_parts,
)
from fused_markov.kernels.shape import shaped_winner
from fused_markov.kernels.variant import ROWS, STEP_COLUMNS, embed_columns, embed_index

PARTS_AT_ONCE = tl.constexpr(32)


@triton.jit
def _winner(io, scratch, r, in_batch, step, parts, cfg: tl.constexpr):
    """Token (0 where padded), score and liveness of rows [BLOCK_M] at a finished step."""
    live = load_slot(io, r, step, in_batch) >= 0
    half = (step % 2) * parts
    best, best_id = winner_of_parts(scratch, half, parts, io.rows, r, live, PARTS_AT_ONCE, cfg.FP64)
    if cfg.SHAPED:
        best, best_id, _taken = shaped_winner(scratch, r, live, best, best_id, cfg)
    token = tl.where(live, tl.where(best_id == NO_ID, io.lowest_id, best_id), 0)
    return token, best, live


@triton.jit
def _write_winner(io, r, in_batch, step, token, best, live, cfg: tl.constexpr):
    at = r.to(tl.int64) * io.token_row + step.to(tl.int64) * io.token_step
    tl.store(io.tokens + at, token, mask=in_batch)
    odd = live & ((tl.abs(best) < float("inf")) == 0)
    tl.store(io.nonfinite + r * cfg.STEPS + step, odd, mask=in_batch)


@triton.jit
def _sample_part(io, w2_tiles, r, in_batch, step, prev, pid, parts, cfg: tl.constexpr):
    """Best score and id of rows [BLOCK_M] over this program's tiles."""
    slot = load_slot(io, r, step, in_batch)
    live = slot >= 0
    base_at = base_offset(io, r, step, cfg)
    cache_at, temp, state, state64, ban = base_at, 0.0 * r, r, r, base_at
    if cfg.CACHED:
        cache_at = cache_offset(io, tl.where(live, slot, 0), step, cfg)
    if cfg.NOISE:
        temp, state, state64 = load_noise(io, r, step, slot, live, cfg)
    if cfg.BANNED:
        ban = ban_offset(io, tl.where(live, slot, 0), step)
    need = tl.where(live, LOWEST_NEED, float("inf"))
    rows = (prev, live, base_at, cache_at, temp, need, state, state64, ban, prev)
    first = tl.where(tl.max(live.to(tl.int32), axis=0) > 0, pid, io.vocab)
    return check_tiles(io, w2_tiles, rows, first, parts, cfg)


@triton.jit(do_not_specialize=["io", "scratch", "step"], do_not_specialize_on_alignment=["scratch"])
def step_kernel(io, w2_tiles, scratch, step, cfg: tl.constexpr):
    """Draft step ``step`` of all rows; leaves a winner of each program's part of the vocabulary."""
    pid = tl.program_id(0)
    parts = tl.num_programs(0)
    step = as_scalar(step)
    for block in range(0, tl.cdiv(io.rows, cfg.BLOCK_M)):
        r = as_scalar(block) * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
        in_batch = r < io.rows
        prev = load_anchor(io, r, in_batch)
        if step > 0:
            prev, score, was_live = _winner(io, scratch, r, in_batch, step - 1, parts, cfg)
            if pid == 0:
                _write_winner(io, r, in_batch, step - 1, prev, score, was_live, cfg)
        prev = embed_index(r * cfg.STEPS + step, prev, cfg)
        best, best_id = _sample_part(io, w2_tiles, r, in_batch, step, prev, pid, parts, cfg)
        at = ((step % 2) * parts + pid).to(tl.int64) * io.rows + r
        tl.store(scratch.best + at, best, mask=in_batch)
        tl.store(scratch.best_id + at, best_id, mask=in_batch)
    if cfg.FILL:
        for r in range(pid, io.rows, parts):
            fill_unmapped(io, as_scalar(r), step, cfg)


@triton.jit(
    do_not_specialize=["io", "scratch", "step", "parts"],
    do_not_specialize_on_alignment=["scratch"],
)
def embed_kernel(io, scratch, step, parts, cfg: tl.constexpr):
    """Before a step of a head with a variant: its z, after the winners that its ``parts`` left."""
    step = as_scalar(step)
    blocks = tl.cdiv(cfg.RANK, STEP_COLUMNS)
    r = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    in_batch = r < io.rows
    prev, carried = load_anchor(io, r, in_batch), r < 0
    if step > 0:
        prev, _, carried = _winner(io, scratch, r, in_batch, step - 1, parts, cfg)
    live = load_slot(io, r, step, in_batch) >= 0
    first = tl.program_id(0) % blocks * STEP_COLUMNS
    m = r * cfg.STEPS + step
    embed_columns(io, scratch, m, prev, live, carried, live, first, STEP_COLUMNS, cfg)


@triton.jit(
    do_not_specialize=["io", "scratch", "parts"], do_not_specialize_on_alignment=["scratch"]
)
def last_kernel(io, scratch, parts, cfg: tl.constexpr):
    """The last step's tokens, out of the ``parts`` that its programs left."""
    r = tl.program_id(0) * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
    in_batch = r < io.rows
    step = as_scalar(cfg.STEPS - 1)
    token, best, live = _winner(io, scratch, r, in_batch, step, parts, cfg)
    _write_winner(io, r, in_batch, step, token, best, live, cfg)
