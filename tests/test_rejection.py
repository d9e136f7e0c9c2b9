"""Drafts, then verification, have the target's law: exact for greedy rows, chi-square otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

import fused_markov as fm
from fused_markov.pair.rejection import verify

VOCAB, STEPS, WANTED = 5, 3, 3
NEVER = 1e-6  # a right sampler falls below this once in a million seeds


class World:
    """A target whose next token depends on the last one, and a drafter that half knows it."""

    def __init__(self, *, reduced: bool = False, dtype: torch.dtype = torch.float32) -> None:
        gen = torch.Generator().manual_seed(5)
        self.target = torch.randn(VOCAB, VOCAB, generator=gen) * 1.5
        ids = torch.tensor([0, 2, 3]) if reduced else torch.arange(VOCAB)
        self.base = (torch.randn(STEPS, len(ids), generator=gen)).to(dtype)
        w1 = torch.eye(VOCAB)
        w2 = (self.target + torch.randn(VOCAB, VOCAB, generator=gen)).T[ids]
        id_map = ids if reduced else None
        self.head = fm.MarkovHead(w1.to(dtype), w2.to(dtype).contiguous(), id_map=id_map)
        self.dtype = dtype

    def sampler_options(self) -> dict[str, Any]:
        """What `DraftSampler` is given beside."""
        return {}

    def batch_options(self, rows: int) -> dict[str, Any]:
        """What every batch is given beside."""
        return {}

    def decode(
        self, temperature: float, rows: int, *, checked: bool = True, engine: str = "reference"
    ) -> Tensor:
        """The first ``WANTED`` tokens after token 1 of as many rows (and seeds): ``[rows, 3]``."""
        options = self.batch_options(rows)
        sampler = fm.DraftSampler(
            self.head, max_rows=rows, steps=STEPS, engine=engine, **self.sampler_options()
        )
        cache = torch.empty(rows, STEPS, VOCAB, dtype=self.dtype)
        seeds, temps = torch.arange(rows) * 7919 + 3, torch.full((rows,), temperature)
        anchors, lengths = torch.ones(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        out = torch.full((rows, WANTED + STEPS + 1), -1)
        every = torch.arange(rows)
        base = self.base.expand(rows, -1, -1)
        while int(lengths.min()) < WANTED:
            positions = 1 + lengths[:, None] + torch.arange(STEPS + 1)
            batch = fm.DraftBatch(base, anchors, positions[:, :STEPS], temps, seeds, **options)
            drafts = sampler.sample(batch, cache).tokens
            logits = self.target[torch.cat([anchors[:, None], drafts], 1)]
            verdict = verify(logits, drafts, cache, temps, seeds, positions)
            accepted = verdict.accepted if checked else torch.full_like(anchors, STEPS)
            for step in range(STEPS + 1):
                token = drafts[:, step] if step < STEPS else verdict.tokens
                token = torch.where(step < accepted, token, verdict.tokens)
                live = (step <= accepted) & (lengths + step < out.shape[1])
                out[every[live], (lengths + step)[live]] = token[live]
            lengths, anchors = lengths + accepted + 1, verdict.tokens
        return out[:, :WANTED]

    def expected(self, temperature: float) -> Tensor:
        """Probabilities of all ``VOCAB**3`` continuations of token 1."""
        law = torch.softmax(self.target.double() / temperature, -1)
        chains = itertools.product(range(VOCAB), repeat=WANTED)
        return torch.stack([law[1, a] * law[a, b] * law[b, c] for a, b, c in chains])


def chi_square(samples: Tensor, expected: Tensor) -> float:
    """p-value of the counts of whole three-token continuations; rare ones are pooled."""
    code = (samples * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    counts = torch.bincount(code, minlength=VOCAB**WANTED).double()
    want = expected * len(samples)
    common = want >= 10
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    want = torch.cat([want[common], want[~common].sum()[None]])
    return float(scipy.stats.chisquare(seen.numpy(), want.numpy()).pvalue)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_law_is_the_targets(temperature: float, reduced: bool, dtype: torch.dtype) -> None:
    world = World(reduced=reduced, dtype=dtype)
    assert chi_square(world.decode(temperature, 20_000), world.expected(temperature)) > NEVER


@pytest.mark.parametrize("reduced", [False, True])
def test_law_is_the_targets_with_the_fastest_engine(reduced: bool) -> None:
    world = World(reduced=reduced)
    samples = world.decode(1.0, 2500, engine="auto")
    assert chi_square(samples, world.expected(1.0)) > NEVER


def test_the_test_notices_a_wrong_law() -> None:
    world = World()
    assert chi_square(world.decode(1.0, 20_000, checked=False), world.expected(1.0)) < NEVER
    assert chi_square(world.decode(0.9, 20_000), world.expected(1.0)) < NEVER


def test_greedy_is_the_targets_argmax() -> None:
    world = World()
    out = world.decode(0.0, 4)
    chain = [1]
    for _ in range(WANTED):
        chain.append(int(world.target[chain[-1]].argmax()))
    assert out.tolist() == [chain[1:]] * 4


def _case(rows: int, vocab: int = 50) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(rows)
    return {
        "target_logits": torch.randn(rows, STEPS + 1, vocab, generator=gen),
        "draft_tokens": torch.randint(0, vocab, (rows, STEPS), generator=gen),
        "draft_logits": torch.randn(rows, STEPS, vocab, generator=gen),
        "temperature": torch.tensor([0.0, 1.0, 0.5])[torch.arange(rows) % 3],
        "seeds": torch.arange(rows) - 2**62,
        "positions": torch.arange(rows)[:, None] + torch.arange(STEPS + 1),
    }


def test_a_row_does_not_depend_on_the_others() -> None:
    case = _case(9)
    together = verify(**case)
    for row in range(9):
        alone = verify(**{name: value[row : row + 1] for name, value in case.items()})
        assert int(alone.accepted) == int(together.accepted[row])
        assert int(alone.tokens) == int(together.tokens[row])


def test_equal_laws_accept_everything() -> None:
    case = _case(300)
    case["target_logits"][:, :STEPS] = case["draft_logits"]
    case["temperature"][:] = 0.8
    assert bool((verify(**case).accepted == STEPS).all())


def test_no_drafts_is_sampling_from_the_target() -> None:
    rows, temperature = 20_000, 0.7
    logits = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(rows, -1, -1)
    empty = torch.empty(rows, 0, dtype=torch.int64)
    temps, seeds = torch.full((rows,), temperature), torch.arange(rows)
    verdict = verify(logits, empty, None, temps, seeds, torch.full((rows, 1), 3))
    assert int(verdict.accepted.max()) == 0
    want = torch.softmax(logits[0, 0].double() / temperature, -1) * rows
    counts = torch.bincount(verdict.tokens, minlength=8)
    assert scipy.stats.chisquare(counts.numpy(), want.numpy()).pvalue > NEVER


def test_a_token_without_probability_is_never_drawn() -> None:
    case = _case(3000)
    case["temperature"][:] = 1.0
    case["target_logits"][..., ::2] = -torch.inf
    case["draft_tokens"][:] = 4
    verdict = verify(**case)
    assert int(verdict.accepted.max()) == 0
    assert bool((verdict.tokens % 2 == 1).all())


def test_sampled_drafts_need_their_logits() -> None:
    with pytest.raises(fm.ArgumentError, match="draft_logits"):
        verify(**_case(2) | {"draft_logits": None})


def test_a_draft_that_is_not_offered_is_the_targets_to_draw() -> None:
    """With none offered the token is a draw from p, not from the residual."""
    case = _case(1)
    rows = 20_000
    case = {name: value.expand(rows, *value.shape[1:]) for name, value in case.items()}
    case |= {"seeds": torch.arange(rows), "temperature": torch.full((rows,), 3.0)}
    verdict = verify(**case, limits=torch.zeros(rows, dtype=torch.int64))
    assert int(verdict.accepted.max()) == 0
    want = torch.softmax(case["target_logits"][0, 0].double() / 3.0, -1) * rows
    counts = torch.bincount(verdict.tokens, minlength=len(want))
    assert scipy.stats.chisquare(counts.numpy(), want.numpy()).pvalue > NEVER


def test_ties_go_to_the_lowest_id() -> None:
    case = _case(2)
    case["temperature"][:] = 0.0
    case["target_logits"][:] = 0.0
    case["draft_tokens"] = torch.tensor([[0, 0, 0], [0, 1, 0]])
    verdict = verify(**case)
    assert verdict.accepted.tolist() == [3, 1]
    assert verdict.tokens.tolist() == [0, 0]
