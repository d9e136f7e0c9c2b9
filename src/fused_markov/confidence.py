"""The confidence head: how likely each drafted token is to be accepted, and drafts cut by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError
from fused_markov.rows_product import pointwise, rows_product


@dataclass(frozen=True, eq=False)
class ConfidenceHead:
    """The head that predicts whether a drafted token will be accepted (DSpark; vLLM 0.33's
    ``DSparkConfidenceHead``): a sigmoid over one fp32 linear layer.

    Attributes:
        weight: fp32 ``[H]``, or ``[H + r]`` where it also reads the Markov embedding.
        bias: fp32 ``[]``; 0 where the checkpoint has none.
        with_markov: whether W1 of the previous token follows the hidden state. It is W1's row
            itself, whatever the Markov head's variant makes of it.

    Raises:
        ArgumentError: for a wrong shape or dtype.
    """

    weight: Tensor
    bias: Tensor
    with_markov: bool

    def __post_init__(self) -> None:
        for name, x, shape in (("weight", self.weight, "[inputs]"), ("bias", self.bias, "[]")):
            if x.dtype != torch.float32 or x.dim() != (name == "weight"):
                raise ArgumentError(name, f"fp32 {shape}", f"{x.dtype} {list(x.shape)}")
        if self.bias.device != self.weight.device:
            raise ArgumentError("bias", f"on {self.weight.device}", f"on {self.bias.device}")

    def hidden_size(self, rank: int) -> int:
        """H, for a Markov head of this rank."""
        return self.weight.shape[0] - (rank if self.with_markov else 0)

    def probability(self, hidden: Tensor, markov_embed: Tensor) -> Tensor:
        """fp32 acceptance probabilities ``[...]`` for ``[..., H]`` and ``[..., r]`` inputs.

        On the CPU a row's bits do not depend on its company or its place.
        """
        x = hidden.float()
        if self.with_markov:
            x = torch.cat([x, markov_embed.float()], dim=-1)
        logits = rows_product(x.reshape(-1, x.shape[-1]), self.weight.unsqueeze(0)).squeeze(1)
        return pointwise(torch.sigmoid, logits + self.bias).view(x.shape[:-1])

    def clone(self) -> ConfidenceHead:
        """The same in memory of its own."""
        return ConfidenceHead(self.weight.clone(), self.bias.clone(), self.with_markov)


def too_low(confidence: Tensor, min_confidence: Tensor | None, slots: Tensor) -> Tensor:
    """bool: the live steps (slot >= 0) whose confidence is below what their slot asks for."""
    if min_confidence is None:
        return torch.zeros_like(slots, dtype=torch.bool)
    least = min_confidence.float()[slots.clamp_min(0)]
    return (slots >= 0) & (confidence < least)


def cut(slots: Tensor, low: Tensor) -> Tensor:
    """``slots`` ``[R, S]``, -1 from each row's first True of ``low`` ``[R, S]`` on."""
    return torch.where(low.long().cumsum(dim=1) > 0, -1, slots)


def lengths_of(live: Tensor) -> Tensor:
    """int64 ``[R]`` how many steps of each row are drafted before the first that is not."""
    return live.long().cumprod(dim=1).sum(dim=1)
