"""Philox 4x32 with 10 rounds, and the noise that vLLM 0.25 to 0.30 make of it, in PyTorch.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in the layout of Triton's
``tl.randint4x(seed, offset)``: the key is the seed's (low, high) 32-bit words, the counter the
offset's (low, high) and two zeros. A row's and step's request word is drawn first; it is the key of
that row's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Multipliers of the two halves of the counter, and what is added to the key each round.
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

# Triton's step from 31 bits to a uniform: (2**23 - 1) / 2**54, so that none rounds to 1.
STEP32 = 4.6566127342e-10
LEAST64 = 2.2250738585072014e-308  # the smallest normal number

_U32 = 0xFFFFFFFF


def philox(k0: Tensor, k1: Tensor | int, low: Tensor, high: Tensor | int) -> tuple[Tensor, Tensor]:
    """The first two output words for the key (k0, k1) and the counter (low, high, 0, 0).

    All are uint32 values in int64, where a product wraps but keeps its upper half's bits.
    """
    c0, c1, c2, c3 = low, torch.as_tensor(high), torch.as_tensor(0), torch.as_tensor(0)
    for _ in range(ROUNDS):
        a, b = c0 * ROUND_A, c2 * ROUND_B
        c0, c1 = ((b >> 32) & _U32) ^ c1 ^ k0, b & _U32
        c2, c3 = ((a >> 32) & _U32) ^ c3 ^ k1, a & _U32
        k0, k1 = (k0 + KEY_A) & _U32, (k1 + KEY_B) & _U32
    return c0, c1


def request_word(seed: Tensor, word: Tensor) -> Tensor:
    """uint32 (as int64) key of the tokens of a row and step; int64 arguments broadcast."""
    first, _ = philox(seed & _U32, (seed >> 32) & _U32, word & _U32, (word >> 32) & _U32)
    return first


def fold(word: Tensor) -> Tensor:
    """A uint32 word as an int32 with its sign folded away: 31 bits, as ``tl.rand`` has them."""
    return torch.where(word > _U32 >> 1, word ^ _U32, word)


def uniform32(word: Tensor) -> Tensor:
    """fp32 uniform of a word: ``tl.rand``, at least its own step."""
    return torch.clamp_min(fold(word).to(torch.float32) * STEP32, STEP32)


def uniform64(low: Tensor, high: Tensor) -> Tensor:
    """fp64 uniform of two words, above 0; one of 2**54 rounds to 1, where noise is infinite."""
    # One rounding: both products are exact.
    u = high.to(torch.float64) * 2.0**-32 + low.to(torch.float64) * 2.0**-64
    return torch.clamp_min(u, LEAST64)


def gumbel(state: Tensor, token: Tensor, dtype: torch.dtype) -> Tensor:
    """Gumbel noise of target ids after the request word ``state``; both int64, broadcast."""
    low, high = philox(state, 0, token, 0)
    if dtype == torch.float32:
        # Large where u is small, and dense.
        return -torch.log(-torch.log1p(-uniform32(low)))
    return -torch.log(-torch.log(uniform64(low, high)))
