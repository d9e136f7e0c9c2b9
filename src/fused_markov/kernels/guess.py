"""Guess: for every row-step, the candidates whose noised base logits stand out.

Arithmetic is approximate here. A guess decides only how many passes the check needs.
"""

import triton
import triton.language as tl

from fused_markov.kernels.noise import mix_key, noise_bound
from fused_markov.kernels.rows import (
    as_scalar,
    base_offset,
    below_vocab,
    cache_offset,
    load_noise,
    load_slot,
    target_id,
)

LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _segment_best(packed, lane, cfg: tl.constexpr):
    """Best (value, lane) of each segment: [segments, lanes] -> [segments]."""
    best = tl.max(packed, axis=1)
    at = tl.min(tl.where(packed == best[:, None], lane, cfg.LANES), axis=1)
    return best, tl.minimum(at, cfg.LANES - 1)


@triton.jit
def guess_chunk(io, scratch, item, cfg: tl.constexpr):
    """Candidates of one chunk of the vocabulary for one row-step.

    Every lane keeps the best of the tokens it passes, as a float whose low 8 bits say which; then
    the lanes fall into segments, and each segment gives its best two.
    """
    SEGMENTS: tl.constexpr = cfg.CANDIDATES // cfg.CHUNKS // 2
    PER_SEGMENT: tl.constexpr = cfg.LANES // SEGMENTS
    m = item // cfg.CHUNKS
    chunk = item % cfg.CHUNKS
    r, s = m // cfg.STEPS, m % cfg.STEPS
    slot = load_slot(io, r, s, True)
    if slot >= 0:
        rounds = tl.cdiv(tl.cdiv(io.vocab, cfg.CHUNKS), cfg.LANES)
        first = chunk * rounds * cfg.LANES
        lane = tl.arange(0, cfg.LANES)
        row = io.base + base_offset(io, r, s, cfg)
        inverse = 1.0
        noisy = False
        if cfg.NOISE:
            temp, state, state64 = load_noise(io, r, s, slot, True, cfg)
            noisy = temp != 0.0
            inverse = 1.0 / tl.where(noisy, temp, 1.0)
        best = tl.full([cfg.LANES], LOWEST, tl.float32)
        for i in range(0, rounds):
            v = first + i * cfg.LANES + lane
            mask = below_vocab(io, v, cfg)
            z = tl.load(row + v, mask=mask, other=float("-inf")).to(tl.float32)
            if cfg.NOISE:
                if noisy:
                    key = mix_key(target_id(io, v, mask, cfg).to(tl.uint32))
                    z = z * inverse + noise_bound(state, state64, key, cfg.FP64)
            bits = (z.to(tl.int32, bitcast=True) & ~0xFF) | (i & 0xFF)
            # A NaN or infinite score never wins here; the check sees to those.
            best = tl.maximum(
                best, tl.where(tl.abs(z) < 3.0e38, bits.to(tl.float32, bitcast=True), LOWEST)
            )
        packed = tl.reshape(best, [SEGMENTS, PER_SEGMENT])
        lanes = tl.reshape(lane, [SEGMENTS, PER_SEGMENT])
        out = (
            scratch.candidates + m * cfg.CANDIDATES + chunk * 2 * SEGMENTS + tl.arange(0, SEGMENTS)
        )
        for second in tl.static_range(2):
            top, at = _segment_best(packed, lanes, cfg)
            v = first + (top.to(tl.int32, bitcast=True) & 0xFF) * cfg.LANES + at
            tl.store(out + second * SEGMENTS, tl.minimum(v, io.vocab - 1))
            packed = tl.where(lanes == at[:, None], LOWEST, packed)


@triton.jit
def fill_unmapped(io, pid, programs, cfg: tl.constexpr):
    """-inf into the cache columns that no candidate maps to."""
    WIDTH: tl.constexpr = 1024
    parts = tl.cdiv(io.num_fill, WIDTH)
    for item in range(pid, io.rows * cfg.STEPS * parts, programs):
        m, part = as_scalar(item) // parts, item % parts
        r, s = m // cfg.STEPS, m % cfg.STEPS
        slot = load_slot(io, r, s, True)
        if slot >= 0:
            i = part * WIDTH + tl.arange(0, WIDTH)
            mask = i < io.num_fill
            hole = tl.load(io.holes + i, mask=mask & (i < io.num_holes), other=0)
            column = tl.where(i < io.num_holes, hole, io.fill_from + i - io.num_holes)
            row = io.cache + cache_offset(io, slot, s, cfg)
            lowest = tl.full([WIDTH], float("-inf"), tl.float32).to(cfg.CACHE)
            tl.store(row + column, lowest, mask=mask)


@triton.jit
def guess_all(io, scratch, pid, programs, cfg: tl.constexpr):
    """This program's share of the guess."""
    for item in range(pid, io.rows * cfg.STEPS * cfg.CHUNKS, programs):
        guess_chunk(io, scratch, as_scalar(item), cfg)
    if cfg.FILL:
        fill_unmapped(io, pid, programs, cfg)
