"""Accepted drafts a round of the pair with its W2 as it is and in fewer bits.

    python benchmarks/quantized_head.py --prompts 16 --tokens 96

Prompts are held out (`prompts.json`). A line's figure is accepted drafts over rounds, all prompts
together; its standard error, and that of the difference to the plain head, are from leaving out one
prompt at a time, so that what prompts differ by cancels in the difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

import fused_markov as fm
from fused_markov.pair.generate import Pair, generate
from fused_markov.quantize import BLOCKS

PROMPTS = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
PLAIN = "plain"
Counts = list[tuple[float, int]]  # accepted drafts and rounds of each prompt


def counts(pair: Pair, args: argparse.Namespace, temperature: float) -> Counts:
    found = []
    for prompt in PROMPTS[: args.prompts]:
        report = generate(
            pair, prompt, max_tokens=args.tokens, temperature=temperature, gated=False
        )
        found.append((sum(report.accepted_by_position) * report.rounds, report.rounds))
    return found


def jackknife(found: Counts, less: Counts | None = None, *, size: int) -> tuple[float, float]:
    """Accepted drafts a round, less those of ``less``, and the standard error."""

    def of(chosen: list[int]) -> float:
        return rate(found, chosen) - (rate(less, chosen) if less else 0.0)

    every = list(range(size))
    without = torch.tensor([of([i for i in every if i != out]) for out in every]).double()
    variance = (size - 1) / size * ((without - without.mean()) ** 2).sum()
    return of(every), float(variance.sqrt())


def rate(found: Counts, chosen: list[int]) -> float:
    return sum(found[i][0] for i in chosen) / sum(found[i][1] for i in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    pair = Pair.load()
    heads = {PLAIN: pair.head} | {name: fm.quantize_head(pair.head, name) for name in BLOCKS}
    for temperature in (0.0, 0.8):
        plain: Counts = []
        for name, head in heads.items():
            found = counts(dataclasses.replace(pair, head=head), args, temperature)
            plain = plain or found
            value, error = jackknife(found, size=len(found))
            change, change_error = jackknife(found, plain, size=len(found))
            line = {
                "temperature": temperature,
                "weights": name,
                "accepted_per_round": round(value, 4),
                "standard_error": round(error, 4),
                "change": round(change, 4),
                "change_standard_error": round(change_error, 4),
                "rounds": sum(rounds for _, rounds in found),
                "w2_bytes": head.weights.nbytes(),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
