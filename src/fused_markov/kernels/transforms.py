"""Transforms of finished logits, `fused_markov.LogitTransform`'s half on the device."""

import triton
import triton.language as tl


@triton.jit
def transformed(x, cfg: tl.constexpr):
    """fp32 logits through the head's transform."""
    PARAMETERS: tl.constexpr = cfg.TRANSFORM_PARAMETERS
    return cfg.TRANSFORM(x, PARAMETERS)


@triton.jit
def scaled_soft_cap(x, parameters: tl.constexpr):
    """``parameters``: a multiplier and, where there is one, a cap."""
    x = x * parameters[0]
    if len(parameters) > 1:
        e = tl.exp(-2.0 * tl.abs(x / parameters[1]))
        t = (1.0 - e) / (1.0 + e)
        x = tl.where(x < 0, -t, t) * parameters[1]
    return x
