"""The real pair: `generate`, its command line, and the benchmark's checks at a small size."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from fused_markov.cli.app import app
from fused_markov.errors import CheckpointError
from fused_markov.pair.decode import Round
from fused_markov.pair.generate import Pair, find_drafter, generate

KEYS = {
    "text",
    "tokens",
    "rounds",
    "accepted_per_round",
    "accepted_by_position",
    "passes_per_round",
    "tokens_per_second",
    "engine",
}
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.load()


@pytest.fixture(scope="module")
def benchmark_script() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "pair.py"
    spec = importlib.util.spec_from_file_location("benchmark_pair", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_greedy_text_streams_and_is_the_targets(pair: Pair) -> None:
    pieces: list[str] = []
    rounds: list[Round] = []
    report = generate(pair, PROMPT, max_tokens=24, on_text=pieces.append, on_round=rounds.append)
    alone = generate(pair, PROMPT, max_tokens=24, draft=False)
    assert report.tokens == alone.tokens
    assert report.text == alone.text == "".join(pieces)
    assert "Paris" in report.text
    assert len(pieces) > 1
    assert report.rounds == len(rounds) < alone.rounds
    assert report.accepted_per_round == pytest.approx(sum(report.accepted_by_position))
    assert 1 <= report.passes_per_round <= len(report.accepted_by_position)
    assert report.engine != "none"
    assert alone.engine == "none"


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_engines_give_the_same_text(pair: Pair, engine: str) -> None:
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 3}
    expected = generate(pair, PROMPT, engine="reference", **options)
    assert generate(pair, PROMPT, engine=engine, **options).tokens == expected.tokens


def test_command_line() -> None:
    arguments = ["generate", "--prompt", PROMPT, "--max-tokens", "8"]
    done = CliRunner().invoke(app, [*arguments, "--json", "--temperature", "0.7", "--seed", "5"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert set(report) == KEYS
    assert len(report["tokens"]) <= 8
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "accepted drafts a round" in shown.output
    assert "the same" in shown.output


def test_missing_drafter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_drafter(tmp_path)
    done = CliRunner().invoke(app, ["generate", "--prompt", "x", "--drafter", str(tmp_path)])
    assert isinstance(done.exception, CheckpointError)
    assert str(tmp_path) in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["greedy", "law", "passes"])
def test_benchmark_parts(pair: Pair, benchmark_script: ModuleType, part: str) -> None:
    result = benchmark_script.PARTS[part](pair, benchmark_script.QUICK)
    assert result["ok"], result
