"""W2 as it is stored: plain, or codes of 8 or 4 bits with scales, read without ever being widened.

A quantized format is two things: codes whose values are exact in bf16, fp16 and fp32, and fp32
scales of blocks of rows by parts of the rank. An engine multiplies the values on its matrix unit
and each block's sum by its scale, in fp32:

    bias[v] = round(sum over parts b of scale[v, b] * (sum of value[v, k] * w1[prev, k], k in b))

In NVFP4 the value is that of the four bits times the e4m3 scale of its sixteen, which is exact too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError

PLAIN, FP8, INT8, NVFP4 = "plain", "fp8", "int8", "nvfp4"
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FORMATS = {torch.float8_e4m3fn: FP8, torch.int8: INT8, torch.uint8: NVFP4}

# Values of an NVFP4 scale's own, along the rank.
GROUP = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DEEPSEEK_BLOCK = (128, 128)
# Rows that are looked at side by side in a check of all of them.
_ROWS_AT_ONCE = 16384
_EXPECTED = (
    "fp32, bf16 or fp16; fp8 e4m3 or int8 with w2_scale; or packed NVFP4 (uint8, two a byte) with "
    "w2_scale (e4m3, one for 16) and w2_global_scale"
)


@dataclass(frozen=True)
class StoredWeights:
    """W2 in one of the formats; a head holds it as it is.

    Attributes:
        format: ``"plain"``, ``"fp8"`` (e4m3), ``"int8"`` or ``"nvfp4"``.
        data: ``[rows, r]``; NVFP4: uint8 ``[rows, r / 2]``, the even of two neighbours in the low
            four bits.
        scale: fp32 ``[ceil(rows / block rows), ceil(r / block rank)]``; ``None`` where plain.
        block: rows and part of the rank that one scale is for.
        groups: e4m3 ``[rows, r / 16]`` scales within NVFP4's values, in plain order; else ``None``.
    """

    format: str
    data: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    groups: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def rank(self) -> int:
        return self.data.shape[1] * (2 if self.format == NVFP4 else 1)

    @property
    def quantized(self) -> bool:
        return self.format != PLAIN

    @property
    def parts(self) -> int:
        """Parts of the rank with a scale of their own."""
        return 1 if self.scale is None else self.scale.shape[1]

    def nbytes(self, rows: int | None = None) -> int:
        """Bytes that reading the first ``rows`` rows (all if None) with their scales takes."""
        rows = self.rows if rows is None else rows
        total = rows * self.data.shape[1] * self.data.element_size()
        if self.groups is not None:
            total += rows * self.groups.shape[1]
        if self.scale is not None:
            total += -(-rows // self.block[0]) * self.parts * self.scale.element_size()
        return total

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return tuple(t for t in (self.data, self.scale, self.groups) if t is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> StoredWeights:
        """The same with every tensor replaced, as by ``clone`` or a move to a device."""
        scale, groups = (None if t is None else change(t) for t in (self.scale, self.groups))
        return replace(self, data=change(self.data), scale=scale, groups=groups)

    def values(self, rows: slice | Tensor) -> Tensor:
        """fp32 ``[n, r]`` of some rows before their fp32 scales; exact."""
        data = _take(self.data, rows)
        if self.format != NVFP4:
            return data.float()
        assert self.groups is not None
        pairs = _pairs(data.device).index_select(0, data.flatten().int())
        groups = _take(self.groups, rows).float().unsqueeze(2)
        return (pairs.view(*groups.shape[:2], GROUP) * groups).flatten(1)

    def factors(self, rows: slice | Tensor) -> Tensor:
        """fp32 ``[n, parts]`` scales of some rows' sums."""
        assert self.scale is not None
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.data.device)
        return self.scale.index_select(0, rows // self.block[0])

    def dequantized(self, rows: slice | Tensor) -> Tensor:
        """fp32 ``[n, r]`` of some rows, scales applied: for guesses and for people."""
        if not self.quantized:
            return self.values(rows)
        factors = self.factors(rows).repeat_interleave(self.block[1], dim=1)
        return self.values(rows) * factors[:, : self.rank]

    def products(self, rows: slice, embeds: list[Tensor]) -> list[Tensor]:
        """fp32 ``[rows, n]`` for each fp32 ``[r, n]`` of ``embeds``: sums by parts, scaled."""
        values = self.values(rows)
        if not self.quantized:
            return [torch.mm(values, embed) for embed in embeds]
        factors, width = self.factors(rows), self.block[1]
        results = []
        for embed in embeds:
            total = torch.mm(values[:, :width], embed[:width]) * factors[:, :1]
            for b in range(1, self.parts):
                part = slice(b * width, (b + 1) * width)
                total += torch.mm(values[:, part], embed[part]) * factors[:, b : b + 1]
            results.append(total)
        return results


def stored_weights(
    w2: Tensor,
    scale: Tensor | None = None,
    block: tuple[int, int] | None = None,
    global_scale: Tensor | float | None = None,
) -> StoredWeights:
    """What ``w2`` and its scales are, as `MarkovHead` takes them; shapes and dtypes checked.

    Nothing is copied but fp32 scales that come in another dtype.

    Raises:
        ArgumentError: for what is no format, or scales that do not fit it.
    """
    if w2.dim() != 2 or 0 in w2.shape:
        raise ArgumentError("w2", "two dimensions [rows, rank], none empty", str(list(w2.shape)))
    if not w2.is_contiguous():
        strides = f"strides {w2.stride()}"
        raise ArgumentError("w2", "contiguous rows", strides, "call .contiguous() once at load")
    w2 = w2.detach()
    if w2.dtype in PLAIN_DTYPES:
        _none_given(w2, w2_scale=scale, w2_block=block, w2_global_scale=global_scale)
        return StoredWeights(PLAIN, w2)
    if w2.dtype not in _FORMATS:
        raise ArgumentError("w2", _EXPECTED, str(w2.dtype), "quantize it anew, or dequantize it")
    if _FORMATS[w2.dtype] == NVFP4:
        return _nvfp4(w2, scale, block, global_scale)
    _none_given(w2, w2_global_scale=global_scale)
    if scale is None:
        raise ArgumentError("w2", _EXPECTED, f"{w2.dtype} without w2_scale", "give the scales too")
    return _in_blocks(_FORMATS[w2.dtype], w2, scale, block)


def check_values(weights: StoredWeights, rows: int) -> None:
    """See that the first ``rows`` rows hold numbers: a kernel takes e4m3's NaN for 480.

    Raises:
        ArgumentError: where a code or a scale within the values is not-a-number.
    """
    coded = {"w2": weights.data if weights.format == FP8 else None, "w2_scale": weights.groups}
    for name, codes in coded.items():
        if codes is None:
            continue
        for part in torch.split(codes[:rows].view(torch.int8), _ROWS_AT_ONCE):
            if bool(((part & 0x7F) == 0x7F).any()):
                raise ArgumentError(
                    name, "numbers", "e4m3 not-a-number", "they were never loaded, or are damaged"
                )


def unswizzled_scales(scales: Tensor, rows: int, groups: int) -> Tensor:
    """NVFP4 scales ``[rows, groups]`` in plain order, out of the order of CUTLASS's kernels.

    Args:
        scales: in tiles of 128 rows by 4 groups, ``[rows up to 128s, groups up to 4s]``, as vLLM's
            ``swizzle_blockscale`` leaves them. Where both sizes are such multiples already, no
            shape tells the two orders apart: call this only for scales known to be swizzled.

    Raises:
        ArgumentError: for another shape.
    """
    shape = (-(-rows // 128) * 128, -(-groups // 4) * 4)
    if tuple(scales.shape) != shape:
        raise ArgumentError("scales", f"shape {list(shape)}", str(list(scales.shape)))
    tiles = scales.view(torch.uint8).view(shape[0] // 128, shape[1] // 4, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(shape)[:rows, :groups]
    return plain.contiguous().view(scales.dtype)


def _nvfp4(
    w2: Tensor,
    groups: Tensor | None,
    block: tuple[int, int] | None,
    global_scale: Tensor | float | None,
) -> StoredWeights:
    _none_given(w2, w2_block=block)
    if groups is None or global_scale is None:
        missing = "w2_scale" if groups is None else "w2_global_scale"
        raise ArgumentError("w2", _EXPECTED, f"uint8 without {missing}", "give the scales too")
    rows, rank = w2.shape[0], 2 * w2.shape[1]
    if rank % GROUP:
        raise ArgumentError(
            "w2", f"a rank that is a multiple of {GROUP} in NVFP4, packed two a byte", f"{rank}"
        )
    if groups.dtype != torch.float8_e4m3fn:
        raise ArgumentError("w2_scale", "fp8 e4m3 in NVFP4", str(groups.dtype))
    shape = (rows, rank // GROUP)
    if tuple(groups.shape) != shape or not groups.is_contiguous():
        raise ArgumentError(
            "w2_scale",
            f"contiguous shape {list(shape)}, one for {GROUP} values",
            f"{list(groups.shape)}, strides {groups.stride()}",
            "scales swizzled for a kernel go through fused_markov.weights.unswizzled_scales",
        )
    of_all = torch.as_tensor(global_scale, dtype=torch.float32, device=w2.device).detach()
    if of_all.numel() != 1:
        raise ArgumentError("w2_global_scale", "one number", f"shape {list(of_all.shape)}")
    return StoredWeights(NVFP4, w2, of_all.reshape(1, 1), (rows, rank), groups.detach())


def _in_blocks(
    name: str, w2: Tensor, scale: Tensor, block: tuple[int, int] | None
) -> StoredWeights:
    """fp8 or int8 with scales of the whole, of rows, or of blocks."""
    rows, rank = w2.shape
    if not scale.is_floating_point():
        raise ArgumentError("w2_scale", "a float dtype", str(scale.dtype))
    if scale.dim() > 2:
        raise ArgumentError("w2_scale", "at most two dimensions", str(list(scale.shape)))
    if block is None:
        block = _block_of(rows, rank, scale)
    block = (min(block[0], rows), min(block[1], rank))
    shape = tuple(
        math.ceil(n / size) if size > 0 else 0 for n, size in zip(w2.shape, block, strict=True)
    )
    if (
        0 in shape
        or scale.numel() != math.prod(shape)
        or (scale.dim() == 2 and scale.shape != shape)
    ):
        raise ArgumentError(
            "w2_scale",
            f"shape {list(shape)} for blocks of {list(block)}",
            str(list(scale.shape)),
            "w2_block gives the rows and the part of the rank that a scale is for",
        )
    width = block[1]
    if width < rank and (width < 16 or width & (width - 1)):
        raise ArgumentError(
            "w2_block", f"a part of the rank of 16, 32, 64, ... or all {rank} of it", f"{width}"
        )
    scale = scale.detach().to(device=w2.device, dtype=torch.float32)
    return StoredWeights(name, w2, scale.reshape(shape).contiguous(), block)


def _block_of(rows: int, rank: int, scale: Tensor) -> tuple[int, int]:
    """The blocks that a shape of scales speaks for."""
    if scale.numel() == 1:
        return rows, rank
    if scale.numel() == rows and scale.shape[0] == rows:
        return 1, rank
    if scale.dim() == 2 and scale.shape[0] == rows and rank % scale.shape[1] == 0:
        return 1, rank // scale.shape[1]
    return _DEEPSEEK_BLOCK


def _none_given(w2: Tensor, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ArgumentError("w2", f"a format that takes {name}: {_EXPECTED}", str(w2.dtype))


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    if isinstance(rows, slice):
        return x[rows]
    if x.dtype != torch.float8_e4m3fn:
        return x.index_select(0, rows)
    return x.view(torch.uint8).index_select(0, rows).view(x.dtype)


_tables: dict[torch.device, Tensor] = {}


def _pairs(device: torch.device) -> Tensor:
    """fp32 ``[256, 2]``: the two values of each byte, the low four bits' first."""
    if device not in _tables:
        one = torch.tensor((*_E2M1, *(-x for x in _E2M1)), device=device)
        byte = torch.arange(256, device=device)
        _tables[device] = one[torch.stack((byte & 15, byte >> 4), dim=1)]
    return _tables[device]
