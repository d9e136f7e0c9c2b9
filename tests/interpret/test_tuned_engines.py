"""The engines take what was tuned for their head and plan, and the sampler says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_kernels import CONFIGS, ENGINES

import fused_markov as fm
from fused_markov import reference
from fused_markov.engines import Plan, engine_types
from fused_markov.engines.chips import INTERPRETER
from fused_markov.engines.tuned import SWITCH, key_of, store
from fused_markov.problems import make_problem

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
PLAN = Plan(2, 3, torch.float32)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH)


@pytest.mark.parametrize("name", ENGINES)
def test_tuned_configurations_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(2, 3, 150, 16, dtype=torch.float32, exact_sums=True)
    chip = INTERPRETER
    built_in = chip.one_pass if name == "one_pass" else chip.per_step
    small, limits = CONFIGS[name][0], {"one_pass": "max_row_steps", "per_step": "max_rows"}
    limit = limits[name]
    tuned = [replace(small, **{limit: getattr(config, limit)}) for config in built_in]
    path = store(key_of(name, problem.head, PLAN), tuned, {})

    def sampler() -> fm.DraftSampler:
        return fm.DraftSampler(problem.head, max_rows=2, steps=3, engine=name)

    found = sampler()
    assert found._engine._configs == tuple(tuned)
    assert str(path) in found.explain()
    assert torch.equal(
        found.sample(problem.batch).tokens, reference.sample(problem.head, problem.batch).tokens
    )
    assert engine_types()[name](problem.head, PLAN, built_in)._configs == built_in
    monkeypatch.setenv(SWITCH, "0")
    assert sampler()._engine._configs == built_in
    assert "tuned" not in sampler().explain()
