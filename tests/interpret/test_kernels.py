"""The kernels' logic under Triton's interpreter, on small shapes, against the reference loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_markov as fm
from fused_markov import reference
from fused_markov.engines import Plan
from fused_markov.engines.configs import ONE_PASS, PER_STEP
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import find_successors

pytestmark = [
    pytest.mark.interpret,
    # numpy, which the interpreter computes with, remarks on what the tests are about.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

# Small tiles: several of each kind even in a small vocabulary.
SMALL_ONE_PASS = replace(
    ONE_PASS[0],
    max_row_steps=1 << 30,
    chunks=4,
    guess_m=2,
    lanes=64,
    predecessors=32,
    block_m=16,
    block_v=64,
    stages=1,
    programs_per_sm=1,
)
OTHER_ONE_PASS = replace(SMALL_ONE_PASS, chunks=8, guess_m=1, lanes=32, block_m=64, block_v=32)
STEP = replace(PER_STEP[0], max_rows=1 << 30, block_m=16, block_v=64, stages=1, programs_per_sm=1)
OTHER_STEP = replace(STEP, block_m=64, block_v=128, programs_per_sm=2)
CONFIGS = {"one_pass": (SMALL_ONE_PASS, OTHER_ONE_PASS), "per_step": (STEP, OTHER_STEP)}
ENGINES = tuple(CONFIGS)


@dataclass(frozen=True)
class Case:
    """A problem, and how it is sampled.

    Attributes:
        passes: the fewest passes over W2 that the one-pass engine must have needed.
    """

    name: str
    shape: tuple[int, int, int, int]  # R, S, V, r
    options: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    noise_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    passes: int = 1


CASES = (
    Case("T=1, several tiles", (1, 5, 300, 16)),
    Case("fp64 noise, unaligned", (2, 3, 299, 16), noise_dtype=torch.float64),
    Case("greedy", (2, 3, 304, 16), {"temperature": "greedy"}),
    Case("greedy, no cache, unaligned", (2, 3, 301, 16), {"temperature": "greedy"}, cached=False),
    Case("T=1, no cache", (2, 2, 160, 16), cached=False),
    Case("mixed temperatures", (4, 2, 300, 16), {"temperature": "mixed"}),
    Case("many rows, one step", (18, 1, 130, 16), {"temperature": "mixed"}),
    Case("reduced, draft-wide", (2, 3, 300, 16), {"draft_vocab": 100, "cache": "draft"}),
    Case("reduced, target-wide", (2, 3, 300, 16), {"draft_vocab": 100}),
    Case(
        "reduced, wide, greedy",
        (2, 2, 300, 16),
        {"draft_vocab": 104, "cache": "wide", "temperature": "greedy"},
    ),
    Case("cache wider than the vocabulary", (2, 2, 200, 16), {"cache": "wide"}),
    Case("padding rows", (5, 2, 200, 16), {"slots": "padded"}),
    Case(
        "padding steps, int32",
        (4, 3, 200, 16),
        {"slots": "padded-steps"},
        True,
        torch.float32,
        torch.int32,
    ),
    Case("all padding", (2, 2, 100, 16), {"slots": "none-live"}),
    Case("wide strides", (2, 2, 200, 16), {"strides": "wide"}),
    Case("step-major", (3, 2, 200, 16), {"strides": "step-major"}),
    Case("one candidate", (1, 3, 1, 16)),
    Case("smaller than a tile", (2, 2, 40, 16)),
    Case("rank 24", (2, 2, 200, 24)),
    Case("scale and soft cap", (2, 2, 200, 16), {"scale": 0.5, "soft_cap": 3.0}),
    Case("ties", (2, 2, 300, 16), {"temperature": "greedy", "base_std": 0.0, "bias_std": 0.0}),
    Case("strong head", (2, 4, 1300, 16), {"bias_std": 30.0, "base_std": 0.5}, passes=2),
    Case("fp16", (3, 2, 300, 16), {"dtype": torch.float16}),
    Case("fp16 cache of fp32 logits", (2, 2, 200, 16), {"cache_dtype": torch.float16}),
)


def problem_of(case: Case, seed: int = 3) -> Problem:
    options = {"dtype": torch.float32, "exact_sums": True, **case.options}
    problem = make_problem(*case.shape, seed=seed, **options)
    batch = problem.batch
    index = case.index_dtype
    slots = None if batch.slots is None else batch.slots.to(index)
    batch = replace(
        batch, anchors=batch.anchors.to(index), positions=batch.positions.to(index), slots=slots
    )
    return replace(problem, batch=batch)


def engine_of(
    name: str,
    head: fm.MarkovHead,
    rows: int,
    steps: int,
    noise_dtype: torch.dtype = torch.float32,
    config: int = 0,
) -> OnePassEngine | PerStepEngine:
    plan = Plan(rows, steps, noise_dtype)
    if name == "one_pass":
        return OnePassEngine(head, plan, (CONFIGS[name][config],), cooperative=False)
    return PerStepEngine(head, plan, (CONFIGS[name][config],))


def run(engine: Any, problem: Problem, cached: bool, dtype: torch.dtype = torch.int64) -> Any:
    """Result and cache of one decode step into poisoned outputs."""
    cache = problem.new_cache() if cached else None
    return engine.sample(problem.batch, cache, problem.new_tokens(dtype)), cache


def check(name: str, problem: Problem, case: Case) -> fm.DraftResult:
    """Compare an engine with the reference on all that they write."""
    batch = problem.batch
    cache = problem.new_cache() if case.cached else None
    want = reference.sample(problem.head, batch, cache, noise_dtype=case.noise_dtype)
    engine = engine_of(name, problem.head, batch.rows, batch.steps, case.noise_dtype)
    got, filled = run(engine, problem, case.cached, case.index_dtype)
    assert got.tokens.dtype == case.index_dtype
    assert torch.equal(got.tokens.to(torch.int64), want.tokens)
    assert torch.equal(got.nonfinite, want.nonfinite)
    if cache is not None:
        # Only a soft cap's tanh is not the same arithmetic.
        eps = torch.finfo(cache.dtype).eps if "soft_cap" in case.options else 0.0
        torch.testing.assert_close(filled, cache, rtol=4 * eps, atol=8 * eps, equal_nan=True)
    return got


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(name: str, case: Case) -> None:
    got = check(name, problem_of(case), case)
    assert got.passes >= case.passes or case.options.get("slots") == "none-live"


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
def test_non_finite_logits(name: str, temperature: str) -> None:
    case = Case("", (6, 2, 201, 16), {"temperature": temperature})
    problem = problem_of(case)
    base = problem.batch.base_logits
    base[0, 0], base[1, 1], base[2, 0, 150], base[3, 0, [9, 77]] = (
        torch.nan,
        -torch.inf,
        torch.nan,
        torch.inf,
    )
    base[4, 0] = -torch.inf
    base[4, 0, 130] = -2.0  # the only finite logit
    problem.head.w2[5] = torch.nan
    problem.head.w1[problem.batch.anchors[5]] = torch.nan
    got = check(name, problem, case)
    assert got.nonfinite[:5].tolist() == [
        [True, False],
        [False, True],
        [False, False],
        [True, False],
        [False, False],
    ]
    assert got.tokens[3, 0] == 9
    assert got.tokens[4, 0] == 130
    assert bool(got.nonfinite[5, 0])


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_finite_beside_a_winner_in_a_late_tile(name: str) -> None:
    case = Case("", (2, 1, 201, 16), {"temperature": "greedy"})
    problem = problem_of(case)
    problem.batch.base_logits[0] = -torch.inf
    problem.batch.base_logits[1, 0, 190] = 100.0
    got = check(name, problem, case)
    assert got.tokens.flatten().tolist() == [0, 190]


@pytest.mark.parametrize("name", ENGINES)
def test_a_mask_of_the_lowest_number_is_finite(name: str) -> None:
    case = Case("", (2, 1, 201, 16), {"temperature": "greedy"})
    problem = problem_of(case)
    problem.batch.base_logits.fill_(torch.finfo(torch.float32).min)
    problem.head.w2.zero_()
    got = check(name, problem, case)
    assert got.tokens.flatten().tolist() == [0, 0]
    assert not got.nonfinite.any()


def test_winners_of_a_step_that_was_not_finished_count_no_more() -> None:
    case = Case("", (3, 2, 201, 16), {})
    problem = problem_of(case)
    want = reference.sample(problem.head, problem.batch, problem.new_cache())
    engine = engine_of("one_pass", problem.head, 3, 2)
    engine._scratch.winner.fill_((1 << 63) - 1)  # above every score
    got, _ = run(engine, problem, True)
    assert torch.equal(got.tokens, want.tokens)


# So strong a bias that the base says nothing: only the successors find the chain in one pass.
@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
@pytest.mark.parametrize("rows", [1, 5])
def test_successors_spare_passes(rows: int, temperature: str) -> None:
    options = {"bias_std": 30.0, "base_std": 0.5, "temperature": temperature, "slots": "padded"}
    case = Case("", (rows + 2, 4, 700, 16), options)
    problem = problem_of(case)
    without = check("one_pass", problem, case)
    head = problem.head
    known = fm.MarkovHead(head.w1, head.w2, successors=find_successors(head, 40))
    got = check("one_pass", replace(problem, head=known), case)
    assert without.passes > 1
    assert got.passes == 1


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_alone_and_in_company(name: str) -> None:
    case = Case("", (5, 2, 200, 16), {"temperature": "mixed"})
    problem = problem_of(case)
    got, cache = run(engine_of(name, problem.head, 5, 2), problem, True)
    row, batch = 3, problem.batch
    assert batch.temperature is not None
    assert batch.seeds is not None
    one = slice(row, row + 1)
    batch = fm.DraftBatch(
        batch.base_logits[one],
        batch.anchors[one],
        batch.positions[one],
        batch.temperature[one],
        batch.seeds[one],
    )
    alone = replace(problem, batch=batch, num_slots=1)
    solo, solo_cache = run(engine_of(name, problem.head, 1, 2), alone, True)
    assert torch.equal(solo.tokens[0], got.tokens[row])
    assert torch.equal(solo_cache[0], cache[row])


@pytest.mark.parametrize("name", ENGINES)
def test_rank_between_powers_of_two(name: str) -> None:
    # 48 is a multiple of the tile's 16, and is itself no power of two.
    case = Case("", (2, 2, 130, 48))
    check(name, problem_of(case), case)


@pytest.mark.parametrize("name", ENGINES)
def test_configurations_agree(name: str) -> None:
    problem = problem_of(Case("", (2, 3, 260, 24), {"temperature": "mixed", "bias_std": 4.0}))
    results: list[tuple[fm.DraftResult, Tensor]] = [
        run(engine_of(name, problem.head, 2, 3, config=i), problem, True) for i in range(2)
    ]
    assert torch.equal(results[0][0].tokens, results[1][0].tokens)
    assert torch.equal(results[0][1], results[1][1])


def test_engines_agree() -> None:
    problem = problem_of(Case("", (2, 3, 260, 24), {"dtype": torch.float16}))
    (a, a_cache), (b, b_cache) = (
        run(engine_of(name, problem.head, 2, 3), problem, True) for name in ENGINES
    )
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a_cache, b_cache)


@pytest.mark.parametrize("name", ENGINES)
def test_warmup_touches_nothing(name: str) -> None:
    problem = problem_of(Case("", (2, 2, 100, 16)))
    cache, tokens = problem.new_cache(), problem.new_tokens()
    engine = engine_of(name, problem.head, 2, 2)
    engine.warmup(problem.batch, cache, tokens)
    assert torch.equal(cache, problem.new_cache())
    assert torch.equal(tokens, problem.new_tokens())
    want = reference.sample(problem.head, problem.batch)
    assert torch.equal(engine.sample(problem.batch, cache, tokens).tokens, want.tokens)


@pytest.mark.parametrize("kind", [OnePassEngine, PerStepEngine])
def test_bf16_is_refused(kind: type[OnePassEngine] | type[PerStepEngine]) -> None:
    head = make_problem(1, 1, 20, 16, dtype=torch.bfloat16).head
    reason = kind.why_not(head, Plan(1, 1, torch.float32))
    assert reason is not None
    assert "interpreter" in reason
    assert kind.why_not(problem_of(CASES[0]).head, Plan(1, 1, torch.float32)) is None
