"""Token bans and logit transforms: every engine equals the reference, and what that one gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_markov as fm
from fused_markov import ArgumentError, DraftSampler, reference
from fused_markov.problems import Problem, make_problem
from fused_markov.transforms import scaled_soft_cap
from test_engines import assert_same_bits, check, device_of, every_engine
from test_rejection import NEVER, World, chi_square


def problem_for(engine: str, *shape: int, **options: Any) -> Problem:
    """A problem on the engine's device with sums that are exact, whatever their order."""
    return make_problem(*shape, exact_sums=True, device=device_of(engine), **options)


def random_bans(problem: Problem, share: float, by_step: bool, seed: int = 1) -> Tensor:
    """Masks in which about ``share`` of the tokens are banned, packed bit by bit."""
    gen = torch.Generator().manual_seed(seed)
    vocab, steps = problem.head.vocab_size, problem.batch.steps
    shape = (problem.num_slots, steps, vocab) if by_step else (problem.num_slots, vocab)
    return pack(torch.rand(shape, generator=gen) >= share).to(problem.head.device)


def pack(allowed: Tensor) -> Tensor:
    """int32 words of bool ``[..., vocab]``; bits past the vocabulary are 0."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[-1] % 32))
    bits = padded.view(*padded.shape[:-1], -1, 32).to(torch.int64) << torch.arange(32)
    words = bits.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def with_bans(problem: Problem, bans: Tensor) -> Problem:
    return replace(problem, batch=replace(problem.batch, bans=bans))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab": 300, "slots": "padded"},
    "reduced-narrow": {"draft_vocab": 300, "cache": "draft"},
    "wide": {"cache": "wide", "slots": "padded-steps"},
    "cache-bf16": {"base_dtype": torch.float32, "cache_dtype": torch.bfloat16},
    "hard": {"bias_std": 10.0, "slots": "shuffled"},
}


@every_engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.995])
def test_bans_equal_the_reference(engine: str, kind: str, by_step: bool, share: float) -> None:
    for temperature in ("greedy", "mixed"):
        problem = make_problem(
            5,
            4,
            1000,
            16,
            temperature=temperature,
            exact_sums=True,
            device=device_of(engine),
            **KINDS[kind],
        )
        problem = with_bans(problem, random_bans(problem, share, by_step))
        passes = check(engine, problem)
        if kind == "plain" and engine != "per_step":
            assert passes <= 2
    if "cache_dtype" not in KINDS[kind]:
        check(engine, problem, with_cache=False)


@every_engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_transforms_equal_the_reference(engine: str, kind: str, cap: float | None) -> None:
    if cap is not None and device_of(engine) != "cpu":
        pytest.skip("the kernels' tanh is not PyTorch's on a GPU")
    for temperature in ("greedy", "mixed"):
        p = make_problem(
            5,
            4,
            1000,
            16,
            temperature=temperature,
            exact_sums=True,
            device=device_of(engine),
            **KINDS[kind],
        )
        h = p.head
        head = fm.MarkovHead(
            h.w1, h.w2, id_map=h.id_map, logit_transform=scaled_soft_cap(0.25, cap)
        )
        p = replace(p, head=head)
        check(engine, p)
        check(engine, with_bans(p, random_bans(p, 0.9, True)))
    check(engine, p, with_cache=False)


@every_engine
def test_all_banned_and_not_a_number(engine: str) -> None:
    """A row with every token banned: the lowest id, flagged; a banned NaN or +inf is -inf."""
    for temperature in ("greedy", "mixed"):
        p = problem_for(engine, 4, 3, 500, 16, temperature=temperature)
        p.batch.base_logits[:, :, 7], p.batch.base_logits[:, :, 8] = torch.nan, torch.inf
        allowed = torch.ones(4, 3, 500, dtype=torch.bool)
        allowed[:, :, 7:9] = False
        allowed[1, 1] = allowed[2] = False
        p = with_bans(p, pack(allowed).to(p.head.device))
        check(engine, p)
        cache = p.new_cache()
        got = DraftSampler(p.head, steps=3, engine=engine).sample(p.batch, cache)
        banned = ~allowed.any(-1)
        assert torch.equal(got.nonfinite.cpu(), banned)
        assert bool((got.tokens.cpu()[banned] == 0).all())
        assert torch.equal((cache == -torch.inf).cpu(), ~allowed)


@every_engine
def test_bans_do_not_depend_on_company(engine: str) -> None:
    p = problem_for(engine, 6, 3, 700, 16, temperature="mixed")
    p = with_bans(p, random_bans(p, 0.6, True))
    cache, own, b = p.new_cache(), p.new_cache(), p.batch
    together = DraftSampler(p.head, steps=3, engine=engine).sample(b, cache)
    tokens = together.tokens.clone()
    slot = torch.tensor([4], device=p.head.device)
    one = replace(
        b,
        base_logits=b.base_logits[4:5],
        anchors=b.anchors[4:5],
        positions=b.positions[4:5],
        slots=slot,
    )
    alone = DraftSampler(p.head, steps=3, engine=engine).sample(one, own)
    assert_same_bits(alone.tokens[0], tokens[4], "tokens")
    assert_same_bits(own[4], cache[4], "cache")


def test_mask_bits() -> None:
    """Token 33 of the first mask and 31 of the second alone are allowed; masks may be wider."""
    p = make_problem(2, 2, 40, 8, temperature="greedy")
    bans = torch.zeros(2, 5, dtype=torch.int32)
    bans[0, 1], bans[1, 0] = 2, -(2**31)
    got = reference.sample(p.head, replace(p.batch, bans=bans[:, :2]))
    assert got.tokens.tolist() == [[33, 33], [31, 31]]
    assert torch.equal(reference.sample(p.head, replace(p.batch, bans=bans)).tokens, got.tokens)


@pytest.mark.parametrize(
    "bans",
    [
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.zeros(2, 2, 2, dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(2, 4, dtype=torch.int32)[:, ::2],
    ],
)
def test_wrong_bans_are_refused(bans: Tensor) -> None:
    p = make_problem(2, 3, 40, 8)
    with pytest.raises(ArgumentError, match=r"bans|slots"):
        reference.sample(p.head, replace(p.batch, bans=bans))


def test_wrong_transforms_are_refused() -> None:
    with pytest.raises(ArgumentError, match="triton_fn"):
        fm.LogitTransform(torch.tanh, torch.tanh, "tanh")


class BannedWorld(World):
    """Token 2 is never drafted first, token 4 never second."""

    def batch_options(self, rows: int) -> dict[str, Any]:
        allowed = torch.ones(rows, 3, 5, dtype=torch.bool)
        allowed[:, 0, 2] = allowed[:, 1, 4] = False
        return {"bans": pack(allowed)}


@pytest.mark.parametrize(("engine", "rows"), [("reference", 20_000), ("auto", 2500)])
def test_law_is_the_targets_under_bans(engine: str, rows: int) -> None:
    world = BannedWorld()
    assert chi_square(world.decode(1.0, rows, engine=engine), world.expected(1.0)) > NEVER
