"""A cheap test for which tokens' noise can matter: the hash of `noise.hash32` in int32.

A token's noise reaches ``need`` only if its uniform is at most ``exp(-need)`` away from the end of
the range where noise is large. So a hash and one compare rule out nearly every token, and the two
logarithms are left for the rest. int32 arithmetic wraps as the stream's uint32 does, and eleven
in-place operations on a slice that fits the cache cost about a nanosecond a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov import noise
from fused_markov.head import MarkovHead

# Tokens are gated in runs of this many neighbours, by the run's largest logit.
RUN = 128

# The most noise the stream can give, rounded up: -log(2**-33), and -log(2**-53) in fp64.
MAX_NOISE = {torch.float32: 22.9, torch.float64: 37.5}

_MIN = -(2**31)


def _signed(x: int) -> int:
    """The int32 with the bits of a uint32."""
    return (x + 2**31) % 2**32 - 2**31


_ADD, _MUL1, _MUL2 = _signed(0xE6546B64), _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def _to_int32(x: Tensor) -> Tensor:
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)


class NoiseGate:
    """The gate of a head's candidates: what all hashes of a token share is computed once.

    Args:
        head: the Markov head whose candidates are gated.
        noise_dtype: float32 or float64.
    """

    def __init__(self, head: MarkovHead, noise_dtype: torch.dtype) -> None:
        self.noise_dtype = noise_dtype
        self.most = MAX_NOISE[noise_dtype]
        runs = -(-head.draft_vocab // RUN)
        keys = torch.zeros(runs * RUN, dtype=torch.int32)
        for low, high in head.cpu_blocks():
            ids = head.target_ids(torch.arange(low, high))
            # rotl distributes over xor: the key and the row's state can be rotated beforehand.
            keys[low:high] = _to_int32(noise._rotl(noise._mix_key(ids), 13))
        self._keys = keys.view(runs, RUN)

    def states(self, seed: Tensor, step: Tensor, position: Tensor) -> Tensor:
        """int32 hash states before the token, for `ranks`. int64 arguments of one shape."""
        domain = noise.FP64_DOMAIN if self.noise_dtype == torch.float64 else 0
        h = torch.full_like(seed, domain)
        # The same words as noise.prefix, whose step is one number for all rows.
        for word in (seed, (seed >> 32) ^ step, position - 1 + noise.DRAFT_SALT):
            h = noise._mix(h, word & noise._U32)
        return _to_int32(noise._rotl(h, 13))

    def ranks(self, state: Tensor, run: Tensor) -> Tensor:
        """How far each token's noise is from the largest: int32 ``[n, RUN]``, smaller is larger.

        The last xor of the hash is left out; it changes the low 16 bits only.

        Args:
            state: int32 ``[n]`` of the run's row and step. run: int64 ``[n]`` index of the run.
        """
        x = self._keys.index_select(0, run)
        x.bitwise_xor_(state.unsqueeze(1))
        x.mul_(5).add_(_ADD).bitwise_xor_(16)
        shifted = x >> 16
        x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(_MUL1)
        torch.bitwise_right_shift(x, 13, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(0x7FFFF))
        if self.noise_dtype == torch.float64:  # large where the hash is: ~h
            return x.mul_(-_MUL2).add_(_MIN - 1 + 2**32)
        return x.mul_(_MUL2).add_(_MIN)

    def limit(self, need: Tensor) -> Tensor:
        """The largest rank (int32) whose noise may reach ``need``; float64, any shape."""
        reach = (torch.exp(-need) * 2.0**32).clamp_max_(2.0**32 - 1).to(torch.int64)
        return ((reach | 0xFFFF) + _MIN).to(torch.int32)

    def approximate(self, rank: Tensor) -> Tensor:
        """The noise behind ranks, as fp32 to about a millionth; for guesses only."""
        h = rank.to(torch.int64) - _MIN
        h = h ^ (h >> 16)  # the xor that `ranks` left out
        if self.noise_dtype == torch.float64:
            h = h ^ 0xFFFF
        u = (h.to(torch.float64) + 0.5) * 2.0**-32
        return -torch.log(-torch.log1p(-u)).to(torch.float32)
