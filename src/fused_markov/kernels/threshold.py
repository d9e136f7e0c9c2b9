"""Threshold: the largest key such that the tokens not below it have a wanted count or mass.

Looked for among the few largest that each lane passes, and checked by one read of the row; where
they were too few, found two bits at a time, by one read each. Sums are of integers, in any order: a
lane keeps its own, and they meet once a read.
"""

import triton
import triton.language as tl

from fused_markov.kernels.bans import without_banned
from fused_markov.kernels.rows import as_scalar, target_id
from fused_markov.shaping import COEFFICIENTS, FRACTION, LOG2E, MOST_HALVINGS

LANES = tl.constexpr(2048)
SIGN = tl.constexpr(-(1 << 31))
PER_UNIT = tl.constexpr(LOG2E)
MOST = tl.constexpr(MOST_HALVINGS)
BITS = tl.constexpr(FRACTION)
REST = tl.constexpr(32 - FRACTION)
SCALE = tl.constexpr(2.0**FRACTION)
MASK = tl.constexpr((1 << FRACTION) - 1)
C0 = tl.constexpr(COEFFICIENTS[0])
C1 = tl.constexpr(COEFFICIENTS[1])
C2 = tl.constexpr(COEFFICIENTS[2])
C3 = tl.constexpr(COEFFICIENTS[3])
C4 = tl.constexpr(COEFFICIENTS[4])
C5 = tl.constexpr(COEFFICIENTS[5])
C6 = tl.constexpr(COEFFICIENTS[6])


@triton.jit
def number(x):
    """``x``, with -inf for not-a-number and one zero."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def order_key(x, SHIFT: tl.constexpr):
    """uint32 that rises with ``x``, which `number` gave; ``SHIFT``: low bits its dtype lacks."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | SIGN)).to(tl.uint32, bitcast=True) >> SHIFT


@triton.jit
def _less(c, f, value):
    return tl.full([], c, tl.uint32) - tl.umulhi(f, value)


@triton.jit
def weights(x, top, temp):
    """`fused_markov.shaping.weights` on the device, to the bit."""
    halvings = tl.minimum(tl.div_rn(top - x, temp) * PER_UNIT, MOST)
    fixed = (halvings * SCALE).to(tl.int32)
    f = (fixed & MASK).to(tl.uint32) << REST
    value = _less(C5, f, tl.full([], C6, tl.uint32) + 0 * f)
    value = _less(C4, f, value)
    value = _less(C3, f, value)
    value = _less(C2, f, value)
    value = _less(C1, f, value)
    value = _less(C0, f, value)
    left = tl.full([], 1 << 32, tl.int64) - tl.umulhi(f, value).to(tl.int64)
    return (left << 2) >> (fixed >> BITS).to(tl.int64)


@triton.jit
def cache_column(io, v, inside, cfg: tl.constexpr):
    """Columns of the cache that candidates ``v`` stand in."""
    if cfg.TARGET_WIDE:
        return target_id(io, v, inside, cfg)
    else:
        return v


@triton.jit
def row_block(io, row, first, FROM_BASE: tl.constexpr, cfg: tl.constexpr):
    """Candidates [LANES] from ``first`` on: their numbers, which are inside, their logits.

    ``row``: offsets of the base logits or the cache, and of the bans.
    """
    at, ban_at = row
    v = as_scalar(first) + tl.arange(0, LANES)
    inside = v < io.vocab
    if FROM_BASE:
        x = tl.load(io.base + at + v, mask=inside, other=float("-inf")).to(tl.float32)
        if cfg.BANNED:
            x = without_banned(io, x, ban_at, target_id(io, v, inside, cfg), inside, float("-inf"))
    else:
        x = tl.load(
            io.cache + at + cache_column(io, v, inside, cfg), mask=inside, other=float("-inf")
        ).to(tl.float32)
    return v, inside, number(x)


@triton.jit
def sieve(io, row, FROM_BASE: tl.constexpr, cfg: tl.constexpr):
    """The three largest numbers [LANES] that each lane passes, -inf where there are fewer."""
    first = tl.full([LANES], float("-inf"), tl.float32)
    second, third = first, first
    for start in range(0, io.vocab, LANES):
        _v, _inside, x = row_block(io, row, start, FROM_BASE, cfg)
        beaten = tl.minimum(first, x)
        first = tl.maximum(first, x)
        third = tl.maximum(third, tl.minimum(second, beaten))
        second = tl.maximum(second, beaten)
    return first, second, third


@triton.jit
def _counted(x, least, top, temp, MASS: tl.constexpr, SHIFT: tl.constexpr):
    """Keys of `number`s, and what each counts: nothing below ``least``."""
    key = order_key(x, SHIFT)
    if MASS:
        one = weights(x, top, temp)
    else:
        one = tl.full([LANES], 1, tl.int32)
    return key, tl.where(key >= least, one, 0)


