"""Guesses of the chain for the CPU engine: a few candidates a step, then the best in turn.

Nothing here needs to be exact: a wrong guess costs another pass over W2, never a wrong token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_markov import masks
from fused_markov.batch import DraftBatch
from fused_markov.engines.cpu_noise import UNKNOWN_RANK, NoiseGate
from fused_markov.engines.cpu_runs import RUN, largest_of_runs
from fused_markov.head import MarkovHead

# Candidates kept a step.
CANDIDATES = 160

# With Gumbel noise, e**c tokens on average score above logsumexp - c whatever the logits are. The
# logsumexp of the runs' largest logits, taken for that of all, is too low, so more than 55 do.
REACH = 4.0

# A token this far behind wins once in e**(NEED + REACH) draws: not worth its hash in a guess.
NEED = 12.0

# Rows whose candidates' w2 rows are gathered at a time.
ROWS_AT_ONCE = 32

_NO_ID = torch.iinfo(torch.int64).max


class Candidates:
    """The candidates of every row and step, by their base logits and noise.

    Attributes:
        index: int64 ``[R, S, K]`` rows of w2.
        base: ``[R, S, K]`` their base logits; -inf in unused places.
        noise: fp32 ``[R, S, K]`` times temperature: what is added to logits; 0 for greedy steps.
        least: int32 ``[R, S, runs]`` the least rank of each run's noise where it was computed: most
            runs need no second look in the check.
    """

    def __init__(
        self,
        head: MarkovHead,
        gate: NoiseGate,
        batch: DraftBatch,
        dtype: torch.dtype,
        temp: Tensor,
        state: Tensor,
        live: Tensor,
    ) -> None:
        """``temp`` (0: greedy), ``state``, ``live`` are ``[R, S]``; ``dtype`` is the logits'."""
        self._head, self._gate, self._dtype = head, gate, dtype
        raw = batch.base_logits[:, :, : head.draft_vocab]
        self._logits = _seen(head, batch, raw)
        self._whole = head.draft_vocab // RUN
        shape = (*live.shape, min(CANDIDATES, head.draft_vocab))
        self.index = torch.zeros(shape, dtype=torch.int64)
        self.base = torch.full(shape, -torch.inf, dtype=self._logits.dtype)
        self.noise = torch.zeros(shape)
        self._cold, self._state = temp == 0, state
        self._noisy = not bool(self._cold.all())
        self._used = shape[2]  # places that may hold a candidate
        self._temp = torch.where(self._cold, 1.0, temp)
        tops = self._largest_of_runs(live)
        self.least = torch.full(tops.shape, UNKNOWN_RANK, dtype=torch.int32)
        self._greedy(tops, *(live & (temp == 0)).nonzero(as_tuple=True))
        self._sampled(tops, *(live & (temp != 0)).nonzero(as_tuple=True))
        if head.logit_transform is not None:
            # The bias comes before the transform: from here on the base itself is what counts.
            self.base = torch.where(self.base == -torch.inf, -torch.inf, raw.gather(2, self.index))
            self._logits = raw

    def _whole_runs(self) -> Tensor:
        """The base logits as ``[R, S, whole runs, RUN]``, without a copy."""
        size = (*self._logits.shape[:2], self._whole, RUN)
        return self._logits[:, :, : self._whole * RUN].view(size)

    def _last_run(self, row: Tensor, step: Tensor) -> Tensor:
        """``[n, RUN]`` the logits after the whole runs, then -inf."""
        rest = self._logits[row, step, self._whole * RUN :]
        return F.pad(rest, (0, RUN - rest.shape[1]), value=-torch.inf)

    def _largest_of_runs(self, live: Tensor) -> Tensor:
        """fp32 ``[R, S, runs]``: the largest base logit of each run; -inf of rows not live."""
        tops = torch.full((*live.shape, -(-self._head.draft_vocab // RUN)), -torch.inf)
        for row in live.any(dim=1).nonzero().flatten().tolist():
            tops[row] = largest_of_runs(self._logits[row])
        return tops.nan_to_num_(-torch.inf, torch.inf, -torch.inf)

    def _greedy(self, tops: Tensor, row: Tensor, step: Tensor) -> None:
        """The largest base logits: they lie in the runs with the largest maxima."""
        count = min(self.index.shape[2], tops.shape[2])
        for part in _slices(row.numel(), ROWS_AT_ONCE):
            r, s = row[part], step[part]
            run = tops[r, s].topk(count, dim=1, sorted=False).indices
            logits = self._logits.new_empty(r.numel(), count, RUN)
            inside = run < self._whole
            i, j = inside.nonzero(as_tuple=True)
            logits[i, j] = self._whole_runs()[r[i], s[i], run[i, j]]
            i, j = (~inside).nonzero(as_tuple=True)
            logits[i, j] = self._last_run(r[i], s[i])
            logits.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
            best = logits.flatten(1).topk(self.index.shape[2], dim=1, sorted=False)
            index = run.gather(1, best.indices // RUN) * RUN + best.indices % RUN
            # The padding behind the last candidate is chosen where little else is above -inf.
            self.index[r, s] = index.clamp_max_(self._head.draft_vocab - 1)
            self.base[r, s] = best.values

    def _sampled(self, tops: Tensor, row: Tensor, step: Tensor) -> None:
        """The best noised base logits among the tokens whose noise brings them near the top."""
        if not row.numel():
            return
        temp = self._temp[row, step]
        scaled = tops[row, step] / temp.unsqueeze(1)
        floor = torch.logsumexp(scaled, dim=1) - REACH
        need = floor.unsqueeze(1) - scaled
        pair, run = (need < NEED).nonzero(as_tuple=True)
        states = self._state[row, step][pair]
        least = self._gate.least(states, run)
        self.least[row[pair], step[pair], run] = least
        limit = self._gate.limit(need[pair, run].double())
        near = (least <= limit).nonzero().squeeze(1)
        pair, run = pair[near], run[near]
        at, place, rank = self._gate.passing(states[near], run, limit[near])
        of, column = pair[at], run[at] * RUN + place
        inside = (column < self._logits.shape[2]).nonzero().squeeze(1)
        of, column, rank = of[inside], column[inside], rank[inside]
        base = self._logits[row[of], step[of], column]
        g = self._gate.approximate(rank)
        score = base.float() / temp[of] + g
        near = (score >= floor[of]).nonzero().squeeze(1)
        self._keep_best(row, step, *(x[near] for x in (of, column, base, g, score)))

    def _keep_best(
        self,
        row: Tensor,
        step: Tensor,
        of: Tensor,
        column: Tensor,
        base: Tensor,
        g: Tensor,
        score: Tensor,
    ) -> None:
        """The best finds of each (row, step); ``of`` names a find's place in ``row, step``."""
        order = score.argsort(descending=True)
        order = order[of[order].argsort(stable=True)]
        of, column, base, g = of[order], column[order], base[order], g[order]
        first = torch.searchsorted(of, torch.arange(row.numel()))
        place = torch.arange(of.numel()) - first[of]
        kept = place < self.index.shape[2]
        at = (row[of][kept], step[of][kept], place[kept])
        self.index[at], self.base[at] = column[kept], base[kept]
        self.noise[at] = g[kept] * self._temp[at[:2]]
        if not bool(self._cold.any()):
            self._used = int(at[2].max()) + 1 if at[2].numel() else 1

    def best_after(self, prev: Tensor, row: Tensor, step: int, embed: Tensor) -> Tensor:
        """``[n]`` rows of w2: the best candidates of rows ``row`` at one step after ``prev``, of
        which w2 multiplies ``embed`` ``[n, r]``.
        """
        slices = _slices(row.numel(), ROWS_AT_ONCE)
        parts = [self._best(prev[p], row[p], step, embed[p]) for p in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _best(self, prev: Tensor, row: Tensor, step: int, embed: Tensor) -> Tensor:
        head = self._head
        index, base, g = self._candidates(prev, row, step)
        w2 = head.weights.dequantized(index.flatten()).view(*index.shape, -1)
        bias = torch.bmm(w2, embed.float().unsqueeze(2)).squeeze(2)
        # Rounded as the logits will be: they tie, or lose, by their last place.
        logits = head.finish(base + head.transform(bias.to(head.dtype))).to(self._dtype)
        score = logits.float() + g
        score = score.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        tied = score == score.amax(dim=1, keepdim=True)
        place = torch.where(tied, head.target_ids(index), _NO_ID).argmin(dim=1, keepdim=True)
        return index.gather(1, place).squeeze(1)

    def _candidates(self, prev: Tensor, row: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of w2, base logits and noise ``[n, K]`` of a step, with ``prev``'s successors."""
        kept = self.index, self.base, self.noise
        found = tuple(x[:, step, : self._used].index_select(0, row) for x in kept)
        if self._head.successors is None:
            return found[0], found[1], found[2]
        index = self._head.successors[prev].to(torch.int64)
        base = self._logits[row.unsqueeze(1), step, index]
        g = self._noise(row, step, index) * self._temp[row, step].unsqueeze(1)
        more = (index, base, g)
        index, base, g = (torch.cat(x, dim=1) for x in zip(found, more, strict=True))
        return index, base, g

    def _noise(self, row: Tensor, step: Tensor | int, place: Tensor) -> Tensor:
        """Approximate noise ``[n, k]`` of rows ``place`` of w2; 0 for greedy steps."""
        if not self._noisy:
            return torch.zeros(place.shape)
        g = self._gate.approximate(self._gate.ranks_of(self._state[row, step], place))
        return torch.where(self._cold[row, step].unsqueeze(1), 0.0, g)

    def floors(self, embed: Tensor, row: Tensor, step: Tensor, place: Tensor) -> Tensor:
        """Scores that the steps' best are not below: those of guesses, roundings taken off.

        ``embed`` is ``[n, r]``, the others are ``[n]``, ``place`` the guessed rows of w2; fp32,
        -inf where a guess's is no number.
        """
        head, base = self._head, self._logits[row, step, place]
        products = embed.float() * head.weights.dequantized(place)
        bias = head.transform(products.sum(dim=1).to(head.dtype))
        temp, g = self._temp[row, step], self._noise(row, step, place.unsqueeze(1)).squeeze(1)
        score = head.finish(base + bias).to(self._dtype).float() / temp + g
        # The product may sum in another order, and then round bias and logit the other way.
        eps = max(torch.finfo(d).eps for d in (head.dtype, base.dtype, self._dtype))
        off = 2 * eps * (base.float().abs() + 2 * bias.float().abs())
        off += 2.0**-23 * head.rank * abs(head.scale) * products.abs().sum(dim=1)
        floor = score - off / temp - 1e-5 * score.abs() - 1e-3
        return torch.where(floor.isfinite(), floor, -torch.inf)


def _seen(head: MarkovHead, batch: DraftBatch, base: Tensor) -> Tensor:
    """Base logits as candidates are chosen by: transformed, and -inf where banned."""
    base = head.finish(base)
    if batch.bans is None:
        return base
    ids = head.target_ids(torch.arange(head.draft_vocab))
    slots = batch.slot_matrix().clamp_min(0)
    allowed = [masks.allowed(batch.bans, slots[:, s], s, ids) for s in range(batch.steps)]
    return base.where(torch.stack(allowed, dim=1), -torch.inf)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(low, low + size) for low in range(0, length, size)]
