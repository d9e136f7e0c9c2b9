"""Top-k, top-p and min-p of the draft distribution, as one threshold a row, the same on any device.

A token is kept where its logit is not below the row's threshold, so equal logits share their fate
and no order of summation matters: weights are integers. docs/shaping.md has the definitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch

# exp(-y) as 2**-(y * LOG2E), in units of 2**-34: sums over 2**19 tokens are exact in fp64 too.
UNIT_BITS = 34
LOG2E = 1.4426950408889634
# 1 - 2**-f = f * (C[0] - f * (C[1] - ...)) in units of 2**-32, to 1e-9 over [0, 1].
COEFFICIENTS = (2977044461, 1031764709, 238385872, 41299337, 5703901, 633215, 46675)
# Beyond this many halvings a weight is 0.
MOST_HALVINGS = 62.0
FRACTION = 24  # bits of a halving's fraction: fp32 holds no more


def weights(x: Tensor, top: Tensor, temp: Tensor) -> Tensor:
    """int64 ``2**34 * exp((x - top) / temp)``, a little less at most, rounded down.

    Each step is one exactly rounded fp32 operation or an integer one, none of which a compiler may
    fuse with the next. ``x`` fp32, no NaN; ``top``, finite and not below it, ``temp`` broadcast.
    """
    halvings = ((top - x) / temp * LOG2E).clamp_max(MOST_HALVINGS)
    fixed = (halvings * 2.0**FRACTION).to(torch.int64)
    f = (fixed & ((1 << FRACTION) - 1)) << (32 - FRACTION)
    value = torch.full_like(f, COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        value = c - (f * value >> 32)
    value = (1 << 32) - (f * value >> 32)
    return value << (UNIT_BITS - 32) >> (fixed >> FRACTION)


def is_shaped(batch: DraftBatch) -> bool:
    """Whether any row of a batch can have a threshold: greedy ones have none."""
    given = (batch.top_k, batch.top_p, batch.min_p)
    return batch.temperature is not None and any(x is not None for x in given)


def shape(logits: Tensor, batch: DraftBatch, slot: Tensor) -> Tensor:
    """``logits`` ``[n, v]`` of requests in ``slot`` ``[n]``, -inf below each row's threshold."""
    x = logits.float()
    x = x.where(~x.isnan(), -torch.inf)
    return logits.where(x >= thresholds(x, batch, slot), -torch.inf)


def thresholds(x: Tensor, batch: DraftBatch, slot: Tensor) -> Tensor:
    """fp32 ``[n, 1]`` the least logit kept of each row of ``x`` ``[n, v]``, fp32 without NaN.

    -inf for rows that are greedy or have nothing finite on top. min-p, then top-k of what that
    kept, then top-p of what both kept.
    """
    assert batch.temperature is not None
    temp = batch.temperature[slot].float().unsqueeze(1)
    top = x.amax(dim=1, keepdim=True)
    active = (temp != 0) & top.isfinite()
    top, temp = top.where(active, 0.0), temp.where(active, 1.0)
    least = torch.full_like(temp, -torch.inf)
    if batch.min_p is not None:
        min_p = batch.min_p[slot].double().unsqueeze(1).clamp(0.0, 1.0)
        enough = weights(x, top, temp) >= (min_p * 2.0**UNIT_BITS).to(torch.int64)
        least = x.where(enough, torch.inf).amin(dim=1, keepdim=True)
    x = x.sort(dim=1, descending=True).values
    if batch.top_k is not None:
        k = batch.top_k[slot].to(torch.int64).unsqueeze(1)
        k = k.where((k > 0) & (k < x.shape[1]), x.shape[1])
        least = torch.maximum(least, x.gather(1, k - 1))
    if batch.top_p is not None:
        top_p = batch.top_p[slot].unsqueeze(1)
        weight = weights(x, top, temp).where(x >= least, 0)
        total = weight.sum(dim=1, keepdim=True)
        bound = (top_p.double() * total.double()).ceil().to(torch.int64).clamp_min(1)
        # The mass of what stands before a token, or of its equals too: those are kept all the same.
        above = weight.cumsum(dim=1) - weight
        last = (above < bound).sum(dim=1, keepdim=True) - 1
        least = least.where(~(top_p < 1), torch.maximum(least, x.gather(1, last)))
    return least.where(active, -torch.inf)
