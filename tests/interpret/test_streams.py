"""Noise streams and a tempered cache in the kernels, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_kernels import CONFIGS, ENGINES

import fused_markov as fm
from fused_markov import noise, philox, reference
from fused_markov.engines import Plan
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.kernels.noise import FP64_DOMAIN, bound_terms, reach, row_state, row_words
from fused_markov.kernels.philox import fold, philox_gumbel, request_word, token_words
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import find_successors

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

STREAMS = list(noise.STREAMS)
OLDER = [name for name in STREAMS if name != noise.STREAM]
PHILOX = [name for name in STREAMS if noise.STREAMS[name].generator == "philox"]


def check(name: str, problem: Problem, config: int = 0, **options: Any) -> fm.DraftResult:
    """Compare an engine with the reference, poisoned outputs, tokens and cache to the bit."""
    batch, head = problem.batch, problem.head
    want_cache, cache = problem.new_cache(), problem.new_cache()
    want = reference.sample(head, batch, want_cache, **options)
    plan = Plan(batch.rows, batch.steps, **{"noise_dtype": torch.float32, **options})
    configs = (CONFIGS[name][config],)
    if name == "one_pass":
        engine: Any = OnePassEngine(head, plan, configs, cooperative=False)
    else:
        engine = PerStepEngine(head, plan, configs)
    got = engine.sample(batch, cache, problem.new_tokens())
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.nonfinite, want.nonfinite)
    torch.testing.assert_close(cache, want_cache, rtol=0, atol=0, equal_nan=True)
    return got


def problem_of(rows: int, steps: int, vocab: int, **options: Any) -> Problem:
    kind = {"dtype": torch.float32, "exact_sums": True, "temperature": "mixed", **options}
    return make_problem(rows, steps, vocab, 16, **kind)


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
@pytest.mark.parametrize("stream", OLDER)
@pytest.mark.parametrize("name", ENGINES)
def test_equals_the_reference(name: str, stream: str, dtype: torch.dtype) -> None:
    problem = problem_of(4, 2, 170, slots="padded")
    check(name, problem, noise_stream=stream, noise_dtype=dtype)


@pytest.mark.parametrize("stream", ["vllm-0.25", "vllm-0.33"])
@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab": 100},
        {"draft_vocab": 104, "cache": "wide"},
        {"draft_vocab": 100, "cache": "draft"},
        {"slots": "padded-steps"},
        {"temperature": "greedy"},
        {"temperature": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ENGINES)
def test_tempered_cache(name: str, stream: str, options: dict[str, Any]) -> None:
    problem = problem_of(4, 2, 140, **options)
    check(name, problem, noise_stream=stream, cache_convention="tempered")


@pytest.mark.parametrize("stream", PHILOX)
@pytest.mark.parametrize("name", ENGINES)
def test_other_tiles(name: str, stream: str) -> None:
    check(name, problem_of(3, 2, 140), config=1, noise_stream=stream)


@pytest.mark.parametrize("stream", PHILOX)
def test_several_passes(stream: str) -> None:
    """A head so strong that guesses fail, and then one whose successors find the chain."""
    problem = problem_of(1, 3, 500, bias_std=30.0, base_std=0.5, temperature=1.0)
    assert check("one_pass", problem, noise_stream=stream).passes > 1
    head = problem.head
    known = fm.MarkovHead(head.w1, head.w2, successors=find_successors(head, 40))
    check("one_pass", replace(problem, head=known), noise_stream=stream)


@pytest.mark.parametrize("stream", PHILOX)
@pytest.mark.parametrize("name", ENGINES)
def test_non_finite_logits(name: str, stream: str) -> None:
    problem = problem_of(5, 1, 201)
    base = problem.batch.base_logits
    base[0, 0], base[1, 0], base[2, 0, 150] = torch.nan, -torch.inf, torch.nan
    base[3, 0, [9, 77]] = torch.inf
    base[4, 0] = -torch.inf
    base[4, 0, 130] = -2.0
    check(name, problem, noise_stream=stream, cache_convention="tempered")


# The words, beside Triton's own generator.


@triton.jit
def _words_kernel(seeds, positions, ours, theirs, uniforms, TOKENS: tl.constexpr):
    """Of one request: its word and the tokens' two, from here and from tl.randint4x; tl.rand."""
    seed, position = tl.load(seeds), tl.load(positions)
    token = tl.arange(0, TOKENS)
    state = request_word(seed, position)
    low, high = token_words(state, token.to(tl.uint32))
    tl.store(ours, state)
    tl.store(ours + 1 + token, low)
    tl.store(ours + 1 + TOKENS + token, high)
    tl.store(uniforms + token, fold(low).to(tl.float32) * 4.6566127342e-10)
    word = tl.randint(seed, position)
    first, second, _, _ = tl.randint4x(word, token)
    tl.store(theirs, word)
    tl.store(theirs + 1 + token, first)
    tl.store(theirs + 1 + TOKENS + token, second)
    tl.store(uniforms + TOKENS + token, tl.rand(word, token))


