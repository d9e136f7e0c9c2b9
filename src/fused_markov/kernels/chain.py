"""Chain: a row's guessed tokens one after another, each the best candidate after the last.

A step's candidates are the guess's and, where the head's are known, the successors of the token
before: a strong bias puts tokens first whose base logits do not stand out. Scores are exact but for
the order in which a bias is summed, which the gate's margin covers.
"""

import triton
import triton.language as tl

from fused_markov.kernels.link import gate_of, product, scored
from fused_markov.kernels.rows import NO_ID, as_scalar, target_id
from fused_markov.kernels.variant import embed_index, embed_row, keep_before
from fused_markov.kernels.walk import load_row, places, store_records
from fused_markov.kernels.weights import stored_product

ALIKE = tl.constexpr(16)  # a matrix unit multiplies 16 rows at the least; all are the same


@triton.jit
def _better(z, tid, x, other_z, other_tid, other_x):
    """The better of two scored tokens; the lower id where the scores are equal."""
    take = (other_z > z) | ((other_z == z) & (other_tid < tid))
    return (
        tl.where(take, other_z, z),
        tl.where(take, other_tid, tid),
        tl.where(take, other_x, x),
    )


@triton.jit
def _scored(io, m, noise, prev, v, inside, cfg: tl.constexpr):
    """Score, target id and logit of the candidates ``v`` [n] of row-step ``m`` after ``prev``."""
    tid = target_id(io, v, inside, cfg)
    rows = tl.arange(0, ALIKE)
    after = embed_index(m, prev, cfg) + 0 * rows
    if cfg.FORMAT == "plain":
        acc = product(io, after, v, after >= 0, inside, cfg.CHAIN_K, cfg.LINK_STAGES, cfg)
    else:
        acc = stored_product(io, after, v, after >= 0, inside, cfg.CHAIN_K, cfg.LINK_STAGES, cfg)
    acc = tl.sum(tl.where((rows == 0)[:, None], acc, 0.0), axis=0)
    z, x = scored(io, m, noise, acc[None, :], v, tid, inside, cfg)
    return tl.sum(z, axis=0), tl.where(inside, tid, NO_ID), tl.sum(x, axis=0)


@triton.jit
def _best_after(io, m, noise, prev, candidates, cfg: tl.constexpr):
    """Best of ``candidates`` and of the successors of ``prev`` at row-step ``m``: its score, target
    id and logit.
    """
    i = tl.arange(0, cfg.SUCCESSORS_P2)
    inside = i < cfg.SUCCESSORS
    if cfg.SUCCESSORS > 0:  # asked for first, as the rest waits for it
        at = prev.to(tl.int64) * cfg.SUCCESSORS + i
        successors = tl.load(io.successors + at, mask=inside, other=0)
    best = _scored(io, m, noise, prev, candidates, candidates >= 0, cfg)
    z, tid, x = tl.reduce(best, 0, _better)
    if cfg.SUCCESSORS > 0:
        other = tl.reduce(_scored(io, m, noise, prev, successors, inside, cfg), 0, _better)
        z, tid, x = _better(z, tid, x, other[0], other[1], other[2])
    return z, tid, x


@triton.jit
def _load_candidates(scratch, m, inside, cfg: tl.constexpr):
    at = m * cfg.CANDIDATES + tl.arange(0, cfg.CANDIDATES)
    return tl.load(scratch.candidates + at, mask=inside, other=0)


@triton.jit
def _of_step(vector, s, step):
    """Entry ``step`` of a vector over ``s``, as a scalar."""
    return tl.sum(tl.where(s == step, vector, vector * 0), axis=0)


@triton.jit
def chain_row(io, scratch, r, start, prev, gated, counter, cfg: tl.constexpr):
    """Guess row ``r`` from step ``start`` on after ``prev``; its first step ungated if so asked."""
    row = load_row(io, r, start, cfg)
    s, live, temps, states, states64 = row[0], row[3], row[4], row[5], row[6]
    place = places(live, counter)
    guess, before, need, sure = 0 * s, 0 * s, 0.0 * s, 0.0 * s
    open_gate = gated == 0
    following = _load_candidates(scratch, r * cfg.STEPS + start, r >= 0, cfg)
    for step in range(start, cfg.STEPS):
        m = r * cfg.STEPS + step
        # Asked for a step ahead: one latency less between a token and the next.
        candidates = following
        following = _load_candidates(scratch, m + 1, step + 1 < cfg.STEPS, cfg)
        before = tl.where(s == step, prev, before)
        after, prev = prev, prev * 0
        if _of_step(live.to(tl.int32), s, step) > 0:
            if cfg.VARIANT > 0:
                embed_row(io, scratch, r, as_scalar(step), after, cfg)
            temp = _of_step(temps, s, step)
            noise = temp, _of_step(states, s, step), _of_step(states64, s, step)
            z, token, logit = _best_after(io, m, noise, after, candidates, cfg)
            step_need, step_sure = gate_of(z, logit, temp)
            guess = tl.where(s == step, token, guess)
            lowest = tl.where(open_gate & (step == start), float("-inf"), 0.0)
            need = tl.where(s == step, step_need + lowest, need)
            sure = tl.where(s == step, step_sure + lowest, sure)
            prev = token
    if cfg.VARIANT > 0:
        keep_before(io, scratch, r, s, row[1], before, cfg)
    before = embed_index(r * cfg.STEPS + s, before, cfg)
    store_records(io, scratch, r, start, row, place, guess, before, need, sure, cfg)
