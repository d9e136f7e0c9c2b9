"""The noise stream of vLLM 0.33's draft sampler (``v1/worker/gpu/sample/gumbel.py``), in PyTorch.

A token's noise depends only on (request seed, draft step, position, target id). murmur3 mixes the
32-bit words of ``seed ^ (step << 32)``, of ``position - 1 + 2**30`` (the salt keeps drafts apart
from the target's own draws) and of the id; the hash becomes a uniform at its midpoint, and the
uniform a Gumbel variable whose large values, which decide an argmax, come from u -> 0, where floats
are dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

STREAM = "vllm-0.33"
DRAFT_SALT = 1 << 30
FP64_DOMAIN = 0x9E3779B9  # sets the second hash of a 53-bit uniform apart from the first
NOISE_DTYPES = (torch.float32, torch.float64)

_U32 = 0xFFFFFFFF


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


def prefix(seed: Tensor, step: Tensor | int, position: Tensor, domain: int = 0) -> Tensor:
    """The hash state before the token id: all that is one row's and step's own.

    Args:
        seed: int64 request seeds. step: draft step from 0. position: position of the sampled token
        (not of the one before it). All broadcast together.

    Returns:
        int64 tensor of uint32 values.
    """
    step = torch.as_tensor(step, dtype=torch.int64, device=seed.device)
    seed = seed.to(torch.int64) ^ (step << 32)
    word = position.to(torch.int64) - 1 + DRAFT_SALT
    h = torch.full_like(seed, domain)
    h = _mix(h, seed & _U32)
    h = _mix(h, (seed >> 32) & _U32)
    return _mix(h, word & _U32)


def token_keys(ids: Tensor) -> Tensor:
    """int32 ``like ids``: what a token id brings to its hash whatever the row, for the kernels.

    The kernels turn it and the row's state by 13 bits before they meet, not after.
    """
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
) -> Tensor:
    """Gumbel noise of draft tokens.

    Args:
        seed: int64 request seeds.
        step: draft step from 0.
        position: position of the sampled token.
        token: target ids.
        dtype: float32 (the default of vLLM) or float64 (its ``use_fp64_gumbel``).

    All arguments broadcast together; so does the result, in ``dtype``.
    """
    low = hash32(prefix(seed, step, position), token)
    if dtype == torch.float32:
        return -torch.log(-_log1p_neg(uniform32(low)))
    high = hash32(prefix(seed, step, position, FP64_DOMAIN), token)
    return -torch.log(-torch.log(uniform64(high, low)))
