"""Numbers out of codes: e4m3, int8 and e2m1, in tiles of bytes or of words of 32 bits.

e4m3 and e2m1 are the upper bits of a 16-bit float with another bias, which one exact product sets
right, subnormal codes included. So no chip needs a type for them. NVIDIA's GPUs do it two at a
time: where the compiler's own code takes four instructions a number and more, these take two.
"""

import triton
import triton.language as tl

# Bytes j of two words, each widened to 16 bits with its sign.
_BYTES = ("0xC480", "0xD591", "0xE6A2", "0xF7B3")
# Bytes 0 and 1, then 2 and 3, of one word.
_PAIRS = ("0x9180", "0xB3A2")


def _asm(registers: str, setup: str, results: list[str]) -> tl.constexpr:
    return tl.constexpr(f"{{ .reg .b32 {registers}; {setup} {' '.join(results)} }}")


# In each: $0, $1, ... are results of two numbers; t is where two codes stand, signs spread.
_E4M3_BF16 = "shl.b32 t, t, 4; and.b32 t, t, 0x87F087F0; fma.rn.bf16x2 ${}, t, scale, zero;"
_E4M3_BF16_SETUP = "mov.b32 scale, 0x7B807B80; mov.b32 zero, 0x80008000;"  # 2**120, -0
_E4M3_FP16 = "shl.b32 t, t, 7; and.b32 t, t, 0xBF80BF80; mul.f16x2 ${}, t, scale;"
_E4M3_FP16_SETUP = "mov.b32 scale, 0x5C005C00;"  # 2**8
# Seven bits after 128, less 128 or, for negative codes, 256.
_INT8_BF16 = (
    "lop3.b32 u, t, 0x00800080, base, 0xEA; lop3.b32 t, t, 0x007F007F, base, 0xEA; "
    "fma.rn.bf16x2 ${}, u, minus, t;"
)
_INT8_BF16_SETUP = "mov.b32 base, 0x43004300; mov.b32 minus, 0xBF80BF80;"
# 1024 and the code plus 128, less 1152.
_INT8_FP16 = "lop3.b32 t, t, 0x00FF00FF, base, 0x6A; sub.f16x2 ${}, t, base;"
_INT8_FP16_SETUP = "mov.b32 base, 0x64806480;"
# Short by 2**126 and 2**14; their scales make up for it.
_E2M1_BF16 = "shl.b32 t, t, 2; and.b32 ${}, t, 0x81C081C0;"
_E2M1_FP16 = "shl.b32 t, t, 5; and.b32 ${}, t, 0x8E008E00;"


def _of_bytes(registers: str, setup: str, convert: str) -> tl.constexpr:
    """Four bytes of one register into two results."""
    return _asm(
        registers,
        setup,
        [f"prmt.b32 t, $2, 0, {_PAIRS[i]}; " + convert.format(i) for i in range(2)],
    )


def _of_words(registers: str, setup: str, convert: str) -> tl.constexpr:
    """Two words into four results: their first bytes, their second ones, ..."""
    return _asm(
        registers,
        setup,
        [f"prmt.b32 t, $4, $5, {_BYTES[i]}; " + convert.format(i) for i in range(4)],
    )


def _nibbles_of_bytes(convert: str) -> tl.constexpr:
    """Four bytes into the low ones of each, in two results, and the high ones."""
    sources = ("low", "low", "$4", "$4")
    return _asm(
        "t, low",
        "shl.b32 low, $4, 4;",
        [f"prmt.b32 t, {sources[i]}, 0, {_PAIRS[i % 2]}; " + convert.format(i) for i in range(4)],
    )


def _nibbles_of_words(convert: str) -> tl.constexpr:
    """Two words into eight results: their first four bits, their second ones, ..."""
    sources = ("a, b", "$8, $9")
    return _asm(
        "t, a, b",
        "shl.b32 a, $8, 4; shl.b32 b, $9, 4;",
        [f"prmt.b32 t, {sources[i % 2]}, {_BYTES[i // 2]}; " + convert.format(i) for i in range(8)],
    )


