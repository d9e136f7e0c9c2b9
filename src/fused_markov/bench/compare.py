"""One engine against the reference on one decode step, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fused_markov import reference
from fused_markov.batch import DraftBatch, DraftResult, cache_is_target_wide
from fused_markov.engines import Plan, engine_types
from fused_markov.head import MarkovHead
from fused_markov.problems import Problem


class Sampler(Protocol):
    """What is compared: a `fused_markov.DraftSampler`, or an engine alone."""

    @property
    def plan(self) -> Plan: ...

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult: ...


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        problem: "" where the engine is right, else the first difference, with its coordinate.
        cache_ulps: largest distance between cached logits, in units of the last place.
        passes: how often the engine read W2.
    """

    problem: str
    cache_ulps: int
    passes: int

    @property
    def ok(self) -> bool:
        return not self.problem


def compare(problem: Problem, sampler: Sampler, *, cached: bool = True) -> Verdict:
    """Run ``sampler`` and the reference on ``problem`` and compare all they wrote.

    Outputs start poisoned, so what one leaves unwritten and the other does not shows too.
    """
    batch = problem.batch
    caches = [problem.new_cache() if cached else None for _ in range(2)]
    tokens = [problem.new_tokens() for _ in range(2)]
    want = reference.sample(problem.head, batch, caches[0], tokens[0], **sampler.plan.arithmetic())
    got = sampler.sample(batch, caches[1], tokens[1])
    ulps = 0
    trouble = _first_difference("tokens", want.tokens, got.tokens)
    trouble = trouble or _first_difference("nonfinite", want.nonfinite, got.nonfinite)
    if caches[0] is not None and caches[1] is not None:
        distance = ulp_distance(caches[0], caches[1])
        ulps = int(distance.max()) if distance.numel() else 0
        wrong = distance.nonzero()
        # On a GPU a library may add the products of the bias in another order than a kernel does.
        if len(wrong) and problem.head.device.type == "cuda":
            wrong = wrong[~within_a_place(problem, caches[0], caches[1], wrong)]
        if len(wrong):
            at = tuple(wrong[0].tolist())
            want_value, got_value = caches[0][at].item(), caches[1][at].item()
            trouble = trouble or f"cache{list(at)}: expected {want_value!r}, got {got_value!r}"
    return Verdict(trouble, ulps, got.passes)


def within_a_place(problem: Problem, want: Tensor, got: Tensor, at: Tensor) -> Tensor:
    """bool ``[n]``: whether cached logits differ by a last place of their bias and of themselves.

    A bias whose sum came out on the other side of a rounding differs by a place; where base and
    bias nearly cancel, that is many places of the logit. ``at`` ``[n, 3]``: slot, step, column.
    """
    head, batch = problem.head, problem.batch
    slot, step, column = at.unbind(1)
    row = (batch.slot_matrix()[:, step] == slot).int().argmax(dim=0)
    if head.id_map is not None and cache_is_target_wide(head, want.shape[2]):
        candidates = torch.zeros(want.shape[2], dtype=torch.int64, device=at.device)
        candidates[head.id_map] = torch.arange(head.draft_vocab, device=at.device)
        column = candidates[column]
    base = batch.base_logits[row, step, column.clamp_max(head.draft_vocab - 1)].float().abs()
    expected, came = (cache[slot, step, at[:, 2]].float() for cache in (want, got))
    place = torch.finfo(head.dtype).eps * (base + expected.abs())
    place += torch.finfo(want.dtype).eps * expected.abs()
    return (expected - came).abs() <= place  # not where one of them is not a number


def usable_engines(head: MarkovHead, plan: Plan) -> list[str]:
    """Names of the engines that can run ``plan`` with ``head``, the preferred first."""
    types = engine_types()
    return [name for name, engine in types.items() if engine.why_not(head, plan) is None]


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between ``a`` and ``b``, as int64; NaNs are all equal."""
    width = {2: torch.int16, 4: torch.int32}[a.element_size()]
    x, y = (_ordered(t.contiguous().view(width)) for t in (a, b))
    return torch.where(a.isnan() & b.isnan(), 0, (x - y).abs())


def _ordered(bits: Tensor) -> Tensor:
    """Integers that are ordered as the floats with these bits are; both zeros give 0."""
    sign = torch.iinfo(bits.dtype).min
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, sign - wide, wide)


def _first_difference(name: str, want: Tensor, got: Tensor) -> str:
    different = (want != got).nonzero()
    if not len(different):
        return ""
    at = different[0].tolist()
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    return f"{name}{at}: expected {want[tuple(at)].item()}, got {got[tuple(at)].item()}{more}"
