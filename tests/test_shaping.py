"""Top-k, top-p and min-p of drafts: engines equal the reference, and that keeps vLLM's rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_markov as fm
from fused_markov import ArgumentError, DraftBatch, DraftSampler, reference, shaping
from fused_markov.problems import Problem, make_problem
from test_bans import problem_for, random_bans, with_bans
from test_engines import assert_same_bits, check, device_of, every_engine
from test_rejection import NEVER, World, chi_square

# By slot, in turns: nothing, each alone, all together, and values that are off.
TOP_K = (0, 3, 0, 0, 40, 10**6, 1)
TOP_P = (1.0, 1.0, 0.9, 1.0, 0.6, 1.0, 0.5)
MIN_P = (0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 1.0)


def with_shaping(problem: Problem, **only: Any) -> Problem:
    def by_slot(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        some = [values[i % len(values)] for i in range(problem.num_slots)]
        return torch.tensor(some, dtype=dtype, device=problem.head.device)

    given = {
        "top_k": by_slot(TOP_K, torch.int32),
        "top_p": by_slot(TOP_P, torch.float32),
        "min_p": by_slot(MIN_P, torch.float32),
    }
    given = {name: x for name, x in given.items() if not only or name in only}
    return replace(problem, batch=replace(problem.batch, **given))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab": 300, "slots": "padded"},
    "reduced-narrow": {"draft_vocab": 300, "cache": "draft"},
    "wide": {"cache": "wide", "slots": "padded-steps"},
    "cache-bf16": {"base_dtype": torch.float32, "cache_dtype": torch.bfloat16},
    "hard": {"bias_std": 10.0, "slots": "shuffled"},
    "flat": {"base_std": 0.0, "bias_std": 0.01},
    "ties": {"base_std": 0.0, "bias_std": 0.0},
}


@every_engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", ["mixed", 1.0, 0.05, 30.0])
def test_equals_the_reference(engine: str, kind: str, temperature: str | float) -> None:
    p = make_problem(
        8,
        3,
        1000,
        16,
        temperature=temperature,
        exact_sums=True,
        device=device_of(engine),
        **KINDS[kind],
    )
    check(engine, with_shaping(p))
    check(engine, with_bans(with_shaping(p), random_bans(p, 0.7, True)))


@every_engine
@pytest.mark.parametrize("only", ["top_k", "top_p", "min_p"])
def test_each_alone(engine: str, only: str) -> None:
    p = problem_for(engine, 7, 3, 1000, 16)
    check(engine, with_shaping(p, **{only: True}), noise_dtype=torch.float64)


@every_engine
def test_greedy_is_left_alone(engine: str) -> None:
    """Greedy rows keep every logit, and a batch without temperatures needs no cache for shaping."""
    p = problem_for(engine, 7, 3, 500, 16, temperature=0.0)
    shaped, cache, plain = with_shaping(p), p.new_cache(), p.new_cache()
    got = DraftSampler(p.head, steps=3, engine=engine).sample(shaped.batch, cache)
    want = reference.sample(p.head, p.batch, plain)
    assert torch.equal(got.tokens, want.tokens)
    assert_same_bits(cache, plain, "cache")
    greedy = problem_for(engine, 7, 3, 500, 16, temperature="greedy")
    check(engine, with_shaping(greedy), with_cache=False)


@every_engine
def test_not_a_number(engine: str) -> None:
    p = problem_for(engine, 7, 2, 600, 16)
    base = p.batch.base_logits
    base[:, 0, 5] = torch.nan
    base[1, 1] = -torch.inf
    base[2, 1, 9] = torch.inf
    base[3, 1] = torch.nan
    base[4, 1] = -torch.inf
    base[4, 1, 77] = 1.0
    p = with_shaping(p)
    check(engine, p)
    assert p.batch.bans is None
    all_banned = torch.zeros(7, 19, dtype=torch.int32, device=p.head.device)
    check(engine, with_bans(p, all_banned))


@every_engine
def test_a_row_alone_and_in_company(engine: str) -> None:
    p = with_shaping(problem_for(engine, 14, 3, 700, 16))
    cache, b = p.new_cache(), p.batch
    tokens = DraftSampler(p.head, steps=3, engine=engine).sample(b, cache).tokens.clone()
    for row in (2, 3, 4, 11):
        one = replace(
            b,
            base_logits=b.base_logits[row : row + 1],
            anchors=b.anchors[row : row + 1],
            positions=b.positions[row : row + 1],
            slots=torch.tensor([row], device=p.head.device),
        )
        own = p.new_cache()
        alone = DraftSampler(p.head, steps=3, engine=engine).sample(one, own)
        assert_same_bits(alone.tokens[0], tokens[row], "tokens")
        assert_same_bits(own[row], cache[row], "cache")


# The reference's threshold


def batch_of(temp: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> DraftBatch:
    """A batch whose only slot has these parameters; nothing else of it is looked at."""
    none = torch.empty(1, 1, 1)
    return DraftBatch(
        none,
        none,
        none,
        torch.tensor([temp]),
        top_k=torch.tensor([top_k]),
        top_p=torch.tensor([top_p]),
        min_p=torch.tensor([min_p]),
    )


def kept(x: Tensor, batch: DraftBatch) -> Tensor:
    slot = torch.zeros(x.shape[0], dtype=torch.int64)
    return shaping.shape(x, batch, slot) != -torch.inf


def kept_in_fp64(x: Tensor, temp: float, top_k: int, top_p: float, min_p: float) -> list[Tensor]:
    """Masks of what vLLM's sampler keeps of a row, by sorting; in doubt on top-p, both answers."""
    y = x.double() / temp
    y = y.where(y >= y.max() + torch.log(torch.tensor(min_p, dtype=torch.float64)), -torch.inf)
    if 0 < top_k < len(y):
        y = y.where(y >= y.sort(descending=True).values[top_k - 1], -torch.inf)
    prob = torch.softmax(y, 0)
    answers = []
    for slack in (-1e-7, 1e-7):
        above = torch.where(y > y[:, None], prob, 0.0).sum(1)
        answers.append((above < top_p + slack) & (y > -torch.inf))
    return [y > -torch.inf] if top_p >= 1 else answers


