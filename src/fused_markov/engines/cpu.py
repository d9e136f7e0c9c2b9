"""The CPU engine: guess the chain, check it in one product over W2, settle what is right.

Per pass every unsettled (row, step) is a *pair*: its logits after the predecessor that the guess
names are computed block by block of the vocabulary, stored, and searched for the best score. A
pair is final once its predecessor is; the others are guessed again. See `reference.sample` for
what is computed; the two are equal to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov import masks
from fused_markov.batch import (
    PADDING_TOKEN,
    DraftBatch,
    DraftResult,
    cache_is_target_wide,
    logits_dtype,
)
from fused_markov.engines import Plan
from fused_markov.engines.cpu_check import Best, Pairs
from fused_markov.engines.cpu_guess import Candidates
from fused_markov.engines.cpu_heads import Judge, PairEmbeddings
from fused_markov.engines.cpu_limited import best_kept, sample_limited
from fused_markov.engines.cpu_noise import NoiseGate
from fused_markov.engines.cpu_philox import noise_gate
from fused_markov.engines.reasons import LIMITED_READS, guess_lines
from fused_markov.head import MarkovHead
from fused_markov.shaping import is_shaped, shape

# Pairs whose logits are computed together: enough to use a block of W2 well while it is in the
# cache, few enough that the block's logits are too.
PAIRS_AT_ONCE = 64


class CpuEngine:
    """Reads W2 once a decode step where the guess is right, and at most once a draft step."""

    name = "cpu"

    def __init__(self, head: MarkovHead, plan: Plan) -> None:
        self._head, self._plan = head, plan
        self._gate = noise_gate(head, plan)

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        if head.device.type != "cpu":
            return f"it runs on the CPU, the head is on {head.device}"
        return None

    def explain(self, batch: DraftBatch, logits_cache: Tensor | None) -> list[str]:
        """How often W2 is read, and what makes guesses better or worse."""
        if self._plan.draft_topk is not None:
            return [LIMITED_READS]
        return guess_lines(self._head, batch)

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Nothing to prepare: no kernels to compile, no scratch to hold."""

    @torch.no_grad()
    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        judge = Judge(self._head, batch)
        if self._plan.draft_topk is not None:
            token, nonfinite = sample_limited(self._head, self._plan, judge.batch, logits_cache)
            passes = 0
        else:
            tempered = self._plan.cache_convention == "tempered"
            run = _Run(self._head, self._gate, judge.batch, logits_cache, tempered)
            passes = run.finish()
            token, nonfinite = run.token, run.nonfinite
        confidence, lengths = judge.result(token, nonfinite)
        if tokens is None:
            tokens = token
        else:
            tokens.copy_(token)
        return DraftResult(tokens, nonfinite, self.name, torch.tensor(passes), confidence, lengths)


