"""The per-step engine: one launch a draft step, any number of rows, W2 read once a step."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.chips import Chip, chip_of
from fused_markov.engines.configs import PerStepConfig
from fused_markov.engines.gpu import TritonEngine
from fused_markov.engines.gpu_heads import WARPS, embed_programs, new_state
from fused_markov.engines.launch import block_k, block_v, launch, make_shape, w2_tiles
from fused_markov.engines.tuned import choose
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import Inputs, StepScratch
from fused_markov.kernels.per_step import embed_kernel, last_kernel, step_kernel
from fused_markov.kernels.shape import shape_step_kernel
from fused_markov.shaping import is_shaped


class PerStepEngine(TritonEngine):
    """The design DSpark serving knows, for any rows and steps, in one compiled kernel for all."""

    name = "per_step"

    def __init__(
        self,
        head: MarkovHead,
        plan: Plan,
        configs: tuple[PerStepConfig, ...] | None = None,
        chip: Chip | None = None,
    ) -> None:
        super().__init__(head, plan, chip)
        self._chip = chip or chip_of(head.device)
        if configs is None and chip is None:
            choice = choose(self.name, head, plan, self._chip.per_step)
            configs, self.note = choice.configs, choice.note
        self._configs = configs or self._chip.per_step
        device, rows = head.device, plan.max_rows
        parts = 2 * self._multiprocessors * max(c.programs_per_sm for c in self._configs)
        self._scratch = StepScratch(
            best=torch.zeros(parts, rows, dtype=plan.noise_dtype, device=device),
            best_id=torch.zeros(parts, rows, dtype=torch.int32, device=device),
            state=new_state(head, plan),
            shaped=torch.zeros(rows, dtype=plan.noise_dtype, device=device),
            shaped_id=torch.zeros(rows, dtype=torch.int32, device=device),
        )
        self._passes = torch.tensor(plan.steps, device=device)

    def _options(self, num_warps: int) -> dict[str, Any]:
        return self._chip.options(num_warps)

    def _row_limits(self) -> list[int]:
        return [c.max_rows for c in self._configs]

    def _explain(self, batch: DraftBatch, cache: Tensor | None) -> list[str]:
        config = next(c for c in self._configs if batch.rows <= c.max_rows)
        more = ", one for each step's z" if self._head.variant is not None else ""
        more += ", one for each step's shaping" if is_shaped(batch) else ""
        return [
            f"reads W2 {batch.steps} times, once a draft step",
            f"{batch.steps + 1} launches{more}, in tiles of up to {config.block_m} rows",
        ]

    def _launch(self, io: Inputs, batch: DraftBatch, cache: Tensor | None) -> None:
        head, rows = self._head, batch.rows
        if rows == 0:
            return
        config = next(c for c in self._configs if rows <= c.max_rows)
        shape = make_shape(
            head,
            self._chip,
            batch,
            cache,
            self._plan,
            BLOCK_M=config.block_m,
            BLOCK_V=block_v(config.block_v, head),
            BLOCK_K=block_k(head, self._chip),
            STAGES=config.stages,
        )
        programs = self._multiprocessors * config.programs_per_sm
        options = self._chip.options(config.num_warps)
        tiles = w2_tiles(head, io, shape)
        for step in range(batch.steps):
            if shape.VARIANT:
                blocks = embed_programs(rows, head)
                more = (step, programs, shape)
                launch(embed_kernel, blocks, io, self._scratch, *more, **self._options(WARPS))
            launch(step_kernel, programs, io, tiles, self._scratch, step, shape, **options)
            if shape.SHAPED:
                launch(shape_step_kernel, rows, io, self._scratch, step, shape, **options)
        blocks = triton.cdiv(rows, config.block_m)
        launch(last_kernel, blocks, io, self._scratch, programs, shape, **options)
