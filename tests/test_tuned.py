"""The file of tuned configurations: what is written is found, and what does not fit is not used."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_markov as fm
from fused_markov.engines import Plan
from fused_markov.engines import tuned as module
from fused_markov.engines.configs import ONE_PASS, PER_STEP, OnePassConfig
from fused_markov.engines.tuned import SWITCH, cache_file, choose, key_of, store
from fused_markov.problems import make_problem

HEAD = make_problem(1, 1, 300, 16).head
PLAN = Plan(4, 5, torch.float32)
KEY = key_of("one_pass", HEAD, PLAN)
TUNED = (replace(ONE_PASS[0], stages=2), *ONE_PASS[1:])


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH)
    module._warn_once.cache_clear()
    return tmp_path


def chosen() -> tuple[OnePassConfig, ...]:
    return choose("one_pass", HEAD, PLAN, ONE_PASS).configs


def test_what_is_stored_is_chosen(home: Path) -> None:
    assert chosen() == ONE_PASS
    path = store(KEY, TUNED, {"us": 1.0})
    assert path == home / "fused-markov" / "tuned.json"
    assert chosen() == TUNED
    assert str(path) in choose("one_pass", HEAD, PLAN, ONE_PASS).note
    assert json.loads(path.read_text())[KEY]["measured"] == {"us": 1.0}
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]


def test_entries_stand_side_by_side() -> None:
    other = key_of("per_step", HEAD, PLAN)
    store(KEY, TUNED, {})
    store(other, (replace(PER_STEP[0], stages=1), PER_STEP[1]), {})
    store(other, (replace(PER_STEP[0], stages=2), PER_STEP[1]), {})
    assert chosen() == TUNED
    assert choose("per_step", HEAD, PLAN, PER_STEP).configs[0].stages == 2


@pytest.mark.parametrize(
    "key",
    [
        key_of("per_step", HEAD, PLAN),
        key_of("one_pass", HEAD, Plan(4, 4, torch.float32)),
        key_of("one_pass", make_problem(1, 1, 301, 16).head, PLAN),
        key_of("one_pass", make_problem(1, 1, 300, 32).head, PLAN),
        key_of("one_pass", make_problem(1, 1, 300, 16, dtype=torch.float16).head, PLAN),
        KEY.replace(fm.__version__, "0.0.1"),
        KEY.replace("triton ", "triton 0"),
        KEY.replace("interpreter", "GPU"),
    ],
)
def test_an_entry_for_something_else_is_not_chosen(key: str) -> None:
    store(key, TUNED, {})
    assert chosen() == ONE_PASS


def test_the_number_of_rows_and_the_noise_do_not_matter() -> None:
    assert key_of("one_pass", HEAD, Plan(64, 5, torch.float64)) == KEY


@pytest.mark.parametrize("off", ["0", "off", "No "])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    store(KEY, TUNED, {})
    monkeypatch.setenv(SWITCH, off)
    assert choose("one_pass", HEAD, PLAN, ONE_PASS) == module.Choice(ONE_PASS)
    monkeypatch.setenv(SWITCH, "1")
    assert chosen() == TUNED


def changed(**changes: Any) -> list[dict[str, Any]]:
    return [asdict(TUNED[0]) | changes, *map(asdict, TUNED[1:])]


def without(name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(config).items() if k != name} for config in TUNED]


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        (without("stages"), "missing or unknown: stages"),
        (changed(clusters=2), "missing or unknown: clusters"),
        (changed(stages="2"), "no whole number"),
        (changed(stages=True), "no whole number"),
        (changed(block_v=48), "no power of two"),
        (changed(max_row_steps=6), "other numbers of rows"),
        (changed()[:1], "other numbers of rows"),
        ([], "other numbers of rows"),
        ([3], "no list of configurations"),
        ({"stages": 2}, "no list of configurations"),
    ],
)
def test_stale_entries_are_named_once(
    configs: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_file()
    path.parent.mkdir()
    path.write_text(json.dumps({KEY: {"configs": configs}}))
    with caplog.at_level(logging.WARNING, "fused_markov"):
        assert chosen() == ONE_PASS
        assert chosen() == ONE_PASS
    (line,) = [record.getMessage() for record in caplog.records]
    assert reason in line
    assert "run `fused-markov tune` again" in line
    store(KEY, TUNED, {})
    assert chosen() == TUNED


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"a": NaN'])
def test_a_corrupt_file_is_named_once_and_written_anew(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_file()
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "fused_markov"):
        assert chosen() == ONE_PASS
        assert chosen() == ONE_PASS
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(path) in line
    store(KEY, TUNED, {})
    assert chosen() == TUNED


def test_a_folder_that_cannot_be_written(home: Path) -> None:
    (home / "fused-markov").write_text("in the way")
    assert chosen() == ONE_PASS
    with pytest.raises(fm.ArgumentError, match="XDG_CACHE_HOME"):
        store(KEY, TUNED, {})


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_file() == tmp_path / ".cache" / "fused-markov" / "tuned.json"
