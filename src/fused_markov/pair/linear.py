"""A matrix product for a handful of rows on a CPU, which verification of a draft lives on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Between one row (a matrix-vector product) and many (a blocked product) the library behind
# F.linear packs the whole weight for every call. A batch of narrow products does not: for 8 rows
# and SmolLM2's matrices 80 ms a pass instead of 133, one thread, AVX-512.
FEW = range(3, 17)
WIDTH = 32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear(x, weight)`` for ``x`` ``[..., K]`` and ``weight`` ``[N, K]``."""
    rows = x.numel() // x.shape[-1]
    out, inner = weight.shape
    if rows not in FEW or x.is_cuda or x.dtype != torch.float32 or out % WIDTH:
        return F.linear(x, weight)
    narrow = weight.view(out // WIDTH, WIDTH, inner).transpose(1, 2)
    y = torch.matmul(x.reshape(rows, inner), narrow)  # [N / WIDTH, rows, WIDTH]
    return y.transpose(0, 1).reshape(*x.shape[:-1], out)


def draft_dtype() -> torch.dtype:
    """What a drafter on this CPU computes in fastest: bf16 where there are bf16 matrix units.

    Drafts only have to be drawn from the logits that are verified, so their rounding is free; the
    target stays in fp32.
    """
    has_units = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if has_units() else torch.float32
