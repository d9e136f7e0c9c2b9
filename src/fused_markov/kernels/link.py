"""Link: the exact best candidate of each step after each candidate of the step before.

A product [PREDECESSORS, rank] x [rank, CANDIDATES] a work item, over candidates only. The guessed
chain of a row is then a walk over its links. Where the candidates of a step depend on what went
before, there is nothing to link: see `chain`.
"""

import triton
import triton.language as tl

from fused_markov.kernels.bans import ban_candidates
from fused_markov.kernels.logits import finish_logits
from fused_markov.kernels.noise import gumbel, scores
from fused_markov.kernels.rows import (
    NO_ID,
    base_offset,
    load_anchor,
    load_noise,
    load_slot,
    target_id,
)
from fused_markov.kernels.weights import stored_product


@triton.jit
def rows_of(weights, row, live, cfg: tl.constexpr):
    """Whole rows [len(row), BLOCK_K] of W1 or W2, for a rank of at most BLOCK_K."""
    k = tl.arange(0, cfg.BLOCK_K)
    mask = live[:, None]
    if cfg.RANK < cfg.BLOCK_K:
        mask = mask & (k < cfg.RANK)[None, :]
    return tl.load(weights + row[:, None] * cfg.RANK + k[None, :], mask=mask, other=0.0)


@triton.jit
def product(
    io,
    left,
    right,
    left_live,
    right_live,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    cfg: tl.constexpr,
):
    """fp32 [len(left), len(right)] products of W1 rows ``left`` and W2 rows ``right``.

    The rank goes in order, in steps of the matrix unit, whatever the tile: a sum's bits are the
    same in every tile. ``BLOCK``: part of the rank multiplied at a time; ``STAGES`` of them are
    loaded ahead.
    """
    acc = tl.zeros([left.shape[0], right.shape[0]], tl.float32)
    for k0 in tl.range(0, cfg.RANK, BLOCK, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK)
        a_mask, b_mask = left_live[:, None], right_live[:, None]
        if cfg.RANK % BLOCK != 0:
            a_mask = a_mask & (k < cfg.RANK)[None, :]
            b_mask = b_mask & (k < cfg.RANK)[None, :]
        a = tl.load(io.w1 + left[:, None] * cfg.RANK + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(io.w2 + right[:, None] * cfg.RANK + k[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def load_row_noise(io, m, slot, cfg: tl.constexpr):
    """Temperature and hash states of one row-step; zeros without noise."""
    temp = tl.full([], 0.0, tl.float32)
    state = tl.full([], 0, tl.uint32)
    state64 = state
    if cfg.NOISE:
        temp, state, state64 = load_noise(io, m // cfg.STEPS, m % cfg.STEPS, slot, slot >= 0, cfg)
    return temp, state, state64


@triton.jit
def load_terms(io, m, noise, v, tid, inside, cfg: tl.constexpr):
    """Base logits and noise [n] of candidates ``v`` of row-step ``m``; ``tid``: their target ids.

    Asked for before the product with W2, so that one waits for both together.
    """
    _temp, state, state64 = noise
    at = base_offset(io, m // cfg.STEPS, m % cfg.STEPS, cfg)
    base = tl.load(io.base + at + v, mask=inside, other=float("-inf")).to(tl.float32)
    added = base
    if cfg.NOISE:
        added = gumbel(state, state64, tid, cfg)
    return base, added


@triton.jit
def scored(io, m, temp, acc, terms, tid, inside, cfg: tl.constexpr):
    """Scores and logits [p, n] of the candidates of row-step ``m`` that are ``inside``.

    ``acc`` [p, n]: products of W2's rows with each predecessor's of W1; ``terms``: of `load_terms`.
    """
    base, added = terms
    x = finish_logits(acc, base[None, :], io.scale, io.soft_cap, cfg)
    if cfg.TRANSFORM is not None:
        x = tl.where(inside[None, :], x, float("-inf"))
    if cfg.BANNED:
        x = ban_candidates(io, x, m, tid, inside, cfg)
    if cfg.NOISE:
        z = scores(x, temp, added[None, :], cfg)
    else:
        z = tl.where(x == x, x, float("-inf"))
    return z, x


@triton.jit
def best_of(io, m, noise, prev, v, inside, cfg: tl.constexpr):
    """Best of the candidates ``v`` [n] that are ``inside``, of row-step ``m``, after each of
    ``prev``: its score, target id and logit, each like ``prev``.
    """
    tid = target_id(io, v, inside, cfg)
    terms = load_terms(io, m, noise, v, tid, inside, cfg)
    if cfg.FORMAT == "plain":
        acc = product(io, prev, v, prev >= 0, inside, cfg.LINK_K, cfg.LINK_STAGES, cfg)
    else:
        acc = stored_product(io, prev, v, prev >= 0, inside, cfg.LINK_K, cfg.LINK_STAGES, cfg)
    z, x = scored(io, m, noise[0], acc, terms, tid, inside, cfg)
    top = tl.max(z, axis=1)
    winners = (z == top[:, None]) & inside[None, :]
    token = tl.min(tl.where(winners, tid[None, :], NO_ID), axis=1)
    logit = tl.max(tl.where(tid[None, :] == token[:, None], x, float("-inf")), axis=1)
    return top, token, logit


@triton.jit
def gate_of(top, logit, temp):
    """What a token must be able to reach to matter beside a guess, and from where the check's
    winner is the winner.

    Both are a little less than the guess's score: the margin covers a last place of its logit, were
    the check to round it otherwise.
    """
    margin = tl.abs(logit) / tl.where(temp == 0.0, 1.0, temp) * 0.015625 + 0.02
    top = top.to(tl.float32)
    closed = (tl.abs(top) < 3.0e38) & (margin < 3.0e38)
    need = tl.where(closed, top - margin, float("-inf"))
    return need, tl.where(closed, top - 0.5 * margin, float("-inf"))


@triton.jit
def link_item(io, scratch, m, slot, part, cfg: tl.constexpr):
    """Links of row-step ``m``, of a request in ``slot``, after the predecessors of one part."""
    r, s = m // cfg.STEPS, m % cfg.STEPS
    noise = load_row_noise(io, m, slot, cfg)
    c = tl.arange(0, cfg.CANDIDATES)
    v = tl.load(scratch.candidates + m * cfg.CANDIDATES + c)
    p = part * cfg.PREDECESSORS + tl.arange(0, cfg.PREDECESSORS)
    # Before step 0 stands the anchor, after a padded step token 0, whatever the predecessor.
    prev = load_anchor(io, r, s == 0) + 0 * p
    if s > 0:
        if load_slot(io, r, s - 1, True) >= 0:
            before = tl.load(scratch.candidates + (m - 1) * cfg.CANDIDATES + p)
            prev = target_id(io, before, before >= 0, cfg)
    top, token, logit = best_of(io, m, noise, prev, v, v >= 0, cfg)
    need, sure = gate_of(top, logit, noise[0])
    here = target_id(io, v, v >= 0, cfg)[None, :] == token[:, None]
    at = m * cfg.CANDIDATES + p
    tl.store(scratch.link + at, tl.min(tl.where(here, c[None, :], cfg.CANDIDATES - 1), axis=1))
    tl.store(scratch.link_need + at, need)
    tl.store(scratch.link_sure + at, sure)