E4M3_BYTES_BF16 = _of_bytes("t, scale, zero", _E4M3_BF16_SETUP, _E4M3_BF16)
E4M3_BYTES_FP16 = _of_bytes("t, scale", _E4M3_FP16_SETUP, _E4M3_FP16)
E4M3_WORDS_BF16 = _of_words("t, scale, zero", _E4M3_BF16_SETUP, _E4M3_BF16)
E4M3_WORDS_FP16 = _of_words("t, scale", _E4M3_FP16_SETUP, _E4M3_FP16)
INT8_BYTES_BF16 = _of_bytes("t, u, base, minus", _INT8_BF16_SETUP, _INT8_BF16)
INT8_BYTES_FP16 = _of_bytes("t, base", _INT8_FP16_SETUP, _INT8_FP16)
INT8_WORDS_BF16 = _of_words("t, u, base, minus", _INT8_BF16_SETUP, _INT8_BF16)
INT8_WORDS_FP16 = _of_words("t, base", _INT8_FP16_SETUP, _INT8_FP16)
E2M1_BYTES_BF16 = _nibbles_of_bytes(_E2M1_BF16)
E2M1_BYTES_FP16 = _nibbles_of_bytes(_E2M1_FP16)
E2M1_WORDS_BF16 = _nibbles_of_words(_E2M1_BF16)
E2M1_WORDS_FP16 = _nibbles_of_words(_E2M1_FP16)


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
def _bf16_of_bytes(asm: tl.constexpr, codes):
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [codes], tl.bfloat16, True, 4)


@triton.jit
def _fp16_of_bytes(asm: tl.constexpr, codes):
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [codes], tl.float16, True, 4)


