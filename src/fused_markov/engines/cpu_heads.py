"""Variants and the confidence head on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_markov.batch import PADDING_TOKEN, DraftBatch
from fused_markov.confidence import cut, lengths_of, too_low
from fused_markov.head import MarkovHead


class PairEmbeddings:
    """What w2 multiplies for each (row, step) pair, after the chain as it is now guessed.

    Attributes:
        carried: whether a pair depends on more of its chain than the previous token.
    """

    def __init__(self, head: MarkovHead, batch: DraftBatch, live: Tensor) -> None:
        self._w1, self._variant, self._live = head.w1, head.variant, live
        self.carried = False
        if head.variant is not None and batch.hidden is not None:
            self.carried = head.variant.carries
            self._context = head.variant.context(batch.hidden)
            self._embed = head.w1.new_zeros(*live.shape, head.rank)
            self._state = head.w1.new_zeros(*live.shape, head.rank)

    def follow(self, prev: Tensor, row: Tensor, step: int) -> Tensor:
        """``[n, r]`` of rows ``row`` at a step that ``prev`` now precedes; kept for `of`.

        Steps are followed in order: the state before is the one found last.
        """
        embed = self._w1.index_select(0, prev)
        if self._variant is None:
            return embed
        state = torch.zeros_like(embed)
        if step > 0:
            before = self._state[row, step - 1]
            state = torch.where(self._live[row, step - 1].unsqueeze(1), before, state)
        embed, state = self._variant.embed(embed, self._context[row, step], state)
        self._embed[row, step], self._state[row, step] = embed, state
        return embed

    def of(self, prev: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """``[n, r]`` of pairs, ``prev`` being the tokens they were last followed after."""
        return self._w1[prev] if self._variant is None else self._embed[row, step]


class Judge:
    """Confidences of a batch, and what they leave of it.

    Where they do not depend on the chain, a draft is cut before anything is sampled; else after.

    Attributes:
        batch: what is to be sampled.
    """

    def __init__(self, head: MarkovHead, batch: DraftBatch) -> None:
        self._head, self.batch, self._given = head, batch, batch
        self._slots = batch.slot_matrix()
        self._confidence: Tensor | None = None
        confidence = head.confidence
        if confidence is not None and not confidence.with_markov and batch.hidden is not None:
            self._keep(confidence.probability(batch.hidden, batch.hidden))
            if batch.min_confidence is not None:
                self.batch = replace(batch, slots=self._slots)

    def result(self, tokens: Tensor, nonfinite: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Confidences and lengths; of the sampled ``tokens`` and flags ``[R, S]``, in place, what
        the confidences do not leave becomes padding.
        """
        batch, confidence = self._given, self._head.confidence
        if confidence is not None and confidence.with_markov and batch.hidden is not None:
            anchors = batch.anchors.to(torch.int64).clamp(0, self._head.vocab_size - 1)
            prev = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
            self._keep(confidence.probability(batch.hidden, self._head.w1[prev]))
            if batch.min_confidence is not None:
                tokens.masked_fill_(self._slots < 0, PADDING_TOKEN)
                nonfinite.masked_fill_(self._slots < 0, False)
        asked = batch.min_confidence is not None
        return self._confidence, lengths_of(self._slots >= 0) if asked else None

    def _keep(self, probability: Tensor) -> None:
        low = too_low(probability, self._given.min_confidence, self._slots)
        known = (self._slots >= 0) & (low.long().cumsum(1) - low.long() == 0)
        self._confidence = torch.where(known, probability, 0.0)
        self._slots = cut(self._slots, low)
