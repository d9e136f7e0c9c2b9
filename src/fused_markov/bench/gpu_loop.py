"""The sequential loop as engines run it on a GPU: capturable, with a compiled sampling step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fused_markov import noise
from fused_markov.bench.timing import Step
from fused_markov.problems import Problem


def loop_step(problem: Problem, cached: bool) -> Step:
    """One decode step of S products and S sampling kernels; every row live, row i in slot i."""
    head, batch = problem.head, problem.batch
    cache = problem.new_cache() if cached else None
    tokens = problem.new_tokens()
    sample = _compiled(batch.temperature is not None)
    ids = torch.arange(head.draft_vocab, device=head.device)

    def step() -> None:
        prev = batch.anchors
        for s in range(batch.steps):
            logits = batch.base_logits[:, s] + head.bias(prev)
            if cache is not None:
                cache[:, s] = logits
            if batch.temperature is None or batch.seeds is None:
                prev = sample(logits)
            else:
                prev = sample(logits, batch.temperature, batch.seeds, s, batch.positions[:, s], ids)
            tokens[:, s] = prev

    return step


@lru_cache(maxsize=2)
def _compiled(noised: bool) -> Any:
    return torch.compile(_noised if noised else _greedy, dynamic=False)


def _greedy(logits: Tensor) -> Tensor:
    return logits.argmax(dim=1)


def _noised(
    logits: Tensor, temperature: Tensor, seeds: Tensor, step: int, positions: Tensor, ids: Tensor
) -> Tensor:
    t = temperature.unsqueeze(1)
    g = noise.gumbel(seeds.unsqueeze(1), step, positions.unsqueeze(1), ids)
    scores = torch.where(t == 0, logits.float(), logits.float() / torch.where(t == 0, 1.0, t) + g)
    return scores.argmax(dim=1)
