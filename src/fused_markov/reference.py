"""The sequential loop that every engine must equal: plain PyTorch, never optimised.

The order of operations is that of vLLM's ``DSparkSpeculator._sample_sequential`` with its
``gumbel_sample``, of 0.33 unless another stream and cache convention are named; what that loop
leaves to chance (NaN, padding, ties through an id map) is settled here as the library's contract
says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov import masks, noise, shaping
from fused_markov.batch import (
    PADDING_TOKEN,
    DraftBatch,
    DraftResult,
    cache_is_target_wide,
    check_convention,
    check_inputs,
    logits_dtype,
)
from fused_markov.confidence import lengths_of, too_low
from fused_markov.head import MarkovHead
from fused_markov.limited import best_candidates, check_draft_topk, gathered_logits
from fused_markov.variants import Embeddings


@torch.no_grad()
def sample(
    head: MarkovHead,
    batch: DraftBatch,
    logits_cache: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    noise_dtype: torch.dtype = torch.float32,
    noise_stream: str = noise.STREAM,
    cache_convention: str = "logits",
    draft_topk: int | None = None,
) -> DraftResult:
    """Draft S tokens a row, left to right.

    Args:
        head: the Markov head.
        batch: one decode step's inputs.
        logits_cache: ``[N, >=S, vocab]``, filled at ``[slot, step]`` with the logits that were
            sampled from, before temperature, as the rejection sampler wants them. ``vocab`` counts
            target ids, or candidates where it equals a reduced draft vocabulary. Columns that no
            candidate maps to get -inf.
        tokens: ``[R, S]`` int32/int64 to fill; a new int64 tensor otherwise.
        noise_dtype: float32 or float64 Gumbel noise.
        noise_stream: a name of `fused_markov.noise.STREAMS`.
        cache_convention: ``"logits"``: the cache holds them before temperature, as said;
            ``"tempered"``: divided by it where it is not 0, in an fp32 cache, as vLLM 0.25 to 0.27
            had it. The tokens are the same.
        draft_topk: draft from as many candidates a position, those of the best base logits; None:
            from all. See `fused_markov.limited`.

    Raises:
        ArgumentError: where the inputs do not fit together, or a name is unknown.
    """
    noise.stream_of(noise_stream)
    check_convention(cache_convention)
    check_inputs(head, batch, logits_cache, tokens, cache_convention=cache_convention)
    check_draft_topk(head, draft_topk, cache_convention)
    rows, steps, device = batch.rows, batch.steps, head.device
    if tokens is None:
        tokens = torch.empty(rows, steps, dtype=torch.int64, device=device)
    nonfinite = torch.zeros(rows, steps, dtype=torch.bool, device=device)
    slots = batch.slot_matrix().clone()
    ids = head.target_ids(torch.arange(head.draft_vocab, device=device))
    embeddings = Embeddings(head.w1, head.variant, batch.hidden)
    confidence = torch.zeros(rows, steps, device=device)
    prev = batch.anchors.to(torch.int64).clamp(0, head.vocab_size - 1)
    for step in range(steps):
        if head.confidence is not None and batch.hidden is not None:
            p = head.confidence.probability(batch.hidden[:, step], head.w1[prev])
            confidence[:, step] = torch.where(slots[:, step] >= 0, p, 0.0)
            low = too_low(p, batch.min_confidence, slots[:, step]).unsqueeze(1)
            slots[:, step:] = torch.where(low, -1, slots[:, step:])  # the rest is padding
        live = slots[:, step] >= 0
        slot = slots[:, step].clamp_min(0)
        base = batch.base_logits[:, step, : head.draft_vocab]
        may = torch.ones_like(base, dtype=torch.bool)
        if batch.bans is not None:
            may = masks.allowed(batch.bans, slot, step, ids)
        if draft_topk is None:
            logits = base + head.bias_of(embeddings.step(step, prev, live))
        else:
            index = best_candidates(base.where(may, -torch.inf), draft_topk)
            may = may & torch.zeros_like(may).scatter(1, index, True)
            some = gathered_logits(head, base, prev, index)
            logits = base.to(some.dtype).scatter(1, index, some)
        logits = head.finish(logits).to(logits_dtype(head, batch, logits_cache))
        logits = logits.where(may, -torch.inf)
        if shaping.is_shaped(batch):
            logits = shaping.shape(logits, batch, slot)
        kept, scores = logits, logits.to(noise_dtype)
        if batch.temperature is not None and batch.seeds is not None:
            temp = torch.where(live, batch.temperature[slot].float(), 0.0).unsqueeze(1)
            tempered = logits.float() / torch.where(temp == 0, 1.0, temp)
            kept = tempered if cache_convention == "tempered" else logits
            g = noise.gumbel(
                batch.seeds[slot].unsqueeze(1),
                step,
                batch.positions[:, step].unsqueeze(1),
                ids,
                noise_dtype,
                noise_stream,
            )
            scores = torch.where(temp == 0, scores, tempered.to(noise_dtype) + g)
        if logits_cache is not None:
            _store(head, logits_cache, kept[live], slot[live], step)
        prev, finite = pick(scores, ids)
        prev = torch.where(live, prev, PADDING_TOKEN)
        tokens[:, step] = prev.to(tokens.dtype)
        nonfinite[:, step] = live & ~finite
    passes = torch.tensor(0 if draft_topk else steps, device=device)
    return DraftResult(
        tokens,
        nonfinite,
        "reference",
        passes,
        None if head.confidence is None else confidence,
        None if batch.min_confidence is None else lengths_of(slots >= 0),
    )


def pick(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest target id among each row's best scores, and whether that score is finite.

    NaN counts as -inf. ``scores`` ``[R, V]``, ``ids`` ``[V]`` -> ``[R]`` int64, ``[R]`` bool.
    """
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best = scores.amax(dim=1, keepdim=True)
    tied = torch.where(scores == best, ids, torch.iinfo(torch.int64).max)
    return tied.amin(dim=1), best.squeeze(1).isfinite()


def _store(head: MarkovHead, cache: Tensor, logits: Tensor, slot: Tensor, step: int) -> None:
    """Write rows of logits to ``cache[slot, step]``; -inf where no candidate stands."""
    row = torch.full((logits.shape[0], cache.shape[2]), -torch.inf, dtype=cache.dtype)
    row = row.to(cache.device)
    if head.id_map is not None and cache_is_target_wide(head, cache.shape[2]):
        row[:, head.id_map] = logits
    else:
        row[:, : head.draft_vocab] = logits
    cache[slot, step] = row
