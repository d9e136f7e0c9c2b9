"""A plain head's W2 rounded to fewer bits; scales by the largest magnitude, codes to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError
from fused_markov.head import MarkovHead
from fused_markov.weights import GROUP, StoredWeights, stored_weights

# What `quantize_head` makes, and the blocks that share an fp32 scale; 0: all of the rank.
BLOCKS = {"fp8": (1, 0), "fp8-block": (128, 128), "int8": (1, 0), "nvfp4": (0, 0)}

E4M3_MOST, INT8_MOST, E2M1_MOST = 448.0, 127.0, 6.0


def quantize_head(head: MarkovHead, format: str) -> MarkovHead:
    """The same head with W2 stored in fewer bits; W1 and all else are shared with ``head``.

    Args:
        head: a head whose W2 is plain.
        format: ``"fp8"`` (e4m3, a scale a row), ``"fp8-block"`` (e4m3, a scale for 128 x 128),
            ``"int8"`` (a scale a row) or ``"nvfp4"`` (4 bits, an e4m3 scale for 16 of a row and one
            fp32 scale; the rank must be a multiple of 16).

    Raises:
        ArgumentError: for another format, a quantized head, or weights that are not finite.

    Example:
        >>> import torch, fused_markov as fm
        >>> head = fm.MarkovHead(torch.randn(50, 16), torch.randn(50, 16))
        >>> fm.quantize_head(head, "int8").w2.dtype
        torch.int8
    """
    if format not in BLOCKS:
        raise ArgumentError("format", f"one of {tuple(BLOCKS)}", repr(format))
    if head.weights.quantized:
        raise ArgumentError("head", "a plain W2", f"one in {head.weights.format}")
    if not bool(head.w2.isfinite().all()):
        raise ArgumentError("head", "finite weights", "infinite ones or not-a-number in W2")
    return head.with_weights(head.w1, quantize(head.w2, format))


def quantize(w2: Tensor, format: str, powers: bool = False) -> StoredWeights:
    """``w2`` ``[rows, r]`` in a format of `BLOCKS`.

    Args:
        powers: scales are powers of two: what is whole multiples of a step then stays so.
    """
    w2 = w2.float()
    rows, rank = w2.shape
    block = tuple(size or whole for size, whole in zip(BLOCKS[format], (rows, rank), strict=True))
    block = (min(block[0], rows), min(block[1], rank))
    if format == "nvfp4":
        return _nvfp4(w2, powers)
    most = INT8_MOST if format == "int8" else E4M3_MOST
    scale = _scales(_largest(w2, block), most, powers)
    scaled = w2 / _spread(scale, block, rows, rank)
    if format == "int8":
        codes = scaled.round().clamp(-most, most).to(torch.int8)
    else:
        codes = scaled.clamp(-most, most).to(torch.float8_e4m3fn)
    return stored_weights(codes, scale, block)


def _nvfp4(w2: Tensor, powers: bool) -> StoredWeights:
    rank = w2.shape[1]
    if rank % GROUP:
        raise ArgumentError("format", f"one that takes a rank of {rank}", "nvfp4, in sixteens")
    largest = _largest(w2, (1, GROUP))
    of_all = _scales(largest.max(), E2M1_MOST * E4M3_MOST, powers)
    wanted = largest / of_all / E2M1_MOST
    if powers:
        wanted = torch.where(wanted == 0, 0.0, _power_above(wanted))
    groups = wanted.clamp(max=E4M3_MOST).to(torch.float8_e4m3fn)
    step = (groups.float() * of_all).repeat_interleave(GROUP, dim=1)
    scaled = torch.where(step == 0, 0.0, w2 / step)
    size = scaled.abs()
    # The code of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; of two as near the even code.
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for limit, even_below in zip(
        (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (True, False) * 4, strict=False
    ):
        codes += size > limit if even_below else size >= limit
    codes |= (scaled < 0).to(torch.uint8) << 3
    return stored_weights(codes[:, ::2] | codes[:, 1::2] << 4, groups, global_scale=of_all)


def _largest(w2: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block."""
    parts = [part.abs().amax(dim=1) for part in torch.split(w2, block[1], dim=1)]
    columns = torch.stack(parts, dim=1)
    if block[0] == 1:
        return columns
    return torch.stack([rows.amax(dim=0) for rows in torch.split(columns, block[0])])


def _scales(largest: Tensor, most: float, powers: bool) -> Tensor:
    scale = largest / most
    if powers:
        scale = _power_above(scale)
    return torch.where(largest == 0, 1.0, scale)


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below ``x``, of positive numbers."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).int())


def _spread(scale: Tensor, block: tuple[int, int], rows: int, rank: int) -> Tensor:
    """``[rows, r]`` or what broadcasts to it: each block's scale in its place."""
    if block[1] < rank:
        scale = scale.repeat_interleave(block[1], dim=1)[:, :rank]
    return scale.repeat_interleave(block[0], dim=0)[:rows] if block[0] > 1 else scale
