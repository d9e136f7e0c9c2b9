"""Variants of the Markov head: bias = W2 · z, where z is more than the previous token's embedding.

DeepSpec and vLLM's speculators define three (``markov_head_type``): ``vanilla``, for which z is
W1[prev] and `MarkovHead` needs no variant; ``gated``; ``rnn``. In both z is found from one linear
layer over the embedding e = W1[prev], the step's hidden state h and, for ``rnn``, a state carried
from step to step. The layer is split here: what it makes of h is known for all steps beforehand.

Roundings: the layer is an fp32 sum, rounded once to the weights' dtype; after it every operation is
rounded, as PyTorch's modules in that dtype do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError
from fused_markov.rows_product import pointwise, rows_product


class Variant(ABC):
    """What z is. Weights have the head's dtype and live on its device.

    Attributes:
        kind: ``"gated"`` or ``"rnn"``, DeepSpec's ``markov_head_type``.
        carries: whether a state goes from step to step.
        rank: r. hidden_size: H.
        hidden_weight: ``[outs, H]`` the layer's part for the hidden state.
        mix_weight: ``[outs, r]``, with a state ``[outs, 2r]``: state first, then the embedding.
        bias: ``[outs]``; outs is r, or 3r.
    """

    kind: str
    carries: bool
    rank: int
    hidden_size: int
    hidden_weight: Tensor
    mix_weight: Tensor
    bias: Tensor

    def context(self, hidden: Tensor) -> Tensor:
        """fp32 ``[..., outs]``: the layer's part of hidden states ``[..., H]``, and its bias.

        They are rounded to the weights' dtype first.
        """
        flat = hidden.to(self.bias.dtype).reshape(-1, self.hidden_size)
        out = rows_product(flat, self.hidden_weight) + self.bias.float()
        return out.view(*hidden.shape[:-1], -1)

    @abstractmethod
    def embed(self, prev_embed: Tensor, context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """z ``[n, r]`` of a step and the state after it.

        Args:
            prev_embed: ``[n, r]`` W1 of the previous tokens.
            context: ``[n, outs]`` what `context` gave for the step.
            state: ``[n, r]`` the state after the step before; zeros at step 0 and after padding.
        """

    def _layer(self, inputs: Tensor, context: Tensor) -> Tensor:
        return (context + rows_product(inputs, self.mix_weight)).to(self.bias.dtype)

    def why_not(self, w1: Tensor) -> str | None:
        """Why it does not go with a head of this ``w1``, or None."""
        if self.rank != w1.shape[1]:
            return f"rank {self.rank} where w1 has {w1.shape[1]}"
        if self.bias.dtype != w1.dtype:
            return f"{self.bias.dtype} where w1 is {w1.dtype}"
        if self.bias.device != w1.device:
            return f"on {self.bias.device} where w1 is on {w1.device}"
        return None

    def clone(self) -> Variant:
        """The same in memory of its own."""
        twin = object.__new__(type(self))
        twin.__dict__.update(
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        )
        return twin


class GatedVariant(Variant):
    """z = sigmoid(W_g [h; e] + b) · e, elementwise: the hidden state decides what of e counts.

    Source: ``GatedMarkovHead`` of DeepSpec's ``modeling/dspark/markov_head.py``, and ``gated`` of
    speculators' ``models/dspark/model_definitions.py``.

    Args:
        weight: ``[r, H + r]`` of the layer (``markov_head.gate_proj.weight``); the hidden state's
            columns come first. fp32, bf16 or fp16.
        bias: ``[r]`` (``markov_head.gate_proj.bias``), of the same dtype.

    Raises:
        ArgumentError: for a wrong shape or dtype.
    """

    kind, carries = "gated", False

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        _check_layer(weight, bias, "[r, H + r]")
        self.rank = bias.shape[0]
        self.hidden_size = weight.shape[1] - self.rank
        if weight.shape[0] != self.rank or self.hidden_size < 1:
            raise ArgumentError(
                "weight", f"shape [{self.rank}, H + {self.rank}]", str(list(weight.shape))
            )
        self.hidden_weight = weight[:, : self.hidden_size].detach().contiguous()
        self.mix_weight = weight[:, self.hidden_size :].detach().contiguous()
        self.bias = bias.detach().contiguous()

    def embed(self, prev_embed: Tensor, context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = pointwise(torch.sigmoid, self._layer(prev_embed, context))
        return gate * prev_embed, state


class RnnVariant(Variant):
    """z = tanh(o); the state s becomes g·s + (1 - g)·tanh(c), with [g'; c; o] = W [s; e; h] + b
    and g = sigmoid(g'): a step sees all tokens of the block before it.

    The state is 0 at the block's start. A step's z depends on the state before it, not after it.

    Source: ``RNNHead`` of DeepSpec's ``modeling/dspark/markov_head.py``, and ``rnn`` of
    speculators' ``models/dspark/model_definitions.py``.

    Args:
        weight: ``[3r, 2r + H]`` of the layer (``markov_head.joint_proj.weight``), columns in the
            order state, embedding, hidden state; rows in the order gate, candidate, output.
        bias: ``[3r]`` (``markov_head.joint_proj.bias``), of the same dtype.

    Raises:
        ArgumentError: for a wrong shape or dtype.
    """

    kind, carries = "rnn", True

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        _check_layer(weight, bias, "[3r, 2r + H]")
        self.rank = bias.shape[0] // 3
        self.hidden_size = weight.shape[1] - 2 * self.rank
        if bias.shape[0] % 3 or weight.shape[0] != bias.shape[0] or self.hidden_size < 1:
            raise ArgumentError(
                "weight",
                "shape [3r, 2r + H] beside a bias [3r]",
                f"{list(weight.shape)} and {list(bias.shape)}",
            )
        self.hidden_weight = weight[:, 2 * self.rank :].detach().contiguous()
        self.mix_weight = weight[:, : 2 * self.rank].detach().contiguous()
        self.bias = bias.detach().contiguous()

    def embed(self, prev_embed: Tensor, context: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer(torch.cat([state, prev_embed], dim=1), context)
        gate, candidate, out = layer.chunk(3, dim=1)
        gate = pointwise(torch.sigmoid, gate)
        state = gate * state + (1 - gate) * pointwise(torch.tanh, candidate)
        return pointwise(torch.tanh, out), state


class Embeddings:
    """z of a batch's steps in turn, for an engine that follows all rows' chains together.

    Args:
        w1: ``[w1_rows, r]``.
        variant: or None: z is W1[prev].
        hidden: ``[R, S, H]`` hidden states; looked at where there is a variant.
    """

    def __init__(self, w1: Tensor, variant: Variant | None, hidden: Tensor | None) -> None:
        self._w1, self._variant = w1, variant
        if variant is not None and hidden is not None:
            self._context = variant.context(hidden)
            self._state = w1.new_zeros(hidden.shape[0], variant.rank)

    def step(self, step: int, prev: Tensor, live: Tensor) -> Tensor:
        """z ``[R, r]`` of the next step; a padded step leaves a state of 0 behind."""
        embed = self._w1[prev]
        if self._variant is None:
            return embed
        embed, state = self._variant.embed(embed, self._context[:, step], self._state)
        self._state = torch.where(live.unsqueeze(1), state, 0.0).to(embed.dtype)
        return embed


def _check_layer(weight: Tensor, bias: Tensor, shape: str) -> None:
    if weight.dim() != 2 or bias.dim() != 1:
        raise ArgumentError(
            "weight", f"{shape} beside one bias a row", f"{list(weight.shape)}, {list(bias.shape)}"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentError("weight", "fp32, bf16 or fp16", str(weight.dtype))
    if bias.dtype != weight.dtype or bias.device != weight.device:
        raise ArgumentError(
            "bias",
            f"{weight.dtype} on {weight.device} as weight",
            f"{bias.dtype} on {bias.device}",
        )
