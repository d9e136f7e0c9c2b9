"""What the two Triton engines do alike: outputs, the kernels' inputs, warm-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch, DraftResult
from fused_markov.engines import Plan
from fused_markov.engines.chips import Chip, chip_of
from fused_markov.engines.gpu_heads import GpuHeads
from fused_markov.engines.launch import (
    aligned,
    head_data,
    make_inputs,
    multiprocessors,
    on_device,
    why_not_triton,
)
from fused_markov.engines.limited import LimitedDrafts
from fused_markov.engines.reasons import LIMITED_READS
from fused_markov.engines.warm import bucket_rows, padding_calls
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import Inputs


class TritonEngine(ABC):
    """An engine of Triton kernels; a subclass launches them.

    A result's ``nonfinite`` and ``passes_tensor`` are the engine's own memory, at fixed addresses
    for the sake of graphs: the next `sample` writes over them.
    """

    name: str
    note = ""  # where the configurations are from, unless they are built in or given
    _passes: Tensor  # int64, one element: how often the last sample read W2

    def __init__(self, head: MarkovHead, plan: Plan, chip: Chip | None = None) -> None:
        self._head, self._plan = head, plan
        self._data = head_data(head, plan.noise_stream)
        self._multiprocessors = multiprocessors(head.device)
        self._slots = torch.arange(plan.max_rows, device=head.device)
        self._limited: LimitedDrafts | None = None
        if plan.draft_topk is not None:
            self._limited = LimitedDrafts(head, plan, chip or chip_of(head.device))
            self._no_passes = torch.tensor(0, device=head.device)
        size = plan.max_rows * plan.steps
        self._nonfinite = torch.zeros(size, dtype=torch.uint8, device=head.device)
        self._heads = None if head.hidden_size is None else GpuHeads(head, plan, self._options)

    @property
    def plan(self) -> Plan:
        """What the engine is built for."""
        return self._plan

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        if plan.draft_topk is not None and head.weights.quantized:
            return f"limited candidates (draft_topk) of a W2 in {head.weights.format}"
        return why_not_triton(head)

    @abstractmethod
    def _launch(self, io: Inputs, batch: DraftBatch, cache: Tensor | None) -> None:
        """Launch a decode step; there may be no rows."""

    @abstractmethod
    def _options(self, num_warps: int) -> dict[str, Any]:
        """How the GPU's small kernels are compiled."""

    @abstractmethod
    def _row_limits(self) -> list[int]:
        """The most rows of each configuration, ascending."""

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        head, shape = self._head, (batch.rows, batch.steps)
        if tokens is None:
            tokens = torch.empty(shape, dtype=torch.int64, device=head.device)
        nonfinite, slots = self._nonfinite, self._slots
        io = make_inputs(head, self._data, batch, logits_cache, tokens, nonfinite, slots)
        with on_device(head.device):
            if self._heads is not None:
                io = self._heads.before(batch, io)
            if self._limited is None:
                self._launch(io, batch, logits_cache)
            else:
                self._limited.launch(io, batch, logits_cache)
            if self._heads is not None:
                self._heads.after(batch, io)
        flags = nonfinite[: batch.rows * batch.steps].view(shape).view(torch.bool)
        passes = self._passes if self._limited is None else self._no_passes
        judged = (None, None) if self._heads is None else self._heads.result(batch)
        return DraftResult(tokens, flags, self.name, passes, *judged)

    def explain(self, batch: DraftBatch, logits_cache: Tensor | None) -> list[str]:
        """How the engine goes about a batch."""
        lines = [LIMITED_READS] if self._limited else self._explain(batch, logits_cache)
        if batch.temperature is not None and batch.rows and not self._limited:
            lines.append(f"{self._plan.noise_dtype} noise, gated".replace("torch.", ""))
        if not aligned(self._head, batch, logits_cache):
            lines.append(
                "V or rows of base logits or cache are no multiples of 8 elements or 16 bytes: "
                "loads and stores are narrower"
            )
        return lines

    @abstractmethod
    def _explain(self, batch: DraftBatch, cache: Tensor | None) -> list[str]:
        """`explain`, where candidates are not limited."""

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Compile and load what the plan can run, by sampling padding."""
        for rows in bucket_rows(self._row_limits(), self._plan.max_rows):
            calls = padding_calls(self._head, self._plan, rows, example, logits_cache, tokens)
            for call in calls:
                self.sample(*call)
