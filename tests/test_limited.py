"""Candidate-limited drafts: every engine equals the reference, and what that one gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fused_markov as fm
from fused_markov import ArgumentError, DraftSampler, reference
from fused_markov.limited import best_candidates
from fused_markov.problems import Problem, make_problem
from fused_markov.transforms import scaled_soft_cap
from test_bans import problem_for, random_bans, with_bans
from test_engines import assert_same_bits, device_of, every_engine
from test_rejection import NEVER, World, chi_square
from test_shaping import with_shaping


def check_limited(
    engine: str,
    p: Problem,
    draft_topk: int,
    *,
    with_cache: bool = True,
    noise_dtype: torch.dtype = torch.float32,
) -> fm.DraftResult:
    caches = [p.new_cache() if with_cache else None for _ in range(2)]
    options: dict[str, Any] = {"noise_dtype": noise_dtype, "draft_topk": draft_topk}
    want = reference.sample(p.head, p.batch, caches[0], p.new_tokens(), **options)
    sampler = DraftSampler(p.head, steps=p.batch.steps, engine=engine, **options)
    got = sampler.sample(p.batch, caches[1], p.new_tokens())
    assert_same_bits(got.tokens, want.tokens, "tokens")
    assert_same_bits(got.nonfinite, want.nonfinite, "nonfinite")
    if caches[0] is not None and caches[1] is not None:
        assert_same_bits(caches[1], caches[0], "cache")
    assert got.passes == 0
    return got


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"dtype": torch.float32},
    "scaled": {"scale": 0.5},
    "reduced": {"draft_vocab": 300, "slots": "padded"},
    "reduced-narrow": {"draft_vocab": 300, "cache": "draft"},
    "wide": {"cache": "wide", "slots": "padded-steps"},
    "cache-bf16": {"base_dtype": torch.float32, "cache_dtype": torch.bfloat16},
    "hard": {"bias_std": 10.0, "slots": "shuffled"},
    "ties": {"base_std": 0.0},
}


@every_engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_topk", [1, 7, 64, 300])
def test_equals_the_reference(engine: str, kind: str, draft_topk: int) -> None:
    for temperature in ("greedy", "mixed"):
        p = make_problem(
            5,
            3,
            700,
            16,
            temperature=temperature,
            exact_sums=True,
            device=device_of(engine),
            **KINDS[kind],
        )
        check_limited(engine, p, draft_topk)
        check_limited(engine, with_bans(p, random_bans(p, 0.9, True)), draft_topk)
    check_limited(engine, with_shaping(p), draft_topk, noise_dtype=torch.float64)


@every_engine
def test_transformed_and_without_cache(engine: str) -> None:
    p = problem_for(engine, 5, 3, 700, 16, temperature="mixed")
    check_limited(engine, p, 20, with_cache=False)
    head = fm.MarkovHead(p.head.w1, p.head.w2, logit_transform=scaled_soft_cap(0.5, None))
    check_limited(engine, replace(p, head=head), 20)


@every_engine
def test_not_a_number(engine: str) -> None:
    p = problem_for(engine, 5, 2, 100, 16, temperature="mixed")
    base = p.batch.base_logits
    base[:, 0, 5] = torch.nan
    base[1, 1], base[2, 1] = -torch.inf, torch.nan
    base[3, 1, 9] = torch.inf
    p.head.w2[11] = torch.nan
    for draft_topk in (3, 100):
        got = check_limited(engine, p, draft_topk)
        assert bool(got.nonfinite[1, 1])
        assert got.tokens[1, 1] == 0
    nothing = torch.zeros(5, 4, dtype=torch.int32, device=p.head.device)
    assert bool(check_limited(engine, with_bans(p, nothing), 3).nonfinite.all())


def test_candidates_are_the_largest_and_the_lowest_of_equals() -> None:
    base = torch.tensor([[0.0, 3.0, torch.nan, 3.0, -0.0, 3.0, 5.0], [-torch.inf] * 7])
    assert best_candidates(base, 1).tolist() == [[6], [0]]
    assert best_candidates(base, 3).tolist() == [[1, 3, 6], [0, 1, 2]]
    assert best_candidates(base, 5).tolist() == [[0, 1, 3, 5, 6], [0, 1, 2, 3, 4]]


def test_all_candidates_are_no_limit() -> None:
    p = make_problem(4, 3, 60, 16, dtype=torch.float32, exact_sums=True, temperature="mixed")
    caches = p.new_cache(), p.new_cache()
    want = reference.sample(p.head, p.batch, caches[0])
    got = reference.sample(p.head, p.batch, caches[1], draft_topk=60)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(caches[0], caches[1])
    few = reference.sample(p.head, p.batch, caches[1], draft_topk=8)
    assert (caches[1][:, 0] > -torch.inf).sum(1).tolist() == [8] * 4
    left = caches[1] > -torch.inf
    assert torch.equal(caches[1][:, 0][left[:, 0]], caches[0][:, 0][left[:, 0]])
    assert few.tokens.shape == (4, 3)


def test_wrong_limits_are_refused() -> None:
    p = make_problem(1, 1, 40, 8, soft_cap=3.0)
    for head, draft_topk in ((make_problem(1, 1, 40, 8).head, 41), (p.head, 4)):
        with pytest.raises(ArgumentError, match="draft_topk"):
            DraftSampler(head, steps=1, draft_topk=draft_topk)
    with pytest.raises(ArgumentError, match="draft_topk"):
        reference.sample(make_problem(1, 1, 40, 8).head, p.batch, draft_topk=0)


class LimitedWorld(World):
    def sampler_options(self) -> dict[str, Any]:
        return {"draft_topk": 3}


@pytest.mark.parametrize(("engine", "rows"), [("reference", 20_000), ("auto", 2500)])
def test_law_is_the_targets(engine: str, rows: int) -> None:
    world = LimitedWorld()
    assert chi_square(world.decode(1.0, rows, engine=engine), world.expected(1.0)) > NEVER
