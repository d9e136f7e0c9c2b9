"""The CPU engine where few tokens are left to sample from: limited candidates, shaped logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov import masks, noise
from fused_markov.batch import (
    PADDING_TOKEN,
    DraftBatch,
    cache_is_target_wide,
    logits_dtype,
)
from fused_markov.engines import Plan
from fused_markov.engines.cpu_check import Pairs
from fused_markov.engines.cpu_noise import NoiseGate
from fused_markov.head import MarkovHead
from fused_markov.limited import best_candidates, gathered_logits
from fused_markov.shaping import is_shaped, shape


def sample_limited(
    head: MarkovHead, plan: Plan, batch: DraftBatch, cache: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A decode step from ``plan.draft_topk`` candidates a position: W2 is never read whole.

    ``[R, S]`` tokens, int64, and whether their scores are not finite.
    """
    slots = batch.slot_matrix()
    found = torch.full(slots.shape, PADDING_TOKEN)
    nonfinite = torch.zeros(slots.shape, dtype=torch.bool)
    prev = batch.anchors.to(torch.int64).clamp(0, head.vocab_size - 1)
    for step in range(batch.steps):
        row = (slots[:, step] >= 0).nonzero().squeeze(1)
        if row.numel():
            picked = _step(head, plan, batch, cache, step, row, slots[row, step], prev[row])
            found[row, step], nonfinite[row, step] = picked
        prev = found[:, step]
    return found, nonfinite


def _step(
    head: MarkovHead,
    plan: Plan,
    batch: DraftBatch,
    cache: Tensor | None,
    step: int,
    row: Tensor,
    slot: Tensor,
    prev: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens of live rows ``row`` at a step after ``prev``, and whether not finite."""
    assert plan.draft_topk is not None
    base = seen = batch.base_logits[row, step, : head.draft_vocab]
    if batch.bans is not None:
        every = head.target_ids(torch.arange(head.draft_vocab))
        may = masks.allowed(batch.bans, slot, step, every)
        seen = base.where(may, -torch.inf)
    index = best_candidates(seen, plan.draft_topk)
    logits = head.finish(gathered_logits(head, base, prev, index))
    logits = logits.to(logits_dtype(head, batch, cache))
    if batch.bans is not None:
        logits = logits.where(may.gather(1, index), -torch.inf)
    if is_shaped(batch):
        logits = shape(logits, batch, slot)
    ids = head.target_ids(index)
    if cache is not None:
        columns = ids if cache_is_target_wide(head, cache.shape[2]) else index
        cache[slot, step] = -torch.inf
        cache[slot.unsqueeze(1), step, columns] = logits
    temp = torch.zeros(len(row)) if batch.temperature is None else batch.temperature[slot].float()
    seed = slot if batch.seeds is None else batch.seeds[slot]
    position = batch.positions[row, step]
    score = _scores(logits, temp[:, None], seed[:, None], step, position[:, None], ids, plan)
    return _lowest_best(head, score, ids)


def best_kept(
    head: MarkovHead, gate: NoiseGate, pairs: Pairs, some: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of shaped logits ``[n, V]`` of the sampled pairs ``some``, and whether not finite."""
    of, place = (logits != -torch.inf).nonzero(as_tuple=True)  # NaN does no harm
    at, ids = some[of], head.target_ids(place)
    score = (logits[of, place].float() / pairs.temp[at]).to(gate.noise_dtype)
    words = pairs.seed[at], pairs.step[at], pairs.position[at], ids
    score += noise.gumbel(*words, gate.noise_dtype, gate.stream)
    score = torch.where(score.isnan(), -torch.inf, score)
    best = torch.full((len(some),), -torch.inf, dtype=score.dtype)
    best.scatter_reduce_(0, of, score, "amax")
    tied = torch.where(score == best[of], ids, torch.iinfo(torch.int64).max)
    found = torch.full((len(some),), torch.iinfo(torch.int64).max)
    found.scatter_reduce_(0, of, tied, "amin")
    return torch.where(best == -torch.inf, head.lowest_id, found), ~best.isfinite()


def _scores(
    logits: Tensor,
    temp: Tensor,
    seed: Tensor,
    step: int,
    position: Tensor,
    ids: Tensor,
    plan: Plan,
) -> Tensor:
    """What the argmax compares, with the reference's operations; all broadcast to ``logits``."""
    dtype = plan.noise_dtype
    if not bool((temp != 0).any()):
        return logits.to(dtype)
    tempered = (logits.float() / torch.where(temp == 0, 1.0, temp)).to(dtype)
    noised = tempered + noise.gumbel(seed, step, position, ids, dtype, plan.noise_stream)
    return torch.where(temp == 0, logits.to(dtype), noised)


def _lowest_best(head: MarkovHead, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """``[n]`` lowest target id of each row's best score, and whether that is not finite."""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best = scores.amax(dim=1, keepdim=True)
    tied = torch.where(scores == best, ids, torch.iinfo(torch.int64).max).amin(dim=1)
    best = best.squeeze(1)
    return torch.where(best == -torch.inf, head.lowest_id, tied), ~best.isfinite()
