"""The search for the best score of each pair, block by block of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov.engines.cpu_noise import NoiseGate
from fused_markov.engines.cpu_runs import RUN, RUNS_AT_ONCE, largest_of_runs, logits_of_runs
from fused_markov.head import MarkovHead

# Tokens whose exact noise is computed at a time: some forty operations on int64.
SCORES_AT_ONCE = 1 << 14

_NO_ID = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Pairs:
    """n (row, step) pairs whose logits are computed together; tensors are ``[n]`` but as said.

    Attributes:
        row, step, slot: where they stand in the batch and the cache.
        tiles: w1's rows of their predecessors, as `MarkovHead.cpu_bias_block` takes them.
        temp: fp32 temperature; 0 is greedy.
        state: int32 hash states. seed, position: int64.
        least: int32 ``[n, runs]`` the least rank of each run's noise, or `UNKNOWN_RANK`.
        floor: a score that the best one is expected to reach; -inf where nothing is known.
        base: ``[a, b, V]``, a * b = n, without a copy, their base logits, where the pairs are the
            same b successive steps of a successive rows; else None.
        cache: ``[n, V]``, without a copy, their part of the cache, where it has such a view.
    """

    row: Tensor
    step: Tensor
    slot: Tensor
    tiles: list[Tensor]
    temp: Tensor
    state: Tensor
    seed: Tensor
    position: Tensor
    least: Tensor
    floor: Tensor
    base: Tensor | None
    cache: Tensor | None


class Best:
    """The best score so far of each of n pairs, and the lowest target id that has it."""

    def __init__(self, head: MarkovHead, gate: NoiseGate, pairs: Pairs) -> None:
        self._head, self._gate, self._pairs = head, gate, pairs
        count = pairs.row.numel()
        # With no score above -inf the token is the lowest candidate.
        self._score = torch.full((count,), -torch.inf, dtype=gate.noise_dtype)
        self._id = torch.full((count,), head.lowest_id)
        self._greedy = (pairs.temp == 0).nonzero().squeeze(1)
        self._sampled = (pairs.temp != 0).nonzero().squeeze(1)
        self._temp = pairs.temp[self._sampled].unsqueeze(1)
        self._state = pairs.state[self._sampled]
        self._least = pairs.least[self._sampled]
        floor = pairs.floor[self._sampled].double().unsqueeze(1)
        # The margin: the roundings of the sum, of the noise and of the uniform.
        self._floor = floor - (1e-3 + 1e-6 * floor.abs().nan_to_num(posinf=0.0))
        self._waiting: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[n]`` target ids; whether their scores are finite; whether they are surely the best.

        What the gate let through is all that reaches the floor: the best of it is the best of all
        if it does. Else the pair must be checked again, without a floor.
        """
        self._score_waiting()
        sure = (self._pairs.temp == 0) | (self._score >= self._pairs.floor)
        return self._id, self._score.isfinite(), sure

    def update(self, logits: Tensor, low: int) -> None:
        """Take in the logits ``[n, width]`` of the candidates from ``low`` on."""
        tops = largest_of_runs(logits)
        if self._greedy.numel():
            self._update_greedy(logits, tops, low)
        if self._sampled.numel():
            self._update_sampled(logits, tops, low)

    def _update_greedy(self, logits: Tensor, tops: Tensor, low: int) -> None:
        pair = self._greedy
        tops = tops[pair]
        best = tops.amax(dim=1, keepdim=True)
        if self._head.ascending:
            run = _first(tops == best)
            place = _first(logits_of_runs(logits, pair, run) == best)
            found = self._target(low + run * RUN + place)
        else:
            found = torch.full_like(pair, _NO_ID)
            tied = torch.split((tops == best).nonzero(), RUNS_AT_ONCE)
            for of, run in (x.unbind(1) for x in tied):
                values = logits_of_runs(logits, pair[of], run)
                i, place = (values == best[of]).nonzero(as_tuple=True)
                ids = self._target(low + run[i] * RUN + place)
                found.scatter_reduce_(0, of[i], ids, "amin")
        self._merge(pair, best.squeeze(1).to(self._score.dtype), found)

    def _update_sampled(self, logits: Tensor, tops: Tensor, low: int) -> None:
        need = self._floor - tops[self._sampled].float() / self._temp
        limit = self._gate.limit(need)
        first = low // RUN
        # A run of -inf needs too much, or with no floor NaN: it is never looked at.
        reached = (need <= self._gate.most) & (
            self._least[:, first : first + need.shape[1]] <= limit
        )
        of, run = reached.nonzero(as_tuple=True)
        if not of.numel():
            return
        at, place, rank = self._gate.passing(self._state[of], run + first, limit[of, run])
        pair, column = self._sampled[of[at]], run[at] * RUN + place
        column.clamp_max_(logits.shape[1] - 1)  # what fills the last run is its last token again
        self._waiting.append((pair, low + column, logits[pair, column], rank))
        if sum(x[0].numel() for x in self._waiting) >= SCORES_AT_ONCE:
            self._score_waiting()

    def _score_waiting(self) -> None:
        """Compute the exact scores of the tokens that passed the gate."""
        if not self._waiting:
            return
        waiting = [torch.cat(x) for x in zip(*self._waiting, strict=True)]
        self._waiting.clear()
        for at in range(0, waiting[0].numel(), SCORES_AT_ONCE):
            pair, candidate, logits, rank = (x[at : at + SCORES_AT_ONCE] for x in waiting)
            self._score_some(pair, self._target(candidate), logits, rank)

    def _score_some(self, pair: Tensor, ids: Tensor, logits: Tensor, rank: Tensor) -> None:
        pairs, dtype = self._pairs, self._score.dtype
        # The very operations of the reference, on a few tokens of each of its rows.
        state = (pairs.seed[pair], pairs.step[pair], pairs.position[pair])
        tempered = (logits.float() / pairs.temp[pair]).to(dtype)
        score = tempered + self._gate.exact(rank, *state, ids)
        score = torch.where(score.isnan(), -torch.inf, score)
        best = torch.full_like(self._score, -torch.inf).scatter_reduce_(0, pair, score, "amax")
        tied = torch.where(score == best[pair], ids, _NO_ID)
        found = torch.full_like(self._id, _NO_ID).scatter_reduce_(0, pair, tied, "amin")
        self._merge(torch.arange(best.numel()), best, found)

    def _merge(self, pair: Tensor, score: Tensor, ids: Tensor) -> None:
        old, old_id = self._score[pair], self._id[pair]
        better = (score > old) | ((score == old) & (ids < old_id))
        self._score[pair] = torch.where(better, score, old)
        self._id[pair] = torch.where(better, ids, old_id)

    def _target(self, candidate: Tensor) -> Tensor:
        """Target ids; the padding behind the last candidate stands for that one."""
        return self._head.target_ids(candidate.clamp_max(self._head.draft_vocab - 1))


def _first(mask: Tensor) -> Tensor:
    """``[n]`` column of the first True of each row."""
    columns = torch.arange(mask.shape[1])
    return torch.where(mask, columns, mask.shape[1] - 1).amin(dim=1)
