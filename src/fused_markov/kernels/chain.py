"""Chain: a row's guessed tokens one after another, each the best candidate after the last.

A step's candidates are the guess's and, where the head's are known, the successors of the token
before: a strong bias puts tokens first whose base logits do not stand out. Scores are exact but for
the order in which a bias is summed, which the gate's margin covers.
"""

import triton
import triton.language as tl

from fused_markov.kernels.link import gate_of, load_terms, product, rows_of, scored
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
def _embed_of(io, prev, cfg: tl.constexpr):
    """W1's row [RANK] of a token, by an instruction that is no load to the compiler: it would ask
    for a later step's row, whose token nobody knows yet, together with that step's rows of W2.
    """
    at = io.w1 + prev.to(tl.int64) * cfg.RANK + tl.arange(0, cfg.RANK)
    if tl.float32 == cfg.WEIGHT:
        asm32: tl.constexpr = "ld.global.b32 $0, [$1];"
        return tl.inline_asm_elementwise(asm32, "=f,l", [at.to(tl.int64)], tl.float32, True, 1)
    else:
        asm16: tl.constexpr = "ld.global.b16 $0, [$1];"
        return tl.inline_asm_elementwise(asm16, "=h,l", [at.to(tl.int64)], cfg.WEIGHT, True, 1)


@triton.jit
def _biases(
    io,
    m,
    prev,
    v,
    weights,
    AHEAD: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    cfg: tl.constexpr,
):
    """fp32 [CANDIDATES] biases of candidates ``v`` after ``prev``, before their rounding."""
    alike = tl.arange(0, ALIKE)
    if AHEAD:
        embed = tl.broadcast_to(_embed_of(io, prev, cfg)[:, None], [cfg.RANK, ALIKE])
        acc = tl.dot(weights, embed, input_precision="ieee")
        return tl.sum(tl.where((alike == 0)[None, :], acc, 0.0), axis=1)
    else:
        after = embed_index(m, prev, cfg) + 0 * alike
        if cfg.FORMAT == "plain":
            acc = product(io, after, v, after >= 0, v >= 0, PIECE, STAGES, cfg)
        else:
            acc = stored_product(io, after, v, after >= 0, v >= 0, PIECE, STAGES, cfg)
        return tl.sum(tl.where((alike == 0)[:, None], acc, 0.0), axis=0)


@triton.jit
def _scored(io, m, noise, v, bias, terms, tid, inside, cfg: tl.constexpr):
    """Scores, numbers and logits [n] of candidates ``v`` that are ``inside``."""
    z, x = scored(io, m, noise[0], bias[None, :], terms, tid, inside, cfg)
    return tl.sum(z, axis=0), tl.where(inside, v, NO_ID), tl.sum(x, axis=0)


@triton.jit
def _best_successors(
    io, m, noise, prev, PIECE: tl.constexpr, STAGES: tl.constexpr, cfg: tl.constexpr
):
    """Scores, numbers and logits of successors of ``prev``, the best of each of CANDIDATES places.

    A vanilla head's biases of them stand beside their ids: no row of W2 is read.
    """
    WIDTH: tl.constexpr = cfg.CANDIDATES
    ALL: tl.constexpr = cfg.SUCCESSORS
    c = tl.arange(0, WIDTH)
    z = tl.full([WIDTH], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    number, x = c * 0 + NO_ID, c * 0.0
    for first in tl.static_range(0, ALL, WIDTH):
        inside = first + c < ALL
        at = prev.to(tl.int64) * ALL + first + c
        v = tl.load(io.successors + at, mask=inside, other=0)
        tid = target_id(io, v, inside, cfg)
        terms = load_terms(io, m, noise, v, tid, inside, cfg)
        if cfg.VARIANT > 0:
            bias = _biases(io, m, prev, v, v, False, PIECE, STAGES, cfg)
        else:
            bias = tl.load(io.successor_biases + at, mask=inside, other=0.0).to(tl.float32)
        other = _scored(io, m, noise, v, bias, terms, tid, inside, cfg)
        z, number, x = _better(z, number, x, other[0], other[1], other[2])
    return z, number, x


@triton.jit
def _best_after(
    io,
    m,
    noise,
    prev,
    v,
    weights,
    AHEAD: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    cfg: tl.constexpr,
):
    """Best of candidates ``v`` and of the successors of ``prev`` at row-step ``m``: its score,
    number and logit. ``weights``: the candidates' rows of W2, where those are loaded ahead.
    """
    inside = v >= 0
    tid = target_id(io, v, inside, cfg)
    terms = load_terms(io, m, noise, v, tid, inside, cfg)
    if cfg.SUCCESSORS > 0:
        other = _best_successors(io, m, noise, prev, PIECE, STAGES, cfg)
    bias = _biases(io, m, prev, v, weights, AHEAD, PIECE, STAGES, cfg)
    best = _scored(io, m, noise, v, bias, terms, tid, inside, cfg)
    if cfg.SUCCESSORS > 0:
        best = _better(best[0], best[1], best[2], other[0], other[1], other[2])
    return tl.reduce(best, 0, _better)


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
    AHEAD: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    cfg: tl.constexpr,
):
    """Guess row ``r`` from step ``start`` on after ``prev``; its first step ungated if so asked.

    ``AHEAD``: whether a step's rows of W2 are on their way while the step before is computed. Else
    the rank is multiplied in pieces of ``PIECE``, ``STAGES`` in flight.
    """
    row = load_row(io, r, start, cfg)
    s, live, temps, states, states64 = row[0], row[3], row[4], row[5], row[6]
    place = places(live, counter)
    guess, number, before, need, sure = 0 * s, 0 * s, 0 * s, 0.0 * s, 0.0 * s
    open_gate = gated == 0
    c = tl.arange(0, cfg.CANDIDATES)
    candidates = scratch.candidates + r * (cfg.STEPS * cfg.CANDIDATES) + c
    following = tl.load(candidates + start * cfg.CANDIDATES)
    # Padding costs nothing.
    end = tl.where(tl.sum(live.to(tl.int32), axis=0) > 0, cfg.STEPS, start)
    for step in range(start, end):
        m = r * cfg.STEPS + step
        here = s == step
        if AHEAD:
            v = tl.load(candidates + step * cfg.CANDIDATES)
            weights = rows_of(io.w2, v, v >= 0, cfg)
        else:
            v, weights = following, following
            more = (step + 1 < cfg.STEPS) & (c >= 0)
            following = tl.load(candidates + (step + 1) * cfg.CANDIDATES, mask=more, other=0)
        is_live = _of_step(live.to(tl.int32), s, step) > 0
        if cfg.VARIANT > 0:
            if is_live:
                embed_row(io, scratch, r, as_scalar(step), prev, cfg)
        temp = _of_step(temps, s, step)
        noise = temp, _of_step(states, s, step), _of_step(states64, s, step)
        z, v, logit = _best_after(io, m, noise, prev, v, weights, AHEAD, PIECE, STAGES, cfg)
        token = target_id(io, v, v >= 0, cfg)
        step_need, step_sure = gate_of(z, logit, temp)
        lowest = tl.where(open_gate & (step == start), float("-inf"), 0.0)
        before = tl.where(here, prev, before)
        guess, number = tl.where(here, token, guess), tl.where(here, v, number)
        need = tl.where(here, step_need + lowest, need)
        sure = tl.where(here, step_sure + lowest, sure)
        # After a padded step stands token 0.
        prev = tl.where(is_live, token, 0)
    store_records(io, scratch, r, start, row, place, guess, number, before, need, sure, cfg)
