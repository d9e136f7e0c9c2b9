"""`tune` from end to end in the interpreter: real engines and checks, times made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels import CONFIGS
from typer.testing import CliRunner, Result

import fused_markov as fm
from fused_markov.bench import tune as tuning
from fused_markov.bench.compare import Verdict
from fused_markov.bench.timing import Timing
from fused_markov.cli.app import app
from fused_markov.engines.chips import INTERPRETER
from fused_markov.engines.tuned import SWITCH, cache_file
from fused_markov.problems import make_problem

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
ENGINES = {"one_pass": "max_row_steps", "per_step": "max_rows"}
COORDINATE = (("block_v", "stages"), ((32, 1), (32, 2)))
ARGUMENTS = [
    "tune",
    "--vocab",
    "70",
    "--rank",
    "16",
    "--steps",
    "1",
    "--rows",
    "1",
    "--dtype",
    "fp32",
]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that is the interpreter; a step takes longer the larger its tiles are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH)
    last: list[Any] = []
    make_engine = tuning._engine

    def engine(head: fm.MarkovHead, plan: Any, config: Any) -> Any:
        if config.block_v == 32 and config.stages == 2:
            raise RuntimeError("out of resource: shared memory")
        last[:] = [config]
        return make_engine(head, plan, config)

    def time(steps: Sequence[Callable[[], object]]) -> Timing:
        steps[-1]()
        us = float(last[0].block_v)
        return Timing(us, us, 1)

    monkeypatch.setattr(tuning, "make_problem", partial(on_cpu, make_problem))
    monkeypatch.setattr(tuning, "cold_copies", lambda size, device: 2)
    monkeypatch.setattr(tuning, "time_on_gpu", time)
    monkeypatch.setattr(tuning, "_engine", engine)
    monkeypatch.setattr(tuning, "coordinates_of", lambda config, amd: (COORDINATE,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def on_cpu(make: Callable[..., Any], *shape: int, **options: Any) -> Any:
    return make(*shape, **{**options, "device": "cpu"})


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    small = CONFIGS[name][0]
    built_in = INTERPRETER.one_pass if name == "one_pass" else INTERPRETER.per_step
    configs = [replace(small, **{ENGINES[name]: getattr(c, ENGINES[name])}) for c in built_in]
    monkeypatch.setattr(tuning, "built_in", lambda engine: tuple(configs))
    monkeypatch.setattr("fused_markov.cli.tune._engine_here", lambda engine: name)
    done = CliRunner().invoke(app, [*ARGUMENTS, *options], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_faster_is_written_and_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads(run(name, monkeypatch, "--json").stdout)
    rejected = {t["changes"]: t["rejected"] for t in facts["trials"]}
    assert rejected == {
        "default": "",
        "block_v=32": "",
        "block_v=32, stages=2": "does not run: out of resource: shared memory",
    }
    (chosen,) = facts["chosen"]
    assert (chosen["rows"], chosen["changes"]) == ([1, 1], "block_v=32")
    assert chosen["gain"] == pytest.approx(0.5)
    assert facts["written"] == str(cache_file())
    head = make_problem(1, 1, 70, 16, dtype=torch.float32).head
    sampler = fm.DraftSampler(head, max_rows=64, steps=1, engine=name)
    assert [c.block_v for c in sampler._engine._configs][:2] == [32, 64]


def test_wrong_candidates_are_reported_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = tuning.compare

    def wrong(problem: Any, engine: Any, **options: Any) -> Verdict:
        if engine._configs[0].block_v == 32:
            return Verdict("tokens[0, 0]: expected 3, got 4", 0, 1)
        return compare(problem, engine, **options)

    monkeypatch.setattr(tuning, "compare", wrong)
    facts = json.loads(run("one_pass", monkeypatch, "--json").stdout)
    rejected = {t["changes"]: t["rejected"] for t in facts["trials"]}
    assert rejected["block_v=32"].startswith("wrong: one_pass")
    assert rejected["block_v=32"].endswith("tokens[0, 0]: expected 3, got 4")
    assert facts["written"] is None
    assert not cache_file().exists()


def test_tables_and_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "the interpreter")
    shown = run("per_step", monkeypatch).output
    assert "per_step, V=70 r=16 S=1 float32 T=1, the interpreter" in shown
    assert "does not run: out of resource: shared memory" in shown
    assert "50.0%" in shown
    before = cache_file().read_text()
    monkeypatch.setattr(tuning, "coordinates_of", lambda config, amd: ())
    assert "Nothing is faster by 2%: nothing written." in run("per_step", monkeypatch).output
    assert cache_file().read_text() == before
