"""The commands info, verify and bench, with right engines and a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fused_markov import engines
from fused_markov.bench.compare import compare, ulp_distance, within_a_place
from fused_markov.bench.timing import time_on_cpu
from fused_markov.cli.app import app
from fused_markov.engines.loop import LoopEngine
from fused_markov.errors import ArgumentError
from fused_markov.problems import make_problem
from fused_markov.sampler import DraftSampler

TINY = ["--device", "cpu", "--vocab", "300", "--rank", "16", "--seconds", "0.01"]
runner = CliRunner()


class WrongEngine(LoopEngine):
    """The reference with one bit of one cached logit, or one token, turned."""

    name = "wrong"

    def sample(self, batch, logits_cache, tokens):
        result = super().sample(batch, logits_cache, tokens)
        if logits_cache is None:
            result.tokens[-1, -1] += 1
        else:
            logits_cache.view(torch.int16)[-1, -1, 7] += 1
        return result


@pytest.fixture
def wrong_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def types():
        return {e.name: e for e in (LoopEngine, WrongEngine)}

    for module in ("fused_markov.sampler", "fused_markov.bench.compare"):
        monkeypatch.setattr(f"{module}.engine_types", types)
    monkeypatch.setattr(engines, "engine_types", types)


def test_info() -> None:
    done = runner.invoke(app, ["info", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.output)
    assert facts["packages"]["torch"] == torch.__version__
    names = {(e["device"], e["engine"]): e["reason"] for e in facts["engines"]}
    assert names["cpu", "reference"] is None
    assert runner.invoke(app, ["info"]).exit_code == 0


def test_verify() -> None:
    done = runner.invoke(app, ["verify", "--quick", "--json", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results["ok"]
    assert {r["engine"] for r in results["results"]} >= {"reference"}


@pytest.mark.usefixtures("wrong_engine")
def test_verify_fails_on_a_wrong_engine() -> None:
    arguments = ["verify", "--quick", "--json", "--device", "cpu", "--engine", "wrong"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    results = json.loads(done.stdout)
    assert not results["ok"]
    problems = {r["case"]: r["problem"] for r in results["results"]}
    assert problems["greedy, no cache"].startswith("tokens[2, 4]: expected")
    assert problems["T=1"].startswith("cache[2, 4, 7]: expected")


def test_bench(tmp_path: Path) -> None:
    image = tmp_path / "out.png"
    arguments = ["bench", *TINY, "--rows", "1,3", "--json", "--plot", str(image)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["lines"]
    assert [(line["rows"], line["temperature"]) for line in lines] == [
        (rows, t) for rows in (1, 3) for t in ("0", "0.6", "1", "greedy")
    ]
    for line in lines:
        assert line["floor_bytes"] == 300 * 2 * (16 + line["rows"] * 5 * (1 + line["cached"]))
        assert all(e["ok"] and e["median_us"] > 0 for e in line["engines"].values())
    assert image.read_bytes().startswith(b"\x89PNG")
    shown = runner.invoke(app, ["bench", *TINY, "--rows", "1"], env={"COLUMNS": "160"})
    assert "speed-up" in shown.output


@pytest.mark.usefixtures("wrong_engine")
def test_bench_gives_no_time_for_a_wrong_engine() -> None:
    done = runner.invoke(app, ["bench", *TINY, "--rows", "2", "--engines", "wrong", "--json"])
    assert done.exit_code == 1
    for line in json.loads(done.stdout)["lines"]:
        wrong = line["engines"]["wrong"]
        assert not wrong["ok"]
        assert "expected" in wrong["problem"]
        assert "median_us" not in wrong
        assert "speed_up" not in wrong


@pytest.mark.parametrize(
    ("option", "value"),
    [("--rows", "1,x"), ("--rows", "0"), ("--temperatures", "-1"), ("--dtype", "int8")],
)
def test_bench_names_a_bad_option(option: str, value: str) -> None:
    done = runner.invoke(app, ["bench", *TINY, option, value])
    assert isinstance(done.exception, ArgumentError)
    assert option in str(done.exception)


def test_errors_are_messages_not_tracebacks() -> None:
    command = [sys.executable, "-c", "from fused_markov.cli import main; main()"]
    done = subprocess.run(
        [*command, "bench", "--rows", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fused-markov: --rows: expected")


def test_says_what_to_install_without_typer() -> None:
    code = "import sys; sys.modules['typer'] = None; from fused_markov.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'fused-markov[pair]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_compare_counts_passes_and_takes_nan() -> None:
    problem = make_problem(2, 3, 50, 8, dtype=torch.float32)
    problem.batch.base_logits[0, 1] = torch.nan
    sampler = DraftSampler(problem.head, max_rows=2, steps=3, engine="reference")
    verdict = compare(problem, sampler)
    assert verdict.ok, verdict.problem
    assert verdict.passes == 3


def test_ulp_distance() -> None:
    a = torch.tensor([1.0, 0.0, -0.0, torch.nan, torch.inf, -1.0])
    b = torch.nextafter(a, torch.tensor(torch.inf))
    assert ulp_distance(a, b).tolist() == [1, 1, 1, 0, 0, 1]
    tiny = torch.tensor([-1e-45, 1e-45])
    assert int(ulp_distance(tiny[:1], tiny[1:])) == 2
    assert int(ulp_distance(a[:1].bfloat16(), a[:1].bfloat16())) == 0


def test_time_on_cpu_takes_turns() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_on_cpu(steps, seconds=0.0, runs=3)
    assert order == ["a", "b"] * 4
    assert timings["a"].samples == 3


@pytest.mark.parametrize("options", [{}, {"draft_vocab": 60}, {"slots": "padded"}])
def test_within_a_place_of_the_bias(options: dict[str, Any]) -> None:
    """Base and bias that nearly cancel: a place of the bias is many of the logit, two are wrong."""
    problem = make_problem(2, 3, 90, 16, bias_std=0.0, **options)
    slots = problem.batch.slot_matrix()
    row = int((slots[:, 1] >= 0).nonzero()[0])
    candidate = 7
    column = int(problem.head.target_ids(torch.tensor(candidate)))
    problem.batch.base_logits[row, 1, candidate] = -1.0
    want = problem.new_cache(0.0)
    slot = int(slots[row, 1])
    want[slot, 1, column] = 2.0**-6
    at = torch.tensor([[slot, 1, column]])
    for places, right in ((0, True), (1, True), (3, False)):
        got = want.clone()
        got[slot, 1, column] += places * 2.0**-7
        assert within_a_place(problem, want, got, at).tolist() == [right]
    got[slot, 1, column] = torch.nan
    assert within_a_place(problem, want, got, at).tolist() == [False]