@pytest.mark.parametrize("position", [0, 76, 2**30 + 5, 2**33 + 17])
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 5, -(2**63)])
def test_words_are_tritons(seed: int, position: int) -> None:
    tokens = 256
    ours, theirs = torch.zeros(2, 1 + 2 * tokens, dtype=torch.int32).unbind()
    uniforms = torch.zeros(2, tokens)
    _words_kernel[(1,)](
        torch.tensor([seed]), torch.tensor([position]), ours, theirs, uniforms, tokens
    )
    assert torch.equal(ours, theirs)
    assert torch.equal(uniforms[0], uniforms[1])
    assert ours.unique().numel() > 2 * tokens - 3
    state = philox.request_word(torch.tensor(seed), torch.tensor(position))
    low, high = philox.philox(state, 0, torch.arange(tokens), 0)
    expected = torch.cat([state.view(1), low, high])
    assert torch.equal(ours.long() & 0xFFFFFFFF, expected)
    assert torch.equal(uniforms[0].clamp_min(philox.STEP32), philox.uniform32(low))


@triton.jit
def _noise_kernel(seeds, positions, out, cfg: tl.constexpr):
    token = tl.arange(0, 512)
    seed, word = row_words(tl.load(seeds), tl.load(seeds) * 0, tl.load(positions), cfg)
    state = request_word(seed, word) + 0 * token.to(tl.uint32)
    tl.store(out + token, philox_gumbel(state, token.to(tl.uint32), cfg.FP64))


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
@pytest.mark.parametrize("stream", PHILOX)
def test_gumbel(stream: str, dtype: torch.dtype) -> None:
    seed, position, out = torch.tensor([-77]), torch.tensor([2**33]), torch.zeros(512, dtype=dtype)
    _noise_kernel[(1,)](seed, position, out, Bound(stream, dtype == torch.float64))
    expected = noise.gumbel(seed, 0, position, torch.arange(512), dtype, stream)
    eps = float(np.finfo(np.float64 if dtype == torch.float64 else np.float32).eps)
    assert float((out - expected).abs().max()) <= 16 * eps


class Bound(NamedTuple):
    """As much of `args.Shape` as `reach` reads."""

    STREAM: str
    FP64: bool
    TEMPERED: bool = False
    PTX: bool = False


@triton.jit
def _reach_kernel(seeds, positions, temperatures, keys, out, cfg: tl.constexpr):
    row, token = tl.arange(0, 4), tl.arange(0, 2048)
    temp = tl.load(temperatures + row)
    at = tl.load(seeds + row), row, tl.load(positions + row)
    state = row_state(at[0], at[1], at[2], 0, cfg)
    state64 = row_state(at[0], at[1], at[2], FP64_DOMAIN, cfg)
    key = tl.load(keys + token).to(tl.uint32, bitcast=True)
    x = tl.full([4, 2048], 1.5, tl.float32)
    far = reach(x, bound_terms(temp), state, state64, key, False, cfg)
    tl.store(out + row[:, None] * 2048 + token[None, :], far)


@pytest.mark.parametrize("dtype", noise.NOISE_DTYPES, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_reach_bounds_the_score(stream: str, dtype: torch.dtype) -> None:
    """Never below the exact score, and within 0.06 of it where the noise is large."""
    g = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (4,), generator=g)
    positions, temp = torch.tensor([1, 77, 4095, 2**33]), torch.tensor([1.0, 0.3, 2.5, 0.0])
    ids = torch.arange(2048)
    keys, out = noise.token_keys(ids, stream), torch.full((4, 2048), torch.nan)
    cfg = Bound(stream, dtype == torch.float64)
    _reach_kernel[(1,)](seeds, positions, temp, keys, out, cfg)
    at = (seeds[:, None], torch.arange(4)[:, None], positions[:, None], ids)
    gumbel = noise.gumbel(*at, dtype, stream).double()
    hot = temp != 0
    exact = 1.5 / torch.where(hot, temp, 1.0)[:, None].double() + hot[:, None] * gumbel
    over = out.double() - exact
    assert float(over.min()) >= -1e-5
    assert float(over[gumbel > 4].max()) < 0.075
    assert int((gumbel[:3] > 4).sum()) > 50
    assert torch.equal(out[3], torch.full((2048,), 1.5))
