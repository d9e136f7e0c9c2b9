"""What the CPU engine stands on: maxima of runs, the gate of the noise, views of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fused_markov import DraftSampler, MarkovHead, noise, reference
from fused_markov.engines.cpu_noise import NoiseGate
from fused_markov.engines.cpu_runs import RUN, largest_of_runs
from fused_markov.problems import Problem, make_problem

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_equals_reference(p: Problem, caches: tuple[Tensor, Tensor] | None = None) -> None:
    ours, theirs = caches or (p.new_cache(), p.new_cache())
    expected = reference.sample(p.head, p.batch, theirs)
    got = DraftSampler(p.head, steps=p.batch.steps, engine="cpu").sample(p.batch, ours)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.nonfinite, expected.nonfinite)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, RUN - 1, RUN, 3 * RUN, 5 * RUN + 7])
def test_largest_of_runs(dtype: torch.dtype, width: int) -> None:
    gen = torch.Generator().manual_seed(width)
    x = torch.randn(12, width, generator=gen).to(dtype)
    x[1], x[2], x[3] = x[1].abs(), -x[2].abs(), -0.0
    x[4], x[5], x[6] = torch.inf, -torch.inf, torch.nan
    x[7] = torch.tensor(torch.nan).to(dtype).neg()  # its bits as an integer are below zero
    for row, nan in ((8, torch.nan), (9, -torch.nan)):
        x[row, ::3] = nan
    x[10, ::2], x[10, 1::2] = -0.0, 0.0
    x[11, ::5], x[11, 1::5] = torch.inf, -torch.inf
    plain = torch.where(x.isnan(), -torch.inf, x)
    expected = torch.stack([part.amax(1) for part in torch.split(plain, RUN, dim=1)], dim=1)
    assert torch.equal(largest_of_runs(x), expected)
    assert torch.equal(largest_of_runs(x.repeat(1, 2)[:, :width]), expected)


@pytest.mark.parametrize("noise_dtype", noise.NOISE_DTYPES, ids=str)
def test_gate_lets_all_through_that_reach(noise_dtype: torch.dtype) -> None:
    vocab = 5 * RUN - 3
    head = MarkovHead(torch.zeros(vocab, 1), torch.zeros(vocab, 1))
    gate = NoiseGate(head, noise_dtype)
    seed, step, position = torch.tensor([5]), torch.tensor([2]), torch.tensor([77])
    state, run = gate.states(seed, step, position).expand(5), torch.arange(5)
    rank = gate.ranks(state, run).view(-1)
    ids = torch.arange(vocab)
    g = noise.gumbel(seed, 2, position, ids, noise_dtype)
    one = (seed.expand(vocab), step.expand(vocab), position.expand(vocab), ids)
    assert torch.equal(gate.exact(rank[:vocab], *one), g)
    assert torch.equal(rank[vocab:], rank[vocab - 1].expand(3)), "the last token fills its run"
    assert torch.equal(gate.least(state, run), rank.view(5, RUN).amin(1))
    for need in (-1e300, -60.0, -3.0, 0.0, 1.0, 4.0, 8.0, gate.most, 60.0, 1e300):
        limit = gate.limit(torch.tensor([need - 1e-3], dtype=torch.float64))
        assert not (g >= need)[rank[:vocab] > limit].any()


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 0.05, 30.0, 1e6, 1e38])
def test_extreme_temperatures(temperature: float) -> None:
    assert_equals_reference(make_problem(2, 3, 1500, 16, temperature=temperature))


@pytest.mark.parametrize("temperature", ["greedy", 1.0])
def test_nonfinite_rows_beside_others(temperature: str | float) -> None:
    p = make_problem(4, 3, 40_000, 16, temperature=temperature)
    base = p.batch.base_logits
    base[0, 1], base[1, 0, ::2], base[2, 2, 20_000] = torch.nan, -torch.nan, torch.inf
    base[3, :, 16_384:] = -torch.inf
    assert_equals_reference(p)


@pytest.mark.parametrize("temperature", ["greedy", 1.0])
@pytest.mark.parametrize("bias_std", [1.0, 30.0])  # one pass, and several on parts of the steps
@pytest.mark.parametrize("slots", [[0, 1], [2, 3], [3, 1], [1, -1]])
@pytest.mark.parametrize("steps", [4, 6])
def test_views_of_the_cache(
    temperature: str | float, bias_std: float, slots: list[int], steps: int
) -> None:
    """Slots in and out of order, and a cache of more steps than are drafted."""
    p = make_problem(4, 4, 33_000, 16, temperature=temperature, bias_std=bias_std)
    rows = slice(0, 2)
    batch = replace(
        p.batch,
        base_logits=p.batch.base_logits[rows],
        anchors=p.batch.anchors[rows],
        positions=p.batch.positions[rows],
        slots=torch.tensor(slots),
    )
    caches = [torch.full((4, steps, 33_000), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    assert_equals_reference(replace(p, batch=batch), (caches[0], caches[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cap", [None, 0.5])
def test_products_without_the_processors_help(dtype: torch.dtype, cap: float | None) -> None:
    """w2 made fp32 piece by piece: the same bits in any company, and those of an fp32 product."""
    p = make_problem(1, 1, 20_000, 64, dtype=dtype, soft_cap=cap)
    head = p.head
    head._multiplied = False
    full = head.bias(torch.arange(40))
    for rows in ([0], [39], [3, 7, 31], list(range(17))):
        assert torch.equal(head.bias(torch.tensor(rows)), full[rows])
    exact = (head.w1[:40].double() @ head.w2.double().T).to(dtype)
    torch.testing.assert_close(full, head.transform(exact), rtol=0.02, atol=1e-3)
