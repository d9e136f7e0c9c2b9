"""What each feature costs beside the plain head, on one GPU.

    python benchmarks/features.py [--rows 1 64] [--only fp8 rnn] [--engines one_pass per_step]

Every feature runs on the same base logits, of exact sums, in one process: first against the
reference (tokens, and the cache within a last place), then timed in CUDA graphs with a cold L2,
less an empty replay. A feature whose check fails gets no time. One JSON line a feature, engine and
number of rows, with the bytes that such a step must move.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import fused_markov as fm
from fused_markov.bench.compare import compare
from fused_markov.bench.floor import floor_bytes
from fused_markov.bench.table import step_of
from fused_markov.bench.timing import cold_copies, time_on_gpu
from fused_markov.problem_features import with_successors, with_transform
from fused_markov.problem_heads import with_heads
from fused_markov.problems import Problem, make_problem
from fused_markov.quantize import quantize
from fused_markov.successors import COUNT
from fused_markov.transforms import scaled_soft_cap

Change = Callable[[Problem], Problem]


def _scaled(problem: Problem) -> Problem:
    head = problem.head
    return replace(problem, head=fm.MarkovHead(head.w1, head.w2, scale=0.5))


def _stored(name: str) -> Change:
    """W2 in fewer bits, with scales that are powers of two: sums stay exact."""

    def change(problem: Problem) -> Problem:
        head = problem.head
        stored = quantize(head.w2, name, powers=True)
        return replace(problem, head=head.with_weights(head.w1, stored))

    return change


def _heads(**options: Any) -> Change:
    return lambda p: with_heads(p, exact=True, hidden_size=2048, **options)


def _batch(**values: Callable[[Problem], torch.Tensor | None]) -> Change:
    def change(problem: Problem) -> Problem:
        made = {name: make(problem) for name, make in values.items()}
        return replace(problem, batch=replace(problem.batch, **made))

    return change


def _by_slot(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Problem], torch.Tensor]:
    return lambda p: torch.full((p.num_slots,), value, dtype=dtype, device=p.head.device)


def _bans(problem: Problem) -> torch.Tensor:
    """One token of every 32 is banned."""
    shape = (problem.num_slots, -(-problem.head.vocab_size // 32))
    return torch.full(shape, ~1, dtype=torch.int32, device=problem.head.device)


def _fp32_cache(problem: Problem) -> Problem:
    return replace(problem, cache_dtype=torch.float32)


# name -> what it makes of the plain problem, and what the sampler is told. The plain one is first.
FEATURES: dict[str, tuple[Change, dict[str, Any]]] = {
    "plain": (lambda p: p, {}),
    "greedy": (_batch(temperature=lambda p: None, seeds=lambda p: None), {}),
    "successors": (lambda p: with_successors(p, COUNT), {}),
    "fp8": (_stored("fp8"), {}),
    "fp8-block": (_stored("fp8-block"), {}),
    "int8": (_stored("int8"), {}),
    "nvfp4": (_stored("nvfp4"), {}),
    "gated": (_heads(variant="gated"), {}),
    "rnn": (_heads(variant="rnn"), {}),
    "confidence": (_heads(confidence="hidden"), {}),
    "confidence-markov": (_heads(confidence="markov"), {}),
    "bans": (_batch(bans=_bans), {}),
    "transform": (lambda p: with_transform(p, scaled_soft_cap(0.5, None)), {}),
    "scale": (_scaled, {}),
    "top-k": (_batch(top_k=_by_slot(50, torch.int32)), {}),
    "top-p": (_batch(top_p=_by_slot(0.95)), {}),
    "min-p": (_batch(min_p=_by_slot(0.02)), {}),
    "draft-topk": (lambda p: p, {"draft_topk": 64}),
    "vllm-0.25": (_fp32_cache, {"noise_stream": "vllm-0.25", "cache_convention": "tempered"}),
    "vllm-0.29": (lambda p: p, {"noise_stream": "vllm-0.29"}),
    "vllm-0.31": (lambda p: p, {"noise_stream": "vllm-0.31"}),
    "fp64-noise": (lambda p: p, {"noise_dtype": torch.float64}),
}


def problems(rows: int, vocab: int, rank: int, steps: int) -> list[Problem]:
    """Enough plain problems of one shape that none finds its own in the L2."""

    def make(seed: int) -> Problem:
        shape = (rows, steps, vocab, rank)
        return make_problem(*shape, temperature=1.0, exact_sums=True, seed=seed, device="cuda")

    first = make(0)
    count = cold_copies(floor_bytes(first, cached=True) // 3, first.head.device)
    return [first, *(make(seed) for seed in range(1, count))]


def measure(name: str, engine: str, plain: list[Problem]) -> dict[str, Any]:
    """Check a feature on one problem, then time it on all."""
    change, options = FEATURES[name]
    made = [change(p) for p in plain]
    batch, cached = made[0].batch, name != "greedy"
    samplers = [
        fm.DraftSampler(p.head, max_rows=batch.rows, steps=batch.steps, engine=engine, **options)
        for p in made
    ]
    verdict = compare(made[0], samplers[0], cached=cached)
    line = {
        "feature": name,
        "engine": engine,
        "rows": batch.rows,
        "passes": verdict.passes,
        "problem": verdict.problem,
        "floor_bytes": floor_bytes(made[0], cached=cached),
    }
    if verdict.ok:
        steps = [step_of(p, s, cached) for p, s in zip(made, samplers, strict=True)]
        line["us"] = round(time_on_gpu(steps, rounds=5).median_us, 1)
    return line


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for rows in options.rows:
        plain = problems(rows, options.vocab, options.rank, options.steps)
        for engine in options.engines:
            beside = None
            for name in ["plain", *(n for n in options.only if n != "plain")]:
                try:
                    line = measure(name, engine, plain)
                except fm.FusedMarkovError as error:
                    line = {"feature": name, "engine": engine, "rows": rows, "problem": str(error)}
                beside = line.get("us") if name == "plain" else beside
                if beside and "us" in line:
                    line["times_plain"] = round(line["us"] / beside, 2)
                yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--only", nargs="+", default=list(FEATURES), choices=list(FEATURES))
    parser.add_argument("--engines", nargs="+", default=["one_pass"])
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    wrong = 0
    for line in run(parser.parse_args()):
        wrong += bool(line["problem"])
        print(json.dumps(line), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
