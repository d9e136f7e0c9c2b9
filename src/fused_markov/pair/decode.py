"""Speculative decoding in rounds: draft a block, run the target over it once, keep what stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.errors import ArgumentError
from fused_markov.head import MarkovHead
from fused_markov.pair.drafter import Drafter
from fused_markov.pair.layers import KVCache
from fused_markov.pair.rejection import verify
from fused_markov.pair.target import Target
from fused_markov.sampler import DraftSampler

NO_TOKEN = -1

# How likely a draft must be to stand, by the confidence head, to be worth its verification. The
# target runs two tokens in the time of one, but three take half as long again and each further one
# little more: so the second draft is the one that has to pay.
WORTH = (0.0, 0.22, 0.05)


@dataclass(frozen=True)
class Round:
    """What one round emitted.

    Attributes:
        tokens: int64 ``[R, <=S+1]`` the accepted drafts and the target's own token, then -1.
        accepted: int64 ``[R]`` how many drafts stood; -1 for a row that was done before.
        passes: how often the draft sampler read W2; 0 where nothing was drafted.
        batch: what the drafts were sampled from, or None.
    """

    tokens: Tensor
    accepted: Tensor
    passes: int = 0
    batch: DraftBatch | None = None


@dataclass(frozen=True)
class _Drafted:
    """Drafts ``[R, S]``, how many of each row's to verify ``[R]``, and how they came about."""

    tokens: Tensor
    limits: Tensor
    passes: int = 0
    batch: DraftBatch | None = None


