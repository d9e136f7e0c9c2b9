"""Shape: -inf into a cached row below its threshold, and the best score of what is left.

A row-step is one program's work: it reads the row, which the check has just written, several times
out of L2. `fused_markov.shaping` says what is computed.
"""

import triton
import triton.language as tl

from fused_markov.kernels.noise import gumbel, scores
from fused_markov.kernels.rows import (
    NO_ID,
    as_scalar,
    cache_offset,
    load_noise,
    load_slot,
    merge_best,
    target_id,
)
from fused_markov.kernels.threshold import (
    LANES,
    cache_column,
    order_key,
    row_block,
    sieve,
    sum_from,
    threshold,
    weights,
)

UNSHAPED = tl.constexpr(-1)
UNIT = tl.constexpr(1 << 34)


@triton.jit
def _parameters(io, slot, cfg: tl.constexpr):
    """k (0: off), p (1: off) and the least weight (0: off) of a slot; whether any is on."""
    k = tl.full([], 0, tl.int32)
    p = tl.full([], 1.0, tl.float32)
    min_weight = tl.full([], 0, tl.int64)
    if cfg.TOP_K:
        given = tl.load(io.top_k + slot * io.top_k_slot)
        k = tl.where((given > 0) & (given < io.vocab), given, 0).to(tl.int32)
    if cfg.TOP_P:
        p = tl.load(io.top_p + slot * io.top_p_slot).to(tl.float32)
    if cfg.MIN_P:
        share = tl.load(io.min_p + slot * io.min_p_slot).to(tl.float64)
        share = tl.where(share > 0.0, tl.where(share < 1.0, share, 1.0), 0.0)
        min_weight = (share * UNIT).to(tl.int64)
    return k, p, min_weight, (k > 0) | (p < 1.0) | (min_weight > 0)


@triton.jit
def _least_of_weight(io, row, top, temp, min_weight, cfg: tl.constexpr):
    """The least key of the tokens of at least a weight."""
    least = tl.full([LANES], 0xFFFFFFFF, tl.int64)
    for first in range(0, io.vocab, LANES):
        _v, inside, x = row_block(io, row, first, False, cfg)
        key = order_key(x, cfg.CACHE_SHIFT).to(tl.int64)
        enough = inside & (weights(x, top, temp) >= min_weight)
        least = tl.minimum(least, tl.where(enough, key, 0xFFFFFFFF))
    return tl.min(least, axis=0).to(tl.uint32)


@triton.jit
def _least_kept(io, row, sieved, top, temp, parameters, cfg: tl.constexpr):
    """The key of the threshold: min-p's, then top-k's, then top-p's of what those kept."""
    k, p, min_weight, _on = parameters
    least = tl.full([], 0, tl.uint32)
    if cfg.MIN_P:
        if min_weight > 0:
            least = _least_of_weight(io, row, top, temp, min_weight, cfg)
    if cfg.TOP_K:
        if k > 0:
            all_keys = least * 0
            count = k.to(tl.int64)
            of_k = threshold(
                io, row, sieved, count, all_keys, top, temp, False, False, cfg.CACHE_SHIFT, cfg
            )
            least = tl.maximum(least.to(tl.int64), of_k.to(tl.int64)).to(tl.uint32)
    if cfg.TOP_P:
        if p < 1.0:
            mass = sum_from(io, row, least, top, temp, True, False, cfg.CACHE_SHIFT, cfg)
            share = p.to(tl.float64) * mass.to(tl.float64)
            whole = share.to(tl.int64)
            wanted = tl.maximum(whole + (whole.to(tl.float64) < share).to(tl.int64), 1)
            of_p = threshold(
                io, row, sieved, wanted, least, top, temp, True, False, cfg.CACHE_SHIFT, cfg
            )
            least = tl.maximum(least.to(tl.int64), of_p.to(tl.int64)).to(tl.uint32)
    return least


@triton.jit
def _keep(io, row, least, temp, state, state64, cfg: tl.constexpr):
    """-inf into the cache below ``least``; best score and lowest id of the others."""
    best = tl.full([], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    best_id = tl.full([], NO_ID, tl.int32)
    lowest = tl.full([LANES], float("-inf"), tl.float32).to(cfg.CACHE)
    for first in range(0, io.vocab, LANES):
        v, inside, x = row_block(io, row, first, False, cfg)
        kept = inside & (order_key(x, cfg.CACHE_SHIFT) >= least)
        column = cache_column(io, v, inside, cfg)
        tl.store(io.cache + row[0] + column, lowest, mask=inside & (kept == 0))
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            tid = target_id(io, v, inside, cfg)
            z = scores(x, temp, gumbel(state, state64, tid, cfg), cfg)
            z = tl.where(kept, z, float("-inf"))
            top = tl.max(z, axis=0)
            winners = kept & (z == top)
            token = tl.min(tl.where(winners, tid, NO_ID), axis=0)
            token = tl.where(top > float("-inf"), token, NO_ID)
            best, best_id = merge_best(best, best_id, top, token)
    return best, best_id


@triton.jit
def shape_row(io, r, s, slot, cfg: tl.constexpr):
    """Shape the cached logits of a row and step, of a request in ``slot``, where it asks for it.

    Best score and its target id; the id is UNSHAPED where nothing was done.
    """
    best = tl.full([], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    best_id = tl.full([], UNSHAPED, tl.int32)
    temp, state, state64 = load_noise(io, r, s, slot, slot >= 0, cfg)
    parameters = _parameters(io, slot, cfg)
    if (temp != 0.0) & parameters[3]:
        at = cache_offset(io, slot, s, cfg)
        row = (at, at)
        sieved = sieve(io, row, False, cfg)
        top = tl.max(sieved[0], axis=0)
        if tl.abs(top) < float("inf"):
            least = _least_kept(io, row, sieved, top, temp, parameters, cfg)
            best, best_id = _keep(io, row, least, temp, state, state64, cfg)
    return best, best_id


@triton.jit
def shape_all(io, scratch, pid, programs, cfg: tl.constexpr):
    """This program's row-steps of those that the last check was of: the steps not yet settled."""
    for m in range(pid, io.rows * cfg.STEPS, programs):
        m = as_scalar(m)
        r, s = m // cfg.STEPS, m % cfg.STEPS
        slot = load_slot(io, r, s, True)
        if (slot >= 0) & (s >= tl.load(scratch.start + r)):
            best, best_id = shape_row(io, r, s, slot, cfg)
            tl.store(scratch.shaped + m, best)
            tl.store(scratch.shaped_id + m, best_id)


@triton.jit
def shaped_winner(scratch, m, live, best, token, cfg: tl.constexpr):
    """A check's winners [n] of row-steps ``m``, or the shaped rows' own; which are those."""
    token_shaped = tl.load(scratch.shaped_id + m, mask=live, other=UNSHAPED)
    taken = token_shaped != UNSHAPED
    score = tl.load(scratch.shaped + m, mask=taken, other=float("-inf"))
    return tl.where(taken, score, best), tl.where(taken, token_shaped, token), taken


@triton.jit(do_not_specialize=["io", "scratch", "step"], do_not_specialize_on_alignment=["scratch"])
def shape_step_kernel(io, scratch, step, cfg: tl.constexpr):
    """The per-step engine's: one program a row, after a step's launch."""
    r, s = as_scalar(tl.program_id(0)), as_scalar(step)
    slot = load_slot(io, r, s, True)
    if slot >= 0:
        best, best_id = shape_row(io, r, s, slot, cfg)
        tl.store(scratch.shaped + r, best)
        tl.store(scratch.shaped_id + r, best_id)
