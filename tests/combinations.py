"""Features that meet in one decode step, and how an engine is held to the reference on them.

One list for every engine: `test_combinations.py` has those of this process, on the CPU and on a
GPU, `interpret/test_combined_kernels.py` the kernels under Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fused_markov as fm
from fused_markov import noise, reference
from fused_markov.bench.compare import Sampler, ulp_distance
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

# Exact in any arithmetic, and no rising function.
NEGATED = scaled_soft_cap(-0.5, None)
# In the interpreter: two tiles of candidates, rows that are greedy and rows that are not.
SMALL, SMALL_MANY = (3, 3, 80, 16), (6, 3, 60, 16)
MANY = (14, 5, 60, 16)  # more than 64 row-steps
OLDEST, *OLDER = [name for name in noise.STREAMS if name != noise.STREAM]
FP64 = {"noise_dtype": torch.float64}


@dataclass(frozen=True)
class Combination:
    """A decode step and what is asked of it.

    Attributes:
        shape: R, S, V, r.
        options: of `make_problem`; heads: of `with_heads`; plan: of the sampler.
        bans: the share that is banned, other ids at each step; 0: no bans.
        shaped: top-k, top-p and min-p, or the ones named. transformed: a logit transform.
        successors: of each token, known to the head.
    """

    name: str
    shape: tuple[int, int, int, int] = (4, 3, 130, 16)
    options: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    bans: float = 0.0
    shaped: bool | tuple[str, ...] = False
    transformed: bool = False
    successors: int = 0
    cached: bool = True

    def problem(self, dtype: torch.dtype, device: str, *, small: bool = False) -> Problem:
        """Sums are exact, and so are gates: every bit is the same in any engine."""
        shape = SMALL_MANY if self.many else SMALL
        options = {"dtype": dtype, "temperature": "mixed", **self.options}
        if self.plan.get("cache_convention") == "tempered":
            options["cache_dtype"] = torch.float32
        shape = shape if small else self.shape
        made = make_problem(*shape, exact_sums=True, seed=3, device=device, **options)
        if self.transformed:
            made = with_transform(made, NEGATED)
        if self.successors:
            made = with_successors(made, self.successors)
        if self.heads:
            made = with_heads(made, exact=True, **self.heads)
        if self.bans:
            made = with_bans(made, self.bans)
        if self.shaped:
            made = with_shaping(made, SHAPING if self.shaped is True else self.shaped)
        return made

    @property
    def many(self) -> bool:
        """Whether it is about many row-steps, which `one_pass` guesses by chains, not links."""
        return self.shape == MANY

    def planned(self) -> dict[str, Any]:
        return {"noise_dtype": torch.float32, **self.plan}


def check(problem: Problem, sampler: Sampler, *, cached: bool = True) -> fm.DraftResult:
    """All that an engine writes against what the reference writes, into poisoned outputs."""
    batch = problem.batch
    caches = [problem.new_cache() if cached else None for _ in range(2)]
    options = sampler.plan.arithmetic()
    want = reference.sample(problem.head, batch, caches[0], problem.new_tokens(), **options)
    got = sampler.sample(batch, caches[1], problem.new_tokens())
    assert_equal("tokens", got.tokens, want.tokens)
    assert_equal("nonfinite", got.nonfinite, want.nonfinite)
    assert (got.confidence is None) == (want.confidence is None)
    if got.confidence is not None and want.confidence is not None:
        torch.testing.assert_close(got.confidence, want.confidence, rtol=1e-5, atol=1e-6)
    assert (got.lengths is None) == (want.lengths is None)
    if got.lengths is not None and want.lengths is not None:
        assert_equal("lengths", got.lengths, want.lengths)
    if caches[0] is not None and caches[1] is not None:
        _forget_undefined(problem, want, caches)
        distance = ulp_distance(*caches)
        assert_equal("cache, in last places", distance, torch.zeros_like(distance))
    return got


def assert_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Reports the first difference."""
    places = (got != want).nonzero()
    if len(places):
        at = tuple(places[0].tolist())
        raise AssertionError(
            f"{name}{list(at)}: {got[at].item()} for {want[at].item()}, {len(places)} differ"
        )


def _forget_undefined(problem: Problem, want: fm.DraftResult, caches: list[Tensor | None]) -> None:
    """0 into the cached logits past a draft's end, where that is found after sampling."""
    confidence, slots = problem.head.confidence, problem.batch.slot_matrix()
    if confidence is None or not confidence.with_markov or want.lengths is None:
        return
    steps = torch.arange(problem.batch.steps, device=slots.device)
    row, step = ((steps >= want.lengths[:, None]) & (slots >= 0)).nonzero(as_tuple=True)
    for cache in caches:
        assert cache is not None
        cache[slots[row, step], step] = 0.0


HARD = {"bias_std": 30.0, "base_std": 0.5}  # guesses fail
MARKOV, HIDDEN = ({"confidence": reads, "min_confidence": 0.5} for reads in ("markov", "hidden"))
TEMPERED = {"cache_convention": "tempered"}