@pytest.mark.parametrize("seed", range(20))
def test_keeps_what_a_sort_in_fp64_keeps(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(200, generator=gen) * 3).to(dtype).float()
        x[:20] = x[20:40]  # ties
        temp = float(torch.rand((), generator=gen) * 2 + 0.1)
        top_k = int(torch.randint(0, 220, (), generator=gen))
        top_p = float(torch.rand((), generator=gen)) if seed % 3 else 1.0
        min_p = float(torch.rand((), generator=gen) ** 8) if seed % 2 else 0.0
        got = kept(x[None], batch_of(temp, top_k, top_p, min_p))[0]
        few, many = (kept_in_fp64(x, temp, top_k, top_p, min_p) * 2)[:2]
        assert bool((few <= got).all())
        assert bool((got <= many).all())


def test_weights_are_those_of_a_softmax() -> None:
    x = torch.cat([torch.linspace(-40, 3, 5001), torch.tensor([-torch.inf, -1e38])])
    got = shaping.weights(x, torch.tensor(3.0), torch.tensor(0.7)).double() * 2.0**-34
    want = torch.exp((x.double() - 3) / 0.7)
    torch.testing.assert_close(got, want, rtol=3e-6, atol=2.0**-33)
    assert shaping.weights(x, torch.tensor(3.0), torch.tensor(0.7))[5000] == 1 << 34
    order = shaping.weights(x[:5001], torch.tensor(3.0), torch.tensor(0.7))
    assert bool((order[1:] >= order[:-1]).all())


