"""What a sampler says of a batch: the engine, the bytes, and the reasons that matter."""

import pytest
import torch

import fused_markov as fm
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import find_successors
from fused_markov.traffic import Traffic, traffic


def problem(**options: object) -> Problem:
    return make_problem(3, 4, 200, 16, dtype=torch.float32, **options)  # type: ignore[arg-type]


def explain(of: Problem, cached: bool = True, **options: object) -> str:
    batch = of.batch
    sampler = fm.DraftSampler(of.head, max_rows=3, steps=4, **options)  # type: ignore[arg-type]
    return sampler.explain(batch, of.new_cache() if cached else None)


def test_bytes_are_those_of_weights_base_and_cache() -> None:
    of = problem()
    least = traffic(of.head, of.batch, of.new_cache())
    rows = 3 * 4 * 200 * 4
    assert least == Traffic(200 * 16 * 4, rows, rows)
    assert traffic(of.head, of.batch, None).cache == 0
    assert traffic(of.head, of.batch, None, draft_topk=5).weights == 3 * 4 * 5 * 16 * 4


def test_a_quantized_head_moves_what_is_stored() -> None:
    of = problem()
    stored = fm.quantize_head(of.head, "int8")
    assert traffic(stored, of.batch, None).weights == 200 * 16 + 200 * 4


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_says_how_often_w2_is_read(engine: str) -> None:
    said = explain(problem(), engine=engine)
    assert "3 rows of 4 steps, with temperatures, float32 base logits" in said
    assert "moves at least 0.0 MB (W2 0.0, base 0.0, cache 0.0)" in said
    assert ("once a pass" if engine == "cpu" else "reads W2 4 times") in said


def test_says_what_guesses_are_made_of() -> None:
    of = problem()
    assert "from the base logits alone" in explain(of, engine="cpu")
    known = find_successors(of.head, 7)
    of = Problem(
        fm.MarkovHead(of.head.w1, of.head.w2, successors=known),
        of.batch,
        of.num_slots,
        of.cache_width,
        of.cache_dtype,
    )
    assert "and 7 successors" in explain(of, engine="cpu")


def test_says_what_limits_and_shapes() -> None:
    assert "only the rows of each position's candidates" in explain(problem(), draft_topk=8)
    greedy = problem(temperature="greedy")
    said = explain(greedy, cached=False)
    assert "greedy" in said
    assert "no cache" in said


def test_refuses_what_sample_refuses() -> None:
    of = problem()
    sampler = fm.DraftSampler(of.head, max_rows=2, steps=4)
    with pytest.raises(fm.ArgumentError, match="at most 2 rows"):
        sampler.explain(of.batch)


def test_without_a_batch_there_is_nothing_of_one() -> None:
    of = problem()
    assert "moves" not in fm.DraftSampler(of.head, max_rows=3, steps=4).explain()
