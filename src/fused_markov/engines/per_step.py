"""The per-step engine: one launch a draft step, any number of rows, W2 read once a step."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fused_markov.batch import DraftBatch, DraftResult
from fused_markov.engines import Plan
from fused_markov.engines.configs import PER_STEP, PerStepConfig
from fused_markov.engines.launch import (
    block_k,
    block_v,
    head_data,
    launch,
    make_inputs,
    make_shape,
    multiprocessors,
    on_device,
    why_not_triton,
)
from fused_markov.engines.warm import bucket_rows, padding_calls
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import StepScratch
from fused_markov.kernels.per_step import last_kernel, step_kernel


class PerStepEngine:
    """The design DSpark serving knows, for any rows and steps, in one compiled kernel for all."""

    name = "per_step"

    def __init__(
        self, head: MarkovHead, plan: Plan, configs: tuple[PerStepConfig, ...] = PER_STEP
    ) -> None:
        self._head, self._plan, self._configs = head, plan, configs
        self._data = head_data(head)
        device, rows = head.device, plan.max_rows
        self._multiprocessors = multiprocessors(device)
        parts = 2 * self._multiprocessors * max(c.programs_per_sm for c in configs)
        self._scratch = StepScratch(
            best=torch.zeros(parts, rows, dtype=plan.noise_dtype, device=device),
            best_id=torch.zeros(parts, rows, dtype=torch.int32, device=device),
        )
        self._slots = torch.arange(rows, device=device)
        self._nonfinite = torch.zeros(rows * plan.steps, dtype=torch.uint8, device=device)
        self._passes = torch.tensor(plan.steps, device=device)

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        return why_not_triton(head)

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        head, rows, steps = self._head, batch.rows, batch.steps
        if tokens is None:
            tokens = torch.empty(rows, steps, dtype=torch.int64, device=head.device)
        if rows > 0:
            with on_device(head.device):
                self._launch(batch, logits_cache, tokens)
        flags = self._nonfinite[: rows * steps].view(rows, steps).view(torch.bool)
        return DraftResult(tokens, flags, self.name, self._passes)

    def _launch(self, batch: DraftBatch, cache: Tensor | None, tokens: Tensor) -> None:
        head, rows = self._head, batch.rows
        config = next(c for c in self._configs if rows <= c.max_rows)
        io = make_inputs(head, self._data, batch, cache, tokens, self._nonfinite, self._slots)
        shape = make_shape(
            head,
            batch,
            cache,
            self._plan.noise_dtype == torch.float64,
            BLOCK_M=config.block_m,
            BLOCK_V=block_v(config.block_v, head),
            BLOCK_K=block_k(config.block_k, head),
            STAGES=config.stages,
        )
        programs, warps = self._multiprocessors * config.programs_per_sm, config.num_warps
        for step in range(batch.steps):
            launch(step_kernel, programs, io, self._scratch, step, shape, num_warps=warps)
        blocks = triton.cdiv(rows, config.block_m)
        launch(last_kernel, blocks, io, self._scratch, programs, shape, num_warps=warps)

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Compile and load what the plan can run, by sampling padding."""
        limits = [c.max_rows for c in self._configs]
        for rows in bucket_rows(limits, self._plan.max_rows):
            calls = padding_calls(self._head, self._plan, rows, example, logits_cache, tokens)
            for call in calls:
                self.sample(*call)
