"""Elementwise transforms of the finished logits: base plus bias, before temperature."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError


@dataclass(frozen=True)
class LogitTransform:
    """A function of each logit alone, in PyTorch and, for the Triton engines, in Triton.

    It takes base plus bias, rounded as without it, and gives fp32; a cache then rounds that to its
    own dtype. Bans and shaping come after it. The two functions should agree to the bit: where they
    do not, engines draft differently, each still from the very logits in its cache.

    Args:
        torch_fn: ``f(x, *parameters)``, an fp32 tensor to an fp32 tensor of its shape.
        triton_fn: a ``@triton.jit`` function ``f(x, parameters)`` on an fp32 block;
            ``parameters`` is a ``tl.constexpr`` tuple. ``None``: no Triton engine can run it.
        name: for messages.
        parameters: numbers that both are given.

    Example:
        >>> import torch
        >>> halved = LogitTransform(lambda x, by: x * by, None, "halved", (0.5,))
        >>> halved(torch.tensor([4.0]))
        tensor([2.])
    """

    torch_fn: Callable[..., Tensor]
    triton_fn: Any
    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.torch_fn):
            raise ArgumentError("torch_fn", "a function of an fp32 tensor", repr(self.torch_fn))
        if self.triton_fn is not None and not hasattr(self.triton_fn, "fn"):
            raise ArgumentError("triton_fn", "a @triton.jit function or None", repr(self.triton_fn))

    def __call__(self, logits: Tensor) -> Tensor:
        """The transform of ``logits`` of any dtype, fp32."""
        return self.torch_fn(logits.float(), *self.parameters)


def scaled_soft_cap(multiplier: float, cap: float | None) -> LogitTransform:
    """``cap * tanh(x * multiplier / cap)``, or ``x * multiplier`` without a cap, all in fp32.

    vLLM 0.33's Muse Spark draft transforms its logits so (``output_multiplier`` and
    ``output_soft_cap_temp``). A GPU's tanh and the kernels' differ in their last places.
    """
    parameters = (float(multiplier),) if cap is None else (float(multiplier), float(cap))
    triton_fn = None
    if importlib.util.find_spec("triton") is not None:
        from fused_markov.kernels.transforms import scaled_soft_cap as triton_fn
    return LogitTransform(_scaled_soft_cap, triton_fn, "scaled soft cap", parameters)


def _scaled_soft_cap(x: Tensor, multiplier: float, cap: float | None = None) -> Tensor:
    x = x * multiplier
    return x if cap is None else cap * torch.tanh(x / cap)
