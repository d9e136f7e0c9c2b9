"""Guess: for every row-step, the candidates whose noised base logits stand out.

Arithmetic is approximate here. A guess decides only how many passes the check needs.
"""

import triton
import triton.language as tl

from fused_markov.kernels.bans import ban_offset, ban_tile
from fused_markov.kernels.fill import fill_unmapped
from fused_markov.kernels.noise import bound_terms, reach
from fused_markov.kernels.prefetch import prefetch_candidates
from fused_markov.kernels.rows import (
    as_scalar,
    base_offset,
    below_vocab,
    load_noise,
    load_slot,
    token_key,
)
from fused_markov.kernels.transforms import transformed

LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _look(io, rows, v, live, inside_chunk, cfg: tl.constexpr):
    """Base logits [GUESS_M, LANES] of candidates ``v`` and the keys of their noise [LANES]."""
    in_vocab = inside_chunk & below_vocab(io, v, cfg)
    # Vectors of four, as the keys are loaded, so that a token and its key meet in one thread.
    at = tl.max_contiguous(rows + v[None, :], [1, 4])
    z = tl.load(at, mask=live[:, None] & in_vocab[None, :], other=float("-inf"))
    key = v
    if cfg.NOISE:
        key = token_key(io, v, in_vocab).to(tl.int32, bitcast=True)
    return z, key


@triton.jit
def _scan_chunk(io, r, s, slot, live, first, rounds, cfg: tl.constexpr):
    """Best token that each lane passes: [GUESS_M, LANES] scores whose low 8 bits say which round.

    Not-a-number loses against everything in `tl.maximum`, and so do infinities, which turn into it
    with the round's bits: the check sees to those. Each round's loads are under way during the
    round before.
    """
    lane = tl.arange(0, cfg.LANES)
    rows = io.base + base_offset(io, r, s, cfg)[:, None]
    following, following_key = _look(io, rows, first + lane, live, lane >= 0, cfg)
    if cfg.NOISE:
        temp, state, state64 = load_noise(io, r, s, slot, live, cfg)
        terms = bound_terms(temp)
    best = tl.full([cfg.GUESS_M, cfg.LANES], LOWEST, tl.float32)
    for i in range(0, rounds):
        v = first + as_scalar(i) * cfg.LANES + lane
        z, key = following.to(tl.float32), following_key.to(tl.uint32, bitcast=True)
        more = (as_scalar(i) + 1 < rounds) & (lane >= 0)
        following, following_key = _look(io, rows, v + cfg.LANES, live, more, cfg)
        in_vocab = below_vocab(io, v, cfg)
        if cfg.TRANSFORM is not None:
            z = tl.where(live[:, None] & in_vocab[None, :], transformed(z, cfg), float("-inf"))
        if cfg.NOISE:
            z = reach(z, terms, state, state64, key, True, cfg)
        if cfg.BANNED:
            at = ban_offset(io, tl.where(live, slot, 0), s)
            z = ban_tile(io, z, at, v, live, in_vocab, LOWEST, cfg)
        bits = (z.to(tl.int32, bitcast=True) & ~0xFF) | i
        best = tl.maximum(best, bits.to(tl.float32, bitcast=True))
    return best


@triton.jit
def _guess_item(io, scratch, item, cfg: tl.constexpr):
    """Candidates of one chunk of the vocabulary for GUESS_M row-steps.

    Every lane keeps the best of the tokens it passes; the lanes fall into segments, and each
    segment gives its best two.
    """
    SEGMENTS: tl.constexpr = cfg.CANDIDATES // cfg.CHUNKS // 2
    PER_SEGMENT: tl.constexpr = cfg.LANES // SEGMENTS
    M: tl.constexpr = cfg.GUESS_M
    m = item // cfg.CHUNKS * M + tl.arange(0, M)
    chunk = item % cfg.CHUNKS
    r, s = m // cfg.STEPS, m % cfg.STEPS
    slot = load_slot(io, r, s, r < io.rows)
    live = slot >= 0
    if tl.max(live.to(tl.int32), axis=0) > 0:
        rounds = tl.cdiv(tl.cdiv(io.vocab, cfg.CHUNKS), cfg.LANES)
        first = chunk * rounds * cfg.LANES
        best = _scan_chunk(io, r, s, slot, live, first, rounds, cfg)
        packed = tl.reshape(best, [M, SEGMENTS, PER_SEGMENT])
        lane = tl.reshape(tl.arange(0, cfg.LANES), [1, SEGMENTS, PER_SEGMENT])
        out = m[:, None] * cfg.CANDIDATES + chunk * 2 * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
        for second in tl.static_range(2):
            top = tl.max(packed, axis=2)
            at = tl.min(tl.where(packed == top[:, :, None], lane, cfg.LANES), axis=2)
            v = first + (top.to(tl.int32, bitcast=True) & 0xFF) * cfg.LANES + at
            v = tl.maximum(tl.minimum(v, io.vocab - 1), 0)
            prefetch_candidates(io, tl.reshape(v, [M * SEGMENTS]), cfg)
            tl.store(scratch.candidates + out + second * SEGMENTS, v, mask=live[:, None])
            packed = tl.where(lane == at[:, :, None], LOWEST, packed)


@triton.jit
def guess_all(io, scratch, pid, programs, cfg: tl.constexpr):
    """This program's share of the guess."""
    blocks = tl.cdiv(io.rows * cfg.STEPS, cfg.GUESS_M)
    for item in range(pid, blocks * cfg.CHUNKS, programs):
        _guess_item(io, scratch, as_scalar(item), cfg)
    if cfg.FILL:
        for m in range(pid, io.rows * cfg.STEPS, programs):
            fill_unmapped(io, as_scalar(m) // cfg.STEPS, as_scalar(m) % cfg.STEPS, cfg)
