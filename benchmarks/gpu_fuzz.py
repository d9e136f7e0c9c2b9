"""Random small problems: the GPU engines against the reference, to the bit.

    python benchmarks/gpu_fuzz.py --problems 10000 --seconds 100
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python benchmarks/gpu_fuzz.py --problems 30 --heads 1

Shapes come from a short table, so that little is compiled; rows, contents, strides, padding,
not-a-numbers, ties and temperatures are drawn. Weights add up exactly in fp32 in whatever order, so
every difference in the cache is a fault. A token may differ where two scores are within the
logarithms' last places of each other: for each such difference both scores are computed in fp64,
and near-ties are counted apart. Exits with 1 on any other difference, or if nothing was compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch
from fuzzing import WILD, differences, make_wild
from torch import Tensor

import fused_markov as fm
from fused_markov.successors import find_successors

ENGINES = ("one_pass", "per_step")


@dataclass(frozen=True)
class Kind:
    """What compiles apart: one line of the table."""

    vocab: int
    steps: int
    rank: int
    max_rows: int
    dtype: torch.dtype = torch.bfloat16
    draft: int = 0  # candidates of a reduced vocabulary
    extra: int = 0  # cache columns past the vocabulary; draft-wide if negative
    noise: bool = True
    cached: bool = True
    fp64: bool = False
    aligned: bool = True  # base rows at multiples of 8 elements
    successors: int = 0  # a token, known to the head

    @property
    def candidates(self) -> int:
        return self.draft or self.vocab

    @property
    def cache_width(self) -> int:
        return self.draft if self.extra < 0 else self.vocab + self.extra


TABLE = (
    Kind(1024, 5, 64, 3),
    Kind(1024, 5, 64, 12, successors=20),
    Kind(900, 4, 32, 5, draft=333, aligned=False, successors=48),
    Kind(1100, 3, 64, 3, noise=False, cached=False, successors=7),
    Kind(2001, 4, 24, 16, aligned=False),
    Kind(5000, 5, 256, 40),
    Kind(1000, 7, 128, 2, noise=False, cached=False),
    Kind(3000, 3, 64, 21, noise=False, aligned=False),
    Kind(513, 2, 32, 8, dtype=torch.float32, aligned=False),
    Kind(1500, 3, 32, 5, dtype=torch.float16, extra=7),
    Kind(1200, 4, 64, 4, draft=300),
    Kind(1200, 3, 64, 12, draft=299, extra=-1, aligned=False),
    Kind(800, 2, 16, 8, fp64=True),
    Kind(7, 3, 16, 5, aligned=False),
    Kind(4096, 16, 64, 4, cached=False),
)


@dataclass(frozen=True)
class Problem:
    head: fm.MarkovHead
    batch: fm.DraftBatch
    cache: Tensor | None


class Drawer:
    """Heads, samplers and problems of one kind."""

    def __init__(self, kind: Kind, gen: torch.Generator, heads: int) -> None:
        self.kind, self._gen = kind, gen
        self._heads = [self._head() for _ in range(heads)]
        self._noise_dtype = torch.float64 if kind.fp64 else torch.float32
        self._samplers = [
            [
                fm.DraftSampler(
                    head,
                    max_rows=kind.max_rows,
                    steps=kind.steps,
                    engine=engine,
                    noise_dtype=self._noise_dtype,
                )
                for engine in ENGINES
            ]
            for head in self._heads
        ]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._gen, device=self._gen.device)

    def _randint(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._gen, device=self._gen.device)

    def _choice(self, count: int) -> int:
        return int(torch.randint(0, count, (1,)))

    def _head(self) -> fm.MarkovHead:
        kind = self.kind
        strength = (0.0, 4.0, 16.0, 64.0)[self._choice(4)]
        w1 = (self._randn(kind.vocab, kind.rank) * 8).round().clamp(-32, 32) / 8
        w2 = self._randn(kind.candidates, kind.rank) * strength / kind.rank**0.5
        w2 = (w2 * 8).round().clamp(-64, 64) / 64
        ids = None
        if kind.draft:
            ids = torch.randperm(kind.vocab, generator=self._gen, device=self._gen.device)
            ids = ids[: kind.draft]
        head = fm.MarkovHead(w1.to(kind.dtype), w2.to(kind.dtype), id_map=ids)
        if kind.successors:
            head.successors = find_successors(head, kind.successors)
        return head

    def draw(self) -> tuple[Problem, list[fm.DraftSampler]]:
        kind, index = self.kind, self._choice(len(self._heads))
        rows, slots_count = 1 + self._choice(kind.max_rows), kind.max_rows + 2
        temperature = seeds = cache = None
        if kind.noise:
            values = torch.tensor([0.0, 1.0, 0.7, 0.25, 3.0], device=self._gen.device)
            temperature = values[self._randint(0, 5, slots_count)]
            seeds = self._randint(-(2**63), 2**63 - 1, slots_count)
        if kind.cached:
            shape = (slots_count, kind.steps, kind.cache_width)
            cache = torch.full(shape, 12345.0, dtype=kind.dtype, device=self._gen.device)
        batch = fm.DraftBatch(
            self._base(rows),
            self._randint(0, kind.vocab, rows),
            self._randint(0, 1 << 30, rows, kind.steps),
            temperature,
            seeds,
            self._slots(rows, slots_count),
        )
        return Problem(self._heads[index], batch, cache), self._samplers[index]

    def _base(self, rows: int) -> Tensor:
        kind = self.kind
        step = kind.candidates + (-kind.candidates % 8 + 8 if kind.aligned else 3)
        home = self._randn(rows, kind.steps, step) * (0.5, 2.0, 6.0)[self._choice(3)]
        wild = self._choice(WILD)
        make_wild(home, wild, wild == 4 and bool(self._choice(2)))
        home = home.to(kind.dtype)
        if self._choice(2):  # step-major
            home = home.transpose(0, 1).contiguous().transpose(0, 1)
        first = 0 if kind.aligned else 3
        return home[:, :, first : first + kind.candidates]

    def _slots(self, rows: int, count: int) -> Tensor | None:
        form = self._choice(4)
        if form == 0:
            return None
        slots = torch.randperm(count, generator=self._gen, device=self._gen.device)[:rows]
        if form == 1:
            return slots
        padding = self._randint(0, 4, rows) == 0
        if form == 2:
            return torch.where(padding, -1, slots)
        live = self._randint(0, self.kind.steps + 1, rows, 1)
        steps = torch.arange(self.kind.steps, device=self._gen.device)
        return torch.where(steps < live, slots.unsqueeze(1), -1)

    def warmup(self, problems: int) -> None:
        for _ in range(problems):
            problem, samplers = self.draw()
            for sampler in samplers:
                sampler.warmup(problem.batch, problem.cache)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=100.0, help="after compiling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    # Drawn once: a head and its engines cost more than a problem.
    parser.add_argument("--heads", type=int, default=4, help="heads of each shape")
    parser.add_argument("--show", type=int, default=20, help="differences to print")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    gen = torch.Generator(device=arguments.device).manual_seed(arguments.seed)
    start = time.perf_counter()
    drawers = [Drawer(kind, gen, arguments.heads) for kind in TABLE]
    for drawer in drawers:
        drawer.warmup(arguments.heads)
    print(f"{len(TABLE)} kinds compiled in {time.perf_counter() - start:.0f} s", flush=True)
    found: Counter[str] = Counter()
    end, done = time.perf_counter() + arguments.seconds, 0
    while done < arguments.problems and time.perf_counter() < end:
        problem, samplers = drawers[done % len(drawers)].draw()
        for what, text in differences(problem.head, problem.batch, problem.cache, samplers):
            found[what] += 1
            if sum(found.values()) <= arguments.show:
                print(f"problem {done}, {TABLE[done % len(TABLE)]}: {what}: {text}", flush=True)
        done += 1
    wrong = sum(found.values()) - found["near-tie"]
    print(f"{done} problems, each on {len(ENGINES)} engines: {dict(found) or 'all equal'}")
    if done < arguments.problems:
        print(f"stopped by --seconds before {arguments.problems} problems")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