@triton.jit
def e4m3(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Numbers in ``dtype`` of int8 codes; not-a-number reads as 480."""
    if PTX and dtype == tl.bfloat16:
        return _bf16_of_bytes(E4M3_BYTES_BF16, codes)
    elif PTX and dtype == tl.float16:
        return _fp16_of_bytes(E4M3_BYTES_FP16, codes)
    else:
        return _exact(_e4m3_as_fp16(codes), dtype)


@triton.jit
def int8(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Numbers in ``dtype`` of int8 codes."""
    if PTX and dtype == tl.bfloat16:
        return _bf16_of_bytes(INT8_BYTES_BF16, codes)
    elif PTX and dtype == tl.float16:
        return _fp16_of_bytes(INT8_BYTES_FP16, codes)
    else:
        return _exact(codes.to(tl.float32), dtype)


@triton.jit
def _bf16_of_words(asm: tl.constexpr, words):
    return tl.inline_asm_elementwise(
        asm,
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        True,
        2,
    )


@triton.jit
def _fp16_of_words(asm: tl.constexpr, words):
    return tl.inline_asm_elementwise(
        asm,
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        (tl.float16, tl.float16, tl.float16, tl.float16),
        True,
        2,
    )


@triton.jit
def _number(words, J: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    codes = (words >> 8 * J).to(tl.int8)
    if FP8:
        return e4m3(codes, dtype, False)
    else:
        return int8(codes, dtype, False)


@triton.jit
def numbers_of_words(words, FP8: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Of int32 ``words`` of fp8 or int8 the numbers of their first, second, third, fourth bytes."""
    if not PTX:
        return (
            _number(words, 0, FP8, dtype),
            _number(words, 1, FP8, dtype),
            _number(words, 2, FP8, dtype),
            _number(words, 3, FP8, dtype),
        )
    elif dtype == tl.bfloat16:
        if FP8:
            return _bf16_of_words(E4M3_WORDS_BF16, words)
        else:
            return _bf16_of_words(INT8_WORDS_BF16, words)
    elif FP8:
        return _fp16_of_words(E4M3_WORDS_FP16, words)
    else:
        return _fp16_of_words(INT8_WORDS_FP16, words)


@triton.jit
def _e2m1_as_fp16(nibble):
    bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _short_pairs(codes, dtype: tl.constexpr):
    """e2m1 of the low and the high four bits of bytes, short."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            E2M1_BYTES_BF16,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            (tl.bfloat16, tl.bfloat16),
            True,
            4,
        )
    else:
        return tl.inline_asm_elementwise(
            E2M1_BYTES_FP16,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            (tl.float16, tl.float16),
            True,
            4,
        )


@triton.jit
def _short_eights(words, dtype: tl.constexpr):
    """e2m1 of the eight times four bits of words, short."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            E2M1_WORDS_BF16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words],
            (
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            True,
            2,
        )
    else:
        return tl.inline_asm_elementwise(
            E2M1_WORDS_FP16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words],
            (
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            True,
            2,
        )


@triton.jit
def times(x, groups):
    """``x`` [n, k], equal runs of it along k times their ``groups`` [n, runs]."""
    runs = tl.reshape(x, [x.shape[0], groups.shape[1], x.shape[1] // groups.shape[1]])
    return tl.reshape(runs * groups[:, :, None], [x.shape[0], x.shape[1]])


@triton.jit
def _short_scale(groups, dtype: tl.constexpr):
    """NVFP4's scales from their codes, such that products with short e2m1 are `SHORT` too small.

    Were they not, 448 * 2**126 would be too large for bf16.
    """
    scale = _e4m3_as_fp16(groups)
    if dtype == tl.bfloat16:
        return (scale.to(tl.float32) * 2.0**118).to(dtype)
    else:
        return scale * 64.0


SHORT = tl.constexpr(256.0)


@triton.jit
def nvfp4(codes, groups, dtype: tl.constexpr, PTX: tl.constexpr):
    """Even and odd values [n, k / 2] of packed ``codes`` [n, k / 2] with e4m3 codes ``groups``
    [n, k / 16]; `SHORT` times too small where NVIDIA's instructions make 16-bit floats of them.
    """
    if PTX and dtype != tl.float32:
        low, high = _short_pairs(codes, dtype)
        scale = _short_scale(groups, dtype)
        return times(low, scale), times(high, scale)
    else:
        # Of fp16's eleven bits a product takes six.
        nibbles = codes.to(tl.int16)
        low, high = _e2m1_as_fp16(nibbles), _e2m1_as_fp16(nibbles >> 4)
        scale = _e4m3_as_fp16(groups)
        return _exact(times(low, scale), dtype), _exact(times(high, scale), dtype)


@triton.jit
def _eighth(words, scale, J: tl.constexpr, dtype: tl.constexpr):
    return _exact(times(_e2m1_as_fp16((words >> 4 * J).to(tl.int16)), scale), dtype)


@triton.jit
def nvfp4_of_words(words, groups, dtype: tl.constexpr, PTX: tl.constexpr):
    """Of int32 ``words`` [n, k / 8] the eight tiles of their first, ..., eighth four bits, scaled
    by e4m3 codes ``groups`` [n, k / 16]; `SHORT` times too small as in `nvfp4`.
    """
    if PTX:
        x = _short_eights(words, dtype)
        s = _short_scale(groups, dtype)
        return (
            times(x[0], s), times(x[1], s), times(x[2], s), times(x[3], s),
            times(x[4], s), times(x[5], s), times(x[6], s), times(x[7], s),
        )  # fmt: skip
    else:
        s = _e4m3_as_fp16(groups)
        return (
            _eighth(words, s, 0, dtype), _eighth(words, s, 1, dtype),
            _eighth(words, s, 2, dtype), _eighth(words, s, 3, dtype),
            _eighth(words, s, 4, dtype), _eighth(words, s, 5, dtype),
            _eighth(words, s, 6, dtype), _eighth(words, s, 7, dtype),
        )  # fmt: skip
