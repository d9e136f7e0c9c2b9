"""Heads that read hidden states under Triton's interpreter, against the reference loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_kernels import ENGINES, engine_of, run

import fused_markov as fm
from fused_markov import reference
from fused_markov.kernels import chain
from fused_markov.problem_heads import with_heads
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import find_successors

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
VARIANTS = ("gated", "rnn")


@dataclass(frozen=True)
class Case:
    """A problem with heads; ``passes``: the fewest that the one-pass engine must have needed."""

    name: str
    shape: tuple[int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, Any] = field(default_factory=dict)
    passes: int = 1


HARD = {"bias_std": 30.0, "base_std": 0.5}
CASES = (
    Case("T=1", (2, 3, 140, 16)),
    Case("greedy, bad guesses", (3, 4, 140, 24), {**HARD, "temperature": "greedy"}, {}, 2),
    Case("mixed, bad guesses", (2, 4, 140, 24), {**HARD, "temperature": "mixed"}, {}, 2),
    Case(
        "padding steps, mixed", (4, 3, 100, 16), {"slots": "padded-steps", "temperature": "mixed"}
    ),
    Case("padding rows, reduced", (4, 2, 120, 16), {"slots": "padded", "draft_vocab": 80}),
    Case("more rows than a block", (17, 2, 24, 16), {"temperature": "greedy"}),
    Case("rank 80, fp16", (1, 2, 80, 80), {"dtype": torch.float16}),
    Case("hidden of another dtype", (2, 2, 60, 16), {}, {"hidden_dtype": torch.float16}),
)
JUDGED = (
    Case("known beforehand", (3, 3, 60, 16), {}, {"confidence": "hidden"}),
    Case("read from the draft", (3, 3, 60, 16), {}, {"confidence": "markov"}),
    Case("cut", (4, 4, 60, 16), {"slots": "padded-steps", "temperature": "mixed"}, {
        "confidence": "hidden", "min_confidence": 0.5}),
    Case("cut afterwards", (4, 4, 60, 16), {"slots": "shuffled", "temperature": "mixed"}, {
        "confidence": "markov", "min_confidence": 0.5}),
)  # fmt: skip


def problem_of(case: Case, variant: str | None, *, exact: bool = True) -> Problem:
    options = {"dtype": torch.float32, "exact_sums": True, **case.options}
    problem = make_problem(*case.shape, seed=3, **options)
    return with_heads(problem, variant=variant, exact=exact, **case.heads)


def check(name: str, problem: Problem) -> fm.DraftResult:
    """An engine and the reference give the same tokens and cached bits of the same steps."""
    cache = problem.new_cache()
    want = reference.sample(problem.head, problem.batch, cache)
    rows, steps = problem.batch.rows, problem.batch.steps
    got, filled = run(engine_of(name, problem.head, rows, steps), problem, True)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.nonfinite, want.nonfinite)
    assert (got.confidence is None) == (want.confidence is None)
    if want.confidence is not None:  # an exponential is not the same arithmetic everywhere
        torch.testing.assert_close(got.confidence, want.confidence, rtol=1e-5, atol=1e-6)
    assert (got.lengths is None) == (want.lengths is None)
    if want.lengths is not None:
        assert torch.equal(got.lengths, want.lengths)
        assert 0 < int(want.lengths.sum()) < rows * steps
        slots = problem.batch.slot_matrix()
        late = (torch.arange(steps) >= want.lengths[:, None]) & (slots >= 0)
        head = problem.head.confidence
        if head is not None and head.with_markov:
            row, step = late.nonzero(as_tuple=True)
            filled[slots[row, step], step] = cache[slots[row, step], step]
    torch.testing.assert_close(filled, cache, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(name: str, variant: str, case: Case) -> None:
    got = check(name, problem_of(case, variant))
    assert got.passes >= case.passes


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_between_live_steps(name: str, variant: str) -> None:
    """The state after padding is 0, as at a block's start."""
    problem = problem_of(Case("", (2, 3, 60, 16), {"slots": "shuffled"}), variant)
    slots = problem.batch.slot_matrix().clone()
    slots[0, 1], slots[1, 0] = -1, -1
    engine = engine_of(name, problem.head, 2, 3)
    run(engine, problem, True)  # leaves a state after every step behind
    problem = replace(problem, batch=replace(problem.batch, slots=slots))
    cache = problem.new_cache()
    want = reference.sample(problem.head, problem.batch, cache)
    got, filled = run(engine, problem, True)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(filled, cache)


