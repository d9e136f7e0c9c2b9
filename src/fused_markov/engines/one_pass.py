"""The one-pass engine: guess, chain, check and settle, with W2 read once in the common case."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fused_markov.batch import DraftBatch, DraftResult
from fused_markov.engines import Plan
from fused_markov.engines.configs import CANDIDATES, HOPPER, OnePassConfig
from fused_markov.engines.launch import head_data, make_inputs, make_shape, why_not_triton
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import Inputs, Scratch, Shape
from fused_markov.kernels.one_pass import (
    chain_kernel,
    check_kernel,
    fused_kernel,
    guess_kernel,
    settle_kernel,
)


class OnePassEngine:
    """Draft sampling in one cooperative launch (or one launch a phase where there is none)."""

    name = "one_pass"

    def __init__(
        self,
        head: MarkovHead,
        plan: Plan,
        configs: tuple[OnePassConfig, ...] = HOPPER,
        cooperative: bool | None = None,
    ) -> None:
        self._head, self._plan, self._configs = head, plan, configs
        on_gpu = head.device.type == "cuda"
        self._cooperative = on_gpu if cooperative is None else cooperative
        self._multiprocessors = 4
        if on_gpu:
            properties = torch.cuda.get_device_properties(head.device)
            self._multiprocessors = properties.multi_processor_count
        self._data = head_data(head)
        most = self._multiprocessors * max(c.programs_per_sm for c in configs)
        self._scratch = _allocate(head, plan, configs, most)
        device = head.device
        self._slots = torch.arange(plan.max_rows, device=device)
        self._nonfinite = torch.zeros(plan.max_rows, plan.steps, dtype=torch.uint8, device=device)

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        return why_not_triton(head)

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        head = self._head
        if tokens is None:
            tokens = torch.empty(batch.rows, batch.steps, dtype=torch.int64, device=head.device)
        if batch.rows == 0:
            self._scratch.passes.zero_()
        else:
            config = self.config_for(batch.rows)
            nonfinite = self._nonfinite
            io = make_inputs(head, self._data, batch, logits_cache, tokens, nonfinite, self._slots)
            shape = self.shape_for(config, batch, logits_cache)
            if self._cooperative:
                self._launch_fused(io, shape, config)
            else:
                self._launch_phases(io, shape, config)
        flags = self._nonfinite.view(-1)[: batch.rows * batch.steps].view(torch.bool)
        flags = flags.view(batch.rows, batch.steps)
        return DraftResult(tokens, flags, self.name, self._scratch.passes[0])

    def config_for(self, rows: int) -> OnePassConfig:
        """The configuration for a number of rows."""
        row_steps = rows * self._plan.steps
        return next(c for c in self._configs if row_steps <= c.max_row_steps)

    def shape_for(self, config: OnePassConfig, batch: DraftBatch, cache: Tensor | None) -> Shape:
        return make_shape(
            self._head,
            batch,
            cache,
            self._plan.noise_dtype == torch.float64,
            CANDIDATES=CANDIDATES,
            CHUNKS=config.chunks,
            LANES=config.lanes,
            BLOCK_M=config.block_m,
            BLOCK_V=block_v(config, self._head),
            ONE_BLOCK=config.max_row_steps <= config.block_m,
            STAGES=config.stages,
            PREFETCH=config.prefetch,
        )

    def _launch_fused(self, io: Inputs, shape: Shape, config: OnePassConfig) -> None:
        grid = (self._multiprocessors * config.programs_per_sm,)
        fused_kernel[grid](
            io, self._scratch, shape, num_warps=config.num_warps, launch_cooperative_grid=True
        )

    def _launch_phases(self, io: Inputs, shape: Shape, config: OnePassConfig) -> None:
        grid = (self._multiprocessors * config.programs_per_sm,)
        rows = (min(io.rows, grid[0]),)
        warps = config.num_warps
        guess_kernel[grid](io, self._scratch, shape, num_warps=warps)
        chain_kernel[rows](io, self._scratch, shape, num_warps=warps)
        for index in range(shape.PASSES):
            check_kernel[grid](io, self._scratch, index, shape, num_warps=warps)
            settle_kernel[rows](io, self._scratch, index, grid[0], shape, num_warps=warps)

    def warmup(self) -> None:
        """Compile what the plan can run."""


def block_v(config: OnePassConfig, head: MarkovHead) -> int:
    """Candidates a tile: the configured number is for 512 bytes a row of W2."""
    row_bytes = max(16, triton.next_power_of_2(head.rank)) * head.w2.element_size()
    return max(16, config.block_v * 512 // max(row_bytes, 512))


def _allocate(
    head: MarkovHead, plan: Plan, configs: tuple[OnePassConfig, ...], most_programs: int
) -> Scratch:
    m, device = plan.max_rows * plan.steps, head.device
    parts = max(triton.cdiv(head.draft_vocab, block_v(c, head)) for c in configs)
    parts = max(parts, most_programs)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return Scratch(
        candidates=new(m, CANDIDATES),
        guess=new(m),
        prev=new(m),
        sure=new(m, dtype=torch.float32),
        start=new(plan.max_rows),
        num_active=new(2, 2 * plan.steps + 1),
        row_m=new(m),
        row_prev=new(m),
        row_need=new(m, dtype=torch.float32),
        row_temp=new(m, dtype=torch.float32),
        row_state=new(m),
        row_state64=new(m),
        row_base=new(m, dtype=torch.int64),
        row_cache=new(m, dtype=torch.int64),
        best=new(parts, m, dtype=plan.noise_dtype),
        best_id=new(parts, m),
        arrivals=new(1, dtype=torch.int64),
        launches=new(1),
        passes=new(1, dtype=torch.int64),
    )
