"""The reference loop as an engine: runs anywhere PyTorch does."""

from __future__ import annotations

from torch import Tensor

from fused_markov import reference
from fused_markov.batch import DraftBatch, DraftResult
from fused_markov.engines import Plan
from fused_markov.engines.reasons import LIMITED_READS
from fused_markov.head import MarkovHead


class LoopEngine:
    """Runs `fused_markov.reference.sample`; reads W2 once a draft step."""

    name = "reference"

    def __init__(self, head: MarkovHead, plan: Plan) -> None:
        self._head, self._plan = head, plan

    @staticmethod
    def why_not(head: MarkovHead, plan: Plan) -> str | None:
        return None

    def sample(
        self, batch: DraftBatch, logits_cache: Tensor | None, tokens: Tensor | None
    ) -> DraftResult:
        return reference.sample(self._head, batch, logits_cache, tokens, **self._plan.arithmetic())

    def explain(self, batch: DraftBatch, logits_cache: Tensor | None) -> list[str]:
        """It reads W2 once a draft step."""
        if self._plan.draft_topk is not None:
            return [LIMITED_READS]
        return [f"reads W2 {batch.steps} times, once a draft step"]

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Nothing to prepare."""
