"""The least that a decode step can cost: the bytes it must move."""

from __future__ import annotations

import torch

from fused_markov.problems import Problem
from fused_markov.traffic import traffic

# What plain reads and writes of this machine reach, measured with the sizes of a draft head.
COPY_BYTES = 1 << 28


def floor_bytes(problem: Problem, *, cached: bool) -> int:
    """Bytes of W2 once, as it is stored, the base once and the cache once."""
    shape = (1, problem.batch.steps, problem.cache_width)
    cache = torch.empty(shape, dtype=problem.cache_dtype, device="meta") if cached else None
    return traffic(problem.head, problem.batch, cache).total


def bytes_a_us(device: str) -> float:
    """Bytes a microsecond that a copy moves on ``device`` (read and write counted)."""
    from fused_markov.bench.timing import time_on_cpu, time_on_gpu

    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    if device == "cpu":
        timing = time_on_cpu({"copy": lambda: target.copy_(source)}, seconds=0.5)["copy"]
    else:
        timing = time_on_gpu([lambda: target.copy_(source)])
    return 2 * COPY_BYTES / timing.best_us
