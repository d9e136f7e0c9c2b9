"""Token bans: bitmasks of the tokens that may be drafted, as grammar back ends make them."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32  # tokens a word


def words(vocab_size: int) -> int:
    """Words of a mask over as many target ids."""
    return -(-vocab_size // BITS)


def allowed(bans: Tensor, slot: Tensor, step: Tensor | int, ids: Tensor) -> Tensor:
    """Whether target ids may be drafted: bit ``id % 32`` of word ``id // 32`` is 1.

    ``bans`` is `DraftBatch.bans`; ``slot`` (and ``step``) ``[n]``, not negative; ``ids`` ``[v]``.
    Returns bool ``[n, v]``.
    """
    rows = bans[slot, step] if bans.dim() == 3 else bans[slot]
    return (rows[:, ids // BITS] >> (ids % BITS).to(torch.int32) & 1).bool()
