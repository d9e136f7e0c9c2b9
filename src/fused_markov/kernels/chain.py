"""Chain: a row's guessed tokens one after another, each the best candidate after the last.

A step's candidates are the guess's and, where the head's are known, the successors of the token
before: a strong bias puts tokens first whose base logits do not stand out. Scores are exact but for
the order in which a bias is summed, which the gate's margin covers.
"""

import triton
import triton.language as tl

from fused_markov.kernels.link import gate_of, load_terms, product, scored
from fused_markov.kernels.rows import NO_ID, as_scalar, target_id
from fused_markov.kernels.variant import embed_index, embed_row
from fused_markov.kernels.walk import load_row, places, store_records
from fused_markov.kernels.weights import stored_product

ALIKE = tl.constexpr(16)  # a matrix unit multiplies 16 rows at the least; all are the same


@triton.jit
def _better(z, v, x, other_z, other_v, other_x):
    """The better of two scored candidates; the lower where the scores are equal."""
    take = (other_z > z) | ((other_z == z) & (other_v < v))
    return tl.where(take, other_z, z), tl.where(take, other_v, v), tl.where(take, other_x, x)


@triton.jit
def _load_candidates(scratch, m, inside, cfg: tl.constexpr):
    """The guess's candidates of row-step ``m``, with room for successors behind them."""
    c = tl.arange(0, cfg.CHAIN_WIDTH)
    mask = inside & (c < cfg.CANDIDATES)
    return tl.load(scratch.candidates + m * cfg.CANDIDATES + c, mask=mask, other=0)


@triton.jit
def _best_after(
    io, m, noise, prev, candidates, PIECE: tl.constexpr, STAGES: tl.constexpr, cfg: tl.constexpr
):
    """Best of ``candidates`` and of the successors of ``prev`` at row-step ``m``: its score,
    number and logit.
    """
    c = tl.arange(0, cfg.CHAIN_WIDTH)
    v, inside = candidates, c < cfg.CANDIDATES + cfg.SUCCESSORS
    if cfg.SUCCESSORS > 0:
        follows = inside & (c >= cfg.CANDIDATES)
        at = prev.to(tl.int64) * cfg.SUCCESSORS + c - cfg.CANDIDATES
        v = tl.where(follows, tl.load(io.successors + at, mask=follows, other=0), v)
    tid = target_id(io, v, inside, cfg)
    terms = load_terms(io, m, noise, v, tid, inside, cfg)
    rows = tl.arange(0, ALIKE)
    after = embed_index(m, prev, cfg) + 0 * rows
    if cfg.FORMAT == "plain":
        acc = product(io, after, v, after >= 0, inside, PIECE, STAGES, cfg)
    else:
        acc = stored_product(io, after, v, after >= 0, inside, PIECE, STAGES, cfg)
    acc = tl.sum(tl.where((rows == 0)[:, None], acc, 0.0), axis=0)
    z, x = scored(io, m, noise[0], acc[None, :], terms, tid, inside, cfg)
    found = tl.sum(z, axis=0), tl.where(inside, v, NO_ID), tl.sum(x, axis=0)
    return tl.reduce(found, 0, _better)


@triton.jit
def _of_step(vector, s, step):
    """Entry ``step`` of a vector over ``s``, as a scalar."""
    return tl.sum(tl.where(s == step, vector, vector * 0), axis=0)


@triton.jit
def chain_row(
    io,
    scratch,
    r,
    start,
    prev,
    gated,
    counter,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    cfg: tl.constexpr,
):
    """Guess row ``r`` from step ``start`` on after ``prev``; its first step ungated if so asked.

    The rank is multiplied in pieces of ``PIECE``, ``STAGES`` in flight.
    """
    row = load_row(io, r, start, cfg)
    s, live, temps, states, states64 = row[0], row[3], row[4], row[5], row[6]
    place = places(live, counter)
    guess, number, before, need, sure = 0 * s, 0 * s, 0 * s, 0.0 * s, 0.0 * s
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
            z, v, logit = _best_after(io, m, noise, after, candidates, PIECE, STAGES, cfg)
            token = target_id(io, v, v >= 0, cfg)
            step_need, step_sure = gate_of(z, logit, temp)
            guess, number = tl.where(s == step, token, guess), tl.where(s == step, v, number)
            lowest = tl.where(open_gate & (step == start), float("-inf"), 0.0)
            need = tl.where(s == step, step_need + lowest, need)
            sure = tl.where(s == step, step_sure + lowest, sure)
            prev = token
    store_records(io, scratch, r, start, row, place, guess, number, before, need, sure, cfg)
