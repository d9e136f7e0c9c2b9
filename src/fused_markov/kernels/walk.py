"""Walk: a row's guessed tokens, by following its links, and the records that the check reads."""

import triton
import triton.language as tl

from fused_markov.kernels.rows import base_offset, cache_offset, load_noise, load_slot, target_id


@triton.jit
def _follow(links, start, index, s, cfg: tl.constexpr):
    """Candidate index of every step [STEPS_P2] from ``start`` on, where it is ``index``."""
    c = tl.arange(0, cfg.CANDIDATES)
    path = tl.where(s == start, index, 0)
    for step in range(start + 1, cfg.STEPS):
        here = (s == step)[:, None] & (c == index)[None, :]
        index = tl.sum(tl.sum(tl.where(here, links, 0), axis=1), axis=0)
        path = tl.where(s == step, index, path)
    return path


@triton.jit
def walk_row(io, scratch, r, start, prev, index, need, sure, counter, cfg: tl.constexpr):
    """Guess row ``r`` from step ``start`` on, and put its steps on the list of the coming check.

    ``prev``, ``index``, ``need``, ``sure``: of step ``start``; links give those of later steps.
    All that does not depend on the guess is asked for first: one latency, not one after another.
    """
    s = tl.arange(0, cfg.STEPS_P2)
    m = r * cfg.STEPS + s
    inside = (s >= start) & (s < cfg.STEPS)
    c = tl.arange(0, cfg.CANDIDATES)
    links = tl.load(scratch.link + m[:, None] * cfg.CANDIDATES + c[None, :], mask=inside[:, None])
    slot = load_slot(io, r + 0 * s, s, inside)
    live = inside & (slot >= 0)
    if cfg.NOISE:
        temp, state, state64 = load_noise(io, r + 0 * s, s, slot, live, cfg)
    count = live.to(tl.int32)
    place = tl.atomic_add(counter, tl.sum(count, axis=0)) + tl.cumsum(count, axis=0) - 1
    path = _follow(links, start, index, s, cfg)
    v = tl.load(scratch.candidates + m * cfg.CANDIDATES + path, mask=live, other=0)
    # A step's predecessor is the guess of the step before.
    later = inside & (s > start)
    before = s[:, None] == (s[None, :] + 1)
    at = m * cfg.CANDIDATES + tl.sum(tl.where(before, path[None, :], 0), axis=1)
    need = tl.load(scratch.link_need + at, mask=later, other=0.0) + tl.where(later, 0.0, need)
    sure = tl.load(scratch.link_sure + at, mask=later, other=0.0) + tl.where(later, 0.0, sure)
    tl.store(scratch.sure + m, sure, mask=live)
    # Finite, so that a logit of -inf never passes the gate.
    tl.store(scratch.row_need + place, tl.maximum(need, -3.0e38), mask=live)
    if cfg.NOISE:
        tl.store(scratch.row_temp + place, temp, mask=live)
        tl.store(scratch.row_state + place, state.to(tl.int32, bitcast=True), mask=live)
        if cfg.FP64:
            tl.store(scratch.row_state64 + place, state64.to(tl.int32, bitcast=True), mask=live)
    guess = tl.where(live, target_id(io, v, live, cfg), 0)
    prev = tl.where(later, tl.sum(tl.where(before, guess[None, :], 0), axis=1), prev)
    tl.store(scratch.row_prev + place, prev, mask=live)
    tl.store(scratch.row_base + place, base_offset(io, r + 0 * s, s, cfg), mask=live)
    if cfg.CACHED:
        at = cache_offset(io, tl.where(live, slot, 0), s, cfg)
        tl.store(scratch.row_cache + place, at, mask=live)
    tl.store(scratch.place + m, place, mask=live)
    tl.store(scratch.guess + m, guess, mask=inside)
    tl.store(scratch.start + r, start)
    token_at = r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step
    tl.store(io.tokens + token_at, 0, mask=inside & (live == 0))
    tl.store(io.nonfinite + m, 0, mask=inside & (live == 0))