class Decoder:
    """R continuations of one prompt; the rows differ in their seeds.

    Args:
        target: the target model.
        drafter: its drafter; ``None`` decodes with the target alone.
        head: the drafter's Markov head.
        prompt: token ids.
        max_tokens: a row is done once it has emitted as many.
        temperature: 0 is greedy.
        seeds: int64 ``[R]``.
        stop: a row is done once it has emitted this id.
        engine: which engine `DraftSampler` shall use.
        gated: leave out drafts that the confidence head thinks too little of (`WORTH`).

    A row's tokens do not depend on how many rows there are, but for the target's own rounding.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        head: MarkovHead | None,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Tensor | None = None,
        stop: int | None = None,
        engine: str = "auto",
        gated: bool = True,
    ) -> None:
        if not prompt:
            raise ArgumentError("prompt", "at least one token", "none")
        if not temperature >= 0:
            raise ArgumentError("temperature", "a number from 0", str(temperature))
        if (drafter is None) != (head is None):
            raise ArgumentError("head", "given with a drafter, and only then", str(head))
        self._target, self._drafter = target, drafter
        self._seeds = torch.zeros(1, dtype=torch.int64) if seeds is None else seeds
        rows = self._seeds.shape[0]
        self._temperature = torch.full((rows,), float(temperature))
        self._max_tokens, self._stop, self._gated = max_tokens, stop, gated
        self._room = len(prompt) + max_tokens
        self._sampler: DraftSampler | None = None
        self._logits: Tensor | None = None
        if drafter is not None and head is not None:
            steps = drafter.config.block_size
            self._sampler = DraftSampler(head, max_rows=rows, steps=steps, engine=engine)
            if temperature > 0:
                dtype = torch.promote_types(drafter.dtype, head.dtype)
                self._logits = torch.empty(rows, steps, head.vocab_size, dtype=dtype)
        self.emitted = torch.zeros(rows, dtype=torch.int64)
        self.done = torch.zeros(rows, dtype=torch.bool)
        self._anchors = torch.zeros(rows, dtype=torch.int64)
        self._prompt = torch.tensor([list(prompt)])

    @property
    def engine(self) -> str:
        """Name of the engine that samples the drafts, or "none"."""
        return self._sampler.engine if self._sampler else "none"

    @property
    def steps(self) -> int:
        """Drafts a round, S; 0 without a drafter."""
        return self._sampler.plan.steps if self._sampler else 0

    @torch.inference_mode()
    def start(self) -> Round:
        """Read the prompt, once for all rows, and emit each row's first token."""
        rows, length = self._seeds.shape[0], self._prompt.shape[1]
        # The last round may emit S tokens too many, and done rows still run along in the next.
        room = self._room + 2 * (self.steps + 1)
        cache = self._target.new_cache(1, room)
        out = self._target(self._prompt, cache)
        self._cache = _spread(cache, self._target.new_cache(rows, room))
        if self._drafter is not None:
            context = self._drafter.new_cache(1, room)
            self._drafter.extend(context, out.hidden)
            self._context = _spread(context, self._drafter.new_cache(rows, room))
        logits = self._target.logits(out.final[:, -1:]).expand(rows, -1, -1)
        none = self._anchors.new_empty(rows, 0)
        where = self._anchors.new_full((rows, 1), length)
        first = verify(logits, none, None, self._temperature, self._seeds, where)
        return self._emit(none, first.accepted, first.tokens)

    @torch.inference_mode()
    def round(self) -> Round:
        """Draft, verify, emit; rows that are done stay as they are."""
        where = self._cache.lengths[:, None] + 1 + torch.arange(self.steps + 1)
        drafted = self._draft(where)
        most = int(drafted.limits.max())
        drafts, where = drafted.tokens[:, :most], where[:, : most + 1]
        draft_logits = None if self._logits is None else self._logits[:, :most]
        out = self._target(torch.cat([self._anchors[:, None], drafts], 1), self._cache)
        verdict = verify(
            self._target.logits(out.final),
            drafts,
            draft_logits,
            self._temperature,
            self._seeds,
            where,
            drafted.limits,
        )
        counts = torch.where(self.done, 0, verdict.accepted + 1)
        self._cache.crop(where[:, 0] - 1 + counts)
        if self._drafter is not None:
            # What lies past the longest row's count would stand for nobody.
            self._drafter.extend(self._context, out.hidden[:, : int(counts.max())], counts)
        emitted = self._emit(drafts, verdict.accepted, verdict.tokens)
        return Round(emitted.tokens, emitted.accepted, drafted.passes, drafted.batch)

    def _draft(self, where: Tensor) -> _Drafted:
        if self._drafter is None or self._sampler is None:
            rows = self._anchors.shape[0]
            return _Drafted(self._anchors.new_empty(rows, 0), torch.zeros_like(self._anchors))
        base, hidden = self._drafter.base_logits(self._context, self._anchors)
        greedy = self._logits is None
        batch = DraftBatch(
            base,
            self._anchors,
            where[:, : self.steps],
            None if greedy else self._temperature,
            None if greedy else self._seeds,
        )
        result = self._sampler.sample(batch, self._logits)
        limits = torch.full_like(self._anchors, self.steps)
        if self._gated:
            limits = self._worth(hidden, result.tokens)
        return _Drafted(result.tokens, limits, result.passes, batch)

    def _worth(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """How many drafts of each row to verify ``[R]``: those before the first not worth it.

        The confidence in a draft depends on those before it only, so the law stays the target's.
        """
        assert self._drafter is not None
        prev = torch.cat([self._anchors[:, None], tokens[:, :-1]], 1)
        chance = self._drafter.confidence(hidden, prev).cumprod(1)
        least = torch.tensor([WORTH[min(s, len(WORTH) - 1)] for s in range(self.steps)])
        return (chance >= least).long().cumprod(1).sum(1)

    def _emit(self, drafts: Tensor, accepted: Tensor, own: Tensor) -> Round:
        """Put a round's tokens together, cut at the stop and at ``max_tokens``."""
        steps = drafts.shape[1]
        tokens = torch.cat([drafts, own[:, None]], 1)
        tokens.scatter_(1, accepted[:, None], own[:, None])
        at = torch.arange(steps + 1)
        keep = (at <= accepted[:, None]) & (at < (self._max_tokens - self.emitted)[:, None])
        keep &= ~self.done[:, None]
        if self._stop is not None:
            before = (tokens == self._stop).long().cumsum(1) - (tokens == self._stop).long()
            keep &= before == 0
        accepted = torch.where(self.done, NO_TOKEN, accepted)
        self._anchors = torch.where(self.done, self._anchors, own)
        self.emitted = self.emitted + keep.sum(1)
        tokens = torch.where(keep, tokens, NO_TOKEN)
        self.done = self.done | (self.emitted >= self._max_tokens)
        if self._stop is not None:
            self.done = self.done | (tokens == self._stop).any(1)
        return Round(tokens, accepted)


def _spread(one: KVCache, many: KVCache) -> KVCache:
    """Copy the single row of ``one`` to every row of ``many``."""
    length = int(one.lengths[0])
    many.keys[:, :, :, :length] = one.keys[:, :, :, :length]
    many.values[:, :, :, :length] = one.values[:, :, :, :length]
    many.advance(length)
    return many