def test_ties_at_the_threshold_share_their_fate() -> None:
    x = torch.tensor([[1.0, 4.0, 2.0, 2.0, 0.0, -0.0, 2.0]])
    assert kept(x, batch_of(1.0, top_k=2))[0].tolist() == [False, True, True, True, 0, 0, True]
    assert kept(x, batch_of(1.0, top_k=6))[0].tolist() == [True] * 7
    # 0.61 of the mass is the first's; the next three hold 0.25 together.
    assert kept(x, batch_of(1.0, top_p=0.6))[0].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert kept(x, batch_of(1.0, top_p=0.75))[0].tolist() == [0, 1, 1, 1, 0, 0, 1]
    assert kept(x, batch_of(1.0, top_p=0.0))[0].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert kept(x, batch_of(1.0, min_p=0.1353))[0].tolist() == [0, 1, 1, 1, 0, 0, 1]
    assert kept(x, batch_of(1.0, min_p=0.1354))[0].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert kept(x, batch_of(2.0, min_p=0.1354))[0].tolist() == [1, 1, 1, 1, 0, 0, 1]
    even = torch.zeros(1, 4)
    assert kept(even, batch_of(1.0, top_p=0.5))[0].tolist() == [True] * 4
    assert kept(even, batch_of(1.0, top_k=1))[0].tolist() == [True] * 4


def test_the_order_of_tokens_does_not_matter() -> None:
    gen = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 3000, generator=gen) * 2).bfloat16()
    for top_p in torch.rand(20, generator=gen).tolist():
        order = torch.randperm(3000, generator=gen)
        batch = batch_of(0.8, top_p=top_p)
        assert torch.equal(kept(x, batch)[:, order], kept(x[:, order], batch))


def test_errors_name_the_argument() -> None:
    p = make_problem(2, 3, 40, 8)
    two = torch.ones(2)
    bad: list[tuple[str, dict[str, Tensor]]] = [
        ("top_k", {"top_k": two}),
        ("top_p", {"top_p": two.long()}),
        ("min_p", {"min_p": two[:, None]}),
        ("top_p", {"top_p": two * 1.5}),
        ("min_p", {"min_p": two * torch.nan}),
        ("slots", {"top_p": two[:1]}),
    ]
    for name, given in bad:
        with pytest.raises(ArgumentError, match=name):
            reference.sample(p.head, replace(p.batch, **given), p.new_cache())
    with pytest.raises(ArgumentError, match="logits_cache"):
        reference.sample(p.head, replace(p.batch, top_p=two))


class ShapedWorld(World):
    def batch_options(self, rows: int) -> dict[str, Any]:
        top_k = torch.tensor([3, 0, 2, 0])[torch.arange(rows) % 4]
        top_p = torch.tensor([1.0, 0.8, 0.9, 1.0])[torch.arange(rows) % 4]
        min_p = torch.tensor([0.0, 0.0, 0.05, 0.2])[torch.arange(rows) % 4]
        return {"top_k": top_k, "top_p": top_p, "min_p": min_p}


@pytest.mark.parametrize(("engine", "rows"), [("reference", 10_000), ("auto", 2500)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_law_is_the_targets(engine: str, rows: int, temperature: float) -> None:
    world = ShapedWorld()
    samples = world.decode(temperature, rows, engine=engine)
    assert chi_square(samples, world.expected(temperature)) > NEVER


def test_the_cache_holds_what_was_sampled_from() -> None:
    """No excluded token is drafted, and the kept logits are the plain ones."""
    p = make_problem(7, 1, 300, 16)
    plain, cache = p.new_cache(), p.new_cache()
    reference.sample(p.head, p.batch, plain)
    shaped = with_shaping(p)
    for seed in range(50):
        seeds = torch.arange(7) + 7 * seed
        got = fm.reference.sample(p.head, replace(shaped.batch, seeds=seeds), cache)
        assert bool((cache[torch.arange(7), 0, got.tokens[:, 0]] > -torch.inf).all())
    left = cache != -torch.inf
    assert torch.equal(cache[left], plain[left])
    assert left[:, 0].sum(1).tolist()[1] >= 3
