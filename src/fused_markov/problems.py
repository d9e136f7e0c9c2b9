"""Synthetic decode steps: the one place where tests, `verify` and the benchmarks get inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch, logits_dtype
from fused_markov.errors import ArgumentError
from fused_markov.head import MarkovHead
from fused_markov.quantize import BLOCKS, quantize
from fused_markov.weights import PLAIN, stored_weights

# Outputs start poisoned: whatever an engine forgets to write, or wrongly writes, shows.
CACHE_POISON = 12345.0
TOKEN_POISON = 2**31 - 1

# vLLM-style mixture of one batch's requests, repeated over the slots.
MIXED_TEMPERATURES = (0.0, 1.0, 0.7, 0.3)

# Base logits of a language model are a wide bulk with a few ids far above it.
PEAKS, PEAK_HEIGHT = 6, 14.0

SLOTS = ("all", "shuffled", "padded", "padded-steps", "none-live")
STRIDES = ("contiguous", "wide", "step-major")
CACHES = ("target", "draft", "wide")


@dataclass(frozen=True)
class Problem:
    """One decode step's inputs, and makers of its outputs.

    Attributes:
        head: the Markov head.
        batch: R rows of S steps.
        num_slots: N, the slots of temperature, seeds and cache.
        cache_width: last dimension of the cache that `new_cache` makes.
        cache_dtype: its dtype.
    """

    head: MarkovHead
    batch: DraftBatch
    num_slots: int
    cache_width: int
    cache_dtype: torch.dtype

    def new_cache(self, fill: float = CACHE_POISON) -> Tensor:
        """``[N, S, cache_width]`` filled with a sentinel."""
        shape = (self.num_slots, self.batch.steps, self.cache_width)
        return torch.full(shape, fill, dtype=self.cache_dtype, device=self.head.device)

    def new_tokens(self, dtype: torch.dtype = torch.int64, fill: int = TOKEN_POISON) -> Tensor:
        """``[R, S]`` filled with a sentinel."""
        shape = (self.batch.rows, self.batch.steps)
        return torch.full(shape, fill, dtype=dtype, device=self.head.device)

    def clone(self) -> Problem:
        """The same problem in memory of its own."""
        head, batch = self.head, self.batch
        copies: dict[str, Any] = {f.name: _copied(getattr(batch, f.name)) for f in fields(batch)}
        twin = head.with_weights(head.w1.clone(), head.weights.map(torch.clone))
        twin.id_map, twin.successors = _copied(head.id_map), _copied(head.successors)
        twin.variant = None if head.variant is None else head.variant.clone()
        twin.confidence = None if head.confidence is None else head.confidence.clone()
        return replace(self, head=twin, batch=replace(batch, **copies))


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def make_problem(
    rows: int,
    steps: int,
    vocab: int,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    base_dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    temperature: str | float = 1.0,
    draft_vocab: int | None = None,
    cache: str = "target",
    slots: str = "all",
    strides: str = "contiguous",
    bias_std: float = 1.0,
    base_std: float = 2.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    exact_sums: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    weights: str = PLAIN,
) -> Problem:
    """A random decode step, the same on every device for the same arguments.

    Args:
        rows, steps, vocab, rank: R, S, target vocabulary, r.
        dtype: of the weights; ``base_dtype`` of the base logits (``dtype`` if None);
            ``cache_dtype`` of the cache (the logits' own dtype if None).
        temperature: ``"greedy"`` (no temperature tensor), ``"mixed"`` over the slots, or one value.
        draft_vocab: candidates of a reduced vocabulary; None: every target id.
        cache: width of the cache: ``"target"`` ids, ``"draft"`` candidates, or ``"wide"``: 5
            columns past the target vocabulary.
        slots: ``"all"``: row i is slot i (``slots=None``); ``"shuffled"``: distinct slots among
            R+3; ``"padded"``: so, and every third row is -1; ``"padded-steps"``: ``[R, S]``, each
            row live for its own number of steps; ``"none-live"``: all -1.
        strides: of the base: ``"contiguous"``, ``"wide"`` (rows 16 + 7 elements too long, odd
            offset) or ``"step-major"`` (``[S, R, V]`` in memory).
        bias_std: standard deviation of the Markov bias; 0 gives zero weights. Far above
            ``base_std`` the base says nothing about the chain, and guesses fail.
        base_std: standard deviation of the bulk of the base; 0 gives constant logits (all ties).
        exact_sums: weights of 64 steps at most: fp32 sums of 1024 products are exact, so that the
            order of addition, a library's own affair, shows nowhere.
        weights: how w2 is stored: ``"plain"``, or a format of `fused_markov.quantize_head`; with
            ``exact_sums`` its scales are powers of two.
    """
    _choice("weights", weights, (PLAIN, *BLOCKS))
    _choice("slots", slots, SLOTS)
    _choice("strides", strides, STRIDES)
    _choice("cache", cache, CACHES)
    gen = torch.Generator().manual_seed(seed)
    base_dtype = base_dtype or dtype
    candidates = vocab if draft_vocab is None else draft_vocab
    w1 = torch.randn(vocab, rank, generator=gen).to(dtype)
    w2 = (torch.randn(candidates, rank, generator=gen) * (bias_std / rank**0.5)).to(dtype)
    if exact_sums:
        w1, w2 = _in_steps(w1, 1.0), _in_steps(w2, bias_std / rank**0.5)
    id_map = None
    if draft_vocab is not None:
        id_map = torch.randperm(vocab, generator=gen)[:draft_vocab].sort().values.to(device)
    stored = stored_weights(w2) if weights == PLAIN else quantize(w2, weights, powers=exact_sums)
    stored = stored.map(lambda x: x.to(device))
    head = MarkovHead(w1.to(device), stored, id_map=id_map, scale=scale, soft_cap=soft_cap)
    base = _strided(_base(rows, steps, candidates, base_std, base_dtype, gen), strides, device)
    slot_ids, num_slots = _slots(rows, steps, slots, gen)
    temperatures = seeds = None
    if temperature != "greedy":
        values = MIXED_TEMPERATURES if temperature == "mixed" else (float(temperature),)
        temperatures = torch.tensor([values[i % len(values)] for i in range(num_slots)])
        seeds = torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=gen)
    start = torch.randint(0, 4096, (rows, 1), generator=gen)
    batch = DraftBatch(
        base,
        torch.randint(0, vocab, (rows,), generator=gen).to(device),
        (start + torch.arange(steps)).to(device),
        None if temperatures is None else temperatures.to(device),
        None if seeds is None else seeds.to(device),
        None if slot_ids is None else slot_ids.to(device),
    )
    if cache_dtype is None:
        cache_dtype = logits_dtype(head, batch, None)
    width = {"target": vocab, "draft": candidates, "wide": vocab + 5}[cache]
    return Problem(head, batch, num_slots, width, cache_dtype)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(name, f"one of {choices}", repr(value))


def _in_steps(weights: Tensor, std: float) -> Tensor:
    """``weights`` rounded to at most 64 steps either way, of an eighth of ``std`` or more."""
    step = 2.0 ** (math.ceil(math.log2(std)) - 3) if std else 1.0
    return ((weights.float() / step).round().clamp(-64, 64) * step).to(weights.dtype)


def _base(
    rows: int, steps: int, vocab: int, std: float, dtype: torch.dtype, gen: torch.Generator
) -> Tensor:
    """Bulk and peaks, row by row: the fp32 form of the whole would be twice the result."""
    base = torch.empty(rows, steps, vocab, dtype=dtype)
    for row in base:
        logits = torch.randn(steps, vocab, generator=gen) * std
        if std:
            peaks = torch.randint(0, vocab, (steps, PEAKS), generator=gen)
            heights = PEAK_HEIGHT + torch.randn(steps, PEAKS, generator=gen)
            logits.scatter_(1, peaks, heights)
        row.copy_(logits)
    return base


def _strided(base: Tensor, strides: str, device: torch.device | str) -> Tensor:
    rows, steps, vocab = base.shape
    if strides == "wide":
        home = torch.full((rows, steps, vocab + 23), torch.nan, dtype=base.dtype, device=device)
        view = home[:, :, 7 : 7 + vocab]
    elif strides == "step-major":
        home = torch.empty(steps, rows, vocab, dtype=base.dtype, device=device)
        view = home.transpose(0, 1)
    else:
        return base.to(device)
    return view.copy_(base)


def _slots(rows: int, steps: int, kind: str, gen: torch.Generator) -> tuple[Tensor | None, int]:
    if kind == "all":
        return None, rows
    if kind == "none-live":
        return torch.full((rows,), -1), rows
    num_slots = rows + 3
    slots = torch.randperm(num_slots, generator=gen)[:rows]
    if kind == "padded":
        slots[::3] = -1
    elif kind == "padded-steps":
        live = torch.arange(rows).unsqueeze(1) % (steps + 1)
        slots = torch.where(torch.arange(steps) < live, slots.unsqueeze(1), -1)
    return slots, num_slots
