"""Scale, soft cap and logit transform by hand: what stands in the cache of every engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_markov import DraftBatch, DraftSampler, MarkovHead
from fused_markov.engines import engine_types
from fused_markov.transforms import scaled_soft_cap
from test_engines import as_parameters, device_of

every_engine = pytest.mark.parametrize("engine", as_parameters(list(engine_types())))


def cached(engine: str, **options: Any) -> Tensor:
    """Logits ``[3]`` of base (1, -2, 0.5) and, after token 1, a bias of (0, 8, -4)."""
    device = device_of(engine)
    w1, w2 = torch.zeros(3, 16, device=device), torch.zeros(3, 16, device=device)
    w1[1, 5], w2[1, 5], w2[2, 5] = 2.0, 4.0, -2.0
    head = MarkovHead(w1, w2, **options)
    base = torch.tensor([[[1.0, -2.0, 0.5]]], device=device)
    index = torch.ones(1, 1, dtype=torch.int64, device=device)
    cache = torch.full((1, 1, 3), 12345.0, device=device)
    sampler = DraftSampler(head, max_rows=1, steps=1, engine=engine)
    token = int(sampler.sample(DraftBatch(base, index[0], index), cache).tokens)
    assert token == int(cache.argmax())
    return cache.flatten().cpu()


@every_engine
def test_scale(engine: str) -> None:
    """On the bias alone."""
    assert cached(engine, scale=0.5).tolist() == [1.0, 2.0, -1.5]
    assert cached(engine, scale=-1.0).tolist() == [1.0, -10.0, 4.5]


@every_engine
def test_soft_cap(engine: str) -> None:
    """On the bias alone, before the scale."""
    bias = [3 * math.tanh(x / 3) for x in (0.0, 8.0, -4.0)]
    want = torch.tensor([1.0, -2.0, 0.5]) + torch.tensor(bias) * 0.5
    torch.testing.assert_close(cached(engine, soft_cap=3.0, scale=0.5), want)


@every_engine
def test_transform(engine: str) -> None:
    """On base plus bias."""
    halved = cached(engine, logit_transform=scaled_soft_cap(-0.5, None), scale=0.5)
    assert halved.tolist() == [-0.5, -1.0, 0.75]
    capped = cached(engine, logit_transform=scaled_soft_cap(0.5, 2.0))
    want = [2 * math.tanh(x * 0.5 / 2) for x in (1.0, 6.0, -3.5)]
    torch.testing.assert_close(capped, torch.tensor(want))
