"""Shaped and limited drafts in the kernels, under the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_kernels import CONFIGS, ENGINES, Case, check, engine_of, problem_of, run

from fused_markov import reference, shaping
from fused_markov.engines import Plan
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.kernels import limited, shape, threshold
from fused_markov.kernels.threshold import order_key, weights
from fused_markov.problems import Problem
from test_bans import STEEP, transformed, with_bans

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

# By slot, in turns: all together, one each, nothing, values that are off.
TOP_K = (9, 3, 0, 0, 0, 10**6)
TOP_P = (0.8, 1.0, 0.9, 1.0, 1.0, 1.0)
MIN_P = (0.001, 0.0, 0.0, 0.05, 0.0, 0.0)


def shaped(problem: Problem) -> Problem:
    def by_slot(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
        some = [values[i % len(values)] for i in range(problem.num_slots)]
        return torch.tensor(some, dtype=dtype)

    batch = replace(
        problem.batch,
        top_k=by_slot(TOP_K, torch.int32),
        top_p=by_slot(TOP_P, torch.float32),
        min_p=by_slot(MIN_P, torch.float32),
    )
    return replace(problem, batch=batch)


CASES = (
    Case("T=1, all kinds", (6, 2, 130, 16), {"base_std": 1.0}),
    Case("mixed, padding", (5, 2, 101, 16), {"temperature": "mixed", "slots": "padded"}),
    Case("fp64 noise", (3, 2, 101, 16), {"temperature": 0.7}, noise_dtype=torch.float64),
    Case("reduced", (3, 2, 300, 16), {"draft_vocab": 101, "slots": "padded-steps"}),
    Case("fp16 cache", (4, 1, 104, 16), {"cache_dtype": torch.float16, "cache": "wide"}),
    Case(
        "fp16, narrow",
        (2, 2, 300, 16),
        {"dtype": torch.float16, "draft_vocab": 104, "cache": "draft"},
    ),
    Case("ties", (4, 1, 100, 16), {"base_std": 0.0, "bias_std": 0.0}),
    Case("strong head", (3, 3, 200, 16), {"bias_std": 30.0, "base_std": 0.5}),
    Case("two tiles", (2, 1, 1100, 16), {"base_std": 1.0}),
)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shaped(name: str, case: Case) -> None:
    check(name, shaped(problem_of(case)), case)


@pytest.mark.parametrize("name", ENGINES)
def test_shaped_with_bans_and_transform(name: str) -> None:
    case = Case("", (4, 2, 101, 16), {"temperature": "mixed"})
    check(name, with_bans(shaped(transformed(problem_of(case), STEEP)), 0.6, True), case)


@pytest.mark.parametrize("name", ENGINES)
def test_shaped_and_not_a_number(name: str) -> None:
    case = Case("", (6, 1, 101, 16))
    problem = shaped(problem_of(case))
    base = problem.batch.base_logits
    base[0, 0, 5], base[1, 0], base[2, 0, 9] = torch.nan, -torch.inf, torch.inf
    base[3, 0], base[4, 0] = torch.nan, -torch.inf
    base[0, 0, 7] = -torch.inf
    got = check(name, problem, case)
    assert got.nonfinite[:, 0].tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_alone_and_in_company(name: str) -> None:
    problem = shaped(problem_of(Case("", (4, 2, 101, 16))))
    got, cache = run(engine_of(name, problem.head, 4, 2), problem, True)
    batch = problem.batch
    one = replace(
        batch,
        base_logits=batch.base_logits[2:3],
        anchors=batch.anchors[2:3],
        positions=batch.positions[2:3],
        slots=torch.tensor([2]),
    )
    solo, own = run(engine_of(name, problem.head, 1, 2), replace(problem, batch=one), True)
    assert torch.equal(solo.tokens[0], got.tokens[2])
    assert torch.equal(own[2], cache[2])


@pytest.fixture
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> int:
    """So few that a row goes round them many times."""
    for module in (threshold, shape, limited):
        monkeypatch.setattr(module, "LANES", tl.constexpr(16))
    return 16


# The largest in lanes of their own, in any, and all in one lane, which then has more than it keeps.
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_lanes_that_pass_many_tokens(name: str, crowded: bool, few_lanes: int) -> None:
    case = Case("", (6, 1, 130, 16), {"base_std": 1.0})
    problem = shaped(problem_of(case))
    if crowded:
        problem.batch.base_logits[:, :, ::few_lanes] += 30.0
    check(name, problem, case)


@pytest.mark.parametrize("crowded", [False, True])
def test_limited_lanes_that_pass_many_tokens(crowded: bool, few_lanes: int) -> None:
    case = Case("", (2, 2, 130, 16))
    problem = problem_of(case)
    if crowded:
        problem.batch.base_logits[:, :, ::few_lanes] += 30.0
    cache = problem.new_cache()
    want = reference.sample(problem.head, problem.batch, cache, draft_topk=9)
    got, filled = run(limited_engine(ENGINES[0], problem, case, 9), problem, True)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(filled, cache)


def limited_engine(name: str, problem: Problem, case: Case, draft_topk: int) -> Any:
    plan = Plan(problem.batch.rows, problem.batch.steps, case.noise_dtype, draft_topk=draft_topk)
    if name == "one_pass":
        return OnePassEngine(problem.head, plan, (CONFIGS[name][0],), cooperative=False)
    return PerStepEngine(problem.head, plan, (CONFIGS[name][0],))


LIMITED = (
    Case("T=1", (3, 3, 130, 16)),
    Case("greedy, no cache", (2, 3, 101, 16), {"temperature": "greedy"}, cached=False),
    Case("mixed, padding", (5, 2, 101, 16), {"temperature": "mixed", "slots": "padded-steps"}),
    Case("reduced, fp64 noise", (3, 2, 300, 24), {"draft_vocab": 101}, noise_dtype=torch.float64),
    Case("fp16, wide", (2, 2, 104, 16), {"dtype": torch.float16, "cache": "wide"}),
    Case("ties, two tiles", (2, 1, 1100, 16), {"base_std": 0.0}),
    Case("scale", (2, 2, 101, 16), {"scale": 0.5, "temperature": "greedy"}),
)


@pytest.mark.parametrize("case", LIMITED, ids=lambda case: case.name)
@pytest.mark.parametrize("extra", [False, True])
def test_limited(case: Case, extra: bool) -> None:
    """Both engines launch the same kernels: each has every other case."""
    index = LIMITED.index(case)
    name, draft_topk = ENGINES[(index + extra) % 2], (1, 20, 90)[(index + 2 * extra) % 3]
    problem = problem_of(case)
    if extra:
        problem = with_bans(problem, 0.5, True)
        problem = shaped(problem) if case.cached else transformed(problem, STEEP)
    problem.batch.base_logits[0, 0, 17] = torch.nan
    cache = problem.new_cache() if case.cached else None
    options: dict[str, Any] = {"noise_dtype": case.noise_dtype, "draft_topk": draft_topk}
    want = reference.sample(problem.head, problem.batch, cache, **options)
    got, filled = run(limited_engine(name, problem, case, draft_topk), problem, case.cached)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.nonfinite, want.nonfinite)
    assert got.passes == 0
    if cache is not None:
        torch.testing.assert_close(filled, cache, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _weigh_kernel(x, temp, out, keys, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(out + i, weights(value, tl.load(x), tl.load(temp)))
    tl.store(keys + i, order_key(value, 0).to(tl.int64))


def test_weights_and_keys() -> None:
    """The weights are the reference's to the bit; keys are in the order of their values."""
    x = torch.cat([torch.linspace(5, -60, 2045), torch.tensor([-1e38, -torch.inf, -torch.inf])])
    for temp in (1.0, 0.3, 7.7, 1e-30):
        out, keys = torch.zeros(2, 2048, dtype=torch.int64)
        _weigh_kernel[(1,)](x, torch.tensor([temp]), out, keys, 2048)
        assert torch.equal(out, shaping.weights(x, x[0], torch.tensor(temp)))
    assert torch.equal(keys.argsort(descending=True, stable=True), torch.arange(2048))
