"""The pair's figures: same tokens, same law, accepted drafts, speed, passes.

    python benchmarks/pair.py --part greedy --part law --part accepted --part speed --part passes

Every part prints what it found and whether that is what it should be; the exit status is 1 if not.
`--quick` makes each part small enough for a test. Prompts are held out: the target wrote them, like
all of the drafter's training text, at a seed that training does not use (`prompts.json`).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy.stats
import torch

import fused_markov as fm
from fused_markov import reference
from fused_markov.pair.decode import NO_TOKEN, Decoder, Round
from fused_markov.pair.generate import Pair, Report, generate

PROMPTS = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
LAW_TOKENS = 3
NEVER = 1e-4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much each part does."""

    prompts: int = 20
    tokens: int = 128
    seeds: int = 2000
    batch: int = 100
    speed_prompts: int = 10
    row_steps: int = 10_000


QUICK = Sizes(prompts=1, tokens=24, seeds=50, batch=50, speed_prompts=1, row_steps=150)


def greedy(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """(a) Greedy decoding with and without drafts gives the same tokens."""
    different = []
    for prompt in PROMPTS[: sizes.prompts]:
        options = {"max_tokens": sizes.tokens, "stop": None}
        drafted = generate(pair, prompt, **options).tokens
        if drafted != generate(pair, prompt, draft=False, **options).tokens:
            different.append(prompt)
    return {"prompts": sizes.prompts, "different": different, "ok": not different}


def law(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """(b) At T=1 the first tokens with drafts and without are samples of one law.

    Chi-square of homogeneity for each of the first three tokens and for pairs of neighbours; the
    rarer outcomes are pooled.
    """
    ids = pair.prompt_ids(PROMPTS[0])
    samples = {draft: _first_tokens(pair, ids, draft, sizes) for draft in (True, False)}
    pvalues = {}
    for name, columns in {"1": [0], "2": [1], "3": [2], "1-2": [0, 1], "1-2-3": [0, 1, 2]}.items():
        counts = [
            collections.Counter(map(tuple, samples[draft][:, columns].tolist()))
            for draft in (True, False)
        ]
        pvalues[name] = _homogeneity(*counts)
    least = min(pvalues.values())
    return {"seeds": sizes.seeds, "pvalues": pvalues, "ok": least > NEVER}


def _first_tokens(pair: Pair, ids: list[int], draft: bool, sizes: Sizes) -> torch.Tensor:
    parts = []
    # Seeds of the two samples are disjoint: shared ones would make them too alike.
    first = 0 if draft else sizes.seeds
    for start in range(first, first + sizes.seeds, sizes.batch):
        decoder = _decoder(
            pair, ids, draft, seeds=torch.arange(start, start + sizes.batch), max_tokens=LAW_TOKENS
        )
        rounds = [decoder.start()]
        while not bool(decoder.done.all()):
            rounds.append(decoder.round())
        tokens = torch.cat([r.tokens for r in rounds], 1)
        parts += [[t for t in row if t != NO_TOKEN] for row in tokens.tolist()]
    return torch.tensor(parts)


def _decoder(pair: Pair, ids: list[int], draft: bool, **options: Any) -> Decoder:
    drafter, head = (pair.drafter, pair.head) if draft else (None, None)
    return Decoder(pair.target, drafter, head, ids, temperature=1.0, **options)


def _homogeneity(a: collections.Counter[Any], b: collections.Counter[Any]) -> float:
    common = [key for key in {*a, *b} if a[key] + b[key] >= 10]
    table = [[c[key] for key in common] for c in (a, b)]
    for row, counter in zip(table, (a, b), strict=True):
        row.append(counter.total() - sum(row))
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    if len(columns) < 2:
        return 1.0
    return float(scipy.stats.chi2_contingency(list(zip(*columns, strict=True))).pvalue)


def accepted(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """(c) Accepted drafts a round, with the head and with the head switched off."""
    off = fm.MarkovHead(pair.head.w1, torch.zeros_like(pair.head.w2))
    result: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        for name, head in (("with head", pair.head), ("without", off)):
            reports = _reports(dataclasses.replace(pair, head=head), sizes, temperature)
            rounds = sum(r.rounds for r in reports)
            steps = len(reports[0].accepted_by_position)
            stood = [
                sum(r.accepted_by_position[s] * r.rounds for r in reports) for s in range(steps)
            ]
            result[f"T={temperature} {name}"] = {
                "rounds": rounds,
                "accepted_per_round": sum(stood) / rounds,
                "accepted_by_position": [count / rounds for count in stood],
            }
    means = {name: case["accepted_per_round"] for name, case in result.items()}
    result["ok"] = all(means[f"T={t} with head"] > means[f"T={t} without"] for t in (0.0, 0.8))
    return result


def _reports(pair: Pair, sizes: Sizes, temperature: float) -> list[Report]:
    return [
        generate(pair, prompt, max_tokens=sizes.tokens, temperature=temperature, gated=False)
        for prompt in PROMPTS[: sizes.prompts]
    ]


def speed(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """(d) Tokens a second with drafts by those without, prompt by prompt, in turns."""
    ratios = []
    rates: dict[str, list[float]] = {"with": [], "without": []}
    generate(pair, PROMPTS[0], max_tokens=8)  # warm
    for prompt in PROMPTS[: sizes.speed_prompts]:
        a = generate(pair, prompt, max_tokens=sizes.tokens).tokens_per_second
        b = generate(pair, prompt, max_tokens=sizes.tokens, draft=False).tokens_per_second
        rates["with"].append(a)
        rates["without"].append(b)
        ratios.append(a / b if b else 1.0)
    median = statistics.median(ratios)
    return {"ratios": ratios, "median": median, "tokens_per_second": rates, "ok": median >= 1.2}


def passes(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """(e) Passes over W2 on the pair's own batches, and its tokens against the reference's."""
    histogram: collections.Counter[int] = collections.Counter()
    row_steps = wrong = 0
    for turn, prompt in enumerate(PROMPTS * 1000):
        rounds: list[Round] = []
        temperature = (0.0, 1.0)[turn % 2]
        options = {"max_tokens": sizes.tokens, "temperature": temperature, "seed": turn}
        engine = generate(pair, prompt, on_round=rounds.append, **options).engine
        head = pair.head
        sampler = fm.DraftSampler(head, max_rows=1, steps=pair.drafter.config.block_size)
        for r in rounds:
            assert r.batch is not None
            dtype = torch.promote_types(r.batch.base_logits.dtype, head.dtype)
            caches = [
                None
                if r.batch.greedy
                else torch.zeros(1, r.batch.steps, head.vocab_size, dtype=dtype)
                for _ in range(2)
            ]
            got = sampler.sample(r.batch, caches[0])
            want = reference.sample(head, r.batch, caches[1])
            histogram[got.passes] += 1
            row_steps += r.batch.rows * r.batch.steps
            wrong += int((got.tokens != want.tokens).sum())
            if caches[0] is not None and caches[1] is not None:
                wrong += int((caches[0] != caches[1]).sum())
        if row_steps >= sizes.row_steps:
            break
    mean = sum(count * times for count, times in histogram.items()) / histogram.total()
    return {
        "engine": engine,
        "histogram": dict(sorted(histogram.items())),
        "mean": mean,
        "row_steps": row_steps,
        "different": wrong,
        "ok": not wrong,
    }


PARTS: dict[str, Callable[[Pair, Sizes], dict[str, Any]]] = {
    f.__name__: f for f in (greedy, law, accepted, speed, passes)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--json", default=None, help="file to write the results to")
    args = parser.parse_args()
    pair = Pair.load(args.drafter)
    results = {}
    for name in args.part or PARTS:
        results[name] = PARTS[name](pair, QUICK if args.quick else Sizes())
        print(name, json.dumps(results[name], indent=2), flush=True)
    if args.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), **results}
        Path(args.json).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
