"""Settle: what a check decided of a row, and its next guess where it is not finished.

A step is right if its predecessor was. Up to the first step whose winner differs from the guess all
is final, and that step's own winner is too; the steps after it are guessed again from it.
"""

import triton
import triton.language as tl

from fused_markov.kernels.chain import NO_ID, chain_row
from fused_markov.kernels.check import merge_best
from fused_markov.kernels.rows import as_scalar, load_slot

PARTS_AT_ONCE = tl.constexpr(512)


@triton.jit
def _winner(io, scratch, m, mask, parts, cfg: tl.constexpr):
    """Best score and lowest id over all parts of the vocabulary of row-steps ``m`` [STEPS_P2]."""
    dtype = tl.float64 if cfg.FP64 else tl.float32
    best = tl.full([cfg.STEPS_P2], float("-inf"), dtype)
    best_id = tl.full([cfg.STEPS_P2], NO_ID, tl.int32)
    for first in range(0, parts, PARTS_AT_ONCE):
        part = as_scalar(first) + tl.arange(0, PARTS_AT_ONCE)
        at = part.to(tl.int64)[None, :] * (io.rows * cfg.STEPS) + m[:, None]
        inside = mask[:, None] & (part < parts)[None, :]
        z = tl.load(scratch.best + at, mask=inside, other=float("-inf"))
        ids = tl.load(scratch.best_id + at, mask=inside, other=NO_ID)
        top = tl.max(z, axis=1)
        top_id = tl.min(tl.where(z == top[:, None], ids, NO_ID), axis=1)
        best, best_id = merge_best(best, best_id, top, top_id)
    return best, best_id


@triton.jit
def _at(values, s, i):
    return tl.sum(tl.where(s == i, values, 0), axis=0)


@triton.jit
def _settle_row(io, scratch, r, parts, counter, cfg: tl.constexpr):
    start = tl.load(scratch.start + r)
    if start < cfg.STEPS:
        s = tl.arange(0, cfg.STEPS_P2)
        inside = (s >= start) & (s < cfg.STEPS)
        live = inside & (load_slot(io, r + 0 * s, s, inside) >= 0)
        m = r * cfg.STEPS + s
        best, token = _winner(io, scratch, m, live, parts, cfg)
        token = tl.where(token == NO_ID, io.lowest_id, token)
        sure = live | (s >= 0)
        if cfg.NOISE:
            sure = best >= tl.load(scratch.sure + m, mask=live, other=float("-inf"))
        guess = tl.load(scratch.guess + m, mask=live, other=0)
        wrong = live & ((token != guess) | (sure == 0))
        first = tl.min(tl.where(wrong, s, cfg.STEPS), axis=0)
        undecided = tl.sum(tl.where((s == first) & (sure == 0), 1, 0), axis=0)
        end = tl.minimum(first + 1 - undecided, cfg.STEPS)
        done = live & (s < end)
        at = r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step
        tl.store(io.tokens + at, token, mask=done)
        tl.store(io.nonfinite + m, (tl.abs(best) < float("inf")) == 0, mask=done)
        if end < cfg.STEPS:
            prev = _at(token, s, first)
            if undecided > 0:
                prev = tl.load(scratch.prev + r * cfg.STEPS + first)
            ungated = tl.where(undecided > 0, first, -1)
            chain_row(io, scratch, r, end, prev, ungated, counter, cfg)
        else:
            tl.store(scratch.start + r, end)


@triton.jit
def settle_all(io, scratch, pid, programs, parts, counter, cfg: tl.constexpr):
    """This program's rows."""
    for r in range(pid, io.rows, programs):
        _settle_row(io, scratch, as_scalar(r), parts, counter, cfg)
