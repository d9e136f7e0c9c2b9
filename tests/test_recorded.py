"""The pair's decode steps as problems: they are what it drafted from, and `bench` runs on them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from fused_markov.bench.compare import compare
from fused_markov.bench.recorded import Recorder, load_prompts
from fused_markov.bench.timing import in_turns
from fused_markov.cli.app import app
from fused_markov.errors import ArgumentError
from fused_markov.pair.decode import Round
from fused_markov.pair.generate import Pair, generate
from fused_markov.problems import make_problem
from fused_markov.sampler import DraftSampler

runner = CliRunner()


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.load()


@pytest.fixture(scope="module")
def recorder(pair: Pair) -> Recorder:
    return Recorder(pair, load_prompts()[:2], 4, "cpu")


@pytest.mark.parametrize("temperature", ["0.8", "greedy"])
def test_rows_are_the_rounds_of_generate(pair: Pair, recorder: Recorder, temperature: str) -> None:
    value = 0.0 if temperature == "greedy" else float(temperature)
    (problem,) = recorder.problems(4, temperature, count=1)
    assert problem.batch.greedy == (temperature == "greedy")
    for seed, prompt in enumerate(load_prompts()[:2]):
        rounds: list[Round] = []
        options = {"temperature": value, "seed": seed, "max_tokens": 24}
        generate(pair, prompt, on_round=rounds.append, **options)
        for turn in range(2):
            row, want = 2 * turn + seed, rounds[turn].batch
            assert want is not None
            for name in ("base_logits", "anchors", "positions"):
                assert torch.equal(getattr(problem.batch, name)[row], getattr(want, name)[0])
            if problem.batch.seeds is not None:
                assert int(problem.batch.seeds[row]) == seed


def test_engines_are_right_on_them(recorder: Recorder) -> None:
    for problem in recorder.problems(3, "0.8", count=2):
        sampler = DraftSampler(problem.head, max_rows=3, steps=problem.batch.steps)
        verdict = compare(problem, sampler)
        assert verdict.ok, verdict.problem
        assert 1 <= verdict.passes <= problem.batch.steps


def test_rounds_are_used_again_where_there_are_too_few(recorder: Recorder) -> None:
    (problem,) = recorder.problems(6, "greedy", count=1)
    assert torch.equal(problem.batch.base_logits[4:], problem.batch.base_logits[:2])


def test_bench_on_the_pair() -> None:
    arguments = ["bench", "--pair", "--device", "cpu", "--rounds", "2", "--seconds", "0.01"]
    arguments += ["--rows", "1,2", "--temperatures", "0.8", "--engines", "cpu", "--json"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["lines"]
    assert [line["rows"] for line in lines] == [1, 2]
    for line in lines:
        assert (line["vocab"], line["rank"], line["steps"]) == (49152, 64, 7)
        assert 1 <= line["engines"]["cpu"]["passes"] <= 7
        assert line["engines"]["cpu"]["median_us"] > 0


def test_the_pairs_shape_is_not_a_choice() -> None:
    done = runner.invoke(app, ["bench", "--pair", "--device", "cpu", "--vocab", "300"])
    assert isinstance(done.exception, ArgumentError)
    assert "--pair" in str(done.exception)


def test_clones_share_no_memory() -> None:
    problem = make_problem(2, 2, 60, 16, draft_vocab=50, scale=0.5, soft_cap=3.0)
    twin = problem.clone()
    assert twin.head.w2.data_ptr() != problem.head.w2.data_ptr()
    assert twin.batch.base_logits.data_ptr() != problem.batch.base_logits.data_ptr()
    want, got = (
        DraftSampler(p.head, max_rows=2, steps=2).sample(p.batch).tokens for p in (problem, twin)
    )
    assert torch.equal(want, got)


def test_in_turns() -> None:
    calls: list[str] = []
    step = in_turns([lambda name=name: calls.append(name) for name in "ab"])
    for _ in range(3):
        step()
    assert calls == ["a", "b", "a"]
