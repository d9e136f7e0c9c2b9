"""The gate of `cpu_noise` for the Philox streams, and which gate a plan has."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov import noise, philox
from fused_markov.engines import Plan
from fused_markov.engines.cpu_noise import NoiseGate
from fused_markov.head import MarkovHead

_MIN = -(2**31)
_U32 = 0xFFFFFFFF

# The most noise of the fp32 stream, rounded up: its least uniform is 2**-31. fp64's has no end: a
# uniform of 1 gives infinity; a logit of -inf still needs more than this.
MAX_PHILOX = {torch.float32: 21.5, torch.float64: 1e300}


class PhiloxGate(NoiseGate):
    """Ranks tokens by their Philox words, in int64: torch has no upper half of a product.

    Dearer a token than murmur3 by an order of magnitude: ten rounds, nothing of which is shared.
    """

    def __init__(self, head: MarkovHead, noise_dtype: torch.dtype, stream: str) -> None:
        super().__init__(head, noise_dtype, stream)
        self.most = MAX_PHILOX[noise_dtype]

    def states(self, seed: Tensor, step: Tensor, position: Tensor) -> Tensor:
        """int32 request words."""
        state = noise.prefix(seed, step, position, stream=self.stream)
        return torch.where(state >= 2**31, state - 2**32, state).to(torch.int32)

    def _hashed(self, x: Tensor, state: Tensor, scratch: Tensor | None = None) -> Tensor:
        """The ranks of token ids ``[n, k]`` after request words ``[n, 1]``, in place of the ids.

        fp32 noise is large where the folded word, of 31 bits, is small; fp64 noise where its upper
        word is large.
        """
        low, high = philox.philox(state.to(torch.int64) & _U32, 0, x.to(torch.int64), 0)
        word = _U32 - high if self.noise_dtype == torch.float64 else philox.fold(low) << 1
        return x.copy_(word + _MIN)

    def approximate(self, rank: Tensor) -> Tensor:
        """The noise behind ranks, or in fp64, whose lower word is not known, a little less."""
        word = rank.to(torch.float64) - _MIN
        if self.noise_dtype == torch.float64:
            u = ((word + 1) * 2.0**-32).clamp_max_(1 - 2.0**-33)
        else:
            u = word.clamp_min_(2) * (philox.STEP32 / 2)
        return -torch.log(-torch.log1p(-u)).to(torch.float32)

    def exact(
        self, rank: Tensor, seed: Tensor, step: Tensor, position: Tensor, token: Tensor
    ) -> Tensor:
        """`noise.gumbel` of the other arguments, all ``[n]``."""
        return noise.gumbel(seed, step, position, token, self.noise_dtype, self.stream)


def noise_gate(head: MarkovHead, plan: Plan) -> NoiseGate:
    """The gate of a plan's noise stream."""
    philox_stream = noise.stream_of(plan.noise_stream).generator == "philox"
    kind = PhiloxGate if philox_stream else NoiseGate
    return kind(head, plan.noise_dtype, plan.noise_stream)
