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
from fused_markov.engines.cpu_runs import RUN, RUNS_AT_ONCE
from fused_markov.head import MarkovHead

# Below every rank's limit: for runs whose least rank is not known.
UNKNOWN_RANK = -(2**31)

# The most noise the stream can give, rounded up: -log(2**-33), and -log(2**-53) in fp64.
MAX_NOISE = {torch.float32: 22.9, torch.float64: 37.5}

_MIN = -(2**31)


def _signed(x: int) -> int:
    """The int32 with the bits of a uint32."""
    return (x + 2**31) % 2**32 - 2**31


def _constant(x: int) -> Tensor:
    """A number as operations on int32 take it without a conversion each time."""
    return torch.tensor(_signed(x), dtype=torch.int32)


def _to_int32(x: Tensor) -> Tensor:
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)


class NoiseGate:
    """The gate of a head's candidates: what all hashes of a token share is computed once.

    Args:
        head: the Markov head whose candidates are gated.
        noise_dtype: float32 or float64.
        stream: a murmur3 stream of `noise.STREAMS`; `cpu_philox` has the gate of the others.
    """

    def __init__(
        self, head: MarkovHead, noise_dtype: torch.dtype, stream: str = noise.STREAM
    ) -> None:
        self.noise_dtype, self.stream = noise_dtype, stream
        self.most = MAX_NOISE[noise_dtype]
        runs = -(-head.draft_vocab // RUN)
        keys = torch.zeros(runs * RUN, dtype=torch.int32)
        for low, high in head.cpu_blocks():
            ids = head.target_ids(torch.arange(low, high))
            # rotl distributes over xor: the key and the row's state can be rotated beforehand.
            keys[low:high] = noise.token_keys(ids, stream)
        keys[head.draft_vocab :] = keys[head.draft_vocab - 1]  # it stands for what is missing
        self._keys = keys.view(runs, RUN)
        self._mixed, self._middle = _constant(0xE6546B64), _constant(0x85EBCA6B)
        self._last, self._ranked = _signed(0xC2B2AE35), _constant(2**31)
        if noise_dtype == torch.float64:  # whose noise is large where the hash is: ~h for h
            self._last, self._ranked = _signed(-0xC2B2AE35), _constant(2**31 - 1)
        self._sixteen, self._thirteen = _constant(16), _constant(13)
        self._low16, self._low19 = _constant(0xFFFF), _constant(0x7FFFF)

    def states(self, seed: Tensor, step: Tensor, position: Tensor) -> Tensor:
        """int32 hash states before the token, for `ranks`. int64 arguments of one shape."""
        domain = noise.FP64_DOMAIN if self.noise_dtype == torch.float64 else 0
        state = noise.prefix(seed, step, position, domain, self.stream)
        return _to_int32(noise._rotl(state, 13))

    def ranks(self, state: Tensor, run: Tensor) -> Tensor:
        """How far each token's noise is from the largest: int32 ``[n, RUN]``, smaller is larger.

        The last xor of the hash is left out; it changes the low 16 bits only.

        Args:
            state: int32 ``[n]`` of the run's row and step. run: int64 ``[n]`` index of the run.
        """
        return self._hashed(self._keys.index_select(0, run), state.unsqueeze(1))

    def ranks_of(self, state: Tensor, candidate: Tensor) -> Tensor:
        """The ranks of single candidates ``[n, k]``; ``state`` int32 ``[n]``."""
        return self._hashed(self._keys.view(-1)[candidate], state.unsqueeze(1))

    def _hashed(self, x: Tensor, state: Tensor, scratch: Tensor | None = None) -> Tensor:
        """The ranks behind keys ``[n, k]``, computed in their place; ``state`` ``[n, 1]``."""
        x.bitwise_xor_(state)
        torch.add(self._mixed, x, alpha=5, out=x).bitwise_xor_(self._sixteen)
        shifted = torch.bitwise_right_shift(x, self._sixteen, out=scratch)
        x.bitwise_xor_(shifted.bitwise_and_(self._low16)).mul_(self._middle)
        torch.bitwise_right_shift(x, self._thirteen, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(self._low19))
        return torch.add(self._ranked, x, alpha=self._last, out=x)

    def least(self, state: Tensor, run: Tensor) -> Tensor:
        """int32 ``[n]`` the least rank of each of n runs; arguments as for `ranks`."""
        least, size = torch.empty_like(state), min(RUNS_AT_ONCE, run.numel())
        if not size:
            return least
        keys, scratch = torch.empty(2, size, RUN, dtype=torch.int32).unbind()
        parts = (torch.split(x, size) for x in (run, state.unsqueeze(1), least))
        for some, states, out in zip(*parts, strict=True):
            if some.numel() < size:
                keys, scratch = keys[: some.numel()], scratch[: some.numel()]
            torch.index_select(self._keys, 0, some, out=keys)
            torch.amin(self._hashed(keys, states, scratch), dim=1, out=out)
        return least

    def passing(self, state: Tensor, run: Tensor, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of n runs whose ranks are within the limit of their run.

        Args:
            state: int32 ``[n]``. run: int64 ``[n]``. limit: int32 ``[n]``. The runs are best chosen
            by their `least` rank: each is hashed.

        Returns:
            Each token's place in ``[n]``, its place in the run, and its rank.
        """
        found = []
        for low in range(0, run.numel(), RUNS_AT_ONCE):
            part = slice(low, low + RUNS_AT_ONCE)
            rank = self.ranks(state[part], run[part])
            at, place = (rank <= limit[part].unsqueeze(1)).nonzero(as_tuple=True)
            found.append((at + low, place, rank[at, place]))
        if not found:
            none = run.new_empty(0)
            return none, none, none.to(torch.int32)
        at, place, rank = (torch.cat(x) for x in zip(*found, strict=True))
        return at, place, rank

    @staticmethod
    def limit(need: Tensor) -> Tensor:
        """The largest rank (int32) whose noise may reach ``need`` (float64, margins taken off)."""
        reach = (torch.exp(-need) * 2.0**32).clamp_max_(2.0**32 - 1).to(torch.int64)
        return (reach.bitwise_or_(0xFFFF).add_(_MIN)).to(torch.int32)

    def approximate(self, rank: Tensor) -> Tensor:
        """The noise behind ranks to about 1e-5, or in fp64, whose low bits are not known, less."""
        h, middle = _hash_of(rank), 0.5
        if self.noise_dtype == torch.float64:
            h, middle = h ^ 0xFFFF, 1.0
        u = ((h.to(torch.float64) + middle) * 2.0**-32).clamp_max_(1 - 2.0**-33)
        return -torch.log(-torch.log1p(-u)).to(torch.float32)

    def exact(
        self, rank: Tensor, seed: Tensor, step: Tensor, position: Tensor, token: Tensor
    ) -> Tensor:
        """`noise.gumbel` of the other arguments, all ``[n]``, whose ranks are known."""
        if self.noise_dtype == torch.float64:
            return noise.gumbel(seed, step, position, token, torch.float64, self.stream)
        return -torch.log(-noise._log1p_neg(noise.uniform32(_hash_of(rank))))


def _hash_of(rank: Tensor) -> Tensor:
    """uint32 hashes (as int64) behind fp32 noise's ranks: with the xor that `ranks` leaves out."""
    h = rank.to(torch.int64) - _MIN
    return h ^ (h >> 16)
