"""Chain: the sequential loop of one row over its candidates only.

The tokens it gives are the guess that the check verifies. Its arithmetic is the check's, so that
the guess fails only where the winner is no candidate.
"""

import triton
import triton.language as tl

from fused_markov.kernels.logits import finish_logits
from fused_markov.kernels.noise import scores
from fused_markov.kernels.rows import (
    as_scalar,
    base_offset,
    cache_offset,
    load_noise,
    load_slot,
    target_id,
)

NO_ID = tl.constexpr(2147483647)


@triton.jit
def _reserve(io, r, start, counter, cfg: tl.constexpr):
    """Room on the coming check's list for the row's live steps from ``start`` on."""
    s = tl.arange(0, cfg.STEPS_P2)
    inside = (s >= start) & (s < cfg.STEPS)
    live = inside & (load_slot(io, r + 0 * s, s, inside) >= 0)
    return tl.atomic_add(counter, tl.sum(live.to(tl.int32), axis=0))


@triton.jit
def _candidate_logits(io, r, s, v, prev, cfg: tl.constexpr):
    """Exact logits of candidates ``v`` [C] after token ``prev``."""
    k = tl.arange(0, cfg.RANK_P2)
    inside = (k < cfg.RANK)[None, :]
    w = tl.load(io.w2 + v.to(tl.int64)[:, None] * cfg.RANK + k[None, :], mask=inside, other=0.0)
    base = tl.load(io.base + base_offset(io, r, s, cfg) + v).to(tl.float32)
    # A matrix unit multiplies 16 rows at the least; all 16 are the same.
    row = tl.arange(0, 16)
    at = prev.to(tl.int64) * cfg.RANK + 0 * row[:, None] + k[None, :]
    e = tl.load(io.w1 + at, mask=(row >= 0)[:, None] & inside, other=0.0)
    acc = tl.dot(e, tl.trans(w), input_precision="ieee")
    acc = tl.sum(tl.where(row[:, None] == 0, acc, 0.0), axis=0)
    return finish_logits(acc, base, io.scale, io.soft_cap, cfg)


@triton.jit
def chain_row(io, scratch, r, start, prev, ungated, counter, cfg: tl.constexpr):
    """Guess the steps of row ``r`` from ``start`` on, after token ``prev``, and list them.

    ``ungated``: a step whose check must not be gated, -1 for none.
    """
    tl.store(scratch.start + r, start)
    i = _reserve(io, r, start, counter, cfg)
    for step in range(start, cfg.STEPS):
        s = as_scalar(step)
        m = r * cfg.STEPS + s
        slot = load_slot(io, r, s, True)
        tl.store(scratch.prev + m, prev)
        if slot >= 0:
            v = tl.load(scratch.candidates + m * cfg.CANDIDATES + tl.arange(0, cfg.CANDIDATES))
            tid = target_id(io, v, v >= 0, cfg)
            x = _candidate_logits(io, r, s, v, prev, cfg)
            if cfg.NOISE:
                temp, state, state64 = load_noise(io, r, s, slot, True, cfg)
                z = scores(x, temp, state, state64, tid, cfg.FP64)
            else:
                z = tl.where(x == x, x, float("-inf"))
            top = tl.max(z, axis=0)
            token = tl.min(tl.where(z == top, tid, NO_ID), axis=0)
            token = tl.where(top == float("-inf"), io.lowest_id, token)
            if cfg.NOISE:
                logit = tl.max(tl.where(tid == token, x, float("-inf")), axis=0)
                _set_gate(scratch, m, i, logit, top.to(tl.float32), temp, s == ungated)
                tl.store(scratch.row_temp + i, temp)
                tl.store(scratch.row_state + i, state.to(tl.int32, bitcast=True))
                if cfg.FP64:
                    tl.store(scratch.row_state64 + i, state64.to(tl.int32, bitcast=True))
            tl.store(scratch.guess + m, token)
            tl.store(scratch.row_m + i, m)
            tl.store(scratch.row_prev + i, prev)
            tl.store(scratch.row_base + i, base_offset(io, r, s, cfg))
            if cfg.CACHED:
                tl.store(scratch.row_cache + i, cache_offset(io, slot, s, cfg))
            i += 1
            prev = token
        else:
            tl.store(io.tokens + r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step, 0)
            tl.store(io.nonfinite + m, 0)
            tl.store(scratch.guess + m, 0)
            prev = prev * 0


@triton.jit
def _set_gate(scratch, m, i, logit, top, temp, ungated):
    """What a token must be able to reach to matter in the check: a little less than the guess.

    The margin covers a last place of the guess's logit, were the check to round it otherwise.
    """
    margin = tl.abs(logit) / tl.where(temp == 0.0, 1.0, temp) * 0.015625 + 0.02
    closed = (tl.abs(top) < 3.0e38) & (margin < 3.0e38) & (ungated == 0)
    tl.store(scratch.row_need + i, tl.where(closed, top - margin, float("-inf")))
    tl.store(scratch.sure + m, tl.where(closed, top - 0.5 * margin, float("-inf")))


@triton.jit
def chain_all(io, scratch, pid, programs, counter, cfg: tl.constexpr):
    """This program's rows, from their anchors."""
    for row in range(pid, io.rows, programs):
        r = as_scalar(row)
        anchor = tl.load(io.anchors + r.to(tl.int64) * io.anchor_row).to(tl.int32)
        anchor = tl.minimum(tl.maximum(anchor, 0), io.vocab_size - 1)
        start = r * 0
        chain_row(io, scratch, r, start, anchor, start - 1, counter, cfg)
