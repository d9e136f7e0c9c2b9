"""W2 in fewer bits: codes are loaded as bytes and become numbers on their way to the matrix unit.

A code's value is exact in bf16, fp16 and fp32, so the sums are those of a plain W2 that holds the
values; the fp32 scales are applied to the sums. In NVFP4 a byte holds two neighbours of the rank:
all even ones are multiplied, then all odd ones.

Bytes stay bytes in the loads, and no chip needs a type for them: e4m3 and e2m1 are the upper bits
of a 16-bit float with another bias, which one exact product sets right, subnormal codes included.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(16)  # values of NVFP4 with one scale within the values
# What NVFP4's values are short of where NVIDIA's instructions make them: then no product overflows.
SHORT = tl.constexpr(256.0)


@triton.jit
def _exact(x, dtype: tl.constexpr):
    """Numbers of at most 8 significant bits in ``dtype``."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _e4m3_as_fp16(codes):
    bits = (codes.to(tl.int16) << 7) & -16512  # sign and magnitude in fp16's places, 0xBF80
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e4m3(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Numbers in ``dtype`` of int8 codes; not-a-number reads as 480."""
    if PTX and dtype == tl.bfloat16:
        asm: tl.constexpr = """{ .reg .b32 a, b, scale, zero;
            mov.b32 scale, 0x7B807B80; mov.b32 zero, 0x80008000;
            prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xB3A2;
            shl.b32 a, a, 4; shl.b32 b, b, 4;
            and.b32 a, a, 0x87F087F0; and.b32 b, b, 0x87F087F0;
            fma.rn.bf16x2 $0, a, scale, zero; fma.rn.bf16x2 $1, b, scale, zero; }"""
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    elif PTX and dtype == tl.float16:
        asm: tl.constexpr = """{ .reg .b32 a, b, scale;
            mov.b32 scale, 0x5C005C00;
            prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xB3A2;
            shl.b32 a, a, 7; shl.b32 b, b, 7;
            and.b32 a, a, 0xBF80BF80; and.b32 b, b, 0xBF80BF80;
            mul.f16x2 $0, a, scale; mul.f16x2 $1, b, scale; }"""
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], tl.float16, True, 4)
    else:
        return _exact(_e4m3_as_fp16(codes), dtype)


@triton.jit
def int8(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Numbers in ``dtype`` of int8 codes."""
    if PTX and dtype == tl.bfloat16:
        # Seven bits after 128, less 128 or, for negative codes, 256.
        asm: tl.constexpr = """{ .reg .b32 a, b, c, d, one, least;
            mov.b32 least, 0x43004300; mov.b32 one, 0xBF80BF80;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 c, a, 0x00800080, least, 0xEA; lop3.b32 d, b, 0x00800080, least, 0xEA;
            lop3.b32 a, a, 0x007F007F, least, 0xEA; lop3.b32 b, b, 0x007F007F, least, 0xEA;
            fma.rn.bf16x2 $0, c, one, a; fma.rn.bf16x2 $1, d, one, b; }"""
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    elif PTX and dtype == tl.float16:
        # 1024 and the code plus 128, less 1152.
        asm: tl.constexpr = """{ .reg .b32 a, b, c, high, least;
            mov.b32 high, 0x64646464; mov.b32 least, 0x64806480;
            xor.b32 c, $2, 0x80808080;
            prmt.b32 a, c, high, 0x4140; prmt.b32 b, c, high, 0x4342;
            sub.f16x2 $0, a, least; sub.f16x2 $1, b, least; }"""
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], tl.float16, True, 4)
    else:
        return _exact(codes.to(tl.float32), dtype)


@triton.jit
def _e2m1_as_fp16(nibble):
    bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _nibbles_as_floats(codes, dtype: tl.constexpr):
    """Of two e2m1 codes a byte the low ones and the high ones, times 2**-126 or, fp16, 2**-14."""
    if dtype == tl.bfloat16:
        asm: tl.constexpr = """{ .reg .b32 a, b, low;
            shl.b32 low, $4, 4;
            prmt.b32 a, low, 0, 0x9180; prmt.b32 b, low, 0, 0xB3A2;
            shl.b32 a, a, 2; shl.b32 b, b, 2;
            and.b32 $0, a, 0x81C081C0; and.b32 $1, b, 0x81C081C0;
            prmt.b32 a, $4, 0, 0x9180; prmt.b32 b, $4, 0, 0xB3A2;
            shl.b32 a, a, 2; shl.b32 b, b, 2;
            and.b32 $2, a, 0x81C081C0; and.b32 $3, b, 0x81C081C0; }"""
        return tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        asm: tl.constexpr = """{ .reg .b32 a, b, low;
            shl.b32 low, $4, 4;
            prmt.b32 a, low, 0, 0x9180; prmt.b32 b, low, 0, 0xB3A2;
            shl.b32 a, a, 5; shl.b32 b, b, 5;
            and.b32 $0, a, 0x8E008E00; and.b32 $1, b, 0x8E008E00;
            prmt.b32 a, $4, 0, 0x9180; prmt.b32 b, $4, 0, 0xB3A2;
            shl.b32 a, a, 5; shl.b32 b, b, 5;
            and.b32 $2, a, 0x8E008E00; and.b32 $3, b, 0x8E008E00; }"""
        return tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r", [codes], (tl.float16, tl.float16), True, 4
        )


@triton.jit
def _times(x, groups):
    """``x`` [n, k], each run of eight along k times its ``groups`` [n, k / 8]."""
    runs = tl.reshape(x, [x.shape[0], groups.shape[1], x.shape[1] // groups.shape[1]])
    return tl.reshape(runs * groups[:, :, None], [x.shape[0], x.shape[1]])


@triton.jit
def nvfp4(codes, groups, dtype: tl.constexpr, PTX: tl.constexpr):
    """Even and odd values [n, k / 2] of packed ``codes`` [n, k / 2] with e4m3 codes ``groups``
    [n, k / 16]; `SHORT` times too small where `is_short`.
    """
    scale = _e4m3_as_fp16(groups)
    if PTX and dtype != tl.float32:
        low, high = _nibbles_as_floats(codes, dtype)
        if dtype == tl.bfloat16:
            scale = (scale.to(tl.float32) * 2.0**118).to(dtype)
        else:
            scale = scale * 64.0
        return _times(low, scale), _times(high, scale)
    else:
        # Of fp16's eleven bits a product takes six.
        nibbles = codes.to(tl.int16)
        low, high = _e2m1_as_fp16(nibbles), _e2m1_as_fp16(nibbles >> 4)
        return _exact(_times(low, scale), dtype), _exact(_times(high, scale), dtype)


@triton.jit
def _codes(at, row, live, k0, WIDTH: tl.constexpr, TOTAL: tl.constexpr):
    """int8 [n, WIDTH] from column ``k0`` of rows of ``TOTAL`` bytes; zeros outside."""
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
    if cfg.SCALE_PARTS > 1:
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
    if cfg.FORMAT == "nvfp4":
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
            part = _add(0.0 * acc, embed[b], _numbers(codes, cfg), TURNED)
            factor = _factor(io, v, in_vocab, b, cfg)
            factor = factor[:, None] if TURNED else factor[None, :]
            acc = tl.fma(part, factor + 0.0 * acc, acc)
    if TURNED:
        acc = tl.trans(acc)
    if cfg.FORMAT == "nvfp4":
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
                acc = tl.fma(part, factor + 0.0 * part, acc)
            else:
                acc = _add(acc, a, b, False)
    if cfg.SCALE_PARTS == 1:
        acc *= _factor(io, right, right_live, 0, cfg)[None, :]
    return acc
