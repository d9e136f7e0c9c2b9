"""The engines, and the one interface through which the sampler drives them.

An engine computes what `fused_markov.reference.sample` computes. It states in `why_not` what keeps
it from a plan; the sampler logs that reason, and never falls back without one.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch, DraftResult
from fused_markov.errors import EngineUnavailableError
from fused_markov.head import MarkovHead
from fused_markov.noise import STREAM


@dataclass(frozen=True)
class Plan:
    """What a sampler is built for.

    Attributes:
        max_rows: most rows R of a batch.
        steps: draft steps S of a batch.
        noise_dtype: float32 or float64 Gumbel noise.
        noise_stream: a name of `fused_markov.noise.STREAMS`.
        cache_convention: a name of `fused_markov.batch.CACHE_CONVENTIONS`.
        draft_topk: candidates a position is drafted from, or None: all.
    """

    max_rows: int
    steps: int
    noise_dtype: torch.dtype
    # What is as ever is not in the explanation of a plan.
    noise_stream: str = field(default=STREAM, repr=False)
    cache_convention: str = field(default="logits", repr=False)
    draft_topk: int | None = field(default=None, repr=False)

    def arithmetic(self) -> dict[str, Any]:
        """What `reference.sample` must be told to compute what the plan's engine does."""
        return {
            "noise_dtype": self.noise_dtype,
            "noise_stream": self.noise_stream,
            "cache_convention": self.cache_convention,
            "draft_topk": self.draft_topk,
        }


class Engine(Protocol):
    """One way to compute a decode step's drafts."""

    name: str

    def __init__(self, head: MarkovHead, plan: Plan) -> None: ...

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        """The reason this engine cannot run the plan on this machine, or None."""

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        """Draft for inputs that `check_inputs` has passed."""

    def explain(self, batch: DraftBatch, logits_cache: Tensor | None) -> list[str]:
        """Lines on how the engine goes about a batch that `check_inputs` has passed."""

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Compile, load and allocate all that `sample` will need for the plan.

        The arguments' contents are neither read nor written; see `DraftSampler.warmup`.
        """


def engine_types() -> dict[str, type[Engine]]:
    """Every engine by name, the preferred first."""
    from fused_markov.engines.cpu import CpuEngine
    from fused_markov.engines.loop import LoopEngine

    engines: list[type[Engine]] = [CpuEngine, *_triton_engines(), LoopEngine]
    return {e.name: e for e in engines}


def _triton_engines() -> list[type[Engine]]:
    if importlib.util.find_spec("triton") is None:
        return [_NoOnePass, _NoPerStep]
    from fused_markov.engines.one_pass import OnePassEngine
    from fused_markov.engines.per_step import PerStepEngine

    # AMD's last cache holds W2 from its first read on, and a launch costs more: docs/amd.md.
    on_amd = torch.version.hip is not None
    return [PerStepEngine, OnePassEngine] if on_amd else [OnePassEngine, PerStepEngine]


class _NoTriton:
    """Stands for an engine whose module cannot be imported, to say why."""

    name = ""

    def __init__(self, head: MarkovHead, plan: Plan) -> None:
        raise EngineUnavailableError(self.name, self.why_not(head, plan), ["cpu", "reference"])

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str:
        return "Triton is not installed; it comes with PyTorch's GPU builds, or: pip install triton"

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        raise NotImplementedError

    def explain(self, batch: DraftBatch, logits_cache: Tensor | None) -> list[str]:
        raise NotImplementedError

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        raise NotImplementedError


class _NoOnePass(_NoTriton):
    name = "one_pass"


class _NoPerStep(_NoTriton):
    name = "per_step"
