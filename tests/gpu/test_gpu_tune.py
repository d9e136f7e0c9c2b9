"""`tune` on a GPU: candidates are checked, timed and turned down as they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fused_markov.bench import tune as tuning
from fused_markov.bench.search import DoesNotRun
from fused_markov.cli.app import app
from fused_markov.engines.tuned import SWITCH, cache_file

pytestmark = pytest.mark.gpu

ENGINES = ("one_pass", "per_step")


@pytest.mark.parametrize("temperature", ["1", "greedy"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_configuration_is_measured_and_admitted(engine: str, temperature: str) -> None:
    shape = tuning.Shape(4, 3, 4096, 64, torch.bfloat16, temperature)
    config = tuning.built_in(engine)[0]
    candidates = tuning.Candidates(shape, [1, 4])
    assert candidates.measure(config) > 1
    candidates.admit(config)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_fit_is_turned_down_and_harms_nothing(engine: str) -> None:
    shape = tuning.Shape(4, 3, 4096, 64, torch.bfloat16, "1")
    config = tuning.built_in(engine)[-1]
    candidates = tuning.Candidates(shape, [4])
    with pytest.raises(DoesNotRun):
        candidates.measure(replace(config, block_v=1024, stages=8))
    assert candidates.measure(config) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_tune(engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH)
    coordinate = (("block_v",), ((32,), (64,)))
    monkeypatch.setattr(tuning, "coordinates_of", lambda config, amd: (coordinate,))
    shape = ["--vocab", "4096", "--rank", "64", "--steps", "3", "--rows", "2"]
    done = CliRunner().invoke(app, ["tune", *shape, "--engine", engine, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert [trial["rejected"] for trial in facts["trials"]] == [""] * len(facts["trials"])
    assert cache_file().exists() == (facts["written"] is not None)
