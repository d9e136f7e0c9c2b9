"""The Triton engines' launches of candidate-limited drafts; both engines' are the same."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.chips import Chip
from fused_markov.engines.launch import launch, make_shape, piece_of_rank
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import Inputs
from fused_markov.kernels.limited import limited_kernel, select_kernel

BLOCK = 64  # candidates whose rows of W2 are multiplied at a time
SELECT_WARPS, WALK_WARPS = 8, 4


class LimitedDrafts:
    """Two launches: the candidates of every row and step, then every row's walk over them."""

    def __init__(self, head: MarkovHead, plan: Plan, chip: Chip) -> None:
        assert plan.draft_topk is not None
        self._head, self._chip, self._plan = head, chip, plan
        shape = (plan.max_rows * plan.steps, plan.draft_topk)
        self._candidates = torch.zeros(shape, dtype=torch.int32, device=head.device)

    def launch(self, io: Inputs, batch: DraftBatch, cache: Tensor | None) -> None:
        if batch.rows == 0:
            return
        tiles: dict[str, Any] = {
            "BLOCK_M": 16,
            "BLOCK_V": 16,
            "BLOCK_K": piece_of_rank(self._head),
            "STAGES": 1,
            "LIMIT": self._candidates.shape[1],
            "LIMIT_BLOCK": min(BLOCK, max(16, triton.next_power_of_2(self._candidates.shape[1]))),
        }
        shape = make_shape(self._head, self._chip, batch, cache, self._plan, **tiles)
        options = self._chip.options
        row_steps = batch.rows * batch.steps
        candidates = self._candidates
        launch(select_kernel, row_steps, io, candidates, shape, **options(SELECT_WARPS))
        launch(limited_kernel, batch.rows, io, candidates, shape, **options(WALK_WARPS))
