"""Chain: a row's guessed tokens one after another, each the exact best candidate after the last.

A step's candidates are the guess's and, where the head's are known, the successors of the token
before: a strong bias puts tokens first whose base logits do not stand out.
"""

import triton
import triton.language as tl

from fused_markov.kernels.link import best_of, gate_of, load_row_noise
from fused_markov.kernels.rows import as_scalar, load_slot, merge_best
from fused_markov.kernels.variant import embed_index, embed_row, keep_before
from fused_markov.kernels.walk import load_records, store_records

ALIKE = tl.constexpr(16)  # a matrix unit multiplies 16 rows at the least; all are the same


@triton.jit
def _best_after(io, scratch, m, slot, prev, cfg: tl.constexpr):
    """Best candidate of row-step ``m`` after token ``prev``: its target id, need and sure."""
    noise = load_row_noise(io, m, slot, cfg)
    rows = embed_index(m, prev, cfg) + 0 * tl.arange(0, ALIKE)
    v = tl.load(scratch.candidates + m * cfg.CANDIDATES + tl.arange(0, cfg.CANDIDATES))
    top, token, logit = best_of(io, m, noise, rows, v, v >= 0, cfg)
    if cfg.SUCCESSORS > 0:
        i = tl.arange(0, cfg.SUCCESSORS_P2)
        inside = i < cfg.SUCCESSORS
        at = prev.to(tl.int64) * cfg.SUCCESSORS + i
        v = tl.load(io.successors + at, mask=inside, other=0)
        other, other_token, other_logit = best_of(io, m, noise, rows, v, inside, cfg)
        first = top
        top, token = merge_best(top, token, other, other_token)
        logit = tl.where(top > first, other_logit, logit)
    need, sure = gate_of(top, logit, noise[0])
    return tl.max(token, axis=0), tl.max(need, axis=0), tl.max(sure, axis=0)


@triton.jit
def chain_row(io, scratch, r, start, prev, gated, counter, cfg: tl.constexpr):
    """Guess row ``r`` from step ``start`` on after ``prev``; its first step ungated if so asked."""
    records = load_records(io, r, start, counter, cfg)
    s = records[0]
    guess, before, need, sure = 0 * s, 0 * s, 0.0 * s, 0.0 * s
    open_gate = gated == 0
    for step in range(start, cfg.STEPS):
        slot = load_slot(io, r, as_scalar(step), True)
        before = tl.where(s == step, prev, before)
        prev = prev * 0
        if slot >= 0:
            m = r * cfg.STEPS + step
            at = tl.max(tl.where(s == step, before, 0), axis=0)
            if cfg.VARIANT > 0:
                embed_row(io, scratch, r, as_scalar(step), at, cfg)
            token, step_need, step_sure = _best_after(io, scratch, m, slot, at, cfg)
            guess = tl.where(s == step, token, guess)
            lowest = tl.where(open_gate & (step == start), float("-inf"), 0.0)
            need = tl.where(s == step, step_need + lowest, need)
            sure = tl.where(s == step, step_sure + lowest, sure)
            prev = token
    if cfg.VARIANT > 0:
        keep_before(io, scratch, r, s, records[1], before, cfg)
    before = embed_index(r * cfg.STEPS + s, before, cfg)
    store_records(io, scratch, r, start, records, guess, before, need, sure, cfg)