@triton.jit
def sum_from(
    io,
    row,
    least,
    top,
    temp,
    MASS: tl.constexpr,
    FROM_BASE: tl.constexpr,
    SHIFT: tl.constexpr,
    cfg: tl.constexpr,
):
    """int64 count or mass of the tokens whose key is not below ``least``, by one read."""
    total = tl.zeros([LANES], tl.int64 if MASS else tl.int32)
    for start in range(0, io.vocab, LANES):
        _v, inside, x = row_block(io, row, start, FROM_BASE, cfg)
        _key, one = _counted(x, least, top, temp, MASS, SHIFT)
        total += tl.where(inside, one, 0)
    return tl.sum(total, axis=0).to(tl.int64)


@triton.jit
def _sum_over(keys, ones, cut):
    total = tl.where(keys[0] >= cut, ones[0], 0) + tl.where(keys[1] >= cut, ones[1], 0)
    return tl.sum(total + tl.where(keys[2] >= cut, ones[2], 0), axis=0).to(tl.int64)


@triton.jit
def _threshold_of(sieved, wanted, least, top, temp, MASS: tl.constexpr, SHIFT: tl.constexpr):
    """`threshold` among the finite numbers of `sieve` alone, and their sum not below it."""
    key_0, one_0 = _counted(sieved[0], least, top, temp, MASS, SHIFT)
    key_1, one_1 = _counted(sieved[1], least, top, temp, MASS, SHIFT)
    key_2, one_2 = _counted(sieved[2], least, top, temp, MASS, SHIFT)
    one_0 = tl.where(sieved[0] > float("-inf"), one_0, 0)
    one_1 = tl.where(sieved[1] > float("-inf"), one_1, 0)
    one_2 = tl.where(sieved[2] > float("-inf"), one_2, 0)
    keys, ones = (key_0, key_1, key_2), (one_0, one_1, one_2)
    LEVELS: tl.constexpr = 32 - SHIFT
    found = tl.full([], 0, tl.uint32)
    for level in range(0, LEVELS):
        cut = found + (tl.full([], 1, tl.uint32) << (LEVELS - 1 - as_scalar(level)).to(tl.uint32))
        if _sum_over(keys, ones, cut) >= wanted:
            found = cut
    return found, _sum_over(keys, ones, found)


@triton.jit
def threshold(
    io,
    row,
    sieved,  # of `sieve`
    wanted,  # int64, at least 1 and at most the sum over all
    least,  # key below which nothing is summed
    top,
    temp,
    MASS: tl.constexpr,  # sum `weights`, not ones
    FROM_BASE: tl.constexpr,
    SHIFT: tl.constexpr,
    cfg: tl.constexpr,
):
    """The largest key not below which at least ``wanted`` is."""
    found, among = _threshold_of(sieved, wanted, least, top, temp, MASS, SHIFT)
    low = tl.maximum(found.to(tl.int64), least.to(tl.int64)).to(tl.uint32)
    # Nothing not below it is missing among the sieved: then it is the row's own.
    all_there = sum_from(io, row, low, top, temp, MASS, FROM_BASE, SHIFT, cfg) == among
    if (among < wanted) | (all_there == 0):
        found = _threshold_by_bits(io, row, wanted, least, top, temp, MASS, FROM_BASE, SHIFT, cfg)
    return found


@triton.jit
def _threshold_by_bits(
    io,
    row,
    wanted,  # int64, at least 1 and at most the sum over all
    least,  # key below which nothing is summed
    top,
    temp,
    MASS: tl.constexpr,  # sum `weights`, not ones
    FROM_BASE: tl.constexpr,
    SHIFT: tl.constexpr,
    cfg: tl.constexpr,
):
    """`threshold`, two bits of it by each read."""
    LEVELS: tl.constexpr = (33 - SHIFT) // 2
    found = tl.full([], 0, tl.uint32)
    for level in range(0, LEVELS):
        up = (2 * (LEVELS - 1 - as_scalar(level))).to(tl.uint32)
        step = tl.full([], 1, tl.uint32) << up
        low, mid, high = found + step, found + 2 * step, found + 3 * step
        sum_type: tl.constexpr = tl.int64 if MASS else tl.int32
        over_low = tl.zeros([LANES], sum_type)
        over_mid = tl.zeros([LANES], sum_type)
        over_high = tl.zeros([LANES], sum_type)
        for first in range(0, io.vocab, LANES):
            _v, inside, x = row_block(io, row, first, FROM_BASE, cfg)
            key, one = _counted(x, least, top, temp, MASS, SHIFT)
            one = tl.where(inside, one, 0)
            over_low += tl.where(key >= low, one, 0)
            over_mid += tl.where(key >= mid, one, 0)
            over_high += tl.where(key >= high, one, 0)
        met = (tl.sum(over_low, axis=0) >= wanted).to(tl.uint32)
        met += (tl.sum(over_mid, axis=0) >= wanted).to(tl.uint32)
        met += (tl.sum(over_high, axis=0) >= wanted).to(tl.uint32)
        found += met << up
    return found
