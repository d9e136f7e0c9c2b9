"""The benchmark itself: the loop and the engines on the same decode steps, checked, then timed."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_markov import reference
from fused_markov.batch import dtype_name
from fused_markov.bench.compare import Sampler, compare, usable_engines
from fused_markov.bench.floor import bytes_a_us, floor_bytes
from fused_markov.bench.timing import (
    Step,
    Timing,
    cold_copies,
    in_turns,
    time_on_cpu,
    time_on_gpu,
)
from fused_markov.engines import Plan
from fused_markov.head import MarkovHead
from fused_markov.problems import Problem, make_problem
from fused_markov.sampler import DraftSampler
from fused_markov.weights import PLAIN

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
    weights: str = PLAIN  # how W2 is stored, as `make_problem` takes it


def run(spec: Spec) -> Iterator[dict[str, Any]]:
    """One dict a line: the shape, the floor, and for each engine verdict and time.

    The time of an engine that fails its check is not measured.
    """

    def make(rows: int, temperature: str) -> list[Problem]:
        problem = make_problem(
            rows,
            spec.steps,
            spec.vocab,
            spec.rank,
            dtype=spec.dtype,
            temperature=temperature,
            device=spec.device,
            weights=spec.weights,
        )
        return [problem]

    return run_problems(spec, make)


def run_problems(
    spec: Spec, make: Callable[[int, str], Sequence[Problem]]
) -> Iterator[dict[str, Any]]:
    """`run` on problems of one's own; the shape is theirs, not that of ``spec``.

    Args:
        spec: what to measure.
        make: problems of a number of rows and a temperature, all of one head. Each is checked;
            passes are their mean, and the times are of the problems in turns.
    """
    speed = bytes_a_us(spec.device)
    for rows in spec.rows:
        for temperature in spec.temperatures:
            problems = make(rows, temperature)
            head, cached = problems[0].head, temperature != NO_CACHE
            size = floor_bytes(problems[0], cached=cached)
            yield {
                "device": spec.device,
                "rows": rows,
                "temperature": temperature,
                "steps": problems[0].batch.steps,
                "vocab": head.draft_vocab,
                "rank": head.rank,
                "dtype": dtype_name(head.dtype),
                "weights": head.weights.format,
                "cached": cached,
                "floor_bytes": size,
                "floor_us": size / speed,
                "engines": _measure(problems, spec, cached),
            }


def _measure(problems: Sequence[Problem], spec: Spec, cached: bool) -> dict[str, dict[str, Any]]:
    head, batch = problems[0].head, problems[0].batch
    plan = Plan(batch.rows, batch.steps, torch.float32)
    names = [n for n in spec.engines or usable_engines(head, plan) if n != LOOP]
    result = {name: _check(problems, _sampler(head, plan, name), cached) for name in names}
    right = [name for name in names if result[name]["ok"]]
    timings = _time(problems, plan, right, spec, cached)
    result[LOOP] = {"ok": True, "problem": "", "passes": plan.steps}
    for name, timing in timings.items():
        result[name] |= dataclasses.asdict(timing)
        result[name]["speed_up"] = timings[LOOP].median_us / timing.median_us
    return result


def _check(problems: Sequence[Problem], sampler: DraftSampler, cached: bool) -> dict[str, Any]:
    verdicts = [compare(problem, sampler, cached=cached) for problem in problems]
    wrong = [verdict.problem for verdict in verdicts if not verdict.ok]
    passes = statistics.mean(verdict.passes for verdict in verdicts)
    return {"ok": not wrong, "problem": wrong[0] if wrong else "", "passes": passes}


def _time(
    problems: Sequence[Problem], plan: Plan, names: list[str], spec: Spec, cached: bool
) -> dict[str, Timing]:
    head = problems[0].head
    if spec.device == "cpu":
        samplers = {name: _sampler(head, plan, name) for name in names}
        steps = {LOOP: in_turns([_loop_step(p, cached) for p in problems])}
        for name, sampler in samplers.items():
            steps[name] = in_turns([step_of(p, sampler, cached) for p in problems])
        return time_on_cpu(steps, seconds=spec.seconds, runs=3)
    from fused_markov.bench.gpu_loop import loop_step

    size = floor_bytes(problems[0], cached=cached)
    count = cold_copies(size, head.device)
    copies = [p.clone() for p in itertools.islice(itertools.cycle(problems), count)]
    timings = {LOOP: time_on_gpu([loop_step(p, cached) for p in copies])}
    for name in names:
        samplers_by_copy = [_sampler(p.head, plan, name) for p in copies]
        for sampler in samplers_by_copy:
            sampler.warmup()
        pairs = zip(copies, samplers_by_copy, strict=True)
        timings[name] = time_on_gpu([step_of(p, s, cached) for p, s in pairs])
    return timings


def _sampler(head: MarkovHead, plan: Plan, name: str) -> DraftSampler:
    return DraftSampler(head, max_rows=plan.max_rows, steps=plan.steps, engine=name)


def _loop_step(problem: Problem, cached: bool) -> Step:
    cache = problem.new_cache() if cached else None
    tokens = problem.new_tokens()
    return lambda: reference.sample(problem.head, problem.batch, cache, tokens)


def step_of(problem: Problem, sampler: Sampler, cached: bool) -> Step:
    """What to time: ``sampler`` on ``problem``, into outputs made once."""
    cache = problem.new_cache() if cached else None
    tokens = problem.new_tokens()
    return lambda: sampler.sample(problem.batch, cache, tokens)
