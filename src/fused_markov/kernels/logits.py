"""Exact logits of a tile: the bias rounded once, capped and scaled as vLLM does, then the base."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 ``x`` rounded to the values of ``dtype``, still in fp32."""
    if dtype == tl.float32:
        return x
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
    bias = rounded(acc, cfg.WEIGHT)
    if cfg.CAPPED:
        bias = rounded(bias / soft_cap, cfg.WEIGHT)
        bias = rounded(_tanh(bias), cfg.WEIGHT)
        bias = rounded(bias * soft_cap, cfg.WEIGHT)
    if cfg.SCALED:
        bias = rounded(bias * scale, cfg.WEIGHT)
    x = rounded(base + bias, cfg.LOGIT)
    if cfg.CACHE != cfg.LOGIT:
        x = rounded(x, cfg.CACHE)
    return x
