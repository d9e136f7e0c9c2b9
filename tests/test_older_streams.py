"""The noise streams of vLLM 0.25 to 0.32, as docs/vllm-versions.md states them.

Draws of those releases' own kernels (data/make_older_draws.py) against the statements, written out
here once more on Python's integers, and against the library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fused_markov as fm
from fused_markov import noise, reference

DRAWS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "noise_vllm_older.json").read_text()
)
U32 = 0xFFFFFFFF
U64 = (1 << 64) - 1


def philox(key: tuple[int, int], counter: tuple[Any, ...]) -> tuple[Any, Any]:
    """The first two output words of Philox 4x32 with 10 rounds, on Python integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) ^ c1 ^ k0) & U32, b & U32, ((a >> 32) ^ c3 ^ k1) & U32, a & U32
        k0, k1 = (k0 + 0x9E3779B9) & U32, (k1 + 0xBB67AE85) & U32
    return c0, c1


def philox_gumbel(seed: int, word: int, vocab: int, fp64: bool) -> np.ndarray:
    """Streams vllm-0.25 and vllm-0.29; ``word`` is the position before the token's, salted."""
    seed, word = seed & U64, word & U64
    request, _ = philox((seed & U32, seed >> 32), (word & U32, word >> 32, 0, 0))
    token = np.arange(vocab).astype(object)
    low, high = philox((request, 0), (token, 0 * token, 0 * token, 0 * token))
    if fp64:
        u = ((high << 32) | low).astype(np.float64) * 2.0**-64
        return -np.log(-np.log(np.maximum(u, np.finfo(np.float64).tiny)))
    signed = low.astype(np.uint32).view(np.int32)
    least = np.float32(4.6566127342e-10)
    u = np.where(signed < 0, -signed - 1, signed).astype(np.float32) * least
    return -np.log(-np.log1p(-np.maximum(u, least)))


def murmur_gumbel(seed: int, position: int, vocab: int, fp64: bool) -> np.ndarray:
    """Stream vllm-0.31: vllm-0.33's, whose step 0 leaves the seed as it is."""
    dtype = torch.float64 if fp64 else torch.float32
    ids = torch.arange(vocab)
    return noise.gumbel(torch.tensor(seed), 0, torch.tensor(position), ids, dtype).numpy()


GUMBEL = {
    "vllm-0.25": lambda seed, p, vocab, fp64: philox_gumbel(seed, p - 1, vocab, fp64),
    "vllm-0.29": lambda seed, p, vocab, fp64: philox_gumbel(seed, p - 1 + (1 << 30), vocab, fp64),
    "vllm-0.31": murmur_gumbel,
}


def logits(vocab: int, row: int, step: int) -> np.ndarray:
    """One row of DRAWS["logits"]."""
    v = np.arange(vocab)
    return (((v * 104729 + row * 7919 + step * 31) % 251) / 32 - 4).astype(np.float32)


@pytest.mark.parametrize("case", ["64-fp32", "64-fp64", "1000-fp32", "1000-fp64"])
@pytest.mark.parametrize("stream", list(GUMBEL))
def test_stream(stream: str, case: str) -> None:
    vocab, fp64 = int(case.split("-")[0]), case.endswith("fp64")
    drawn = np.array(DRAWS["streams"][stream][case])
    for p, step, row in np.ndindex(drawn.shape):
        slot = DRAWS["slots"][row]
        temperature = np.float32(DRAWS["temperature_by_slot"][slot])
        scores = logits(vocab, row, step)
        if temperature != 0:
            tempered = (scores / temperature).astype(np.float64 if fp64 else np.float32)
            seed, position = DRAWS["seed_by_slot"][slot], DRAWS["positions"][p]
            scores = tempered + GUMBEL[stream](seed, position, vocab, fp64)
        assert scores.argmax() == drawn[p, step, row], f"position {p}, step {step}, row {row}"


@pytest.mark.parametrize("case", ["64-fp32", "64-fp64", "1000-fp32", "1000-fp64"])
@pytest.mark.parametrize("stream", list(GUMBEL))
def test_library(stream: str, case: str) -> None:
    """reference.sample with a zero head gives the tokens of the release's gumbel_sample."""
    vocab, dtype = int(case.split("-")[0]), torch.float64 if "fp64" in case else torch.float32
    drawn = torch.tensor(DRAWS["streams"][stream][case])
    head = fm.MarkovHead(torch.zeros(vocab, 4), torch.zeros(vocab, 4))
    rows, steps = range(drawn.shape[2]), range(drawn.shape[1])
    base = torch.tensor(np.array([[logits(vocab, row, step) for step in steps] for row in rows]))
    for position, expected in zip(DRAWS["positions"], drawn, strict=True):
        batch = fm.DraftBatch(
            base,
            torch.zeros(len(rows), dtype=torch.int64),
            torch.full((len(rows), len(steps)), position),
            torch.tensor(DRAWS["temperature_by_slot"]),
            torch.tensor(DRAWS["seed_by_slot"]),
            torch.tensor(DRAWS["slots"]),
        )
        result = reference.sample(head, batch, noise_dtype=dtype, noise_stream=stream)
        assert torch.equal(result.tokens.T, expected)


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 5, -(2**63)])
@pytest.mark.parametrize("stream", list(GUMBEL))
def test_noise(stream: str, seed: int, fp64: bool) -> None:
    """The library's noise is the statements', to the rounding of a library's logarithm."""
    dtype = torch.float64 if fp64 else torch.float32
    for position in (1, 77, 2**31, 2**33 + 5):
        at = (torch.tensor(seed), 3, torch.tensor(position), torch.arange(500))
        got = noise.gumbel(*at, dtype, stream).numpy()
        expected = GUMBEL[stream](seed, position, 500, fp64)
        assert np.abs(got - expected).max() <= 4 * np.finfo(expected.dtype).eps * 8
