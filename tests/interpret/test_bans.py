"""Bans and transforms in the kernels, under the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_kernels import ENGINES, Case, check, engine_of, problem_of, run
from torch import Tensor

import fused_markov as fm
from fused_markov.problems import Problem

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@triton.jit
def _steep(x, parameters: tl.constexpr):
    return tl.where(x > parameters[1], x * parameters[0], x) - 1.0


def _steep_in_torch(x: Tensor, factor: float, above: float) -> Tensor:
    return torch.where(x > above, x * factor, x) - 1.0


# Exact in both, and no monotone function.
STEEP = fm.LogitTransform(_steep_in_torch, _steep, "steep", (-0.5, 9.0))

CASES = (
    Case("greedy, no cache", (2, 2, 130, 16), {"temperature": "greedy"}, cached=False),
    Case("fp64 noise, padding", (4, 2, 101, 16), {"slots": "padded"}, noise_dtype=torch.float64),
    Case("reduced", (2, 2, 300, 16), {"draft_vocab": 101, "slots": "padded-steps"}),
    Case("fp16 cache", (2, 2, 104, 16), {"cache_dtype": torch.float16, "cache": "wide"}),
    Case("strong head, mixed", (2, 3, 200, 16), {"bias_std": 30.0, "temperature": "mixed"}),
)


def masks_for(problem: Problem, share: float, by_step: bool) -> Tensor:
    gen = torch.Generator().manual_seed(4)
    width = -(-problem.head.vocab_size // 32)
    shape = (problem.num_slots, problem.batch.steps, width) if by_step else (1, 1, width)
    bits = torch.rand(*shape, 32, generator=gen) >= share
    words = (bits.to(torch.int64) << torch.arange(32)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words if by_step else words[0].expand(problem.num_slots, -1).contiguous()


def with_bans(problem: Problem, share: float, by_step: bool) -> Problem:
    bans = masks_for(problem, share, by_step)
    return replace(problem, batch=replace(problem.batch, bans=bans))


def transformed(problem: Problem, transform: fm.LogitTransform) -> Problem:
    h = problem.head
    head = fm.MarkovHead(h.w1, h.w2, id_map=h.id_map, logit_transform=transform)
    return replace(problem, head=head)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bans(name: str, case: Case) -> None:
    by_step = CASES.index(case) % 2 == 0
    check(name, with_bans(problem_of(case), 0.95 if by_step else 0.5, by_step), case)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_transforms(name: str, case: Case) -> None:
    problem = transformed(problem_of(case), STEEP)
    check(name, with_bans(problem, 0.7, True) if CASES.index(case) % 2 else problem, case)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("cap", [None, 4.0])
def test_scaled_soft_cap(name: str, cap: float | None) -> None:
    options: dict[str, Any] = {"temperature": "mixed", **({} if cap is None else {"soft_cap": 1.0})}
    case = Case("", (2, 2, 100, 16), options)
    problem = transformed(problem_of(replace(case, options={"temperature": "mixed"})),
                          fm.transforms.scaled_soft_cap(0.5, cap))  # fmt: skip
    check(name, problem, case)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
def test_all_banned_and_not_a_number(name: str, temperature: str) -> None:
    case = Case("", (4, 2, 130, 16), {"temperature": temperature})
    problem = problem_of(case)
    base = problem.batch.base_logits
    base[:, :, 7], base[:, :, 8], base[3, :, 40] = torch.nan, torch.inf, torch.nan
    bans = torch.full((4, 2, 5), -1, dtype=torch.int32)
    bans[:, :, 0] = ~(3 << 7)
    bans[1, 1], bans[2] = 0, 0
    problem = replace(problem, batch=replace(problem.batch, bans=bans))
    got = check(name, problem, case)
    assert got.nonfinite.tolist() == [[False, False], [False, True], [True, True], [False, False]]
    assert got.tokens[2].tolist() == [0, 0]


@pytest.mark.parametrize("name", ENGINES)
def test_few_allowed_tokens_are_guessed(name: str) -> None:
    """A grammar that allows five of 700 tokens still takes one pass where the base decides."""
    case = Case("", (3, 3, 700, 16), {"bias_std": 0.1})
    problem = problem_of(case)
    bans = torch.zeros(3, 3, 22, dtype=torch.int32)
    bans[:, :, 2], bans[:, 1, 2], bans[:, 2, 20] = 0b111010001, 1 << 9, 0b1000000000101
    got = check(name, replace(problem, batch=replace(problem.batch, bans=bans)), case)
    assert got.passes == (1 if name == "one_pass" else 3)


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_alone_and_in_company(name: str) -> None:
    problem = with_bans(problem_of(Case("", (5, 2, 100, 16), {"temperature": "mixed"})), 0.5, True)
    got, cache = run(engine_of(name, problem.head, 5, 2), problem, True)
    batch = problem.batch
    one = replace(
        batch,
        base_logits=batch.base_logits[3:4],
        anchors=batch.anchors[3:4],
        positions=batch.positions[3:4],
        slots=torch.tensor([3]),
    )
    solo, own = run(engine_of(name, problem.head, 1, 2), replace(problem, batch=one), True)
    assert torch.equal(solo.tokens[0], got.tokens[3])
    assert torch.equal(own[3], cache[3])
