"""Candidate-limited drafts: a position's best base logits are found once, then a row is one walk.

W2 is read at the candidates alone. `fused_markov.limited` says what is computed.
"""

import triton
import triton.language as tl

from fused_markov.kernels.bans import ban_offset, without_banned
from fused_markov.kernels.link import load_row_noise
from fused_markov.kernels.logits import rounded
from fused_markov.kernels.noise import gumbel, scores
from fused_markov.kernels.rows import (
    NO_ID,
    as_scalar,
    base_offset,
    cache_offset,
    load_anchor,
    load_slot,
    merge_best,
    target_id,
)
from fused_markov.kernels.shape import UNSHAPED, shape_row
from fused_markov.kernels.threshold import (
    LANES,
    cache_column,
    order_key,
    row_block,
    sieve,
    sum_from,
    threshold,
)
from fused_markov.kernels.transforms import transformed


@triton.jit
def _clear_row(io, slot, s, cfg: tl.constexpr):
    """-inf into a whole cached row; the walk then writes the candidates'."""
    at = cache_offset(io, slot, s, cfg)
    lowest = tl.full([LANES], float("-inf"), tl.float32).to(cfg.CACHE)
    for first in range(0, io.cache_width, LANES):
        column = as_scalar(first) + tl.arange(0, LANES)
        tl.store(io.cache + at + column, lowest, mask=column < io.cache_width)


@triton.jit(do_not_specialize=["io", "candidates"], do_not_specialize_on_alignment=["candidates"])
def select_kernel(io, candidates, cfg: tl.constexpr):
    """Candidates [M, LIMIT], ascending, of one row-step a program."""
    m = as_scalar(tl.program_id(0))
    r, s = m // cfg.STEPS, m % cfg.STEPS
    slot = load_slot(io, r, s, True)
    if slot >= 0:
        if cfg.CACHED:
            _clear_row(io, slot, s, cfg)
        row = (base_offset(io, r, s, cfg), ban_offset(io, slot, s))
        wanted = tl.full([], cfg.LIMIT, tl.int64)
        zero, one = tl.full([], 0, tl.uint32), tl.full([], 1.0, tl.float32)
        sieved = sieve(io, row, True, cfg)
        key = threshold(io, row, sieved, wanted, zero, one, one, False, True, cfg.BASE_SHIFT, cfg)
        above = sum_from(io, row, key + 1, one, one, False, True, cfg.BASE_SHIFT, cfg)
        equals = cfg.LIMIT - above.to(tl.int32)  # the first of those are taken
        taken = tl.full([], 0, tl.int32)
        for first in range(0, io.vocab, LANES):
            v, inside, x = row_block(io, row, first, True, cfg)
            here = order_key(x, cfg.BASE_SHIFT)
            if tl.max((inside & (here >= key)).to(tl.int32), axis=0) > 0:
                equal = (inside & (here == key)).to(tl.int32)
                first_equal = (equal > 0) & (tl.cumsum(equal, axis=0) <= equals)
                take = inside & ((here > key) | first_equal)
                place = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
                at = m.to(tl.int64) * cfg.LIMIT + place
                tl.store(candidates + at, v, mask=take)
                taken += tl.sum(take.to(tl.int32), axis=0)
                equals -= tl.sum(equal, axis=0)


@triton.jit
def _gathered_logits(io, m, slot, prev, v, tid, inside, cfg: tl.constexpr):
    """Logits [LIMIT_BLOCK] of candidates ``v``: the fp32 bias is added unrounded."""
    s = m % cfg.STEPS
    acc = tl.full([cfg.LIMIT_BLOCK], 0.0, tl.float32)
    for k0 in range(0, cfg.RANK, cfg.BLOCK_K):
        k = as_scalar(k0) + tl.arange(0, cfg.BLOCK_K)
        in_rank = k < cfg.RANK
        embed = tl.load(io.w1 + prev.to(tl.int64) * cfg.RANK + k, mask=in_rank, other=0.0)
        at = v.to(tl.int64)[:, None] * cfg.RANK + k[None, :]
        w2 = tl.load(io.w2 + at, mask=inside[:, None] & in_rank[None, :], other=0.0)
        acc += tl.sum(w2.to(tl.float32) * embed.to(tl.float32)[None, :], axis=1)
    if cfg.SCALED:
        acc = acc * io.scale
    at = base_offset(io, m // cfg.STEPS, s, cfg)
    base = tl.load(io.base + at + v, mask=inside, other=float("-inf")).to(tl.float32)
    x = rounded(base + acc, cfg.LOGIT, False)
    if cfg.TRANSFORM is not None:
        x = transformed(x, cfg)
    x = rounded(x, cfg.CACHE, False)
    if cfg.BANNED:
        x = without_banned(io, x, ban_offset(io, slot, s), tid, inside, float("-inf"))
    return x


@triton.jit
def _best_candidate(io, candidates, m, slot, prev, cfg: tl.constexpr):
    """Best score and target id of row-step ``m`` after token ``prev``; its logits are cached."""
    s = m % cfg.STEPS
    temp, state, state64 = load_row_noise(io, m, slot, cfg)
    best = tl.full([], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    best_id = tl.full([], NO_ID, tl.int32)
    for first in range(0, cfg.LIMIT, cfg.LIMIT_BLOCK):
        c = as_scalar(first) + tl.arange(0, cfg.LIMIT_BLOCK)
        inside = c < cfg.LIMIT
        v = tl.load(candidates + m.to(tl.int64) * cfg.LIMIT + c, mask=inside, other=0)
        tid = target_id(io, v, inside, cfg)
        x = _gathered_logits(io, m, slot, prev, v, tid, inside, cfg)
        if cfg.CACHED:
            at = cache_offset(io, slot, s, cfg) + cache_column(io, v, inside, cfg)
            tl.store(io.cache + at, x.to(cfg.CACHE), mask=inside)
        if cfg.NOISE:
            z = scores(x, temp, gumbel(state, state64, tid, cfg), cfg)
        else:
            z = tl.where(x == x, x, float("-inf"))
        z = tl.where(inside, z, float("-inf"))
        top = tl.max(z, axis=0)
        winners = inside & (z == top)
        token = tl.min(tl.where(winners, tid, NO_ID), axis=0)
        token = tl.where(top > float("-inf"), token, NO_ID)
        best, best_id = merge_best(best, best_id, top, token)
    if cfg.SHAPED:
        tl.debug_barrier()  # the row's logits are in the cache now
        shaped, shaped_id = shape_row(io, m // cfg.STEPS, s, slot, cfg)
        if shaped_id != UNSHAPED:
            best, best_id = shaped, shaped_id
    return best, best_id


@triton.jit(do_not_specialize=["io", "candidates"], do_not_specialize_on_alignment=["candidates"])
def limited_kernel(io, candidates, cfg: tl.constexpr):
    """A row's tokens, one after another; one program a row."""
    r = as_scalar(tl.program_id(0))
    prev = load_anchor(io, r, r >= 0)
    for step in range(0, cfg.STEPS):
        s = as_scalar(step)
        m = r * cfg.STEPS + s
        slot = load_slot(io, r, s, True)
        token = r * 0
        odd = r < 0
        if slot >= 0:
            best, best_id = _best_candidate(io, candidates, m, slot, prev, cfg)
            token = tl.where(best_id == NO_ID, io.lowest_id, best_id).to(tl.int32)
            odd = (tl.abs(best) < float("inf")) == 0
        at = r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step
        tl.store(io.tokens + at, token)
        tl.store(io.nonfinite + m, odd)
        prev = token
