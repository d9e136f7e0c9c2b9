"""How many kernels a sampler compiles, and that the warm-up compiles them all; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from aot import Launch, distinct, recorded

from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.chips import NVIDIA
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.problems import Problem, make_problem

MAX_ROWS, MAX_VARIANTS = 64, 12
ENGINES = {"one_pass": OnePassEngine, "per_step": PerStepEngine}


def engine_of(name: str, problem: Problem) -> Any:
    plan = Plan(MAX_ROWS, problem.batch.steps, torch.float32)
    if name == "one_pass":
        return OnePassEngine(problem.head, plan, chip=NVIDIA)
    return PerStepEngine(problem.head, plan, chip=NVIDIA)


def first_rows(batch: DraftBatch, rows: int) -> DraftBatch:
    return replace(
        batch,
        base_logits=batch.base_logits[:rows],
        anchors=batch.anchors[:rows],
        positions=batch.positions[:rows],
        slots=None if batch.slots is None else batch.slots[:rows],
    )


def sampled(
    engine: Any, problem: Problem, cached: bool, row_counts: Iterable[int]
) -> dict[str, Launch]:
    """What batches of these row counts launch."""
    cache = problem.new_cache() if cached else None
    tokens = problem.new_tokens()
    with recorded() as launches:
        for rows in row_counts:
            engine.sample(first_rows(problem.batch, rows), cache, tokens[:rows])
    return distinct(launches)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("temperature", ["mixed", "greedy"])
def test_few_and_all_warm(name: str, temperature: str, cached: bool) -> None:
    problem = make_problem(MAX_ROWS, 5, 1008, 64, temperature=temperature)
    engine = engine_of(name, problem)
    with recorded() as launches:
        engine.warmup()
    warm = distinct(launches)
    used = sampled(engine, problem, cached, range(1, MAX_ROWS + 1))
    assert len(used) <= MAX_VARIANTS
    assert used.keys() <= warm.keys(), new(used, warm)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("shape", "options", "index"),
    [
        ((64, 7, 1001, 24), {"dtype": torch.float16, "slots": "padded-steps"}, torch.int32),
        ((64, 3, 1008, 64), {"strides": "step-major", "slots": "shuffled"}, torch.int64),
        ((64, 3, 1008, 64), {"strides": "wide", "base_dtype": torch.float32}, torch.int64),
        ((64, 3, 1008, 64), {"draft_vocab": 304, "cache": "draft"}, torch.int64),
        ((64, 3, 1008, 64), {"draft_vocab": 304, "cache": "wide"}, torch.int32),
    ],
    ids=["fp16", "step-major", "wide", "draft-wide", "reduced"],
)
def test_warm_by_example(
    name: str, shape: tuple[int, int, int, int], options: dict[str, Any], index: torch.dtype
) -> None:
    problem = make_problem(*shape, **options)
    batch = problem.batch
    slots = None if batch.slots is None else batch.slots.to(index)
    batch = replace(batch, anchors=batch.anchors.to(index), slots=slots)
    problem = replace(problem, batch=batch)
    engine = engine_of(name, problem)
    with recorded() as launches:
        engine.warmup(first_rows(batch, 2), problem.new_cache(), problem.new_tokens())
    warm = distinct(launches)
    used = sampled(engine, problem, True, (1, 2, 3, 16, 20, 31, 48, 64))
    assert used.keys() <= warm.keys(), new(used, warm)
    assert len(warm) <= MAX_VARIANTS


def new(used: dict[str, Launch], warm: dict[str, Launch]) -> str:
    """The first variant that the warm-up left out, beside one of the same kernel."""
    key = sorted(used.keys() - warm.keys())[0]
    like = next((k for k in warm if k.split()[0] == key.split()[0]), "none of that kernel")
    return f"not warm: {key}\nwarm: {like}"
