"""Heads that read hidden states on a GPU: against the reference, in company, in graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_gpu import assert_same, exact, sampler_of

import fused_markov as fm
from fused_markov import reference
from fused_markov.problem_heads import with_heads
from fused_markov.problems import Problem

pytestmark = pytest.mark.gpu

ENGINES = ("one_pass", "per_step")
VARIANTS = ("gated", "rnn")
HARD = {"bias_std": 30.0, "base_std": 0.5}


def kept(problem: Problem, result: fm.DraftResult) -> torch.Tensor:
    """bool ``[N, S]``: places of the cache that are not past a draft's end."""
    slots = problem.batch.slot_matrix()
    shape = (problem.num_slots, problem.batch.steps)
    found = torch.ones(shape, dtype=torch.bool, device=slots.device)
    if result.lengths is not None:
        row, step = (slots >= 0).nonzero(as_tuple=True)
        found[slots[row, step], step] = step < result.lengths[row]
    return found


def check(problem: Problem, engine: str) -> fm.DraftResult:
    cache, want_cache = problem.new_cache(), problem.new_cache()
    want = reference.sample(problem.head, problem.batch, want_cache)
    got = sampler_of(problem, engine).sample(problem.batch, cache, problem.new_tokens())
    assert_same(got.tokens, want.tokens, "tokens")
    assert_same(got.nonfinite, want.nonfinite, "nonfinite")
    if want.confidence is not None:
        torch.testing.assert_close(got.confidence, want.confidence, rtol=1e-5, atol=1e-6)
    if want.lengths is not None:
        assert got.lengths is not None
        assert_same(got.lengths, want.lengths, "lengths")
    where = kept(problem, want)
    assert_same(cache[where], want_cache[where], "cache")
    return got


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "mixed", "slots": "padded-steps"},
        {"temperature": "greedy", **HARD},
        {"dtype": torch.float32},
    ],
    ids=["mixed", "hard", "fp32"],
)
def test_equals_the_reference(
    engine: str, variant: str | None, rows: int, options: dict[str, Any]
) -> None:
    heads: list[dict[str, Any]] = [{}, {"confidence": "markov"}]
    heads += [{"confidence": c, "min_confidence": 0.5} for c in ("hidden", "markov")]
    for more in heads:
        problem = exact(rows, 5, 2000, 64, **options)
        check(with_heads(problem, variant=variant, exact=True, **more), engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_large(engine: str, variant: str) -> None:
    problem = exact(9, 7, 151936, 256, temperature="mixed")
    check(with_heads(problem, variant=variant, hidden_size=2560, exact=True), engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_alone_and_in_company(engine: str, variant: str) -> None:
    """To the bit, though nothing is exact here."""
    problem = exact(130, 5, 3000, 256, temperature="mixed")
    problem = with_heads(problem, variant=variant, confidence="markov", hidden_size=1000)
    cache = problem.new_cache()
    got = sampler_of(problem, engine).sample(problem.batch, cache, problem.new_tokens())
    fields = ("base_logits", "anchors", "positions", "temperature", "seeds", "hidden")
    for row in (0, 17, 129):
        parts = {n: getattr(problem.batch, n)[row : row + 1] for n in fields}
        alone = replace(problem, batch=fm.DraftBatch(**parts), num_slots=1)
        solo_cache = alone.new_cache()
        solo = sampler_of(alone, engine).sample(alone.batch, solo_cache, alone.new_tokens())
        assert_same(solo.tokens[0], got.tokens[row], "tokens")
        assert_same(solo_cache[0], cache[row], "cache")
        assert solo.confidence is not None
        assert got.confidence is not None
        assert_same(solo.confidence[0], got.confidence[row], "confidence")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reads", ["hidden", "markov"])
def test_graph_replay(engine: str, reads: str) -> None:
    problem = exact(5, 4, 3000, 64, temperature="mixed")
    problem = with_heads(problem, variant="rnn", confidence=reads, min_confidence=0.5, exact=True)
    cache, tokens = problem.new_cache(), problem.new_tokens()
    sampler = sampler_of(problem, engine)
    sampler.warmup(problem.batch, cache, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sampler.sample(problem.batch, cache, tokens)
    want_cache = problem.new_cache()
    want = reference.sample(problem.head, problem.batch, want_cache)
    where = kept(problem, want)
    for _ in range(3):
        cache.fill_(12345.0)
        tokens.fill_(-7)
        graph.replay()
        assert_same(tokens, want.tokens, "tokens")
        assert_same(cache[where], want_cache[where], "cache")
        assert result.lengths is not None
        assert want.lengths is not None
        assert_same(result.lengths, want.lengths, "lengths")
