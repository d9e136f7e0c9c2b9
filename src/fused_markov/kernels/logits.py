"""Exact logits of a tile: the bias rounded once, capped and scaled as vLLM does, then the base."""

import triton
import triton.language as tl

from fused_markov.kernels.transforms import transformed


@triton.jit
def rounded(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """fp32 ``x`` rounded to the values of ``dtype``, still in fp32."""
    if dtype == tl.float32:
        return x
    elif PTX and dtype == tl.bfloat16:
        # Two in one instruction; one at a time they go through the unit for slow functions.
        pair: tl.constexpr = """{ .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"""
        return tl.inline_asm_elementwise(pair, "=f,=f,f,f", [x], tl.float32, True, 2)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def finish_logits(
    acc,  # fp32 sums of products
    base,  # fp32 values of the base logits, -inf outside the vocabulary
    scale,
    soft_cap,
    cfg: tl.constexpr,
):
    """The logits that are cached and sampled from, as fp32 values."""
    bias = rounded(acc, cfg.WEIGHT, cfg.PTX)
    if cfg.CAPPED:
        bias = rounded(bias / soft_cap, cfg.WEIGHT, cfg.PTX)
        bias = rounded(_tanh(bias), cfg.WEIGHT, cfg.PTX)
        bias = rounded(bias * soft_cap, cfg.WEIGHT, cfg.PTX)
    if cfg.SCALED:
        bias = rounded(bias * scale, cfg.WEIGHT, cfg.PTX)
    # Not base + bias: the compiler would start an fp32 sum of products from the base.
    x = rounded(tl.fma(bias, 1.0, base), cfg.LOGIT, cfg.PTX)
    if cfg.TRANSFORM is not None:
        x = rounded(transformed(x, cfg), cfg.CACHE, cfg.PTX)
    elif cfg.CACHE != cfg.LOGIT:
        x = rounded(x, cfg.CACHE, cfg.PTX)
    return x
