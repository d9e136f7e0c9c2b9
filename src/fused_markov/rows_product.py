"""Products and functions whose bits do not depend on how many rows are computed together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# On the CPU every product has this many rows: see `head.CPU_ROWS`.
ROWS = 16

# Vector code takes this many numbers at a time at the most, other code what is left over; more than
# that at once is split among threads anywhere.
LANES, AT_ONCE = 64, 1 << 14


def rows_product(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 ``x @ weight.T`` for ``[n, k]`` and ``[outs, k]``, summed in fp32.

    On the CPU a row's bits do not depend on its company or its place.
    """
    x = x.float()
    if x.device.type != "cpu":
        return x @ weight.float().T
    weight = weight.float()
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % ROWS))
    products = [torch.mm(weight, tile.T).T for tile in torch.split(padded, ROWS)]
    return torch.cat(products)[: x.shape[0]] if products else x.new_empty(0, weight.shape[0])


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each number, computed in fp32 and rounded once to ``x``'s dtype.

    PyTorch's CPU kernels have two codes for a function, and a number's place decides which it gets;
    here it is always the same one.
    """
    if x.device.type != "cpu":
        return function(x.float()).to(x.dtype)
    flat = F.pad(x.float().flatten(), (0, -x.numel() % LANES))
    parts = [function(part) for part in torch.split(flat, AT_ONCE)]
    return torch.cat(parts)[: x.numel()].view(x.shape).to(x.dtype)
