"""Features that meet in the kernels, under Triton's interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_kernels import CONFIGS, ENGINES

from combinations import COMBINATIONS, Combination, check
from fused_markov.engines import Plan
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.problems import Problem

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


class Alone:
    """An engine with small tiles; ``many`` row-steps are guessed by chains, not links."""

    def __init__(self, name: str, problem: Problem, many: bool, **options: Any) -> None:
        batch = problem.batch
        self.plan = Plan(batch.rows, batch.steps, **options)
        config: Any = CONFIGS[name][0]
        if name == "one_pass":
            if many:
                config = replace(config, predecessors=0)
            engine: Any = OnePassEngine(problem.head, self.plan, (config,), cooperative=False)
        else:
            engine = PerStepEngine(problem.head, self.plan, (config,))
        self.sample = engine.sample


# Successors and chains are one_pass's alone.
PAIRS = [
    (c, name)
    for c in COMBINATIONS
    for name in ENGINES
    if name == "one_pass" or not (c.many or c.successors)
]


@pytest.mark.parametrize(("combination", "name"), PAIRS, ids=lambda x: getattr(x, "name", x))
def test_equals_the_reference(combination: Combination, name: str) -> None:
    problem = combination.problem(torch.float32, "cpu", small=True)
    engine = Alone(name, problem, combination.many, **combination.planned())
    check(problem, engine, cached=combination.cached)
