"""Noise streams by name, and a cache of tempered logits: every engine that runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fused_markov as fm
from fused_markov import noise, ops, philox, reference
from fused_markov.engines import Plan
from fused_markov.engines.cpu_philox import PhiloxGate, noise_gate
from fused_markov.engines.cpu_runs import RUN
from fused_markov.problems import Problem, make_problem

STREAMS = list(noise.STREAMS)
PHILOX = [name for name in STREAMS if noise.STREAMS[name].generator == "philox"]
CONVENTIONS = ["logits", "tempered"]


def sampler_of(problem: Problem, **options: Any) -> fm.DraftSampler:
    return fm.DraftSampler(problem.head, steps=problem.batch.steps, engine="cpu", **options)


def assert_cpu_equals_reference(problem: Problem, **options: Any) -> torch.Tensor:
    """Tokens and cache to the bit; the cache."""
    ours, theirs = problem.new_cache(), problem.new_cache()
    want = reference.sample(problem.head, problem.batch, theirs, **options)
    got = sampler_of(problem, **options).sample(problem.batch, ours)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.nonfinite, want.nonfinite)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return ours


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_cpu_equals_reference(stream: str, dtype: torch.dtype) -> None:
    problem = make_problem(5, 4, 3000, 16, temperature="mixed", slots="padded", exact_sums=True)
    assert_cpu_equals_reference(problem, noise_stream=stream, noise_dtype=dtype)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab": 700},
        {"draft_vocab": 700, "cache": "draft"},
        {"cache": "wide"},
        {"bias_std": 30.0},
        {"temperature": "greedy"},
        {"slots": "padded-steps"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_tempered(stream: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    kind = {"temperature": "mixed", "dtype": dtype, "exact_sums": True, **options}
    problem = make_problem(4, 3, 1500, 16, cache_dtype=torch.float32, **kind)
    assert_cpu_equals_reference(problem, noise_stream=stream, cache_convention="tempered")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tempered_is_the_logits_divided(dtype: torch.dtype) -> None:
    """The same tokens, and each row's logits over its temperature; cold rows as they are."""
    kind = {"temperature": "mixed", "cache_dtype": torch.float32, "dtype": dtype}
    problem = make_problem(4, 3, 1000, 16, **kind)
    caches, tokens = [], []
    for convention in CONVENTIONS:
        caches.append(problem.new_cache())
        tokens.append(
            reference.sample(
                problem.head, problem.batch, caches[-1], cache_convention=convention
            ).tokens
        )
    assert torch.equal(tokens[0], tokens[1])
    temperature = problem.batch.temperature
    assert temperature is not None
    assert (temperature == 0).any()
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    assert torch.equal(caches[1], caches[0] / divisor)
    assert not torch.equal(caches[1], caches[0])


