"""Heads that read hidden states compile and fit; they are all warm; plain ones launch no more."""

from __future__ import annotations

import pytest
import torch
from aot import SHARED, Launch, distinct, recorded, target
from test_variants import engine_of, first_rows

from fused_markov.engines import Plan
from fused_markov.engines.chips import NVIDIA
from fused_markov.engines.configs import ONE_PASS, PER_STEP
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.problem_heads import with_heads
from fused_markov.problems import make_problem

ENGINES = ("one_pass", "per_step")
OWN = {
    "one_pass": {"context_kernel", "chain_kernel"},
    "per_step": {"context_kernel", "embed_kernel"},
}


def names(launches: list[Launch]) -> list[str]:
    return [launch.name for launch in launches]


def small(name: str, variant: str | None, confidence: str | None, **options: float) -> list[Launch]:
    problem = make_problem(3, 2, 1008, 64)
    problem = with_heads(problem, variant=variant, confidence=confidence, **options)
    with recorded() as found:
        engine_of(name, problem).sample(problem.batch, problem.new_cache(), problem.new_tokens())
    return found


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("variant", ["gated", "rnn"])
def test_compiles(name: str, variant: str) -> None:
    problem = make_problem(1, 2, 1008, 256)
    problem = with_heads(
        problem, variant=variant, confidence="markov", min_confidence=0.5, hidden_size=4096
    )
    plan = Plan(1, 2, torch.float32)
    engine: OnePassEngine | PerStepEngine
    if name == "one_pass":
        engine = OnePassEngine(problem.head, plan, (ONE_PASS[-1],), chip=NVIDIA)
    else:
        engine = PerStepEngine(problem.head, plan, (PER_STEP[-1],), chip=NVIDIA)
    with recorded() as found:
        engine.sample(problem.batch, problem.new_cache(), problem.new_tokens())
    assert OWN[name] | {"confidence_kernel", "cut_kernel"} <= set(names(found))
    for launch in distinct(found).values():
        compiled = launch.compile(target(90))
        assert compiled.metadata.shared <= SHARED[90], launch.name


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_launched(name: str) -> None:
    plain = names(small(name, None, None))
    assert not {"context_kernel", "embed_kernel", "confidence_kernel", "cut_kernel"} & set(plain)
    assert names(small(name, None, "hidden")) == ["confidence_kernel", *plain]
    assert names(small(name, None, "markov")) == [*plain, "confidence_kernel"]
    cut = names(small(name, None, "hidden", min_confidence=0.5))
    assert cut == ["confidence_kernel", "cut_kernel", *plain]
    if name == "per_step":
        step = ["embed_kernel", "step_kernel"]
        assert names(small(name, "rnn", None)) == ["context_kernel", *step, *step, "last_kernel"]
    else:
        link = plain.index("link_kernel")
        chained = ["context_kernel", *plain[:link], "chain_kernel", *plain[link + 1 :]]
        assert names(small(name, "rnn", None)) == chained


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("example", [True, False])
def test_all_warm(name: str, example: bool) -> None:
    problem = with_heads(
        make_problem(64, 2, 1008, 64), variant="gated", confidence="hidden", min_confidence=0.5
    )
    engine = engine_of(name, problem)
    cache, tokens = problem.new_cache(), problem.new_tokens()
    with recorded() as launches:
        engine.warmup(*((first_rows(problem.batch, 64), cache, tokens) if example else ()))
    warm = distinct(launches)
    batch = problem.batch
    with recorded() as launches:
        engine.sample(batch, cache, tokens)
    assert distinct(launches).keys() <= warm.keys()
