"""Decode steps of the real pair, recorded while it answers, as problems for the benchmark.

What a random problem cannot show is how often a guess is right: that depends on what a trained head
and its backbone say. Here base logits, anchors, positions and head are the pair's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

import torch

from fused_markov.batch import DraftBatch, logits_dtype
from fused_markov.errors import CheckpointError
from fused_markov.pair.decode import Decoder
from fused_markov.pair.generate import REPOSITORY, Pair
from fused_markov.pair.target import END_OF_TURN
from fused_markov.problems import Problem

PROMPTS = REPOSITORY / "benchmarks" / "prompts.json"
GREEDY = "greedy"
MAX_TOKENS = 128  # of an answer

# Problems a line, so that their mean number of passes is one of many draft steps: as many as there
# are rounds for, within these limits.
LEAST_PROBLEMS, MOST_PROBLEMS = 8, 64


def load_prompts() -> list[str]:
    """The held-out prompts of the repository's benchmarks.

    Raises:
        CheckpointError: they are not there; they come with the repository alone, as the drafter.
    """
    try:
        prompts: list[str] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{PROMPTS}: {e.strerror}; run from a clone of the repository") from e
    return prompts


class Recorder:
    """Problems out of the pair's rounds, for any number of rows.

    Args:
        pair: the loaded pair; it decodes on the CPU.
        prompts: what it answers. Rows of a problem are rounds of different prompts where there are
            enough of them.
        rounds: how many to record at each temperature, or fewer where the answers end before.
        device: where the problems are.
    """

    def __init__(self, pair: Pair, prompts: Sequence[str], rounds: int, device: str) -> None:
        self._pair, self._prompts, self._wanted = pair, prompts, rounds
        self._recorded: dict[float, list[DraftBatch]] = {}
        head = pair.head
        weights = head.weights.map(lambda x: x.to(device))
        self._head = head.with_weights(head.w1.to(device), weights)

    def problems(self, rows: int, temperature: str, count: int | None = None) -> list[Problem]:
        """Problems of ``rows`` rows each; rounds are used again where there are too few.

        Args:
            rows: R.
            temperature: at which the pair decodes: a number, or ``"greedy"``: 0, and the drafts are
                sampled without a temperature tensor.
            count: of problems; ``None``: what the rounds suffice for, within limits.
        """
        value = 0.0 if temperature == GREEDY else float(temperature)
        if value not in self._recorded:
            self._recorded[value] = self._record(value)
        rounds = self._recorded[value]
        if count is None:
            count = max(LEAST_PROBLEMS, min(len(rounds) // rows, MOST_PROBLEMS))
        return [
            self._stack(
                [rounds[(k * rows + i) % len(rounds)] for i in range(rows)],
                None if temperature == GREEDY else value,
            )
            for k in range(count)
        ]

    def _record(self, temperature: float) -> list[DraftBatch]:
        """Rounds of one row each, neighbours of different prompts."""
        prompts = self._prompts[: self._wanted]
        share = -(-self._wanted // len(prompts))
        by_prompt = [self._decode(p, i, temperature, share) for i, p in enumerate(prompts)]
        return [batch for turn in zip_longest(*by_prompt) for batch in turn if batch is not None]

    def _decode(self, prompt: str, seed: int, temperature: float, most: int) -> list[DraftBatch]:
        pair = self._pair
        decoder = Decoder(
            pair.target,
            pair.drafter,
            pair.head,
            pair.prompt_ids(prompt),
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seeds=torch.tensor([seed]),
            stop=END_OF_TURN,
        )
        decoder.start()
        batches: list[DraftBatch] = []
        while len(batches) < most and not bool(decoder.done.all()):
            batch = decoder.round().batch
            assert batch is not None  # there is a drafter
            batches.append(batch)
        return batches

    def _stack(self, rounds: Sequence[DraftBatch], temperature: float | None) -> Problem:
        head, rows = self._head, len(rounds)
        temperatures = seeds = None
        if temperature is not None:
            temperatures = torch.full((rows,), temperature, device=head.device)
            # The round's own noise; a greedy round has none, and at T=0 it plays no part.
            own = [
                torch.zeros(1, dtype=torch.int64) if b.seeds is None else b.seeds for b in rounds
            ]
            seeds = torch.cat(own).to(head.device)
        batch = DraftBatch(
            torch.cat([b.base_logits for b in rounds]).to(head.device),
            torch.cat([b.anchors for b in rounds]).to(head.device),
            torch.cat([b.positions for b in rounds]).to(head.device),
            temperatures,
            seeds,
        )
        return Problem(head, batch, rows, head.vocab_size, logits_dtype(head, batch, None))
