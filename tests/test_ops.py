"""The operator: registered soundly, traced through, and equal to the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fused_markov as fm
from fused_markov import ops, reference
from fused_markov.problems import Problem, make_problem

PROBLEMS: dict[str, dict[str, Any]] = {
    "noise": {"temperature": "mixed", "slots": "shuffled"},
    "greedy": {"temperature": "greedy"},
    "reduced": {"draft_vocab": 60, "slots": "padded"},
    "scaled": {"scale": 0.5, "soft_cap": 4.0},
}


@pytest.fixture(autouse=True)
def _no_samplers() -> None:
    ops.clear()


def problem_of(kind: str, device: str = "cpu", **options: Any) -> Problem:
    return make_problem(3, 4, 200, 16, device=device, **{**PROBLEMS[kind], **options})


def arguments(problem: Problem, cache: torch.Tensor | None) -> tuple[Any, ...]:
    head, batch = problem.head, problem.batch
    return (
        head.w1,
        head.w2,
        batch.base_logits,
        batch.anchors,
        batch.positions,
        batch.temperature,
        batch.seeds,
        batch.slots,
        cache,
        head.id_map,
        None,
        head.scale,
        head.soft_cap,
    )


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_opcheck(kind: str, cached: bool, device: str) -> None:
    problem = problem_of(kind, device)
    cache = problem.new_cache() if cached else None
    torch.library.opcheck(torch.ops.fused_markov.sample.default, arguments(problem, cache))


@pytest.mark.parametrize("kind", PROBLEMS)
def test_equals_the_reference(kind: str, device: str) -> None:
    problem = problem_of(kind, device)
    want_cache, cache = problem.new_cache(), problem.new_cache()
    want = reference.sample(problem.head, problem.batch, want_cache)
    tokens, nonfinite, passes = torch.ops.fused_markov.sample(*arguments(problem, cache))
    assert torch.equal(tokens, want.tokens)
    assert torch.equal(nonfinite, want.nonfinite)
    assert 1 <= int(passes) <= 4
    if device == "cpu":
        assert torch.equal(cache, want_cache)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str, device: str) -> None:
    problem = problem_of("noise", device)

    def step(cache: torch.Tensor) -> torch.Tensor:
        tokens, nonfinite, _ = torch.ops.fused_markov.sample(*arguments(problem, cache))
        return torch.where(nonfinite, 0, tokens) + cache.argmax(dim=2).sum()

    want_cache, cache = problem.new_cache(), problem.new_cache()
    want = step(want_cache)
    got = torch.compile(step, backend=backend, fullgraph=True)(cache)
    assert torch.equal(got, want)
    assert torch.equal(cache, want_cache)


def test_results_are_its_own(device: str) -> None:
    first, second = problem_of("noise", device), problem_of("noise", device, seed=1)
    head = first.head
    results = []
    for problem in (first, second):
        mine = (head.w1, head.w2, *arguments(problem, None)[2:])
        results.append(torch.ops.fused_markov.sample(*mine))
    for a, b in zip(*results, strict=True):
        assert a.data_ptr() != b.data_ptr()
    want = reference.sample(head, first.batch)
    assert torch.equal(results[0][0], want.tokens)


def test_samplers_are_kept_and_bounded() -> None:
    problem = problem_of("greedy")
    mine = arguments(problem, None)
    for _ in range(3):
        torch.ops.fused_markov.sample(*mine)
    assert len(ops._samplers) == 1
    kept = [problem_of("greedy", seed=seed) for seed in range(ops.MAX_SAMPLERS + 2)]
    for other in kept:
        got = torch.ops.fused_markov.sample(*arguments(other, None))[0]
        assert torch.equal(got, reference.sample(other.head, other.batch).tokens)
    assert len(ops._samplers) == ops.MAX_SAMPLERS


def test_more_rows_than_before() -> None:
    problem = problem_of("greedy")
    for rows in (3, 70, 0):
        many = make_problem(rows, 4, 200, 16, temperature="greedy")
        args = (problem.head.w1, problem.head.w2, *arguments(many, None)[2:])
        want = reference.sample(problem.head, many.batch).tokens
        assert torch.equal(torch.ops.fused_markov.sample(*args)[0], want)


def test_bad_arguments_are_named() -> None:
    mine = list(arguments(problem_of("greedy"), None))
    mine[4] = mine[4][:, :2]
    with pytest.raises(fm.ArgumentError, match="positions"):
        torch.ops.fused_markov.sample(*mine)
