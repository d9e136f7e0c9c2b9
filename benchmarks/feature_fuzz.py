"""Random combinations of features on small problems: engines against the reference, to the bit.

    python benchmarks/feature_fuzz.py                                          # the CPU engine
    TRITON_INTERPRET=1 python benchmarks/feature_fuzz.py --engines one_pass per_step
    python benchmarks/feature_fuzz.py --engines one_pass per_step --device cuda --kinds 30 \\
        --problems 3000 --seconds 200

A kind is a combination of features with its shape, which is what compiles; the problems of a kind
differ in rows and contents. What is refused (docs/features.md) is not drawn. Sums and gates are
exact, so every difference in the cache is a fault, but for a soft cap's tanh. Near ties, of two
scores or of a confidence and its limit, are counted apart. Exits with 1 on any other difference, or
if nothing was compared.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from fuzzing import WILD, differences, make_wild

import fused_markov as fm
from fused_markov import noise
from fused_markov.problem_features import (
    SHAPING,
    with_bans,
    with_shaping,
    with_successors,
    with_transform,
)
from fused_markov.problem_heads import with_heads
from fused_markov.problems import Problem, make_problem
from fused_markov.transforms import scaled_soft_cap

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Kind:
    """A combination. ``options`` are `make_problem`'s, ``heads`` `with_heads`'s, ``plan`` the
    sampler's; the others `problem_features`'s.
    """

    shape: tuple[int, int, int, int]  # most rows, S, V, r
    options: dict[str, Any]
    heads: dict[str, Any]
    plan: dict[str, Any]
    bans: float
    bans_by_step: bool
    shaping: tuple[str, ...]
    multiplier: float  # of the logit transform; 0: none
    successors: int
    cached: bool

    def features(self) -> str:
        """What is not as ever."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value)


