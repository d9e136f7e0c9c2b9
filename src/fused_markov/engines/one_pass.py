"""The one-pass engine: guess, link, check and settle, with W2 read once in the common case."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.chips import Chip, chip_of
from fused_markov.engines.configs import CANDIDATES, OnePassConfig
from fused_markov.engines.gpu import TritonEngine
from fused_markov.engines.gpu_heads import new_state
from fused_markov.engines.launch import (
    block_k,
    block_v,
    chain_ahead,
    compiled_for,
    launch,
    make_shape,
    multiprocessors,
    piece_of_chain,
    piece_of_rank,
    resident_programs,
    w2_tiles,
)
from fused_markov.engines.reasons import guess_lines
from fused_markov.engines.tuned import choose
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import Inputs, Scratch, Shape
from fused_markov.kernels.one_pass import (
    chain_kernel,
    check_kernel,
    guess_kernel,
    link_kernel,
    passes_kernel,
    settle_kernel,
    shape_kernel,
)


class OnePassEngine(TritonEngine):
    """Draft sampling in three launches: guess, link, and a cooperative one that checks and settles.

    Where there are no cooperative launches, checks and settlings are launched apart, as many as a
    step can need; those with nothing left to do return at once.
    """

    name = "one_pass"

    def __init__(
        self,
        head: MarkovHead,
        plan: Plan,
        configs: tuple[OnePassConfig, ...] | None = None,
        cooperative: bool | None = None,
        chip: Chip | None = None,
    ) -> None:
        super().__init__(head, plan, chip)
        self._chip = chip or chip_of(head.device)
        if configs is None and chip is None:
            choice = choose(self.name, head, plan, self._chip.one_pass)
            configs, self.note = choice.configs, choice.note
        self._configs = configs or self._chip.one_pass
        self._cooperative = self._chip.cooperative if cooperative is None else cooperative
        self._scratch = _allocate(head, plan, self._configs)
        self._passes = self._scratch.passes[0]
        self._resident: dict[Shape, int] = {}

    def config_for(self, rows: int) -> OnePassConfig:
        """The configuration for a number of rows."""
        row_steps = rows * self._plan.steps
        return next(c for c in self._configs if row_steps <= c.max_row_steps)

    def shape_for(self, config: OnePassConfig, batch: DraftBatch, cache: Tensor | None) -> Shape:
        known = self._head.successors
        return make_shape(
            self._head,
            self._chip,
            batch,
            cache,
            self._plan,
            CANDIDATES=CANDIDATES,
            CHUNKS=config.chunks,
            GUESS_M=config.guess_m,
            LANES=config.lanes,
            GUESS_APART=self._chip.guess_apart,
            PREDECESSORS=config.predecessors,
            SUCCESSORS=0 if known is None else known.shape[1],
            LINK_K=piece_of_rank(self._head),
            LINK_STAGES=config.link_stages,
            CHAIN_K=piece_of_chain(self._head, self._chip),
            CHAIN_STAGES=config.link_stages,
            CHAIN_AHEAD=chain_ahead(self._head, self._chip),
            BLOCK_M=config.block_m,
            BLOCK_V=block_v(config.block_v, self._head),
            BLOCK_K=block_k(self._head, self._chip),
            STAGES=config.stages,
        )

    def _explain(self, batch: DraftBatch, cache: Tensor | None) -> list[str]:
        config = self.config_for(max(batch.rows, 1))
        shape = self.shape_for(config, batch, cache)
        follows = "chains, a program a row" if self._chains(shape, config) else "links, then walks"
        checks = "one cooperative launch" if self._cooperative else "a launch each"
        pieces = shape.BLOCK_K < shape.RANK
        return [
            *guess_lines(self._head, batch),
            f"tiles of up to {config.max_row_steps} row-steps: {shape.BLOCK_M} x {shape.BLOCK_V}"
            f"{f', the rank in pieces of {shape.BLOCK_K}' if pieces else ''}",
            f"guess; {follows}; checks and settlings: {checks}",
        ]

    @staticmethod
    def _chains(shape: Shape, config: OnePassConfig) -> bool:
        return bool(shape.SUCCESSORS or shape.VARIANT or not config.predecessors)

    def _launch(self, io: Inputs, batch: DraftBatch, cache: Tensor | None) -> None:
        if batch.rows == 0:
            self._passes.zero_()
            return
        config = self.config_for(batch.rows)
        shape = self.shape_for(config, batch, cache)
        scratch, row_steps = self._scratch, io.rows * shape.STEPS
        guesses = triton.cdiv(row_steps, config.guess_m) * config.chunks
        programs = self._multiprocessors * self._programs_per_sm(io, shape, config)
        launch(guess_kernel, guesses, io, scratch, shape, **self._options(config.guess_warps))
        if self._chains(shape, config):
            chain_options = self._options(config.chain_warps)
            launch(chain_kernel, io.rows, io, scratch, shape, **chain_options)
        else:
            links = row_steps * (CANDIDATES // config.predecessors)
            link_options = self._options(config.link_warps)
            launch(link_kernel, links, io, scratch, shape, **link_options)
        options = self._check_options(config)
        tiles = w2_tiles(self._head, io, shape)
        if self._cooperative:
            launch(passes_kernel, programs, io, tiles, scratch, shape, **options)
            return
        settle_options = self._options(config.chain_warps)
        for index in range(shape.PASSES):
            launch(check_kernel, programs, io, tiles, scratch, index, shape, **options)
            if shape.SHAPED:
                launch(shape_kernel, row_steps, io, scratch, index, shape, **settle_options)
            launch(settle_kernel, io.rows, io, scratch, index, shape, **settle_options)

    def _programs_per_sm(self, io: Inputs, shape: Shape, config: OnePassConfig) -> int:
        """How many checking programs to launch a multiprocessor: all must be resident at once."""
        if not self._cooperative:
            return config.programs_per_sm
        if shape not in self._resident:
            options = self._check_options(config)
            tiles = w2_tiles(self._head, io, shape)
            kernel = compiled_for(passes_kernel, io, tiles, self._scratch, shape, **options)
            fit = resident_programs(kernel, config.check_warps, self._head.device)
            self._resident[shape] = min(fit, config.programs_per_sm)
        return self._resident[shape]

    def _options(self, num_warps: int) -> dict[str, Any]:
        return self._chip.options(num_warps)

    def _check_options(self, config: OnePassConfig) -> dict[str, Any]:
        options = self._chip.options(config.check_warps, config.check_registers)
        if self._cooperative:
            options["launch_cooperative_grid"] = True
        return options

    def _row_limits(self) -> list[int]:
        return [c.max_row_steps // self._plan.steps for c in self._configs]


def _allocate(head: MarkovHead, plan: Plan, configs: tuple[OnePassConfig, ...]) -> Scratch:
    m, device = plan.max_rows * plan.steps, head.device
    programs = multiprocessors(device) * max(c.programs_per_sm * c.block_m for c in configs)
    places = max(programs, m + max(c.block_m for c in configs))

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return Scratch(
        candidates=new(m, CANDIDATES),
        link=new(m, CANDIDATES),
        link_need=new(m, CANDIDATES, dtype=torch.float32),
        link_sure=new(m, CANDIDATES, dtype=torch.float32),
        links_left=new(plan.max_rows),
        guess=new(m),
        sure=new(m, dtype=torch.float32),
        start=new(plan.max_rows),
        num_active=new(2 * plan.steps + 1),
        row_prev=new(m),
        row_guess=new(m),
        row_step=new(m),
        row_need=new(m, dtype=torch.float32),
        row_temp=new(m, dtype=torch.float32),
        row_state=new(m),
        row_state64=new(m),
        row_base=new(m, dtype=torch.int64),
        row_cache=new(m, dtype=torch.int64),
        place=new(m),
        winner=new(m, dtype=torch.int64),
        best=new(places if plan.noise_dtype == torch.float64 else 1, dtype=plan.noise_dtype),
        best_id=new(places if plan.noise_dtype == torch.float64 else 1),
        parts=new(1),
        arrivals=new(1, dtype=torch.int64),
        passes=new(1, dtype=torch.int64),
        state=new_state(head, plan),
        before=new(m),
        row_ban=new(m, dtype=torch.int64),
        shaped=new(m, dtype=plan.noise_dtype),
        shaped_id=new(m),
    )
