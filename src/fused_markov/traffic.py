"""What a decode step must move, and the least time that takes: the floor of every engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.head import MarkovHead


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step, all rows being live.

    Attributes:
        weights: W2 once, as it is stored; of limited candidates, their rows alone.
        base: the base logits once.
        cache: the cached logits once, written.
    """

    weights: int
    base: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.base + self.cache

    def __str__(self) -> str:
        parts = {"W2": self.weights, "base": self.base, "cache": self.cache}
        said = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in parts.items() if size)
        return f"{self.total / 1e6:.1f} MB ({said})"


def traffic(
    head: MarkovHead, batch: DraftBatch, cache: Tensor | None, draft_topk: int | None = None
) -> Traffic:
    """The least that a step of ``batch`` moves; ``cache`` ``[N, >=S, width]`` or None."""
    row_steps = batch.rows * batch.steps
    rows = head.draft_vocab if draft_topk is None else min(row_steps * draft_topk, head.draft_vocab)
    return Traffic(
        head.weights.nbytes(rows),
        row_steps * head.draft_vocab * batch.base_logits.element_size(),
        0 if cache is None else row_steps * cache.shape[2] * cache.element_size(),
    )


def peak_bytes_a_us(device: torch.device) -> float | None:
    """Bytes a microsecond of a GPU's memory by its clock and width, where the driver says so."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock = getattr(properties, "memory_clock_rate", 0)  # kHz; two transfers a clock
    width = getattr(properties, "memory_bus_width", 0)  # bits
    return 2 * clock * 1e3 * width / 8 / 1e6 or None
