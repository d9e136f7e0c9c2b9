"""Measuring configurations of the GPU engines on the GPU at hand, for ``fused-markov tune``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

from fused_markov.batch import DraftBatch
from fused_markov.bench.compare import compare
from fused_markov.bench.floor import floor_bytes
from fused_markov.bench.search import DoesNotRun, Outcome, Trial, Wrong, coordinates_of, search
from fused_markov.bench.table import NO_CACHE, step_of
from fused_markov.bench.timing import cold_copies, time_on_gpu
from fused_markov.engines import Plan
from fused_markov.engines.chips import chip_of
from fused_markov.engines.configs import OnePassConfig, PerStepConfig
from fused_markov.engines.gpu import TritonEngine
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.engines.tuned import key_of
from fused_markov.engines.valid import Config, row_limit
from fused_markov.head import MarkovHead
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import COUNT

C = TypeVar("C", OnePassConfig, PerStepConfig)
ANY_ROWS = 1 << 30
HEAVIEST = "fp64 noise, fp32 base logits, an id map and successors"
LEAST_US = 1e-3  # what a replay takes less than an empty one is no time


@dataclass(frozen=True)
class Shape:
    """What to tune for; ``max_rows`` as of the sampler that will serve, the rest as in `Spec`."""

    max_rows: int
    steps: int
    vocab: int
    rank: int
    dtype: torch.dtype
    temperature: str

    @property
    def cached(self) -> bool:
        return self.temperature != NO_CACHE

    def problem(self, rows: int) -> Problem:
        """A decode step whose right answer does not depend on how a library adds products."""
        return make_problem(
            rows,
            self.steps,
            self.vocab,
            self.rank,
            dtype=self.dtype,
            temperature=self.temperature,
            exact_sums=True,
            device="cuda",
        )


@dataclass(frozen=True)
class Bucket(Generic[C]):
    """A built-in configuration, and the fewest and the most rows that fall to it."""

    config: C
    low: int
    high: int


def buckets(configs: Sequence[C], max_rows: int, steps: int) -> list[Bucket[C]]:
    """The configurations that batches of up to ``max_rows`` rows of ``steps`` steps fall to."""
    found, low = [], 1
    for config in configs:
        each = steps if isinstance(config, OnePassConfig) else 1
        high = min(row_limit(config) // each, max_rows)
        if high >= low:
            found.append(Bucket(config, low, high))
            low = high + 1
    return found


def built_in(engine: str) -> tuple[Any, ...]:
    """The configurations that the library brings for this GPU."""
    chip = chip_of(torch.device("cuda"))
    return chip.one_pass if engine == OnePassEngine.name else chip.per_step


def tune(
    configs: Sequence[C],
    shape: Shape,
    on_trial: Callable[[Bucket[C], Trial[C]], None],
) -> Iterator[tuple[Bucket[C], Outcome[C]]]:
    """Search for each bucket of ``configs``; the fewest and the most rows of it count alike."""
    for bucket in buckets(configs, shape.max_rows, shape.steps):
        candidates = Candidates(shape, sorted({bucket.low, bucket.high}))
        outcome = search(
            bucket.config,
            coordinates_of(bucket.config, amd=torch.version.hip is not None),
            shape.vocab,
            candidates.measure,
            candidates.admit,
            partial(on_trial, bucket),
        )
        yield bucket, outcome


def tuned(configs: Sequence[C], found: Sequence[tuple[Bucket[C], Outcome[C]]]) -> list[C]:
    """``configs`` with the best of each bucket in its place."""
    best = {bucket.config: outcome.best for bucket, outcome in found}
    return [best.get(config, config) for config in configs]


def key_for(engine: str, shape: Shape) -> str:
    """The key under which the engine will look for what was tuned for ``shape``."""
    plan = Plan(shape.max_rows, shape.steps, torch.float32)
    return key_of(engine, shape.problem(1).head, plan)


class Candidates:
    """Checks and times configurations on decode steps of some numbers of rows, with a cold L2."""

    def __init__(self, shape: Shape, rows: Sequence[int]) -> None:
        self._cached = shape.cached
        self._copies = [_copies(shape.problem(count), shape.cached) for count in rows]

    def measure(self, config: Config) -> float:
        """Microseconds a step, the geometric mean over the numbers of rows.

        Raises:
            Wrong: it does not give what the reference gives.
            DoesNotRun: it does not compile or launch.
        """
        return statistics.geometric_mean(self._time(copies, config) for copies in self._copies)

    def admit(self, config: Config) -> None:
        """See that the kernels also fit where they take more than in what was measured.

        The engine uses a configuration for all heads and batches of the shape.

        Raises:
            DoesNotRun: they do not.
        """
        with _failures_told(f"where it must run too ({HEAVIEST}): "):
            head, batch, cache = _heaviest(self._copies[0][0])
            _engine(head, Plan(1, batch.steps, torch.float64), config).warmup(batch, cache)

    def _time(self, copies: Sequence[Problem], config: Config) -> float:
        batch = copies[0].batch
        plan = Plan(batch.rows, batch.steps, torch.float32)
        with _failures_told():
            engines = [_engine(problem.head, plan, config) for problem in copies]
            verdict = compare(copies[0], engines[0], cached=self._cached)
            if not verdict.ok:
                raise Wrong(f"{engines[0].name} against the reference: {verdict.problem}")
            pairs = zip(copies, engines, strict=True)
            timing = time_on_gpu([step_of(p, e, self._cached) for p, e in pairs])
        return max(timing.median_us, LEAST_US)


@contextmanager
def _failures_told(where: str = "") -> Iterator[None]:
    """Turn what Triton and the driver raise about a kernel into `DoesNotRun`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of the shape, not of a configuration
    except (RuntimeError, TritonError) as e:
        torch.cuda.synchronize()  # raises where a kernel has left the device unusable
        text = str(e).strip().splitlines() or [type(e).__name__]
        raise DoesNotRun(where + text[0]) from e


def _copies(problem: Problem, cached: bool) -> list[Problem]:
    count = cold_copies(floor_bytes(problem, cached=cached), problem.head.device)
    return [problem, *(problem.clone() for _ in range(count - 1))]


def _heaviest(problem: Problem) -> tuple[MarkovHead, DraftBatch, Tensor]:
    """Head, batch and cache of one row as in HEAVIEST: no kernels of the shape need more."""
    of, steps, device = problem.head, problem.batch.steps, problem.head.device
    known = torch.zeros(of.vocab_size, COUNT, dtype=torch.int32, device=device)
    ids = torch.arange(of.draft_vocab, device=device)
    head = MarkovHead(of.w1, of.weights, id_map=ids, successors=known)
    base = torch.zeros(1, steps, of.draft_vocab, device=device)
    zeros = torch.zeros(1, steps, dtype=torch.int64, device=device)
    temperature = torch.ones(1, device=device)
    batch = DraftBatch(base, zeros[:, 0], zeros, temperature, zeros[:, 0])
    return head, batch, torch.zeros_like(base)


def _engine(head: MarkovHead, plan: Plan, config: Config) -> TritonEngine:
    """An engine that runs ``config`` whatever the rows."""
    if isinstance(config, OnePassConfig):
        return OnePassEngine(head, plan, (replace(config, max_row_steps=ANY_ROWS),))
    return PerStepEngine(head, plan, (replace(config, max_rows=ANY_ROWS),))
