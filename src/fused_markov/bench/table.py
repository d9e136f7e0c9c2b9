"""The benchmark itself: the loop and the engines on the same decode steps, checked, then timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fused_markov import reference
from fused_markov.batch import DraftBatch
from fused_markov.bench.compare import compare, usable_engines
from fused_markov.bench.floor import bytes_a_us, floor_bytes
from fused_markov.bench.timing import Step, Timing, cold_copies, time_on_cpu, time_on_gpu
from fused_markov.engines import Plan
from fused_markov.head import MarkovHead
from fused_markov.problems import Problem, make_problem
from fused_markov.sampler import DraftSampler

LOOP = "reference"
NO_CACHE = "greedy"


@dataclass(frozen=True)
class Spec:
    """What to measure: the cross product of ``rows`` and ``temperatures`` at one head's shape.

    A temperature of ``"greedy"`` means no temperature tensor and no cache.
    """

    rows: tuple[int, ...]
    temperatures: tuple[str, ...]
    steps: int = 5
    vocab: int = 129280
    rank: int = 256
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    engines: tuple[str, ...] = ()  # empty: all that can run
    seconds: float = 2.0  # a line, on the CPU


def run(spec: Spec) -> Iterator[dict[str, Any]]:
    """One dict a line: the shape, the floor, and for each engine verdict and time.

    The time of an engine that fails its check is not measured.
    """
    speed = bytes_a_us(spec.device)
    for rows in spec.rows:
        for temperature in spec.temperatures:
            problem = make_problem(
                rows,
                spec.steps,
                spec.vocab,
                spec.rank,
                dtype=spec.dtype,
                temperature=temperature,
                device=spec.device,
            )
            cached = temperature != NO_CACHE
            size = floor_bytes(problem, cached=cached)
            yield {
                "device": spec.device,
                "rows": rows,
                "temperature": temperature,
                "steps": spec.steps,
                "vocab": spec.vocab,
                "rank": spec.rank,
                "dtype": str(spec.dtype).removeprefix("torch."),
                "cached": cached,
                "floor_bytes": size,
                "floor_us": size / speed,
                "engines": _measure(problem, spec, cached),
            }


def _measure(problem: Problem, spec: Spec, cached: bool) -> dict[str, dict[str, Any]]:
    plan = Plan(problem.batch.rows, problem.batch.steps, torch.float32)
    names = [n for n in spec.engines or usable_engines(problem.head, plan) if n != LOOP]
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        verdict = compare(problem, _sampler(problem.head, plan, name), cached=cached)
        result[name] = {"ok": verdict.ok, "problem": verdict.problem, "passes": verdict.passes}
    right = [name for name in names if result[name]["ok"]]
    timings = _time(problem, plan, right, spec, cached)
    result[LOOP] = {"ok": True, "problem": "", "passes": spec.steps}
    for name, timing in timings.items():
        result[name] |= dataclasses.asdict(timing)
        result[name]["speed_up"] = timings[LOOP].median_us / timing.median_us
    return result


def _time(
    problem: Problem, plan: Plan, names: list[str], spec: Spec, cached: bool
) -> dict[str, Timing]:
    if spec.device == "cpu":
        samplers = {name: _sampler(problem.head, plan, name) for name in names}
        steps = {LOOP: _loop_step(problem, cached)}
        steps |= {name: _step(problem, s, cached) for name, s in samplers.items()}
        return time_on_cpu(steps, seconds=spec.seconds, runs=3)
    from fused_markov.bench.gpu_loop import loop_step

    size = floor_bytes(problem, cached=cached)
    problems = [_clone(problem) for _ in range(cold_copies(size, problem.head.device))]
    timings = {LOOP: time_on_gpu([loop_step(p, cached) for p in problems])}
    for name in names:
        samplers_by_copy = [_sampler(p.head, plan, name) for p in problems]
        for sampler in samplers_by_copy:
            sampler.warmup()
        pairs = zip(problems, samplers_by_copy, strict=True)
        timings[name] = time_on_gpu([_step(p, s, cached) for p, s in pairs])
    return timings


def _sampler(head: MarkovHead, plan: Plan, name: str) -> DraftSampler:
    return DraftSampler(head, max_rows=plan.max_rows, steps=plan.steps, engine=name)


def _loop_step(problem: Problem, cached: bool) -> Step:
    cache = problem.new_cache() if cached else None
    tokens = problem.new_tokens()
    return lambda: reference.sample(problem.head, problem.batch, cache, tokens)


def _step(problem: Problem, sampler: DraftSampler, cached: bool) -> Step:
    cache = problem.new_cache() if cached else None
    tokens = problem.new_tokens()
    return lambda: sampler.sample(problem.batch, cache, tokens)


def _clone(problem: Problem) -> Problem:
    """The same problem in memory of its own."""
    head, batch = problem.head, problem.batch
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(DraftBatch)}
    copied = {name: t.clone() for name, t in fields.items() if t is not None}
    twin = MarkovHead(head.w1.clone(), head.w2.clone(), vocab_size=head.vocab_size)
    return dataclasses.replace(problem, head=twin, batch=DraftBatch(**copied))
