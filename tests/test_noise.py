"""The noise stream against numbers that vLLM 0.33's own kernels gave (data/make_noise_vectors.py).

Hashes and uniforms are equal to the bit. The Gumbel values pass through logarithms, where numpy
(Triton's interpreter), torch and a GPU may differ in the last place: they are compared to a few
units of the arithmetic's own precision, and exactly where the logarithm's argument is the same.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_markov import DraftBatch, MarkovHead, noise, reference

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "noise_vllm_0_33.json").read_text()
)
TABLE: dict[str, Any] = VECTORS["table"]
DRAWS: dict[str, Any] = VECTORS["draws"]
SALT: int = VECTORS["salt"]


def table_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, steps, positions of the sampled token and token ids, one entry a table row."""
    rows = list(
        itertools.product(
            TABLE["seeds"], TABLE["steps"], TABLE["hashed_positions"], TABLE["tokens"]
        )
    )
    seed, step, hashed, token = (torch.tensor(column) for column in zip(*rows, strict=True))
    return seed, step, hashed - SALT + 1, token


def words(name: str, digits: int) -> list[str]:
    """The hex words of a table column, in the order of `table_inputs`."""
    joined = "".join(TABLE[name])
    return [joined[i : i + digits] for i in range(0, len(joined), digits)]


def floats(name: str, digits: int) -> torch.Tensor:
    """A table column's floats from their bit patterns, in fp64 (fp32 values are exact in it)."""
    code = ">f" if digits == 8 else ">d"
    values = [struct.unpack(code, bytes.fromhex(word))[0] for word in words(name, digits)]
    return torch.tensor(values, dtype=torch.float64)


def first_difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Which table row differs first."""
    index = int((got != expected).nonzero()[0])
    seed, step, position, token = (int(column[index]) for column in table_inputs())
    return (
        f"seed {seed} step {step} position {position} token {token}: "
        f"got {got[index].item()!r}, vLLM has {expected[index].item()!r}"
    )


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert torch.equal(got, expected), first_difference(got, expected)


def test_hash_equals_vllm() -> None:
    seed, step, position, token = table_inputs()
    got = noise.hash32(noise.prefix(seed, step, position), token)
    assert_equal(got, torch.tensor([int(word, 16) for word in words("hash32", 8)]))


def test_uniform32_equals_vllm() -> None:
    seed, step, position, token = table_inputs()
    got = noise.uniform32(noise.hash32(noise.prefix(seed, step, position), token))
    assert got.dtype == torch.float32
    assert_equal(got.double(), floats("uniform32", 8))


def test_uniform64_equals_vllm() -> None:
    seed, step, position, token = table_inputs()
    low = noise.hash32(noise.prefix(seed, step, position), token)
    high = noise.hash32(noise.prefix(seed, step, position, noise.FP64_DOMAIN), token)
    got = noise.uniform64(high, low)
    assert got.dtype == torch.float64
    assert_equal(got, floats("uniform64", 16))


@pytest.mark.parametrize(
    ("dtype", "name", "digits"),
    [(torch.float32, "gumbel32", 8), (torch.float64, "gumbel64", 16)],
)
def test_gumbel_equals_vllm(dtype: torch.dtype, name: str, digits: int) -> None:
    """Equal to the logarithms' own rounding.

    -log(x) near x = 1 turns one unit in the last place of x into that absolute error, so the
    bound is absolute for small values and relative for large ones.
    """
    seed, step, position, token = table_inputs()
    got = noise.gumbel(seed, step, position, token, dtype)
    assert got.dtype == dtype
    expected = floats(name, digits)
    eps = torch.finfo(dtype).eps
    error = (got.double() - expected).abs()
    assert float((error / expected.abs().clamp_min(1.0)).max()) <= 2 * eps


def test_uniform_extremes() -> None:
    """The ends of the hash's range: never 0, never past 1, never 1 in fp64."""
    ends = torch.tensor([0, 1, 0xFFFFFFFE, 0xFFFFFFFF])
    u32 = noise.uniform32(ends)
    assert u32[[0, 1, 3]].tolist() == [2.0**-33, 1.5 * 2.0**-32, 1.0]
    u64 = noise.uniform64(ends, ends)
    assert float(u64[0]) == 2.0**-54
    assert float(u64[3]) < 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_at_extremes(dtype: torch.dtype) -> None:
    """The largest and smallest noise of the stream are finite and of the stated size."""
    ends = torch.tensor([0, 0xFFFFFFFF])
    if dtype == torch.float32:
        u = noise.uniform32(ends)
        g = -torch.log(-noise._log1p_neg(u))
        assert float(g[0]) == pytest.approx(33 * 0.6931471805599453, rel=1e-6)
    else:
        u = noise.uniform64(ends, ends)
        g = -torch.log(-torch.log(u))
        assert float(g[1]) == pytest.approx(53 * 0.6931471805599453, rel=1e-3)
    assert bool(g.isfinite().all())


def draw_logits(vocab: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """The logits that the vectors' draws were made from (DRAWS["logits"])."""
    v = torch.arange(vocab)
    row = torch.arange(3)[:, None]
    return (((v * 104729 + row * 7919 + step * 31) % 251) / 32 - 4).to(dtype)


DRAFT_CASES = [case for case in DRAWS["cases"] if case["drafting"]]


def case_name(case: dict[str, Any]) -> str:
    return f"{case['vocab']}-{case['dtype']}-{'fp64' if case['fp64'] else 'fp32'}"


@pytest.mark.parametrize("case", DRAFT_CASES, ids=case_name)
def test_whole_draws_equal_vllm(case: dict[str, Any]) -> None:
    """reference.sample with a zero head gives the tokens of vLLM's gumbel_sample, and its cache."""
    dtype = getattr(torch, case["dtype"])
    vocab, steps = case["vocab"], len(case["tokens"][0])
    head = MarkovHead(torch.zeros(vocab, 4, dtype=dtype), torch.zeros(vocab, 4, dtype=dtype))
    base = torch.stack([draw_logits(vocab, step, dtype) for step in range(steps)], dim=1)
    slots = torch.tensor(DRAWS["slots"])
    for position, expected in zip(DRAWS["positions"], case["tokens"], strict=True):
        cache = torch.full((3, steps, vocab), 12345.0).to(dtype)
        batch = DraftBatch(
            base,
            torch.zeros(3, dtype=torch.int64),
            torch.full((3, steps), position),
            torch.tensor(DRAWS["temperature_by_slot"]),
            torch.tensor(DRAWS["seed_by_slot"]),
            slots,
        )
        result = reference.sample(
            head,
            batch,
            cache,
            noise_dtype=torch.float64 if case["fp64"] else torch.float32,
        )
        assert result.tokens.T.tolist() == expected
        assert torch.equal(cache[slots], base)


def test_draft_and_target_draws_differ() -> None:
    """Case 28: with equal logits, draft and target agree about as often as chance has it."""
    seed = torch.arange(4096)
    token = torch.arange(64)
    draft = noise.gumbel(seed[:, None], 0, torch.tensor(77), token).argmax(dim=1)
    unsalted = torch.tensor(77 - noise.DRAFT_SALT)
    target = noise.gumbel(seed[:, None], 0, unsalted, token).argmax(dim=1)
    agreed = int((draft == target).sum())
    assert abs(agreed - 64) < 6 * 64**0.5