@triton.jit
def _never_sure(top, logit, temp):
    return top - 1000.0, tl.maximum(top + 1.0, temp + 0.0 * logit)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_checked_again_after_the_same_token(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the gate may have missed something, a row starts again from its last right step."""
    monkeypatch.setattr(chain, "gate_of", _never_sure)
    problem = problem_of(Case("", (2, 3, 60, 16), {"slots": "padded"}), variant)
    assert check("one_pass", problem).passes == 4


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("variant", [None, "rnn"])
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_confidences_and_lengths(name: str, variant: str | None, case: Case) -> None:
    check(name, problem_of(case, variant))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gates_between_open_and_shut(name: str, variant: str) -> None:
    """Nothing is exact here: logits agree to a few last places."""
    problem = problem_of(Case("", (2, 3, 90, 24), {"temperature": "mixed"}), variant, exact=False)
    cache = problem.new_cache()
    want = reference.sample(problem.head, problem.batch, cache)
    got, filled = run(engine_of(name, problem.head, 2, 3), problem, True)
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(filled, cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_successors_are_only_candidates(variant: str) -> None:
    problem = problem_of(Case("", (2, 3, 140, 16), HARD), variant)
    head = problem.head
    known = find_successors(fm.MarkovHead(head.w1, head.w2), 20)
    head = fm.MarkovHead(head.w1, head.w2, variant=head.variant, successors=known)
    check("one_pass", replace(problem, head=head))


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_alone_and_in_company(name: str) -> None:
    case = Case("", (3, 3, 90, 24), {"temperature": "mixed"}, {"confidence": "markov"})
    # The interpreter's products, unlike a matrix unit's, sum in an order of their own: exact sums.
    problem = problem_of(case, "rnn")
    got, cache = run(engine_of(name, problem.head, 3, 3), problem, True)
    fields = ("base_logits", "anchors", "positions", "temperature", "seeds", "hidden")
    batch = fm.DraftBatch(**{n: getattr(problem.batch, n)[2:] for n in fields})
    alone = replace(problem, batch=batch, num_slots=1)
    solo, solo_cache = run(engine_of(name, problem.head, 1, 3, config=1), alone, True)
    assert torch.equal(solo.tokens[0], got.tokens[2])
    assert torch.equal(solo_cache[0], cache[2])
    assert torch.equal(solo.confidence[0], got.confidence[2])


@pytest.mark.parametrize("name", ENGINES)
def test_not_a_number_stays_in_its_row(name: str) -> None:
    problem = problem_of(Case("", (3, 2, 60, 16), {"slots": "padded"}), "rnn")
    hidden = problem.batch.hidden
    assert hidden is not None
    hidden[0] = torch.nan  # padding
    hidden[1, 0, 0] = torch.nan
    got = check(name, problem)
    assert got.nonfinite.tolist() == [[False, False], [True, True], [False, False]]
    assert got.tokens[1].tolist() == [0, 0]


@pytest.mark.parametrize("name", ENGINES)
def test_warmup_touches_nothing(name: str) -> None:
    case = Case("", (2, 2, 60, 16), {}, {"confidence": "markov", "min_confidence": 0.5})
    problem = problem_of(case, "gated")
    cache, tokens = problem.new_cache(), problem.new_tokens()
    engine_of(name, problem.head, 2, 2).warmup(problem.batch, cache, tokens)
    assert torch.equal(cache, problem.new_cache())
    assert torch.equal(tokens, problem.new_tokens())
