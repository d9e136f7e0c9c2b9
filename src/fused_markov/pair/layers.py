"""What target and drafter share: RMS norm, rotary positions, attention, and a ragged K/V cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_markov.errors import ArgumentError


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` over the root mean square of its last axis, times ``weight``; statistics in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


def rope_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """fp32 ``[2, length, head_dim]``: cosines, then sines with the sign of the swapped half."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta**-half)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on ``x`` ``[R, heads, T, d]``; ``cos``, ``sin``: ``[R or 1, 1, T, d]``."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x * cos + swapped * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Grouped-query attention.

    Args:
        q: ``[R, Hq, T, d]``; k, v: ``[R, Hkv, K, d]``: query head ``h`` reads ``h // (Hq/Hkv)``.
        mask: bool ``[R or 1, 1, T or 1, K]``, True where a query may look; ``None``: everywhere.
        causal: the T queries and K = T keys are one sequence seen left to right.

    Returns:
        ``[R, T, Hq * d]``.
    """
    rows, heads, steps, dim = q.shape
    if causal:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows, steps, heads * dim)
    # The query heads of one group become further query rows: no key is ever copied.
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = q.reshape(rows, kv_heads, group * steps, dim)
    if mask is not None:
        mask = mask.expand(mask.shape[0], 1, steps, k.shape[2]).repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
    out = out.view(rows, kv_heads, group, steps, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, steps, heads * dim)


class KVCache:
    """Keys and values of R rows of different lengths, in storage allocated once.

    ``lengths`` is an int64 CPU tensor ``[R]``: the host decides how much of a draft stands, and
    reading it never waits for the device. Entries past a row's length are garbage that the next
    write covers, so taking tokens back is only a smaller length.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, rows, kv_heads, max_length, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self._set(torch.zeros(rows, dtype=torch.int64))
        self._rows = torch.arange(rows, device=device)[:, None]

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    def _set(self, lengths: Tensor) -> None:
        """Take new lengths; what every layer asks of them is worked out once, here."""
        self.lengths = lengths
        self._longest = int(lengths.max())
        # The common length of all rows, or None where they differ.
        self._even = self._longest if int(lengths.min()) == self._longest else None

    def positions(self, steps: int) -> Tensor:
        """int64 ``[R or 1, steps]`` on the device: where the next ``steps`` entries of a row go."""
        even, device = self._even, self.keys.device
        if self._longest + steps > self.max_length:
            raise ArgumentError(
                "cache",
                f"room for {self._longest + steps} positions",
                f"max_length {self.max_length}",
                "make the cache with a larger max_length",
            )
        if even is not None:
            return torch.arange(even, even + steps, device=device)[None]
        return self.lengths.to(device)[:, None] + torch.arange(steps, device=device)

    def mask(self, steps: int, *, causal: bool) -> Tensor | None:
        """Which keys the next ``steps`` queries may see: bool ``[R or 1, 1, steps or 1, K]``.

        ``causal``: those at or before their own position; otherwise everything up to the last of
        the ``steps``. ``None`` where all rows may see all keys.
        """
        even = self._even
        if even is not None and (steps == 1 or not causal):
            return None
        last = self.positions(steps)[:, None, :, None]
        if not causal:
            last = last[:, :, -1:]
        keys = torch.arange(self._longest + steps, device=self.keys.device)
        return keys <= last

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``k`` and ``v`` ``[R, Hkv, T, d]`` after each row's entries; lengths stay.

        Returns:
            The layer's keys and values ``[R, Hkv, K, d]`` up to the longest row's new end (views).
        """
        steps, even = k.shape[2], self._even
        end = self._longest + steps
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            if even is not None:
                store[:, :, even:end] = new
            else:
                store[self._rows, :, self.positions(steps)] = new.transpose(1, 2)
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, counts: int | Tensor) -> None:
        """Let the last written entries stand: ``counts`` of each row (an int, or int64 ``[R]``)."""
        self._set(self.lengths + (counts.cpu() if isinstance(counts, Tensor) else counts))

    def crop(self, lengths: int | Tensor) -> None:
        """Shorten the rows to ``lengths`` (an int, or int64 ``[R]``); shorter ones stay."""
        limit = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        self._set(torch.minimum(self.lengths, limit.expand_as(self.lengths)))