class _Run:
    """One decode step's state; every tensor is ``[R, S]``.

    Attributes:
        token: target ids found; final where the predecessor they were found after is.
        nonfinite: whether their scores are not finite.
    """

    def __init__(
        self,
        head: MarkovHead,
        gate: NoiseGate,
        batch: DraftBatch,
        cache: Tensor | None,
        tempered: bool = False,
    ) -> None:
        self._head, self._gate = head, gate
        self._tempered = tempered and batch.temperature is not None
        self._batch, self._cache = batch, cache
        self._dtype = logits_dtype(head, batch, cache)
        # Whether the candidates' places in the cache are those of their target ids.
        self._scattered = (
            cache is not None
            and head.id_map is not None
            and cache_is_target_wide(head, cache.shape[2])
        )
        slots = batch.slot_matrix()
        shape = slots.shape
        self._live = slots >= 0
        self._slot = slots.clamp_min(0)
        self._temp = torch.zeros(shape)
        self._state = torch.zeros(shape, dtype=torch.int32)
        self._seed = torch.zeros(shape, dtype=torch.int64)
        self._position = batch.positions.to(torch.int64)
        if batch.temperature is not None and batch.seeds is not None and self._live.any():
            self._temp = torch.where(self._live, batch.temperature[self._slot].float(), 0.0)
            self._seed = batch.seeds[self._slot]
            self._state = gate.states(self._seed, torch.arange(shape[1]), self._position)
        self.token = torch.full(shape, PADDING_TOKEN)
        self.nonfinite = torch.zeros(shape, dtype=torch.bool)
        self._found = torch.zeros(shape, dtype=torch.bool)
        self._prev = torch.full(shape, PADDING_TOKEN)  # what `token` was found after
        # The row of w2 that `_prev` was followed by, by guess.
        self._guess = torch.zeros(shape, dtype=torch.int64)
        self._no_floor = torch.zeros(shape, dtype=torch.bool)  # the best once fell below the guess
        self._embeddings = PairEmbeddings(head, batch, self._live)

    def finish(self) -> int:
        """Guess and check until all is final; how often W2 was read."""
        if not self._live.any():
            return 0
        self._fill_unmapped()
        guess = Candidates(
            self._head, self._gate, self._batch, self._dtype, self._temp, self._state, self._live
        )
        passes = 0
        while (todo := self._walk(guess)).any():
            self._check(todo, guess)
            passes += 1
        return passes

    def _walk(self, guess: Candidates) -> Tensor:
        """Follow every row's chain, guessing where it is not known; the pairs to check.

        A pair is known if it was checked after the token that now precedes it.
        """
        todo = []
        moved = torch.zeros(self._live.shape[0], dtype=torch.bool)
        prev = self._batch.anchors.to(torch.int64).clamp(0, self._head.vocab_size - 1)
        state = (self._live, self._found, self._prev, self._guess, self.token)
        for step, (live, found, after, guessed, was) in enumerate(
            zip(*(x.unbind(1) for x in state), strict=True)
        ):
            # Where a state is carried, a pair depends on all that precedes it.
            moved |= live & (after != prev) & self._embeddings.carried
            todo.append(live > (found & (after == prev) & ~moved))
            token = was.clone()
            row = todo[-1].nonzero().squeeze(1)
            if row.numel():
                before = prev.index_select(0, row)
                embed = self._embeddings.follow(before, row, step)
                place = guess.best_after(before, row, step, embed)
                after.index_copy_(0, row, before)
                guessed.index_copy_(0, row, place)
                token.index_copy_(0, row, self._head.target_ids(place))
            prev = token
        return torch.stack(todo, dim=1)

    def _check(self, todo: Tensor, guess: Candidates) -> None:
        """Logits and best tokens of all pairs of ``todo``, in one pass over W2."""
        row, step = todo.nonzero(as_tuple=True)
        dense = bool(todo.all())
        steps = todo.shape[1]
        size = max(1, PAIRS_AT_ONCE // steps) * steps if dense else PAIRS_AT_ONCE
        groups = []
        for low in range(0, row.numel(), size):
            groups.append(self._pairs(guess, row[low : low + size], step[low : low + size]))
        blocks = self._head.cpu_blocks()
        count = _blocks_at_once(groups)
        for some in (blocks[i : i + count] for i in range(0, len(blocks), count)):
            for pairs, best in groups:
                logits = self._logits(pairs, some)
                best.update(logits, some[0][0])
                self._store(pairs, logits, some[0][0], some[-1][1])
                del logits
        for pairs, best in groups:
            token, finite, sure = best.result()
            at = (pairs.row, pairs.step)
            self.token[at], self.nonfinite[at], self._found[at] = token, ~finite, sure
            self._no_floor[at] = ~sure
            if self._cache is not None and is_shaped(self._batch):
                self._shape(pairs, self._cache)

    def _shape(self, pairs: Pairs, cache: Tensor) -> None:
        """Shape the cached logits of pairs, and find the best of those that are left."""
        some = (pairs.temp != 0).nonzero().squeeze(1)
        row, step, slot = pairs.row[some], pairs.step[some], pairs.slot[some]
        columns = torch.arange(self._head.draft_vocab)
        if self._scattered:
            columns = self._head.target_ids(columns)
        at = (slot.unsqueeze(1), step.unsqueeze(1), columns)
        logits = shape(cache[at], self._batch, slot)
        cache[at] = logits
        found = best_kept(self._head, self._gate, pairs, some, logits)
        self.token[row, step], self.nonfinite[row, step] = found
        self._found[row, step] = True

    def _pairs(self, guess: Candidates, row: Tensor, step: Tensor) -> tuple[Pairs, Best]:
        at = (row, step)
        prev, no_floor = self._prev[at], self._no_floor[at]
        embed = self._embeddings.of(prev, row, step)
        floor = guess.floors(embed, row, step, self._guess[at])
        base, cache = self._views(row.tolist(), step.tolist())
        pairs = Pairs(
            row=row,
            step=step,
            slot=self._slot[at],
            tiles=self._head.cpu_tiles(embed),
            temp=self._temp[at],
            state=self._state[at],
            seed=self._seed[at],
            position=self._position[at],
            least=guess.least[at],
            floor=torch.where(no_floor, -torch.inf, floor),
            base=base,
            cache=cache,
        )
        return pairs, Best(self._head, self._gate, pairs)

    def _views(self, row: list[int], step: list[int]) -> tuple[Tensor | None, Tensor | None]:
        """`Pairs.base` and `Pairs.cache` of pairs in the order of their rows and steps."""
        rows, steps = range(row[0], row[-1] + 1), range(step[0], step[-1] + 1)
        if list(zip(row, step, strict=True)) != [(r, s) for r in rows for s in steps]:
            return None, None
        head, cache, across = self._head, self._cache, slice(steps.start, steps.stop)
        base = self._batch.base_logits[rows.start : rows.stop, across, : head.draft_vocab]
        slots = self._slot[rows.start : rows.stop, across].tolist()
        first, count = slots[0][0], len(rows)
        if (
            cache is None
            or self._scattered
            or slots != [[slot] * len(steps) for slot in range(first, first + count)]
            or (count > 1 and cache.stride(0) != len(steps) * cache.stride(1))
        ):
            return base, None
        cache = cache[first : first + count, across, : head.draft_vocab]
        return base, cache.view(-1, head.draft_vocab)

    def _logits(self, pairs: Pairs, blocks: list[tuple[int, int]]) -> Tensor:
        """``[n, width]`` logits of successive blocks: in the cache itself where it has the view."""
        first, last = blocks[0][0], blocks[-1][1]
        if pairs.cache is None:
            logits = torch.empty(pairs.row.numel(), last - first, dtype=self._dtype)
        else:
            logits = pairs.cache[:, first:last]
        for low, high in blocks:
            self._logits_of_block(pairs, low, high, logits[:, low - first : high - first])
        return logits

    def _logits_of_block(self, pairs: Pairs, low: int, high: int, out: Tensor) -> None:
        """Write columns ``low:high`` of the logits to ``out`` ``[n, high-low]``."""
        if self._head.logit_transform is not None or self._batch.bans is not None:
            self._finish_block(pairs, low, high, out)
            return
        same = out.dtype == self._head.dtype
        bias = out if same else torch.empty(out.shape, dtype=self._head.dtype)
        self._head.cpu_bias_block(pairs.tiles, low, high, bias)
        if pairs.base is None:
            base = self._batch.base_logits[pairs.row, pairs.step, low:high]
        else:
            base = pairs.base[:, :, low:high]
            bias, out = bias.view(base.shape), out.view(base.shape)
        torch.add(base, bias, out=out)

    def _finish_block(self, pairs: Pairs, low: int, high: int, out: Tensor) -> None:
        """As `_logits_of_block`, where the sum is not yet the logits."""
        bias = torch.empty(out.shape, dtype=self._head.dtype)
        self._head.cpu_bias_block(pairs.tiles, low, high, bias)
        base = self._batch.base_logits[pairs.row, pairs.step, low:high]
        out.copy_(self._head.finish(base + bias))
        if self._batch.bans is not None:
            ids = self._head.target_ids(torch.arange(low, high))
            allowed = masks.allowed(self._batch.bans, pairs.slot, pairs.step, ids)
            out.masked_fill_(~allowed, -torch.inf)

    def _store(self, pairs: Pairs, logits: Tensor, low: int, high: int) -> None:
        cache, head = self._cache, self._head
        if cache is not None and self._tempered:
            logits.div_(torch.where(pairs.temp == 0, 1.0, pairs.temp).unsqueeze(1))
        if cache is None or pairs.cache is not None:
            return
        if head.id_map is not None and self._scattered:
            columns = head.id_map[low:high].unsqueeze(0)
            cache[pairs.slot.unsqueeze(1), pairs.step.unsqueeze(1), columns] = logits
        else:
            cache[pairs.slot, pairs.step, low:high] = logits

    def _fill_unmapped(self) -> None:
        """-inf in the cache's columns of the live pairs that no candidate will be written to."""
        cache, head = self._cache, self._head
        if cache is None:
            return
        first = 0 if self._scattered else head.draft_vocab
        if first < cache.shape[2]:
            row, step = self._live.nonzero(as_tuple=True)
            cache[self._slot[row, step], step, first:] = -torch.inf


def _blocks_at_once(groups: list[tuple[Pairs, Best]]) -> int:
    """Blocks whose logits are searched at once: more where the pairs are few, for fewer calls.

    Only where the logits are the cache's own: elsewhere they are scratch.
    """
    if any(pairs.cache is None for pairs, _ in groups):
        return 1
    return max(1, PAIRS_AT_ONCE // max(pairs.row.numel() for pairs, _ in groups))
