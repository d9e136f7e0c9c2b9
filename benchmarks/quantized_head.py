"""What a W2 in fewer bits does to the pair's drafts.

    python benchmarks/quantized_head.py --part paired --part decoded --prompts 16 --tokens 64

``paired``: the plain head decodes; wherever its drafts stood so far, the chance that each head's
next draft stands is computed from draft and target probabilities (greedy: whether it is the
target's token). All heads see the same contexts, so their difference is small beside its error.

``decoded``: every head decodes for itself; accepted drafts over rounds. After the first draft that
differs the texts do, and at T > 0 the draws: prompts vary more than heads.

Prompts are held out (`prompts.json`). Standard errors are from leaving out one prompt at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fused_markov as fm
from fused_markov.pair import decode
from fused_markov.pair.generate import Pair, generate
from fused_markov.quantize import BLOCKS

PROMPTS = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
PLAIN = "plain"
Counts = list[tuple[float, int]]  # what stood, of how many, prompt by prompt
Heads = dict[str, fm.MarkovHead]


def decoded(pair: Pair, heads: Heads, temperature: float, sizes: Any) -> dict[str, Counts]:
    """Accepted drafts, and rounds."""
    found: dict[str, Counts] = {}
    for name, head in heads.items():
        found[name] = []
        for prompt in PROMPTS[: sizes.prompts]:
            options = {"max_tokens": sizes.tokens, "temperature": temperature, "gated": False}
            report = generate(dataclasses.replace(pair, head=head), prompt, **options)
            found[name].append((sum(report.accepted_by_position) * report.rounds, report.rounds))
    return found


def paired(pair: Pair, heads: Heads, temperature: float, sizes: Any) -> dict[str, Counts]:
    """Chances to stand, and places where a draft was looked at."""
    found: dict[str, Counts] = {name: [] for name in heads}
    for prompt in PROMPTS[: sizes.prompts]:
        verified: list[tuple[Tensor, Tensor, Tensor]] = []
        rounds: list[decode.Round] = []

        options = {"max_tokens": sizes.tokens, "temperature": temperature, "gated": False}
        with mock.patch.object(decode, "verify", keeping(verified)):
            generate(pair, prompt, on_round=rounds.append, **options)
        batches = [r.batch for r in rounds if r.batch is not None]
        for name, head in heads.items():
            chances = [
                chance(head, batch, *seen, temperature)
                for batch, seen in zip(batches, verified, strict=True)
            ]
            stood = torch.cat(chances)
            found[name].append((float(stood.sum()), stood.numel()))
    return found


def keeping(kept: list[tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Any]:
    """The pair's `verify`, which keeps what it saw of drafts."""
    plain = decode.verify

    def verify(logits: Tensor, drafts: Tensor, *rest: Any) -> Any:
        verdict = plain(logits, drafts, *rest)
        if drafts.shape[1]:
            kept.append((logits, drafts, verdict.accepted))
        return verdict

    return verify


def chance(
    head: fm.MarkovHead,
    batch: fm.DraftBatch,
    target: Tensor,
    drafts: Tensor,
    accepted: Tensor,
    temperature: float,
) -> Tensor:
    """Of one row: the chance that a draft stands at each step that its predecessors stood to."""
    count = min(int(accepted) + 1, drafts.shape[1])
    prev = torch.cat([batch.anchors[:, None], drafts], dim=1)[0, :count]
    logits = (batch.base_logits[0, :count] + head.bias(prev)).float()
    target = target[0, :count].float()
    if temperature == 0:
        return (logits.argmax(1) == target.argmax(1)).float()
    p, q = (torch.softmax(x / temperature, dim=1) for x in (target, logits))
    return torch.minimum(p, q).sum(1)


def jackknife(found: Counts, less: Counts) -> tuple[float, float]:
    """The ratio of all prompts less that of ``less`` (empty: 0), and its standard error."""

    def ratio(counts: Counts, out: int | None) -> float:
        kept = [c for i, c in enumerate(counts) if i != out]
        return sum(c[0] for c in kept) / sum(c[1] for c in kept) if kept else 0.0

    def of(out: int | None) -> float:
        return ratio(found, out) - ratio(less, out)

    size = len(found)
    without = torch.tensor([of(i) for i in range(size)]).double()
    variance = (size - 1) / size * ((without - without.mean()) ** 2).sum()
    return of(None), float(variance.sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"paired": paired, "decoded": decoded}
    parser.add_argument("--part", action="append", choices=parts, help="default: paired")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    pair = Pair.load()
    heads = {PLAIN: pair.head} | {name: fm.quantize_head(pair.head, name) for name in BLOCKS}
    for part in args.part or ["paired"]:
        for temperature in (0.0, 0.8):
            found = parts[part](pair, heads, temperature, args)
            for name, counts in found.items():
                value, error = jackknife(counts, [])
                change, change_error = jackknife(counts, found[PLAIN])
                line = {
                    "part": part,
                    "temperature": temperature,
                    "weights": name,
                    "mean": round(value, 5),
                    "standard_error": round(error, 5),
                    "change": round(change, 5),
                    "change_standard_error": round(change_error, 5),
                    "of": sum(count for _, count in counts),
                    "w2_bytes": heads[name].weights.nbytes(),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
