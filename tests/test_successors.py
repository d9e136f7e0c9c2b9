"""Successors: found right, kept and read back, and never a matter of what is drafted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fused_markov as fm
from fused_markov import reference
from fused_markov.checkpoint import load_markov_head
from fused_markov.cli.app import app
from fused_markov.problems import make_problem
from fused_markov.successors import (
    FILE_NAME,
    FOLDER_NAME,
    find_successors,
    load_successors,
    save_successors,
    successor_biases,
)


def with_successors(head: fm.MarkovHead, successors: torch.Tensor) -> fm.MarkovHead:
    options = {"id_map": head.id_map, "vocab_size": head.vocab_size}
    return fm.MarkovHead(head.w1, head.w2, successors=successors, **options)


def test_the_largest_biases_of_each_token() -> None:
    w1, w2 = (
        torch.eye(4),
        torch.tensor([[0.0, 5, 1, 2], [3, 0, 2, 1.5], [9, 1, 0, 1], [1, 2, 3, 0]]),
    )
    found = find_successors(fm.MarkovHead(w1, w2), 2)
    assert found.tolist() == [[2, 1], [0, 3], [3, 1], [0, 1]]
    assert found.dtype == torch.int32


def test_a_nan_is_nobodys_successor() -> None:
    w2 = torch.randn(20, 4)
    w2[3] = float("nan")
    found = find_successors(fm.MarkovHead(torch.randn(20, 4), w2), 19)
    assert not (found == 3).any()


@pytest.mark.parametrize("stored", ["plain", "fp8-block"])
def test_their_biases_stand_beside_them(stored: str) -> None:
    problem = make_problem(1, 2, 3000, 256, weights=stored)
    head = problem.head
    head.successors = find_successors(head, 50)
    biases = successor_biases(head)
    assert biases.dtype == head.dtype
    want = head.bias(torch.arange(head.vocab_size)).gather(1, head.successors.long())
    assert torch.allclose(biases.float(), want.float(), rtol=2 * torch.finfo(head.dtype).eps)


@pytest.mark.parametrize("vocab", [300, 70_000])
def test_kept_and_read_back(tmp_path: Path, vocab: int) -> None:
    successors = torch.randint(0, vocab, (vocab, 3), dtype=torch.int32)
    successors[0, 0] = vocab - 1
    assert save_successors(successors, tmp_path) == tmp_path / FOLDER_NAME / FILE_NAME
    loaded = load_successors(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded, successors)
    assert load_successors(tmp_path / "nowhere") is None


def test_no_loader_takes_them_for_weights(tmp_path: Path) -> None:
    """vLLM 0.25 loads every safetensors file of a folder without an index as weights."""
    weights = {
        f"markov_head.markov_{name}.weight": torch.randn(30, 4, generator=torch.manual_seed(seed))
        for seed, name in enumerate(("w1", "w2"))
    }
    save_file(weights, tmp_path / "model.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(app, ["successors", str(tmp_path), "--count", "3"])
    assert result.exit_code == 0, result.output
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert after == before
    head = load_markov_head(tmp_path)
    assert head.successors is not None
    assert torch.equal(head.successors, find_successors(head, 3))


def test_those_beside_the_weights_are_read_and_replaced(tmp_path: Path) -> None:
    old, new = torch.zeros(9, 2, dtype=torch.int32), torch.ones(9, 2, dtype=torch.int32)
    save_file({"successors": old}, tmp_path / FILE_NAME)
    loaded = load_successors(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded, old)
    save_successors(new, tmp_path)
    assert not (tmp_path / FILE_NAME).exists()
    loaded = load_successors(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded, new)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a safetensors file")
    with pytest.raises(fm.CheckpointError, match=FILE_NAME):
        load_successors(tmp_path)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (torch.zeros(9, 2, dtype=torch.int32), r"shape \[10, L\]"),
        (torch.zeros(10, 2, dtype=torch.int64), "int32"),
        (torch.full((10, 2), 10, dtype=torch.int32), r"\[0, 10\)"),
        (torch.full((10, 2), -1, dtype=torch.int32), "rows from -1"),
    ],
)
def test_what_does_not_fit_is_refused(bad: torch.Tensor, said: str) -> None:
    with pytest.raises(fm.ArgumentError, match=said):
        fm.MarkovHead(torch.randn(10, 4), torch.randn(10, 4), successors=bad)


@pytest.mark.parametrize("temperature", ["greedy", 1.0, "mixed"])
@pytest.mark.parametrize("draft_vocab", [None, 700])
def test_drafts_do_not_depend_on_them(temperature: str | float, draft_vocab: int | None) -> None:
    for seed in range(4):
        problem = make_problem(
            3, 4, 1000, 16, temperature=temperature, draft_vocab=draft_vocab, bias_std=4, seed=seed
        )
        want_cache = problem.new_cache()
        want = reference.sample(problem.head, problem.batch, want_cache)
        wrong = torch.randint(0, draft_vocab or 1000, (1000, 5), dtype=torch.int32)
        for successors in (wrong, find_successors(problem.head, 40)):
            head, cache = with_successors(problem.head, successors), problem.new_cache()
            got = fm.DraftSampler(head, max_rows=3, steps=4).sample(problem.batch, cache)
            assert torch.equal(got.tokens, want.tokens)
            assert torch.equal(cache, want_cache)


def test_a_strong_bias_is_guessed_with_them() -> None:
    passes = {}
    for count in (0, 40):
        passes[count] = 0
        for seed in range(6):
            problem = make_problem(4, 5, 4000, 32, temperature=1.0, bias_std=4, seed=seed)
            head = problem.head
            if count:
                head = with_successors(head, find_successors(head, count))
            sampler = fm.DraftSampler(head, max_rows=4, steps=5)
            passes[count] += sampler.sample(problem.batch).passes
    assert passes[40] < passes[0]
