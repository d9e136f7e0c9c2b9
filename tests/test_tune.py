"""The search of `tune`, with times made up: what it tries, what it takes, what it never takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fused_markov.bench.search import (
    LEAST_GAIN,
    DoesNotRun,
    Trial,
    Wrong,
    alternatives,
    changes_of,
    coordinates_of,
    search,
)
from fused_markov.bench.tune import Bucket, buckets, tuned
from fused_markov.cli.app import app
from fused_markov.cli.tune import chosen_table, outcome_facts, trial_facts, trials_table
from fused_markov.engines.chips import AMD, NVIDIA
from fused_markov.engines.configs import ONE_PASS, PER_STEP, OnePassConfig
from fused_markov.engines.valid import why_invalid
from fused_markov.errors import ArgumentError, EngineUnavailableError

VOCAB = 129280
ALL = {
    f"{chip.name} {kind} {index}": (config, chip.name.startswith("gfx"))
    for chip in (NVIDIA, *AMD.values())
    for kind, configs in (("one_pass", chip.one_pass), ("per_step", chip.per_step))
    for index, config in enumerate(configs)
}


def cost(config: OnePassConfig) -> float:
    """100 µs for the first built-in configuration, least at one place that it is not at."""
    us = 100.0
    us -= 20 * (config.block_v == 128) - 5 * (config.stages - 3) ** 2
    us -= 10 * (config.check_warps == 8)
    return us - 5 * (config.chunks == 32)


@pytest.mark.parametrize("which", ALL)
def test_neighbourhood_is_valid(which: str) -> None:
    config, amd = ALL[which]
    assert why_invalid(config, VOCAB) is None
    for coordinate in coordinates_of(config, amd):
        others = list(alternatives(config, coordinate, VOCAB))
        assert others
        assert config not in others
        assert len(set(others)) == len(others)
        for other in others:
            assert why_invalid(other, VOCAB) is None
            names = changes_of(other, config).split(", ")
            assert {name.split("=")[0] for name in names} <= set(coordinate[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_v": 48}, "block_v = 48 is no power of two"),
        ({"block_m": 4}, "block_m = 4 is below 8"),
        ({"stages": 0}, "stages = 0 is below 1"),
        ({"check_registers": 999}, "check_registers = 999 is above 512"),
        ({"predecessors": 256}, "predecessors = 256 is above 128"),
        ({"chunks": 128}, "do not give 128 candidates"),
        ({"chunks": 1, "lanes": 64}, "do not give 128 candidates"),
        ({"chunks": 1, "lanes": 256}, "do not reach over 129280 tokens"),
    ],
)
def test_why_invalid(change: dict[str, int], reason: str) -> None:
    assert reason in str(why_invalid(replace(ONE_PASS[0], **change), VOCAB))


def test_the_fastest_is_chosen() -> None:
    tried: list[Trial[OnePassConfig]] = []
    start = ONE_PASS[0]
    found = search(start, coordinates_of(start, False), VOCAB, cost, on_trial=tried.append)
    assert found.default == start
    assert found.best.block_v == 128
    assert found.best.check_warps == 8
    assert found.best.chunks == 32
    assert found.best_us == cost(found.best) == min(trial.us or math.inf for trial in tried)
    assert found.gain == pytest.approx(1 - cost(found.best) / cost(start))
    assert tried == found.trials
    assert tried[0] == Trial(start, cost(start))


@pytest.mark.parametrize("kind", [Wrong, DoesNotRun])
def test_rejected_candidates_are_never_chosen(kind: type[Exception]) -> None:
    def measure(config: OnePassConfig) -> float:
        if config.block_v == 128 or config.check_warps == 8:
            raise kind("so")
        return cost(config)

    start = ONE_PASS[0]
    found = search(start, coordinates_of(start, False), VOCAB, measure)
    assert changes_of(found.best, start) == "chunks=32"
    rejected = [trial for trial in found.trials if trial.rejected]
    assert rejected
    for trial in rejected:
        assert trial.us is None
        assert trial.rejected == ("wrong: so" if kind is Wrong else "does not run: so")


def test_only_what_is_faster_must_be_admitted_and_is_not_chosen_otherwise() -> None:
    start, asked = ONE_PASS[0], []

    def admit(config: OnePassConfig) -> None:
        asked.append(cost(config))
        if config.block_v == 128:
            raise DoesNotRun("fp64 noise: shared memory")

    found = search(start, coordinates_of(start, False), VOCAB, cost, admit)
    assert found.best.block_v == 64
    assert max(asked) < cost(start)


def test_a_small_gain_changes_nothing() -> None:
    start = ONE_PASS[0]

    def measure(config: OnePassConfig) -> float:
        return 100.0 if config == start else 100.0 * (1 - LEAST_GAIN) + 0.1

    found = search(start, coordinates_of(start, False), VOCAB, measure)
    assert found.best == start
    assert found.gain == 0


def test_a_gain_that_does_not_come_again_changes_nothing() -> None:
    times = {config: [100.0, 100.0] for config in ()}

    def measure(config: OnePassConfig) -> float:
        runs = times.setdefault(config, [100.0, 100.0 if config == start else 80.0])
        return runs.pop()

    start = ONE_PASS[0]
    found = search(start, coordinates_of(start, False), VOCAB, measure)
    assert found.best == start


def test_a_default_that_does_not_run_gives_way() -> None:
    start = ONE_PASS[0]

    def measure(config: OnePassConfig) -> float:
        if config.block_v >= 64:
            raise DoesNotRun("shared memory")
        return 100.0

    found = search(start, coordinates_of(start, False), VOCAB, measure)
    assert found.best.block_v == 32
    assert found.default_us == math.inf
    assert found.gain == 1


def test_a_wrong_default_ends_the_search() -> None:
    def measure(config: OnePassConfig) -> float:
        raise Wrong("tokens[0, 0]: expected 1, got 2")

    with pytest.raises(Wrong, match="expected 1, got 2"):
        search(ONE_PASS[0], coordinates_of(ONE_PASS[0], False), VOCAB, measure)


def test_nothing_that_runs() -> None:
    def measure(config: OnePassConfig) -> float:
        raise DoesNotRun("no")

    found = search(ONE_PASS[0], coordinates_of(ONE_PASS[0], False), VOCAB, measure)
    assert (found.best, found.gain) == (ONE_PASS[0], 0)


def test_buckets() -> None:
    def ends(configs, max_rows, steps):
        return [(b.low, b.high) for b in buckets(configs, max_rows, steps)]

    assert ends(ONE_PASS, 64, 5) == [(1, 1), (2, 3), (4, 12), (13, 64)]
    assert ends(ONE_PASS, 2, 5) == [(1, 1), (2, 2)]
    assert ends(ONE_PASS, 8, 20) == [(1, 3), (4, 8)]
    assert ends(PER_STEP, 64, 5) == [(1, 16), (17, 64)]


def test_tuned_replaces_the_bucket_alone() -> None:
    better = replace(ONE_PASS[0], stages=2)
    bucket = Bucket(ONE_PASS[0], 1, 3)
    found = search(ONE_PASS[0], (), VOCAB, cost)
    found.best = better
    assert tuned(ONE_PASS, [(bucket, found)]) == [better, *ONE_PASS[1:]]


def test_tables() -> None:
    start = ONE_PASS[0]
    found = search(start, coordinates_of(start, False), VOCAB, cost)
    bucket = Bucket(start, 1, 3)
    trials = [trial_facts(bucket, trial) for trial in found.trials]
    assert trials[0] == {"rows": [1, 3], "changes": "default", "us": cost(start), "rejected": ""}
    assert trials_table(trials, "").row_count == len(found.trials)
    chosen = outcome_facts(bucket, found)
    assert "block_v=128" in chosen["changes"]
    assert chosen["us"] < chosen["default_us"]
    assert chosen_table([chosen]).row_count == 1


def test_tune_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["tune"])
    assert isinstance(done.exception, EngineUnavailableError)
    assert "there is no GPU here" in str(done.exception)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--engine", "cpu"), ("--temperature", "-1"), ("--temperature", "0,1"), ("--dtype", "int8")],
)
def test_tune_names_a_bad_option(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["tune", option, value])
    assert isinstance(done.exception, ArgumentError)
    assert option in str(done.exception)
