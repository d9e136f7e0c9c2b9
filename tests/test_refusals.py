"""Combinations that are refused, with the words that docs/features.md has for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_markov as fm
from fused_markov import DraftSampler
from fused_markov.engines import Plan
from fused_markov.problem_features import with_shaping, with_transform
from fused_markov.problem_heads import with_heads
from fused_markov.problems import Problem, make_problem


def problem_of(**options: Any) -> Problem:
    return make_problem(2, 1, 40, 16, **options)


def sample(problem: Problem, *, cached: bool = True, **plan: Any) -> None:
    cache = problem.new_cache() if cached else None
    DraftSampler(problem.head, steps=1, **plan).sample(problem.batch, cache)


def without_hidden() -> Problem:
    p = with_heads(problem_of(), variant="gated")
    return replace(p, batch=replace(p.batch, hidden=None))


def unjudged() -> Problem:
    p = problem_of()
    return replace(p, batch=replace(p.batch, min_confidence=torch.zeros(2)))


TEMPERED = {"cache_convention": "tempered"}
FP32 = {"cache_dtype": torch.float32}
REFUSED: dict[str, Callable[[], None]] = {
    "draft_topk, gated or rnn": lambda: sample(
        with_heads(problem_of(), variant="rnn"), draft_topk=4
    ),
    "draft_topk, soft cap": lambda: sample(problem_of(soft_cap=3.0), draft_topk=4),
    "draft_topk, tempered cache": lambda: sample(problem_of(**FP32), draft_topk=4, **TEMPERED),
    "top-k, top-p or min-p, tempered cache": lambda: sample(
        with_shaping(problem_of(**FP32)), **TEMPERED
    ),
    "top-k, top-p or min-p, temperatures, no cache": lambda: sample(
        with_shaping(problem_of()), cached=False
    ),
    "tempered cache, bf16 or fp16": lambda: sample(problem_of(), **TEMPERED),
    "gated, rnn or confidence, no hidden states": lambda: sample(without_hidden()),
    "min_confidence, no confidence head": lambda: sample(unjudged()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_the_words_of_the_page(what: str, repository: Path) -> None:
    with pytest.raises(fm.ArgumentError) as error:
        REFUSED[what]()
    assert f"| {what} | `{error.value}` |" in (repository / "docs" / "features.md").read_text()


def reasons() -> dict[str, tuple[fm.MarkovHead, dict[str, Any]]]:
    """What the Triton engines decline and the others do."""
    fn = fm.LogitTransform(torch.sin, None, "sine")
    wide = make_problem(1, 1, 40, 1040, dtype=torch.float32).head
    return {
        "draft_topk, W2 in fewer bits": (problem_of(weights="int8").head, {"draft_topk": 4}),
        "a logit transform without `triton_fn`": (with_transform(problem_of(), fn).head, {}),
        "rank above 1024": (wide, {}),
    }


@pytest.mark.parametrize("what", reasons())
def test_declined_in_the_words_of_the_page(
    what: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = pytest.importorskip("fused_markov.engines.gpu")
    launch = pytest.importorskip("fused_markov.engines.launch")
    head, options = reasons()[what]
    # As on a GPU: what is asked after the device.
    monkeypatch.setattr(launch.triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(head, "w1", head.w1.float())
    plan = Plan(1, 1, torch.float32, **options)
    reason = gpu.TritonEngine.why_not(head, plan)
    assert reason is not None
    assert f"| {what} | `{reason}` |" in (repository / "docs" / "features.md").read_text()
    assert DraftSampler(head, steps=1, **options).engine == "cpu"
