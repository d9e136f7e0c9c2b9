"""Variants and the confidence head around a Triton engine: kernels before it, kernels after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.launch import DTYPES, launch
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import HiddenInputs, HiddenShape, Inputs
from fused_markov.kernels.hidden import confidence_kernel, context_kernel, cut_kernel

# What a program makes of the context: row-steps and outputs; and of z, before a step: rows and
# columns. As the kernels have it.
ROWS, OUTS = 16, 32
WARPS = 4  # always: what is summed across threads must not depend on a configuration


def new_state(head: MarkovHead, plan: Plan) -> Tensor:
    """Scratch for the state that a variant carries, of no size where there is none."""
    variant = head.variant
    rows = plan.max_rows * plan.steps if variant is not None and variant.carries else 1
    return torch.zeros(rows, head.rank, dtype=head.dtype, device=head.device)


def embed_programs(rows: int, head: MarkovHead) -> int:
    """Programs of the per-step engine's `embed_kernel`."""
    return int(triton.cdiv(rows, ROWS) * triton.cdiv(head.rank, OUTS))


class GpuHeads:
    """The scratch and the small kernels of a head that reads hidden states.

    Args:
        options: how to compile a kernel of so many warps.
    """

    def __init__(
        self, head: MarkovHead, plan: Plan, options: Callable[[int], dict[str, Any]]
    ) -> None:
        self._head, self._plan, self._options = head, plan, options
        m, variant = plan.max_rows * plan.steps, head.variant

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=head.device)

        self._embeds = head.w1
        self._context = new(1, dtype=torch.float32)
        if variant is not None:
            self._embeds = new(m, head.rank, dtype=head.dtype)
            self._context = new(m, variant.bias.shape[0], dtype=torch.float32)
        self._confidence = new(m, dtype=torch.float32)
        self._cut_slots = new(m, dtype=torch.int64)
        self._lengths = new(plan.max_rows, dtype=torch.int64)
        confidence = head.confidence
        self._shape = HiddenShape(
            STEPS=plan.steps,
            STEPS_P2=triton.next_power_of_2(plan.steps),
            RANK=head.rank,
            WITH_MARKOV=confidence is not None and confidence.with_markov,
            WEIGHT=DTYPES[head.dtype],
        )

    def before(self, batch: DraftBatch, io: Inputs) -> Inputs:
        """Make the context, cut what can be cut beforehand; the inputs to sample with."""
        if batch.rows == 0:
            return io
        head, options = self._head, self._options(WARPS)
        inputs = self._inputs(batch, io)
        variant = head.variant
        if variant is not None:
            tiles = triton.cdiv(batch.rows * batch.steps, ROWS) * triton.cdiv(inputs.outs, OUTS)
            launch(context_kernel, tiles, inputs, self._shape, **options)
            io = io._replace(w1=self._embeds, context=self._context, mix=variant.mix_weight)
        if head.confidence is None or head.confidence.with_markov:
            return io
        self._judge(batch, inputs)
        if batch.min_confidence is None:
            return io
        return io._replace(slots=self._cut_slots, slot_row=batch.steps, slot_step=1)

    def after(self, batch: DraftBatch, io: Inputs) -> None:
        """Judge a draft where the confidence head reads its tokens."""
        confidence = self._head.confidence
        if batch.rows and confidence is not None and confidence.with_markov:
            self._judge(batch, self._inputs(batch, io))

    def result(self, batch: DraftBatch) -> tuple[Tensor | None, Tensor | None]:
        """Confidences and lengths, in scratch."""
        if self._head.confidence is None:
            return None, None
        shape = (batch.rows, batch.steps)
        confidence = self._confidence[: batch.rows * batch.steps].view(shape)
        asked = batch.min_confidence is not None
        return confidence, self._lengths[: batch.rows] if asked else None

    def _judge(self, batch: DraftBatch, inputs: HiddenInputs) -> None:
        options = self._options(WARPS)
        row_steps = batch.rows * batch.steps
        launch(confidence_kernel, row_steps, inputs, self._shape, **options)
        if batch.min_confidence is not None:
            launch(cut_kernel, batch.rows, inputs, self._shape, **options)

    def _inputs(self, batch: DraftBatch, io: Inputs) -> HiddenInputs:
        head, hidden, limit = self._head, batch.hidden, batch.min_confidence
        assert hidden is not None  # `check_inputs` has seen to it
        variant, confidence = head.variant, head.confidence
        return HiddenInputs(
            hidden=hidden,
            hidden_weight=head.w1 if variant is None else variant.hidden_weight,
            hidden_bias=head.w1 if variant is None else variant.bias,
            context=self._context,
            confidence_weight=self._context if confidence is None else confidence.weight,
            confidence_bias=self._context if confidence is None else confidence.bias,
            confidence=self._confidence,
            limit=self._context if limit is None else limit,
            cut_slots=self._cut_slots,
            lengths=self._lengths,
            w1=head.w1,
            anchors=io.anchors,
            slots=io.slots,
            tokens=io.tokens,
            nonfinite=io.nonfinite,
            hidden_row=hidden.stride(0),
            hidden_step=hidden.stride(1),
            limit_slot=0 if limit is None else limit.stride(0),
            anchor_row=io.anchor_row,
            slot_row=io.slot_row,
            slot_step=io.slot_step,
            token_row=io.token_row,
            token_step=io.token_step,
            rows=batch.rows,
            vocab_size=head.vocab_size,
            outs=0 if variant is None else variant.bias.shape[0],
            width=hidden.shape[2],
        )