def test_the_token_is_the_argmax_over_what_the_tempered_cache_holds() -> None:
    problem = make_problem(4, 3, 500, 16, temperature="mixed", cache_dtype=torch.float32)
    batch, stream = problem.batch, "vllm-0.25"
    assert batch.temperature is not None
    assert batch.seeds is not None
    options = {"noise_stream": stream, "cache_convention": "tempered"}
    cache = assert_cpu_equals_reference(problem, **options)
    tokens = sampler_of(problem, **options).sample(batch).tokens
    for step in range(3):
        g = noise.gumbel(
            batch.seeds[:, None],
            step,
            batch.positions[:, step, None],
            torch.arange(500),
            stream=stream,
        )
        scores = torch.where(batch.temperature[:, None] == 0, cache[:, step], cache[:, step] + g)
        assert torch.equal(tokens[:, step], scores.argmax(dim=1))


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
@pytest.mark.parametrize("stream", PHILOX)
def test_gate_lets_all_through_that_reach(stream: str, dtype: torch.dtype) -> None:
    vocab = 40 * RUN - 3
    head = fm.MarkovHead(torch.zeros(vocab, 1), torch.zeros(vocab, 1))
    gate = noise_gate(head, Plan(1, 1, dtype, stream))
    assert isinstance(gate, PhiloxGate)
    seed, step, position = torch.tensor([5]), torch.tensor([2]), torch.tensor([77])
    state, run = gate.states(seed, step, position).expand(40), torch.arange(40)
    rank = gate.ranks(state, run).view(-1)
    ids = torch.arange(vocab)
    g = noise.gumbel(seed, 2, position, ids, dtype, stream)
    assert torch.equal(rank[vocab:], rank[vocab - 1].expand(3)), "the last token fills its run"
    assert torch.equal(gate.least(state, run), rank.view(40, RUN).amin(1))
    for need in (-1e300, -60.0, -3.0, 0.0, 1.0, 4.0, 8.0, 21.0, 60.0, 1e300):
        limit = gate.limit(torch.tensor([need - 1e-3], dtype=torch.float64))
        assert not (g >= need)[rank[:vocab] > limit].any()
    error = gate.approximate(rank[:vocab]).double() - g
    assert float(error.max()) < 1e-3
    assert float(error.min()) > -1e-3


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
def test_the_ends_of_philox(dtype: torch.dtype) -> None:
    """The gate's ranks and the uniforms at the ends of a word: noise is never NaN."""
    ends = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    assert philox.fold(ends).tolist() == [0, 1, 2**31 - 1, 2**31 - 1, 1, 0]
    u = philox.uniform32(ends) if dtype == torch.float32 else philox.uniform64(ends, ends)
    assert u.dtype == dtype
    if dtype == torch.float32:
        assert float(u.max()) < 1.0
        assert float(u.min()) == float(torch.tensor(philox.STEP32))
        assert (-torch.log(-torch.log1p(-u))).isfinite().all()
    else:
        assert float(u.max()) == 1.0
        assert float(u[0]) == philox.LEAST64
        assert -torch.log(-torch.log(u))[-1] == torch.inf


# A uniform in [0, 1) for each of the streams, of the very words its noise is made of.


def uniform_of(stream: str, dtype: torch.dtype, seed: torch.Tensor, token: torch.Tensor) -> Any:
    at = (seed[:, None], 3, torch.tensor(1234))
    state = noise.prefix(*at, stream=stream)
    if stream in PHILOX:
        low, high = philox.philox(state, 0, token, 0)
        return philox.uniform32(low) if dtype == torch.float32 else philox.uniform64(low, high)
    low = noise.hash32(state, token)
    if dtype == torch.float32:
        return noise.uniform32(low)
    high = noise.hash32(noise.prefix(*at, noise.FP64_DOMAIN, stream), token)
    return noise.uniform64(high, low)


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("fine", [1, 2**10], ids=["whole", "the tail that wins"])
def test_uniform_draws(stream: str, dtype: torch.dtype, fine: int) -> None:
    """Chi-square over 64 equal bins, of all draws and of those in the end where noise is large."""
    u = uniform_of(stream, dtype, torch.arange(1 << 10), torch.arange(1 << 11)).double().flatten()
    if dtype == torch.float64:
        u = 1 - u  # whose noise is large where u is
        if stream not in PHILOX:
            assert bool((u > 0).all())
    bins = torch.clamp_max(u * 64 * fine, 64).long()
    counts = torch.bincount(bins.clamp(max=64), minlength=65)[:64].double()
    mean = u.numel() / (64 * fine)
    chi2 = float(((counts - mean) ** 2 / mean).sum())
    # 64 degrees of freedom (63 and the total): mean 64, deviation 11.3.
    assert 20 < chi2 < 120


@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_follow_the_softmax(stream: str) -> None:
    """The law of the first draft token, over requests, is the softmax of its logits."""
    rows, vocab = 6000, 12
    logits = torch.linspace(-1.5, 2.0, vocab)
    head = fm.MarkovHead(torch.zeros(vocab, 2), torch.zeros(vocab, 2))
    batch = fm.DraftBatch(
        logits.expand(rows, 1, vocab),
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows, 1), 41),
        torch.full((rows,), 0.8),
        torch.arange(rows) * 7919 - 31,
    )
    tokens = reference.sample(head, batch, noise_stream=stream).tokens
    counts = torch.bincount(tokens.flatten(), minlength=vocab).double()
    expected = rows * torch.softmax(logits.double() / 0.8, dim=0)
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 40  # 11 degrees of freedom


