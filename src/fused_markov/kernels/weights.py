"""W2 in fewer bits: codes are loaded as bytes and become numbers on their way to the matrix unit.

A code's value is exact in bf16, fp16 and fp32 (see `decode`), so the sums are those of a plain W2
that holds the values; the fp32 scales are applied to the sums. In NVFP4 a byte holds two neighbours
of the rank: all even ones are multiplied, then all odd ones. Where a check has few rows (PER_WORD)
the matrix unit takes W2 out of registers. There a lane gets words of 32 bits, and every fourth of
the rank, or in NVFP4 every eighth, is multiplied apart.
"""

import triton
import triton.language as tl

from fused_markov.kernels.decode import (
    SHORT,
    e4m3,
    int8,
    numbers_of_words,
    nvfp4,
    nvfp4_of_words,
)

GROUP = tl.constexpr(16)  # values of NVFP4 with one scale within the values


@triton.jit
def _codes(at, row, live, k0, WIDTH: tl.constexpr, TOTAL: tl.constexpr):
    """[n, WIDTH] bytes or words from column ``k0`` of rows of ``TOTAL``; zeros outside."""
    k = k0 + tl.arange(0, WIDTH)
    mask = live[:, None]
    if TOTAL % WIDTH != 0:
        mask = mask & (k < TOTAL)[None, :]
    return tl.load(at + row[:, None] * TOTAL + k[None, :], mask=mask, other=0)


@triton.jit
def _numbers(codes, cfg: tl.constexpr):
    if cfg.FORMAT == "fp8":
        return e4m3(codes, cfg.WEIGHT, cfg.PTX)
    else:
        return int8(codes, cfg.WEIGHT, cfg.PTX)


