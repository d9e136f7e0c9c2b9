"""Features that meet: every engine that runs here equals the reference, on a GPU too."""

from __future__ import annotations

import pytest
import torch

import fused_markov as fm
from combinations import COMBINATIONS, Combination, check
from test_engines import device_of, every_engine


@every_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.name)
def test_equals_the_reference(engine: str, combination: Combination, dtype: torch.dtype) -> None:
    problem = combination.problem(dtype, device_of(engine))
    sampler = fm.DraftSampler(
        problem.head,
        max_rows=problem.batch.rows,
        steps=problem.batch.steps,
        engine=engine,
        **combination.planned(),
    )
    check(problem, sampler, cached=combination.cached)
