"""Candidate-limited drafts: the Markov bias for a position's best base logits alone.

vLLM 0.33's ``dspark_draft_topk`` (`DSparkSpeculator._sample_sequential_topk`), which leaves open
which of equal base logits are candidates, and NaN to ``torch.topk``; here both are defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError
from fused_markov.head import MarkovHead


def check_draft_topk(
    head: MarkovHead, draft_topk: int | None, cache_convention: str = "logits"
) -> None:
    """Raise an `ArgumentError` where a head cannot draft from ``draft_topk`` candidates."""
    if draft_topk is None:
        return
    if not 1 <= draft_topk <= head.draft_vocab:
        raise ArgumentError(
            "draft_topk", f"1 to {head.draft_vocab} candidates, or None", str(draft_topk)
        )
    if cache_convention != "logits":
        raise ArgumentError(
            "draft_topk", f"None with a cache of {cache_convention} logits", str(draft_topk)
        )
    if head.variant is not None:
        raise ArgumentError(
            "draft_topk",
            "None where the head has a variant",
            str(draft_topk),
            "draft from all candidates; no engine in the field limits a gated or rnn head's",
        )
    if head.soft_cap is not None:
        raise ArgumentError(
            "draft_topk",
            "None where the head has a soft cap",
            str(draft_topk),
            "a candidate's bias is added unrounded, as vLLM does it, which leaves no cap's place",
        )


def best_candidates(base: Tensor, count: int) -> Tensor:
    """int64 ``[n, count]``: the largest of each row of ``base`` ``[n, v]``, ascending columns.

    Of equal logits the lowest columns; NaN counts as -inf.
    """
    base = base.where(~base.isnan(), -torch.inf) + 0.0  # -0.0 equals 0.0
    best = base.argsort(dim=1, descending=True, stable=True)[:, :count]
    return best.sort(dim=1).values


def gathered_logits(head: MarkovHead, base: Tensor, prev: Tensor, index: Tensor) -> Tensor:
    """Base plus bias ``[n, k]`` of the candidates ``index`` ``[n, k]`` after ``prev`` ``[n]``.

    ``base`` ``[n, v]``. The fp32 bias, scaled, is added in fp32 and the sum rounded once, as in a
    product that accumulates onto the base (``baddbmm``).
    """
    w2 = head.weights.dequantized(index.flatten()).view(*index.shape, -1)
    bias = (w2 * head.w1[prev].float().unsqueeze(1)).sum(dim=2)
    bias = bias * head.scale if head.scale != 1.0 else bias
    dtype = torch.promote_types(base.dtype, head.dtype)
    return (base.gather(1, index).float() + bias).to(dtype)