@triton.jit
def _even_and_odd(at, groups_at, row, live, k0, WIDTH: tl.constexpr, cfg: tl.constexpr):
    """The values of rows of NVFP4 from column ``k0`` on, ``WIDTH`` of them; see `nvfp4`."""
    half: tl.constexpr = WIDTH // 2
    few: tl.constexpr = WIDTH // GROUP
    total: tl.constexpr = cfg.RANK // GROUP
    codes = _codes(at, row, live, k0 // 2, half, cfg.RANK // 2)
    groups = _codes(groups_at, row, live, k0 // GROUP, few, total)
    return nvfp4(codes, groups, cfg.WEIGHT, cfg.PTX)


@triton.jit
def _halves(embed):
    """The even and the odd columns."""
    return tl.split(tl.reshape(embed, [embed.shape[0], embed.shape[1] // 2, 2]))


@triton.jit
def _factor(io, v, live, part, cfg: tl.constexpr):
    """fp32 scales of candidates ``v`` for one part of the rank."""
    block = 0 * v
    if cfg.SCALE_ROWS > 0:
        block = v // cfg.SCALE_ROWS
    factor = tl.load(io.w2_scale + block * cfg.SCALE_PARTS + part, mask=live, other=0.0)
    if cfg.FORMAT == "nvfp4" and cfg.PTX and tl.float32 != cfg.WEIGHT:
        factor = factor * SHORT
    return factor


@triton.jit
def embed_of(io, prev, live, cfg: tl.constexpr):
    """W1's rows as `bias_of` multiplies them: a tuple of parts of the rank, or NVFP4's halves."""
    row = prev[:, None] * cfg.RANK
    if cfg.PER_WORD > 0:
        width: tl.constexpr = cfg.RANK // cfg.SCALE_PARTS
        count: tl.constexpr = cfg.SCALE_PARTS * cfg.PER_WORD
        k = cfg.PER_WORD * tl.arange(0, width // cfg.PER_WORD)
        parts = ()
        for i in tl.static_range(count):
            at = io.w1 + row + (i // cfg.PER_WORD * width + i % cfg.PER_WORD + k)[None, :]
            parts = parts + (tl.load(at, mask=live[:, None], other=0.0),)  # noqa: RUF005
        return parts
    elif cfg.SCALE_PARTS > 1:
        k = tl.arange(0, cfg.SCALE_RANK)
        count: tl.constexpr = cfg.SCALE_PARTS
        parts = ()
        for b in tl.static_range(count):
            inside = live[:, None] & (b * cfg.SCALE_RANK + k < cfg.RANK)[None, :]
            at = io.w1 + row + b * cfg.SCALE_RANK + k[None, :]
            parts = parts + (tl.load(at, mask=inside, other=0.0),)  # noqa: RUF005
        return parts
    else:
        k = tl.arange(0, cfg.BLOCK_K)
        inside = live[:, None] & (k < cfg.RANK)[None, :]
        whole = tl.load(io.w1 + row + k[None, :], mask=inside, other=0.0)
        if cfg.FORMAT == "nvfp4":
            return _halves(whole)
        else:
            return (whole,)


@triton.jit
def _add(acc, embed, weights, TURNED: tl.constexpr):
    """``acc`` and the products of rows ``embed`` and ``weights``; ``TURNED``: candidates first."""
    if TURNED:
        return tl.dot(weights, tl.trans(embed), acc, input_precision="ieee")
    else:
        return tl.dot(embed, tl.trans(weights), acc, input_precision="ieee")


@triton.jit
def bias_of(io, embed, tile, in_vocab, cfg: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_V] biases of a tile of candidates, before their rounding.

    ``embed``: as `embed_of` gives it, where a block is the whole rank.
    """
    TURNED: tl.constexpr = cfg.BLOCK_M < 64  # as in `check._bias`
    lane = tl.arange(0, cfg.BLOCK_V)
    v = tile * cfg.BLOCK_V + lane
    first = tile.to(tl.int64) * cfg.BLOCK_V
    if TURNED:
        acc = tl.full([cfg.BLOCK_V, cfg.BLOCK_M], 0.0, tl.float32)
    else:
        acc = tl.full([cfg.BLOCK_M, cfg.BLOCK_V], 0.0, tl.float32)
    if cfg.PER_WORD > 0:
        width: tl.constexpr = cfg.RANK // cfg.SCALE_PARTS
        few: tl.constexpr = width // cfg.PER_WORD
        total: tl.constexpr = cfg.RANK // cfg.PER_WORD
        count: tl.constexpr = cfg.SCALE_PARTS
        each: tl.constexpr = cfg.PER_WORD
        at = io.w2_words + first * total
        for b in tl.static_range(count):
            words = _codes(at, lane, in_vocab, b * few, few, total)
            if cfg.FORMAT == "nvfp4":
                groups_at = io.w2_groups + first * (cfg.RANK // GROUP)
                groups = _codes(groups_at, lane, in_vocab, 0, cfg.RANK // GROUP, cfg.RANK // GROUP)
                x = nvfp4_of_words(words, groups, cfg.WEIGHT, cfg.PTX)
            else:
                x = numbers_of_words(words, cfg.FORMAT == "fp8", cfg.WEIGHT, cfg.PTX)
            part = tl.zeros_like(acc)
            for j in tl.static_range(each):
                part = _add(part, embed[b * each + j], x[j], TURNED)
            factor = _factor(io, v, in_vocab, b, cfg)
            factor = factor[:, None] if TURNED else factor[None, :]
            acc = tl.fma(part, tl.broadcast_to(factor, acc.shape), acc)
    elif cfg.FORMAT == "nvfp4":
        at = io.w2 + first * (cfg.RANK // 2)
        groups_at = io.w2_groups + first * (cfg.RANK // GROUP)
        even, odd = _even_and_odd(at, groups_at, lane, in_vocab, 0, cfg.BLOCK_K, cfg)
        acc = _add(acc, embed[0], even, TURNED)
        acc = _add(acc, embed[1], odd, TURNED)
    else:
        at = io.w2 + first * cfg.RANK
        width: tl.constexpr = cfg.SCALE_RANK if cfg.SCALE_PARTS > 1 else cfg.BLOCK_K
        count: tl.constexpr = cfg.SCALE_PARTS
        for b in tl.static_range(count):
            codes = _codes(at, lane, in_vocab, b * width, width, cfg.RANK)
            part = _add(tl.zeros_like(acc), embed[b], _numbers(codes, cfg), TURNED)
            factor = _factor(io, v, in_vocab, b, cfg)
            factor = factor[:, None] if TURNED else factor[None, :]
            acc = tl.fma(part, tl.broadcast_to(factor, acc.shape), acc)
    if TURNED:
        acc = tl.trans(acc)
    if cfg.FORMAT == "nvfp4" and cfg.PER_WORD == 0:
        acc *= _factor(io, v, in_vocab, 0, cfg)[None, :]
    return acc


@triton.jit
def stored_product(
    io,
    left,
    right,
    left_live,
    right_live,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    cfg: tl.constexpr,
):
    """`link.product` with rows of W2 in fewer bits, scales applied."""
    acc = tl.zeros([left.shape[0], right.shape[0]], tl.float32)
    for k0 in tl.range(0, cfg.RANK, BLOCK, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK)
        mask = left_live[:, None]
        if cfg.RANK % BLOCK != 0:
            mask = mask & (k < cfg.RANK)[None, :]
        a = tl.load(io.w1 + left[:, None] * cfg.RANK + k[None, :], mask=mask, other=0.0)
        if cfg.FORMAT == "nvfp4":
            even, odd = _even_and_odd(io.w2, io.w2_groups, right, right_live, k0, BLOCK, cfg)
            a_even, a_odd = _halves(a)
            acc = _add(acc, a_even, even, False)
            acc = _add(acc, a_odd, odd, False)
        else:
            b = _numbers(_codes(io.w2, right, right_live, k0, BLOCK, cfg.RANK), cfg)
            if cfg.SCALE_PARTS > 1:
                part = _add(tl.zeros_like(acc), a, b, False)
                factor = _factor(io, right, right_live, k0 // cfg.SCALE_RANK, cfg)[None, :]
                acc = tl.fma(part, tl.broadcast_to(factor, acc.shape), acc)
            else:
                acc = _add(acc, a, b, False)
    if cfg.SCALE_PARTS == 1:
        acc *= _factor(io, right, right_live, 0, cfg)[None, :]
    return acc
