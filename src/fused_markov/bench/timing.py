"""How long one decode step takes: the median of many runs, on a CPU or in CUDA graphs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fused_markov.engines.chips import last_cache_bytes

Step = Callable[[], object]

# A graph is replayed long enough that the clock and the events around it do not matter.
REPLAYS = 20
STEPS_PER_GRAPH = 24


@dataclass(frozen=True)
class Timing:
    """Microseconds a step: the median, the fastest, and how many samples they are of."""

    median_us: float
    best_us: float
    samples: int


def time_on_cpu(
    steps: dict[str, Step], *, seconds: float = 1.0, runs: int = 5
) -> dict[str, Timing]:
    """Time several ways of doing the same, in turns, so that a slow moment hits all of them.

    Args:
        steps: name -> what to time. Each is run once before the clock starts.
        seconds: how long to go on, all together; at least ``runs`` rounds are made.
    """
    for step in steps.values():
        step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < runs or time.perf_counter() < end:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            samples[name].append((time.perf_counter() - start) * 1e6)
        rounds += 1
    return {name: _timing(values) for name, values in samples.items()}


def in_turns(steps: Sequence[Step]) -> Step:
    """One step that is another of ``steps`` at each call."""
    if len(steps) == 1:
        return steps[0]
    turns = itertools.cycle(steps)
    return lambda: next(turns)()


def time_on_gpu(copies: Sequence[Step], *, rounds: int = 7) -> Timing:
    """Time a step inside a CUDA graph with a cold L2, less what an empty graph takes.

    Args:
        copies: the same step over different weights and inputs, together larger than the L2, so
            that none finds its own in it. They are run in rotation, ``STEPS_PER_GRAPH`` in a graph.
    """
    count = max(1, STEPS_PER_GRAPH // len(copies)) * len(copies)
    graph = _capture([copies[i % len(copies)] for i in range(count)])
    scratch = torch.zeros(1, device="cuda")
    empty = _capture([lambda: scratch.add_(0)])
    floor_us = min(_replay_us(empty) for _ in range(rounds))
    return _timing([max(0.0, _replay_us(graph) - floor_us) / count for _ in range(rounds)])


def cold_copies(bytes_a_copy: int, device: torch.device) -> int:
    """How many copies of a step's tensors it takes to fill the last cache three times over."""
    return max(2, -(-3 * last_cache_bytes(device) // max(1, bytes_a_copy)))


def _capture(steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and fills the allocator, before the capture
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a replay, of ``REPLAYS`` back to back."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / REPLAYS


def _timing(samples: list[float]) -> Timing:
    return Timing(statistics.median(samples), min(samples), len(samples))
