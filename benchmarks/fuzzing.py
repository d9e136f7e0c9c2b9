"""What the fuzzers share: engines beside the reference, and near ties told from faults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import fused_markov as fm
from fused_markov import noise, philox, reference
from fused_markov.batch import logits_dtype
from fused_markov.engines import Plan
from fused_markov.problems import CACHE_POISON, TOKEN_POISON

NEAR_TIE_ULPS = 4
NEAR_LIMIT = 1e-5  # confidences agree to about 1e-6
WILD = 8  # kinds of base logits, three of them as they are


def make_wild(base: Tensor, kind: int, other: bool) -> None:
    """Ties, not-a-numbers or infinities into base logits ``[R, S, V]``; nothing from kind 5 on."""
    if kind == 0:
        base.round_()
    elif kind == 1:
        base[base > 0.5] = torch.nan
    elif kind == 2:
        base[base < 1.0] = -torch.inf
    elif kind == 3:
        base[base > 8.0] = torch.inf
    elif kind == 4:
        base[0] = -torch.inf if other else torch.nan


def differences(
    head: fm.MarkovHead,
    batch: fm.DraftBatch,
    cache: Tensor | None,
    samplers: Sequence[fm.DraftSampler],
    *,
    slack: float = 0.0,
) -> Iterator[tuple[str, str]]:
    """What differs between samplers of one plan and the reference: (kind, description).

    Args:
        slack: by how much a bias may differ where its arithmetic is not the same everywhere (a
            soft cap's tanh); logits may then differ by as much and their last places.
    """
    options = samplers[0].plan.arithmetic()
    want_cache = None if cache is None else cache.clone()
    want = reference.sample(head, batch, want_cache, **options)
    poison = torch.full_like(want.tokens, TOKEN_POISON)
    for sampler in samplers:
        mine = None if cache is None else cache.clone()
        got = sampler.sample(batch, mine, poison.clone())
        if found := list(_judged_apart(batch, got, want)):
            yield from ((kind, f"{sampler.engine}: {text}") for kind, text in found)
        elif not torch.equal(got.tokens, want.tokens):
            pairs = _token_differences(head, batch, cache, sampler, got, want, slack)
            yield from ((kind, f"{sampler.engine}: {text}") for kind, text in pairs)
        elif not torch.equal(got.nonfinite, want.nonfinite):
            yield "nonfinite", f"{sampler.engine}: nonfinite flags differ"
        elif mine is not None and want_cache is not None:
            _forget_undefined(head, batch, want, mine, want_cache)
            for at in _cache_differences(mine, want_cache, slack)[:1].tolist():
                pair = mine[tuple(at)].item(), want_cache[tuple(at)].item()
                yield "cache", f"{sampler.engine}: cache{at} is {pair[0]!r}, not {pair[1]!r}"


def _judged_apart(
    batch: fm.DraftBatch, got: fm.DraftResult, want: fm.DraftResult
) -> Iterator[tuple[str, str]]:
    """Confidences and lengths that differ; a cut where confidence meets its limit is a near tie.

    Nothing is said of confidences where tokens differ: they may be of other tokens.
    """
    if want.confidence is None or got.confidence is None:
        return
    if want.lengths is not None and got.lengths is not None:
        assert batch.min_confidence is not None
        for row in (got.lengths != want.lengths).nonzero().flatten().tolist():
            step = int(torch.minimum(got.lengths[row], want.lengths[row]))
            if not torch.equal(got.tokens[row, :step], want.tokens[row, :step]):
                continue  # told as tokens
            limit = float(batch.min_confidence[batch.slot_matrix()[row, step].clamp_min(0)])
            near = abs(float(want.confidence[row, step]) - limit) < NEAR_LIMIT
            yield "near-tie" if near else "lengths", f"row {row}: lengths differ at step {step}"
    if torch.equal(got.tokens, want.tokens):
        close = torch.isclose(got.confidence, want.confidence, rtol=1e-5, atol=NEAR_LIMIT / 10)
        for at in (~(close | want.confidence.isnan())).nonzero()[:1].tolist():
            pair = got.confidence[tuple(at)].item(), want.confidence[tuple(at)].item()
            yield "confidence", f"confidence{at} is {pair[0]!r}, not {pair[1]!r}"


def _forget_undefined(
    head: fm.MarkovHead, batch: fm.DraftBatch, want: fm.DraftResult, *caches: Tensor
) -> None:
    """0 into the cached logits past a draft's end, where that is found after sampling."""
    if head.confidence is None or not head.confidence.with_markov or want.lengths is None:
        return
    slots = batch.slot_matrix()
    steps = torch.arange(batch.steps, device=slots.device)
    row, step = ((steps >= want.lengths[:, None]) & (slots >= 0)).nonzero(as_tuple=True)
    for cache in caches:
        cache[slots[row, step], step] = 0.0


def _cache_differences(got: Tensor, want: Tensor, slack: float) -> Tensor:
    """Places that differ, NaNs being all alike."""
    eps = torch.finfo(got.dtype).eps
    got, want = (torch.where(x.isnan(), 54321.0, x.float()) for x in (got, want))
    if slack == 0.0:
        return (got != want).nonzero()
    return (~torch.isclose(got, want, rtol=4 * eps, atol=slack)).nonzero()


def _token_differences(
    head: fm.MarkovHead,
    batch: fm.DraftBatch,
    cache: Tensor | None,
    sampler: fm.DraftSampler,
    got: fm.DraftResult,
    want: fm.DraftResult,
    slack: float,
) -> Iterator[tuple[str, str]]:
    """The first different step of every row, with both candidates' scores."""
    logits = _logits(head, batch, cache, sampler.plan)
    eps = NEAR_TIE_ULPS * torch.finfo(logits.dtype if slack else torch.float32).eps
    for row in (got.tokens != want.tokens).any(dim=1).nonzero().flatten().tolist():
        step = int((got.tokens[row] != want.tokens[row]).nonzero()[0])
        tokens = int(got.tokens[row, step]), int(want.tokens[row, step])
        text = f"row {row} step {step}: token {tokens[0]}, not {tokens[1]}"
        slot = int(batch.slot_matrix()[row, step])
        if slot < 0 or not _drawable(head, tokens[0]):
            yield "tokens", text
            continue
        at = (slot, step, int(batch.positions[row, step]))
        a, b = (
            _score(logits[slot, step, token], batch, at, token, sampler.plan) for token in tokens
        )
        limit = eps * max(abs(a), abs(b), 1.0) + 2 * slack / _temperature(batch, slot)
        near = math.isfinite(limit) and abs(a - b) <= limit
        yield "near-tie" if near else "tokens", f"{text}; scores {a!r} and {b!r}"


def _logits(head: fm.MarkovHead, batch: fm.DraftBatch, cache: Tensor | None, plan: Plan) -> Tensor:
    """The reference's rounded logits ``[N, S, vocab]`` by target id, whatever the cache is."""
    slots = int(batch.slot_matrix().max()) + 1 if cache is None else cache.shape[0]
    shape, dtype = (slots, batch.steps, head.vocab_size), logits_dtype(head, batch, cache)
    logits = torch.full(shape, CACHE_POISON, dtype=dtype, device=head.device)
    options = {**plan.arithmetic(), "cache_convention": "logits"}
    reference.sample(head, batch, logits, **options)
    return logits


def _drawable(head: fm.MarkovHead, token: int) -> bool:
    return 0 <= token < head.vocab_size and (
        head.id_map is None or bool((head.id_map == token).any())
    )


def _score(
    logit: Tensor, batch: fm.DraftBatch, at: tuple[int, int, int], token: int, plan: Plan
) -> float:
    """logit / T + noise of one token, in fp64 from the rounded logit on; ``at`` is slot, step and
    position.
    """
    slot, step, position = at
    if batch.seeds is None or batch.temperature is None or not batch.temperature[slot]:
        return float(logit)
    where = torch.tensor([position, token], device=logit.device)
    draw = (batch.seeds[slot], step, where[0])
    return float(logit) / _temperature(batch, slot) + float(_gumbel(*draw, where[1], plan))


def _temperature(batch: fm.DraftBatch, slot: int) -> float:
    """What a slot's logits are divided by."""
    return 1.0 if batch.temperature is None else float(batch.temperature[slot]) or 1.0


def _gumbel(seed: Tensor, step: int, position: Tensor, token: Tensor, plan: Plan) -> Tensor:
    """The noise of a plan's uniform, its logarithms in fp64."""
    stream = plan.noise_stream
    if plan.noise_dtype == torch.float64:
        return noise.gumbel(seed, step, position, token, torch.float64, stream)
    state = noise.prefix(seed, step, position, stream=stream)
    if noise.stream_of(stream).generator == "philox":
        u = philox.uniform32(philox.philox(state, 0, token, 0)[0])
    else:
        u = noise.uniform32(noise.hash32(state, token))
    return -torch.log(-torch.log1p(-u.double()))
