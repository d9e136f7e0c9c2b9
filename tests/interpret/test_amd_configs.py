"""The configurations for AMD GPUs, with their own tiles, against the reference loop.

The interpreter knows no lanes: this shows what the tiles do to the logic, not what waves of 64 do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_kernels import Case, problem_of, run

from fused_markov import reference
from fused_markov.engines import Plan
from fused_markov.engines.chips import AMD
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

CASES = (
    Case("mixed temperatures, several tiles", (3, 2, 150, 16), {"temperature": "mixed"}),
    Case("fp64 noise, unaligned", (1, 2, 131, 24), noise_dtype=torch.float64),
    Case("reduced, padding", (4, 1, 300, 16), {"draft_vocab": 100, "slots": "padded"}),
    Case("greedy, no cache", (1, 3, 130, 16), {"temperature": "greedy"}, cached=False),
)
# One of each that differs in what the interpreter sees.
CONFIGS = {
    f"{name} {arch} {index}": (name, arch, index)
    for arch, name, index in (
        ("gfx942", "one_pass", 0),
        ("gfx942", "one_pass", 1),
        ("gfx942", "per_step", 0),
        ("gfx942", "per_step", 1),
    )
}


def engine_of(name: str, arch: str, index: int, problem: Any, noise_dtype: torch.dtype) -> Any:
    chip, batch = AMD[arch], problem.batch
    plan = Plan(batch.rows, batch.steps, noise_dtype)
    if name == "one_pass":
        # A chunk is a program, and 64 of them a row-step take the interpreter a minute.
        config = replace(chip.one_pass[index], max_row_steps=1 << 30, chunks=4)
        return OnePassEngine(problem.head, plan, (config,), chip=chip)
    config = replace(chip.per_step[index], max_rows=1 << 30)
    return PerStepEngine(problem.head, plan, (config,), chip=chip)


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(which: str, case: Case) -> None:
    problem = problem_of(case)
    cache = problem.new_cache() if case.cached else None
    want = reference.sample(problem.head, problem.batch, cache, noise_dtype=case.noise_dtype)
    engine = engine_of(*CONFIGS[which], problem, case.noise_dtype)
    got, filled = run(engine, problem, case.cached)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.nonfinite, want.nonfinite)
    if cache is not None:
        torch.testing.assert_close(filled, cache, rtol=0, atol=0, equal_nan=True)