_STREAMS = (
    Combination("stream, padding steps", options={"slots": "padded-steps"}),
    Combination("stream, fp64 noise", plan=FP64),
    Combination("stream, shaped", (7, 2, 130, 16), shaped=True),
    Combination("stream, shaped, fp64 noise", (7, 2, 101, 16), plan=FP64, shaped=True),
    Combination("stream, draft_topk", options={"slots": "padded"}, plan={"draft_topk": 9}),
    Combination("stream, draft_topk, shaped, fp64 noise", plan={"draft_topk": 20, **FP64},
                shaped=True),
    Combination("stream, tempered, successors", options=HARD, plan=TEMPERED, successors=20),
    Combination("stream, rnn, bans", heads={"variant": "rnn"}, bans=0.6),
)  # fmt: skip
_OTHERS = (
    Combination("reduced, target-wide", options={"draft_vocab": 60}),
    Combination("reduced, draft-wide", options={"draft_vocab": 60, "cache": "draft"}),
    Combination("tempered, reduced, wide", plan=TEMPERED,
                options={"draft_vocab": 56, "cache": "wide"}),
    Combination("tempered, fp64 noise, bans", plan={**TEMPERED, **FP64}, bans=0.5),
    Combination("tempered, transform", plan=TEMPERED, transformed=True),
    Combination("tempered, gated", plan=TEMPERED, heads={"variant": "gated"}),
    Combination("tempered, rnn, cut", plan=TEMPERED, heads={"variant": "rnn", **MARKOV}),
    *(Combination(f"{name} alone", (7, 2, 130, 16), shaped=(name,)) for name in SHAPING),
    Combination("gated, bans", heads={"variant": "gated"}, bans=0.9),
    Combination("gated, shaped", (7, 2, 130, 16), heads={"variant": "gated"}, shaped=True),
    Combination("rnn, shaped", (7, 2, 130, 16), heads={"variant": "rnn"}, shaped=True),
    Combination("gated, transform", heads={"variant": "gated"}, transformed=True),
    Combination("rnn, transform, fp64 noise", plan=FP64, heads={"variant": "rnn"},
                transformed=True),
    Combination("gated, draft-wide", options={"draft_vocab": 60, "cache": "draft"},
                heads={"variant": "gated"}),
    Combination("rnn, scale, no cache", options={"scale": 0.5, "temperature": "greedy"},
                heads={"variant": "rnn"}, cached=False),
    Combination("rnn, bans, transform, shaped, cut", options={"slots": "padded-steps"}, bans=0.4,
                heads={"variant": "rnn", **HIDDEN}, transformed=True, shaped=True),
    Combination("rnn, successors, bans, shaped", options=HARD, heads={"variant": "rnn"},
                bans=0.5, shaped=True, successors=20),
    Combination("many, gated", MANY, heads={"variant": "gated"}),
    Combination("many, rnn", MANY, HARD, {"variant": "rnn"}),
    Combination("many, greedy", MANY, {**HARD, "temperature": "greedy"}),
    Combination("many, transform", MANY, HARD, transformed=True),
    Combination("many, bans", MANY, HARD, bans=0.7),
    Combination("many, shaped, bans, padding", MANY, {**HARD, "slots": "padded"}, bans=0.3,
                shaped=True),
    Combination("cut, draft_topk", heads=HIDDEN, plan={"draft_topk": 7}),
    Combination("cut afterwards, draft_topk", options={"slots": "padded-steps"}, heads=MARKOV,
                plan={"draft_topk": 7}),
    Combination("cut, shaped, bans", options={"slots": "shuffled"}, heads=HIDDEN, bans=0.4,
                shaped=True),
    Combination("cut afterwards, shaped", heads=MARKOV, shaped=True),
    Combination("draft_topk, draft-wide, transform, bans",
                options={"draft_vocab": 60, "cache": "draft"}, plan={"draft_topk": 20}, bans=0.5,
                transformed=True),
    Combination("draft_topk, successors", plan={"draft_topk": 20}, successors=20),
    Combination("bans, successors", options=HARD, bans=0.9, successors=20),
    Combination("bans, successors, greedy", options={**HARD, "temperature": "greedy"}, bans=0.5,
                successors=20, cached=False),
    Combination("transform, successors", options=HARD, transformed=True, successors=20),
    Combination("shaped, successors", (7, 3, 130, 16), HARD, shaped=True, successors=20),
    Combination("shaped, scale, reduced", (7, 2, 130, 16), {"scale": 0.5, "draft_vocab": 61},
                shaped=True),
    Combination("fp8, bans, shaped", (7, 2, 130, 32), {"weights": "fp8"}, bans=0.5, shaped=True),
    Combination("int8, tempered, oldest stream", options={"weights": "int8"},
                plan={**TEMPERED, "noise_stream": OLDEST}),
    Combination("nvfp4, transform, bans", options={"weights": "nvfp4"}, transformed=True, bans=0.5),
    Combination("fp8-block, successors, bans", (4, 3, 130, 32), {**HARD, "weights": "fp8-block"},
                bans=0.5, successors=20),
    Combination("nvfp4, rnn, shaped, cut", options={"weights": "nvfp4"}, shaped=True,
                heads={"variant": "rnn", **MARKOV}),
    Combination("many, int8", MANY, {**HARD, "weights": "int8"}),
    Combination("many, fp8-block, gated", MANY, {"weights": "fp8-block"}, {"variant": "gated"}),
    Combination("step-major, bans, shaped", options={"strides": "step-major"}, bans=0.5,
                shaped=True),
)  # fmt: skip


def _of(stream: str, combination: Combination) -> Combination:
    name = combination.name.replace("stream", stream)
    plan = {**combination.plan, "noise_stream": stream}
    return Combination(**{**vars(combination), "name": name, "plan": plan})


COMBINATIONS = (
    *(_of(OLDEST, combination) for combination in _STREAMS),
    *(_of(stream, c) for stream in (*OLDER, noise.STREAM) for c in _STREAMS[:6:2]),
    *_OTHERS,
)
