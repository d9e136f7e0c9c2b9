"""Variants and confidence heads for synthetic decode steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_markov.confidence import ConfidenceHead
from fused_markov.head import MarkovHead
from fused_markov.problems import Problem
from fused_markov.variants import GatedVariant, RnnVariant, Variant

# So large that a sigmoid or tanh of any multiple of an eighth is 0, 1/2, 1 or -1, and exact.
STEEP = {torch.float32: 2.0**16, torch.bfloat16: 2.0**16, torch.float16: 2.0**12}


def with_heads(
    problem: Problem,
    *,
    variant: str | None = None,
    confidence: str | None = None,
    min_confidence: float | None = None,
    hidden_size: int = 24,
    hidden_dtype: torch.dtype | None = None,
    exact: bool = False,
    seed: int = 0,
) -> Problem:
    """The problem with a head of another kind, and hidden states.

    Args:
        variant: ``"gated"``, ``"rnn"`` or None.
        confidence: what a confidence head reads beside the hidden state: ``"markov"`` the previous
            token's embedding, ``"hidden"`` nothing; or None: there is no such head.
        min_confidence: of every other slot, from slot 0 on; the rest have 0. None: not given.
        hidden_size: H. hidden_dtype: None: the weights'.
        exact: weights so large that gates are shut, half open or open, and so exact in any
            arithmetic. For problems made with ``exact_sums``.
    """
    head, batch = problem.head, problem.batch
    gen = torch.Generator().manual_seed(seed)
    shape = (batch.rows, batch.steps, hidden_size)
    hidden = torch.randn(shape, generator=gen)
    hidden = (hidden.round() if exact else hidden).to(hidden_dtype or head.dtype)
    limits = None
    if min_confidence is not None:
        limits = torch.zeros(problem.num_slots)
        limits[::2] = min_confidence
    heads = {
        "variant": None if variant is None else _variant(head, variant, hidden_size, exact, gen),
        "confidence": None
        if confidence is None
        else _confidence(head, confidence, hidden_size, gen),
    }
    twin = MarkovHead(
        head.w1,
        head.weights,
        id_map=head.id_map,
        scale=head.scale,
        soft_cap=head.soft_cap,
        vocab_size=head.vocab_size,
        successors=head.successors,
        logit_transform=head.logit_transform,
        **heads,  # type: ignore[arg-type]
    )
    if limits is not None:
        limits = limits.to(head.device)
    batch = replace(batch, hidden=hidden.to(head.device), min_confidence=limits)
    return replace(problem, head=twin, batch=batch)


def _variant(
    head: MarkovHead, kind: str, hidden_size: int, exact: bool, gen: torch.Generator
) -> Variant:
    rank = head.rank
    if kind == "gated":
        weight = _weights(rank, hidden_size + rank, head.dtype, exact, gen)
        return GatedVariant(weight.to(head.device), weight[:, 0].clone().to(head.device))
    weight = _weights(3 * rank, 2 * rank + hidden_size, head.dtype, exact, gen)
    return RnnVariant(weight.to(head.device), weight[:, 0].clone().to(head.device))


def _weights(
    outs: int, inputs: int, dtype: torch.dtype, exact: bool, gen: torch.Generator
) -> Tensor:
    weight = torch.randn(outs, inputs, generator=gen)
    if exact:
        return (weight.round().clamp(-1, 1) * STEEP[dtype]).to(dtype)
    spread: float = 2.0 / inputs**0.5
    return (weight * spread).to(dtype)


def _confidence(
    head: MarkovHead, reads: str, hidden_size: int, gen: torch.Generator
) -> ConfidenceHead:
    with_markov = reads == "markov"
    inputs = hidden_size + (head.rank if with_markov else 0)
    weight = torch.randn(inputs, generator=gen) * (2.0 / inputs**0.5)
    return ConfidenceHead(weight.to(head.device), torch.tensor(0.25).to(head.device), with_markov)
