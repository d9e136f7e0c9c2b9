"""The noise streams of vLLM's draft samplers (``v1/worker/gpu/sample/gumbel.py``), in PyTorch.

A token's noise depends only on (request seed, draft step, position, target id). vLLM's stream
changed with its releases, so each has a name, that of its first release: see `STREAMS`.

The default, vLLM 0.33's: murmur3 mixes the 32-bit words of ``seed ^ (step << 32)``, of ``position -
1 + 2**30`` (the salt keeps drafts apart from the target's own draws) and of the id; the hash
becomes a uniform at its midpoint, and the uniform a Gumbel variable whose large values, which
decide an argmax, come from u -> 0, where floats are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from fused_markov import philox
from fused_markov.errors import ArgumentError

STREAM = "vllm-0.33"
DRAFT_SALT = 1 << 30
FP64_DOMAIN = 0x9E3779B9  # sets the second hash of a 53-bit uniform apart from the first
NOISE_DTYPES = (torch.float32, torch.float64)

_U32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Stream:
    """How one stream turns its words into noise; docs/vllm-versions.md has the formulas.

    Attributes:
        name: ``vllm-`` and the first release that draws so.
        generator: the hash or counter-based generator of a token's random words.
        salt: what is added to the position before the token's.
        stepped: the draft step is mixed into the seed.
    """

    name: str
    generator: Literal["murmur3", "philox"]
    salt: int
    stepped: bool


STREAMS: Mapping[str, Stream] = MappingProxyType(
    {
        stream.name: stream
        for stream in (
            Stream("vllm-0.25", "philox", 0, stepped=False),
            Stream("vllm-0.29", "philox", DRAFT_SALT, stepped=False),
            Stream("vllm-0.31", "murmur3", DRAFT_SALT, stepped=False),
            Stream("vllm-0.33", "murmur3", DRAFT_SALT, stepped=True),
        )
    }
)


def stream_of(name: str) -> Stream:
    """The stream of a name; an `ArgumentError` with the names there are where there is none."""
    if name not in STREAMS:
        raise ArgumentError("noise_stream", f"one of {', '.join(STREAMS)}", repr(name))
    return STREAMS[name]


def row_words(
    seed: Tensor, step: Tensor | int, position: Tensor, stream: str = STREAM
) -> tuple[Tensor, Tensor]:
    """The two int64 words of a row and step that a stream draws from; see `prefix`."""
    kind = stream_of(stream)
    seed = seed.to(torch.int64)
    if kind.stepped:
        seed = seed ^ (torch.as_tensor(step, dtype=torch.int64, device=seed.device) << 32)
    return seed, position.to(torch.int64) - 1 + kind.salt


def _rotl(x: Tensor, shift: int) -> Tensor:
    return ((x << shift) | (x >> (32 - shift))) & _U32


def _mix_key(key: Tensor) -> Tensor:
    return _rotl(key * 0xCC9E2D51 & _U32, 15) * 0x1B873593 & _U32


def _mix(h: Tensor, key: Tensor) -> Tensor:
    return (_rotl(h ^ _mix_key(key), 13) * 5 + 0xE6546B64) & _U32


def _finalize(h: Tensor) -> Tensor:
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & _U32
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & _U32
    return h ^ (h >> 16)


def prefix(
    seed: Tensor,
    step: Tensor | int,
    position: Tensor,
    domain: int = 0,
    stream: str = STREAM,
) -> Tensor:
    """The state before the token id: all that is one row's and step's own.

    Args:
        seed: int64 request seeds. step: draft step from 0. position: position of the sampled token
        (not of the one before it). All broadcast together.
        domain: sets murmur3's second hash apart; Philox has its own second word.

    Returns:
        int64 tensor of uint32 values.
    """
    seed, word = row_words(seed, step, position, stream)
    if stream_of(stream).generator == "philox":
        return philox.request_word(seed, word)
    h = torch.full_like(seed, domain)
    h = _mix(h, seed & _U32)
    h = _mix(h, (seed >> 32) & _U32)
    return _mix(h, word & _U32)


def token_keys(ids: Tensor, stream: str = STREAM) -> Tensor:
    """int32 ``like ids``: what a token id brings to its noise whatever the row, for the kernels.

    For murmur3 they turn it and the row's state by 13 bits before they meet, not after; Philox
    takes the id itself.
    """
    if stream_of(stream).generator == "philox":
        return ids.to(torch.int32)
    key = _rotl(_mix_key(ids.to(torch.int64)), 13)
    return torch.where(key >= 1 << 31, key - (1 << 32), key).to(torch.int32)


def hash32(state: Tensor, token: Tensor) -> Tensor:
    """uint32 hashes (as int64) of target ids ``token`` after the ``state`` that `prefix` gave."""
    return _finalize(_mix(state, token.to(torch.int64)) ^ 16)


def uniform32(h: Tensor) -> Tensor:
    """fp32 ``(h + 0.5) / 2**32``, rounded once: both halves are exact."""
    high = (h >> 16).to(torch.float32) * 2.0**-16
    return high + ((h & 0xFFFF).to(torch.float32) + 0.5) * 2.0**-32


def uniform64(high: Tensor, low: Tensor) -> Tensor:
    """fp64 midpoint uniform of the top 53 bits of ``high:low``; stays below 1."""
    bits = (high << 21) | (low >> 11)
    u = (bits.to(torch.float64) + 0.5) * 2.0**-53
    return torch.where(u == 1.0, u - 2.0**-53, u)


def _log1p_neg(u: Tensor) -> Tensor:
    """log(1 - u) in fp32 as the stream defines it: a series below 1/4, the logarithm above."""
    poly = torch.full_like(u, 1.0 / 8.0)
    for k in (7, 6, 5, 4, 3, 2, 1):
        poly = 1.0 / k + u * poly
    direct = torch.log(torch.clamp_min(1.0 - u, 5.960464477539063e-08))
    return torch.where(u < 0.25, -u * poly, direct)


def gumbel(
    seed: Tensor,
    step: Tensor | int,
    position: Tensor,
    token: Tensor,
    dtype: torch.dtype = torch.float32,
    stream: str = STREAM,
) -> Tensor:
    """Gumbel noise of draft tokens.

    Args:
        seed: int64 request seeds.
        step: draft step from 0.
        position: position of the sampled token.
        token: target ids.
        dtype: float32 (the default of vLLM) or float64 (its ``use_fp64_gumbel``).
        stream: a name of `STREAMS`.

    All arguments broadcast together; so does the result, in ``dtype``.

    Raises:
        ArgumentError: where there is no such stream.
    """
    state = prefix(seed, step, position, stream=stream)
    if stream_of(stream).generator == "philox":
        return philox.gumbel(state, token.to(torch.int64), dtype)
    low = hash32(state, token)
    if dtype == torch.float32:
        return -torch.log(-_log1p_neg(uniform32(low)))
    high = hash32(prefix(seed, step, position, FP64_DOMAIN, stream), token)
    return -torch.log(-torch.log(uniform64(high, low)))