class Drawer:
    """Draws kinds that no check refuses."""

    def __init__(self, seed: int, engines: list[str], most_rows: int) -> None:
        self._random, self._most_rows = random.Random(seed), most_rows
        self._exact = engines == ["cpu"]  # in all that it computes

    def _is(self, chance: float) -> bool:
        return self._random.random() < chance

    def _of(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def kind(self) -> Kind:
        vocab = self._of(7, 60, 64, 90, 130, 200)
        weights = self._of("plain", "plain", "plain", "fp8", "fp8-block", "int8", "nvfp4")
        limited = self._is(0.2) and (self._exact or weights == "plain")
        variant = None if limited else self._of(None, None, "gated", "rnn")
        shaping = tuple(n for n in SHAPING if self._is(0.6)) if self._is(0.4) else ()
        tempered = not limited and not shaping and self._is(0.3)
        options = self._options(vocab, tempered) | {"weights": weights}
        if not limited and (self._exact or not shaping):
            options["soft_cap"] = self._of(None, None, None, 3.0)
        candidates = options["draft_vocab"] or vocab
        noise_stream = self._of(*noise.STREAMS)
        plan: dict[str, Any] = {
            "noise_stream": noise_stream,
            "noise_dtype": self._of(torch.float32, torch.float32, torch.float64),
            "cache_convention": "tempered" if tempered else "logits",
            "draft_topk": min(candidates, self._of(1, 5, 20, 70)) if limited else None,
        }
        return Kind(
            (self._random.randint(1, self._most_rows), self._random.randint(1, 5), vocab,
             self._of(16, 48) if weights == "nvfp4" else self._of(8, 16, 24, 48)),
            options,
            self._heads(variant),
            plan,
            bans=self._of(0.0, 0.0, 0.5, 0.9, 1.0),
            bans_by_step=self._is(0.5),
            shaping=shaping,
            multiplier=self._of(0.0, 0.0, 0.5, -0.5),
            successors=min(candidates, self._of(0, 0, 5, 20)),
            cached=bool(shaping) or tempered or self._is(0.8),
        )  # fmt: skip

    def _options(self, vocab: int, tempered: bool) -> dict[str, Any]:
        dtypes = [torch.float32, torch.float16, *([] if INTERPRETING else [torch.bfloat16] * 2)]
        hard = self._is(0.4)
        fp32 = torch.float32
        return {
            "dtype": self._of(*dtypes),
            "base_dtype": self._of(None, None, fp32),
            "cache_dtype": fp32 if tempered else self._of(None, None, *dtypes),
            "temperature": self._of("greedy", "mixed", "mixed", 1.0, 0.4),
            "draft_vocab": self._of(None, None, max(1, vocab // 2), max(1, vocab - 3)),
            "cache": self._of("target", "draft", "wide"),
            "slots": self._of("all", "shuffled", "padded", "padded-steps"),
            "strides": self._of("contiguous", "wide", "step-major"),
            "bias_std": 30.0 if hard else 1.0,
            "base_std": self._of(0.5, 0.0) if hard else 2.0,
            "scale": self._of(1.0, 1.0, 0.5),
        }

    def _heads(self, variant: str | None) -> dict[str, Any]:
        confidence = self._of(None, None, "markov", "hidden")
        if variant is None and confidence is None:
            return {}
        limit = None if confidence is None else self._of(None, 0.5, 0.3)
        return {"variant": variant, "confidence": confidence, "min_confidence": limit}


def problem_of(kind: Kind, seed: int, device: str) -> Problem:
    draw = random.Random(seed)
    most, *rest = kind.shape
    shape = (draw.randint(1, most), *rest)
    p = make_problem(*shape, exact_sums=True, seed=seed, device=device, **kind.options)
    make_wild(p.batch.base_logits, draw.randrange(WILD), draw.random() < 0.5)
    if kind.successors:
        p = with_successors(p, kind.successors)
    if kind.multiplier:
        p = with_transform(p, scaled_soft_cap(kind.multiplier, None))
    if kind.heads:
        p = with_heads(p, exact=True, seed=seed, **kind.heads)
    if kind.bans:
        p = with_bans(p, kind.bans, by_step=kind.bans_by_step, seed=seed)
    return with_shaping(p, kind.shaping) if kind.shaping else p


def compare(kind: Kind, problem: Problem, engines: list[str]) -> list[tuple[str, str]]:
    batch, head = problem.batch, problem.head
    sizes = {"max_rows": batch.rows, "steps": batch.steps}
    samplers = [fm.DraftSampler(head, engine=e, **sizes, **kind.plan) for e in engines]
    cache = problem.new_cache() if kind.cached else None
    slack = 0.0
    if head.soft_cap is not None and engines != ["cpu"]:
        slack = 8 * torch.finfo(head.dtype).eps * head.soft_cap
    return list(differences(head, batch, cache, samplers, slack=slack))


def use_small_tiles() -> None:
    """Several tiles of each kind in small vocabularies, and few programs to interpret."""
    from fused_markov.engines import chips

    one_pass, step = chips.INTERPRETER.one_pass[0], chips.INTERPRETER.per_step[0]
    small: dict[str, Any] = {"block_m": 16, "block_v": 64, "stages": 1, "programs_per_sm": 1}
    linked = replace(one_pass, **small, max_row_steps=8, chunks=4, guess_m=2, lanes=64,
                     predecessors=32)  # fmt: skip
    chained = replace(linked, max_row_steps=1 << 30, predecessors=0)
    per_step = replace(step, **small, max_rows=1 << 30)
    chips.INTERPRETER = replace(chips.INTERPRETER, one_pass=(linked, chained), per_step=(per_step,))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["cpu"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", type=int, default=100, help="combinations; each compiles")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="problem to begin with")
    parser.add_argument("--rows", type=int, default=5, help="most rows of a problem")
    parser.add_argument("--seconds", type=float, default=600.0, help="after each kind's first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=20, help="differences to print")
    arguments = parser.parse_args()
    if INTERPRETING:
        use_small_tiles()
    drawer = Drawer(arguments.seed, arguments.engines, arguments.rows)
    kinds = [drawer.kind() for _ in range(arguments.kinds)]
    found: Counter[str] = Counter()
    end, done = float("inf"), 0
    for index in range(arguments.first, arguments.first + arguments.problems):
        if done == len(kinds):
            end = time.perf_counter() + arguments.seconds
        if time.perf_counter() > end:
            print(f"stopped by --seconds before {arguments.problems} problems")
            break
        kind = kinds[index % len(kinds)]
        problem = problem_of(kind, arguments.seed + index, arguments.device)
        for what, text in compare(kind, problem, arguments.engines):
            found[what] += 1
            if sum(found.values()) <= arguments.show:
                print(f"problem {index}: {what}: {text}\n  {kind.features()}", flush=True)
        done += 1
    wrong = sum(found.values()) - found["near-tie"]
    engines = " and ".join(arguments.engines)
    print(f"{done} problems of {min(done, len(kinds))} kinds, each on {engines}: "
          f"{dict(found) or 'all equal'}")  # fmt: skip
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
