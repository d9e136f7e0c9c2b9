"""Walk: a row's guessed tokens, by following its links, and the records that the check reads."""

import triton
import triton.language as tl

from fused_markov.kernels.bans import ban_offset
from fused_markov.kernels.rows import (
    LOWEST_NEED,
    base_offset,
    cache_offset,
    load_anchor,
    load_noise,
    load_slot,
    target_id,
)
from fused_markov.kernels.variant import embed_index


@triton.jit
def load_row(io, r, start, cfg: tl.constexpr):
    """What `store_records` needs of row ``r`` from step ``start`` on that no guess decides.

    Asked for before the guess: one latency, not one after another.
    """
    s = tl.arange(0, cfg.STEPS_P2)
    inside = (s >= start) & (s < cfg.STEPS)
    slot = load_slot(io, r + 0 * s, s, inside)
    live = inside & (slot >= 0)
    temp, state, state64 = 0.0 * s, s.to(tl.uint32), s.to(tl.uint32)
    if cfg.NOISE:
        temp, state, state64 = load_noise(io, r + 0 * s, s, slot, live, cfg)
    return s, inside, slot, live, temp, state, state64


@triton.jit
def places(live, counter):
    """Places in the coming check's list for a row's ``live`` steps."""
    count = live.to(tl.int32)
    return tl.atomic_add(counter, tl.sum(count, axis=0)) + tl.cumsum(count, axis=0) - 1


@triton.jit
def store_records(
    io, scratch, r, start, row, place, guess, number, prev, need, sure, cfg: tl.constexpr
):
    """Put row ``r``'s steps from ``start`` on, as guessed, on the list of the coming check.

    ``row``, ``place``: of `load_row` and `places`; ``guess``, ``number``, ``prev``, ``need``,
    ``sure`` [STEPS_P2]: tokens, as target ids and as candidates, their predecessors, gates.
    """
    s, inside, slot, live, temp, state, state64 = row
    m = r * cfg.STEPS + s
    tl.store(scratch.row_need + place, tl.maximum(need, LOWEST_NEED), mask=live)
    if cfg.NOISE:
        tl.store(scratch.row_temp + place, temp, mask=live)
        tl.store(scratch.row_state + place, state.to(tl.int32, bitcast=True), mask=live)
        if cfg.FP64:
            tl.store(scratch.row_state64 + place, state64.to(tl.int32, bitcast=True), mask=live)
    tl.store(scratch.row_prev + place, embed_index(m, prev, cfg), mask=live)
    tl.store(scratch.before + m, prev, mask=live)
    tl.store(scratch.row_guess + place, number, mask=live)
    tl.store(scratch.row_step + place, m, mask=live)
    tl.store(scratch.row_base + place, base_offset(io, r + 0 * s, s, cfg), mask=live)
    if cfg.CACHED:
        at = cache_offset(io, tl.where(live, slot, 0), s, cfg)
        tl.store(scratch.row_cache + place, at, mask=live)
    if cfg.BANNED:
        at = ban_offset(io, tl.where(live, slot, 0), s)
        tl.store(scratch.row_ban + place, at, mask=live)
    tl.store(scratch.place + m, place, mask=live)
    tl.store(scratch.sure + m, sure, mask=live)
    tl.store(scratch.winner + m, m.to(tl.int64) * 0, mask=live)
    tl.store(scratch.guess + m, guess, mask=inside)
    tl.store(scratch.start + r, start)
    token_at = r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step
    tl.store(io.tokens + token_at, 0, mask=inside & (live == 0))
    tl.store(io.nonfinite + m, 0, mask=inside & (live == 0))


@triton.jit
def _follow(scratch, r, s, cfg: tl.constexpr):
    """Candidate index of every step [STEPS_P2]; step 0 has the anchor's link."""
    c = tl.arange(0, cfg.CANDIDATES)
    at = (r * cfg.STEPS + s)[:, None] * cfg.CANDIDATES + c[None, :]
    links = tl.load(scratch.link + at, mask=(s < cfg.STEPS)[:, None], other=0)
    index = r * 0  # all predecessors of step 0 are the anchor
    path = 0 * s
    for step in range(0, cfg.STEPS):
        here = (s == step)[:, None] & (c == index)[None, :]
        index = tl.sum(tl.sum(tl.where(here, links, 0), axis=1), axis=0)
        path = tl.where(s == step, index, path)
    return path


@triton.jit
def walk_row(io, scratch, r, cfg: tl.constexpr):
    """Guess row ``r`` from its anchor on, by its links."""
    row = load_row(io, r, r * 0, cfg)
    s, inside, live = row[0], row[1], row[3]
    place = places(live, scratch.num_active)
    m = r * cfg.STEPS + s
    path = _follow(scratch, r, s, cfg)
    v = tl.load(scratch.candidates + m * cfg.CANDIDATES + path, mask=live, other=0)
    # A step's predecessor is the guess of the step before.
    before = s[:, None] == (s[None, :] + 1)
    at = m * cfg.CANDIDATES + tl.sum(tl.where(before, path[None, :], 0), axis=1)
    need = tl.load(scratch.link_need + at, mask=inside, other=0.0)
    sure = tl.load(scratch.link_sure + at, mask=inside, other=0.0)
    guess = tl.where(live, target_id(io, v, live, cfg), 0)
    prev = tl.sum(tl.where(before, guess[None, :], 0), axis=1)
    prev = tl.where(s == 0, load_anchor(io, r, r >= 0), prev)
    store_records(io, scratch, r, r * 0, row, place, guess, v, prev, need, sure, cfg)
