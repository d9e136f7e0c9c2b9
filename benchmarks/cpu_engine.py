"""The CPU engine against the reference loop, side by side in one process.

    python benchmarks/cpu_engine.py [--rows 1 4 16 64] [--repeats 9] [--json FILE]

Each line is one shape. Both sides must first agree on every token and on the cache to the bit;
where they do not, no time is printed and the exit status is 1. Runs of the two alternate, so that
whatever else the machine does meets both; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fused_markov import DraftSampler, reference
from fused_markov.problems import Problem, make_problem


def agree(problem: Problem, sampler: DraftSampler) -> tuple[bool, int]:
    """Whether engine and loop give the same tokens and cache, and the engine's passes."""
    caches = problem.new_cache(), problem.new_cache()
    expected = reference.sample(problem.head, problem.batch, caches[0])
    got = sampler.sample(problem.batch, caches[1])
    bits = torch.int32 if caches[0].element_size() == 4 else torch.int16
    same = torch.equal(got.tokens, expected.tokens)
    return same and torch.equal(caches[0].view(bits), caches[1].view(bits)), got.passes


def alternate(sides: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median milliseconds of each side, run in turn."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, spent in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            spent.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(spent) for spent in times]


def measure(rows: int, temperature: str | float, args: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    problem = make_problem(
        rows, args.steps, args.vocab, args.rank, dtype=dtype, temperature=temperature
    )
    sampler = DraftSampler(problem.head, max_rows=rows, steps=args.steps, engine="cpu")
    same, passes = agree(problem, sampler)
    result: dict[str, Any] = {"rows": rows, "temperature": temperature, "passes": passes}
    if not same:
        return {**result, "agree": False}
    cache = problem.new_cache()
    loop, engine = alternate(
        [
            lambda: reference.sample(problem.head, problem.batch, cache),
            lambda: sampler.sample(problem.batch, cache),
        ],
        args.repeats,
    )
    return {**result, "agree": True, "loop_ms": loop, "engine_ms": engine, "times": loop / engine}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    print(
        f"V={args.vocab} r={args.rank} S={args.steps} {args.dtype}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, medians of {args.repeats}"
    )
    print(f"{'R':>4} {'T':>7} {'passes':>6} {'loop ms':>9} {'engine ms':>9} {'times':>6}")
    results = []
    for rows in args.rows:
        for temperature in ("greedy", 1.0):
            r = measure(rows, temperature, args)
            results.append(r)
            figures = (
                f"{r['loop_ms']:9.1f} {r['engine_ms']:9.1f} {r['times']:6.2f}"
                if r["agree"]
                else "DIFFERS from the reference"
            )
            print(f"{rows:>4} {temperature:>7} {r['passes']:>6} {figures}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    return 0 if all(r["agree"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
