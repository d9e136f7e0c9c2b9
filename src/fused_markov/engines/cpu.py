"""The CPU engine: guess the chain, check it in one product over W2, settle what is right.

Per pass every unsettled (row, step) is a *pair*: its logits after the predecessor that the guess
names are computed block by block of the vocabulary, stored, and searched for the best score. A
pair is final once its predecessor is; the others are guessed again. See `reference.sample` for
what is computed; the two are equal to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov.batch import (
    PADDING_TOKEN,
    DraftBatch,
    DraftResult,
    cache_is_target_wide,
    logits_dtype,
)
from fused_markov.engines import Plan
from fused_markov.engines.cpu_check import Best, Pairs
from fused_markov.engines.cpu_guess import Candidates, Guess
from fused_markov.engines.cpu_noise import NoiseGate
from fused_markov.head import MarkovHead

# Pairs whose logits are computed together: enough to use a block of W2 well while it is in the
# cache, few enough that the block's logits are too.
PAIRS_AT_ONCE = 64


class CpuEngine:
    """Reads W2 once a decode step where the guess is right, and at most once a draft step."""

    name = "cpu"

    def __init__(self, head: MarkovHead, plan: Plan) -> None:
        self._head, self._plan = head, plan
        self._gate = NoiseGate(head, plan.noise_dtype)

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        if head.device.type != "cpu":
            return f"it runs on the CPU, the head is on {head.device}"
        return None

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
        run = _Run(self._head, self._gate, batch, logits_cache)
        passes = run.finish()
        if tokens is None:
            tokens = run.token
        else:
            tokens.copy_(run.token)
        return DraftResult(tokens, run.nonfinite, self.name, torch.tensor(passes))


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
    ) -> None:
        self._head, self._gate = head, gate
        self._batch, self._cache = batch, cache
        self._dtype = logits_dtype(head, batch, cache)
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
        self._guess = Guess(  # what `_prev` was followed by, by guess
            self.token.clone(),
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=batch.base_logits.dtype),
            torch.zeros(shape),
        )
        self._no_floor = torch.zeros(shape, dtype=torch.bool)  # the best once fell below the guess

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
        todo = torch.zeros_like(self._live)
        prev = self._batch.anchors.to(torch.int64).clamp(0, self._head.vocab_size - 1)
        for step in range(prev.numel() and self._live.shape[1]):
            known = self._found[:, step] & (self._prev[:, step] == prev)
            todo[:, step] = self._live[:, step] & ~known
            token = torch.where(known, self.token[:, step], PADDING_TOKEN)
            row = todo[:, step].nonzero().squeeze(1)
            if row.numel():
                self._prev[row, step] = prev[row]
                best = guess.best_after(prev[row], row, step)
                token[row] = best.token
                for kept, new in zip(self._guess, best, strict=True):
                    kept[row, step] = new
            prev = token
        return todo

    def _check(self, todo: Tensor, guess: Candidates) -> None:
        """Logits and best tokens of all pairs of ``todo``, in one pass over W2."""
        row, step = todo.nonzero(as_tuple=True)
        dense = bool(todo.all())
        steps = todo.shape[1]
        size = max(1, PAIRS_AT_ONCE // steps) * steps if dense else PAIRS_AT_ONCE
        groups = []
        for low in range(0, row.numel(), size):
            part = slice(low, low + size)
            first = low // steps if dense else None
            groups.append(self._pairs(guess, row[part], step[part], first))
        for low, high in self._head.cpu_blocks():
            for pairs, best in groups:
                logits = self._logits(pairs, low, high)
                self._store(pairs, logits, low, high)
                best.update(logits, low)
                del logits
        for pairs, best in groups:
            token, finite, sure = best.result()
            at = (pairs.row, pairs.step)
            self.token[at], self.nonfinite[at], self._found[at] = token, ~finite, sure
            self._no_floor[at] = ~sure

    def _pairs(
        self, guess: Candidates, row: Tensor, step: Tensor, first: int | None
    ) -> tuple[Pairs, Best]:
        """``first`` is the first row of pairs that are all steps of their rows."""
        at = (row, step)
        floor = guess.floors(self._prev[at], row, step, Guess(*(x[at] for x in self._guess)))
        rows = None
        if first is not None:
            rows = slice(first, first + row.numel() // self._live.shape[1])
        pairs = Pairs(
            row=row,
            step=step,
            slot=self._slot[at],
            embed=self._head.w1[self._prev[at]],
            temp=self._temp[at],
            state=self._state[at],
            seed=self._seed[at],
            position=self._position[at],
            least=guess.least[at],
            floor=torch.where(self._no_floor[at], -torch.inf, floor),
            rows=rows,
        )
        return pairs, Best(self._head, self._gate, pairs)

    def _logits(self, pairs: Pairs, low: int, high: int) -> Tensor:
        """``[n, high-low]`` logits in the cache's dtype."""
        bias = self._head.cpu_bias_block(pairs.embed, low, high)
        base = self._batch.base_logits
        if pairs.rows is None:
            return (base[pairs.row, pairs.step, low:high] + bias).to(self._dtype)
        bias = bias.view(-1, self._live.shape[1], high - low)
        return (base[pairs.rows, :, low:high] + bias).to(self._dtype).flatten(0, 1)

    def _store(self, pairs: Pairs, logits: Tensor, low: int, high: int) -> None:
        cache, head = self._cache, self._head
        if cache is None:
            return
        if head.id_map is not None and cache_is_target_wide(head, cache.shape[2]):
            columns = head.id_map[low:high].unsqueeze(0)
            cache[pairs.slot.unsqueeze(1), pairs.step.unsqueeze(1), columns] = logits
        elif pairs.rows is not None and self._batch.slots is None:
            steps = self._live.shape[1]
            cache[pairs.rows, :steps, low:high] = logits.view(-1, steps, high - low)
        else:
            cache[pairs.slot, pairs.step, low:high] = logits

    def _fill_unmapped(self) -> None:
        """-inf in the cache's columns of the live pairs that no candidate will be written to."""
        cache, head = self._cache, self._head
        if cache is None:
            return
        mapped = head.id_map is not None and cache_is_target_wide(head, cache.shape[2])
        first = 0 if mapped else head.draft_vocab
        if first < cache.shape[2]:
            row, step = self._live.nonzero(as_tuple=True)
            cache[self._slot[row, step], step, first:] = -torch.inf