def test_streams_and_what_they_depend_on() -> None:
    """Older streams draw the same at every step of one position; 0.25's have no salt."""
    seed, ids = torch.tensor(11), torch.arange(300)
    draws = {
        name: [noise.gumbel(seed, step, torch.tensor(9), ids, stream=name) for step in (0, 2)]
        for name in STREAMS
    }
    same = {name: torch.equal(first, later) for name, (first, later) in draws.items()}
    assert same == {
        "vllm-0.25": True,
        "vllm-0.29": True,
        "vllm-0.31": True,
        "vllm-0.33": False,
    }
    assert torch.equal(draws["vllm-0.31"][0], draws["vllm-0.33"][0])
    salted = noise.gumbel(seed, 0, torch.tensor(9 + noise.DRAFT_SALT), ids, stream="vllm-0.25")
    assert torch.equal(salted, draws["vllm-0.29"][0])
    assert not torch.equal(draws["vllm-0.25"][0], draws["vllm-0.29"][0])


def test_the_default_stream_is_the_newest() -> None:
    problem = make_problem(3, 2, 300, 8)
    tokens = [
        reference.sample(problem.head, problem.batch, **options).tokens
        for options in ({}, {"noise_stream": "vllm-0.33"}, {"noise_stream": "vllm-0.25"})
    ]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert next(reversed(noise.STREAMS)) == noise.STREAM


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"noise_stream": "vllm-0.24"}, "vllm-0.25, vllm-0.29, vllm-0.31, vllm-0.33"),
        ({"cache_convention": "probabilities"}, "'logits' or 'tempered'"),
    ],
    ids=["stream", "convention"],
)
def test_unknown_names(options: dict[str, Any], names: str) -> None:
    problem = make_problem(1, 1, 30, 8)
    with pytest.raises(fm.ArgumentError, match=names):
        sampler_of(problem, **options)
    with pytest.raises(fm.ArgumentError, match=names):
        reference.sample(problem.head, problem.batch, **options)


def test_a_tempered_cache_is_fp32() -> None:
    problem = make_problem(1, 1, 30, 8, dtype=torch.bfloat16)
    sampler = sampler_of(problem, cache_convention="tempered")
    for call in (sampler.sample, sampler.warmup):
        with pytest.raises(fm.ArgumentError, match="logits_cache: expected fp32"):
            call(problem.batch, problem.new_cache())
    assert sampler.sample(problem.batch).tokens.shape == (1, 1)  # without a cache all is as ever


def test_explain_names_what_is_not_as_ever() -> None:
    problem = make_problem(1, 1, 30, 8)
    plain = sampler_of(problem).explain()
    assert "vllm-0" not in plain
    assert "tempered" not in plain
    other = sampler_of(problem, noise_stream="vllm-0.29", cache_convention="tempered").explain()
    assert "noise stream vllm-0.29" in other
    assert "tempered logits in the cache" in other


def test_the_operator_takes_the_names() -> None:
    problem = make_problem(2, 2, 200, 8, temperature="mixed", cache_dtype=torch.float32)
    head, batch = problem.head, problem.batch
    options = {"noise_stream": "vllm-0.25", "cache_convention": "tempered"}
    cache, expected = problem.new_cache(), problem.new_cache()
    inputs = (batch.base_logits, batch.anchors, batch.positions, batch.temperature, batch.seeds)
    tokens, _, _ = torch.ops.fused_markov.sample(
        head.w1, head.w2, *inputs, logits_cache=cache, **options
    )
    want = reference.sample(head, batch, expected, **options)
    assert torch.equal(tokens, want.tokens)
    assert torch.equal(cache, expected)
    plain, _, _ = torch.ops.fused_markov.sample(head.w1, head.w2, *inputs)
    assert torch.equal(plain, reference.sample(head, batch).tokens)
    ops.clear()


@pytest.mark.parametrize("stream", STREAMS)
def test_a_row_alone_and_in_company(stream: str) -> None:
    problem = make_problem(5, 3, 900, 8, temperature="mixed", exact_sums=True)
    batch, row = problem.batch, slice(3, 4)
    alone = replace(
        batch,
        base_logits=batch.base_logits[row],
        anchors=batch.anchors[row],
        positions=batch.positions[row],
        slots=torch.tensor([3]),
    )
    sampler = sampler_of(problem, noise_stream=stream)
    assert torch.equal(sampler.sample(batch).tokens[row], sampler.sample(alone).tokens)
