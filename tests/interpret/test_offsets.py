"""Case 1: the kernels' offsets into base logits and cache pass 2**31."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fused_markov.kernels import rows
from fused_markov.kernels.args import Inputs

pytestmark = pytest.mark.interpret

ROWS, STEPS, VOCAB = 964, 16, 151936


@triton.jit
def offsets(io, row, step, slot, out, cfg: tl.constexpr):
    r, s, slot = tl.load(row), tl.load(step), tl.load(slot)
    tl.store(out, rows.base_offset(io, r, s, cfg))
    tl.store(out + 1, rows.cache_offset(io, slot, s, cfg))


@pytest.mark.parametrize("aligned", [False, True])
def test_offsets_are_int64(aligned: bool) -> None:
    strides = {"base_row": STEPS * VOCAB, "base_step": VOCAB}
    strides |= {"cache_slot": STEPS * VOCAB, "cache_step": VOCAB}
    io: Any = Inputs(**{**dict.fromkeys(Inputs._fields, 0), **strides})
    row, step = (torch.tensor([n - 1], dtype=torch.int32) for n in (ROWS, STEPS))
    slot = row.long()  # as `rows.load_slot` gives it
    out = torch.zeros(2, dtype=torch.int64)
    offsets[(1,)](io, row, step, slot, out, SimpleNamespace(ALIGNED=aligned))
    last = ((ROWS - 1) * STEPS + STEPS - 1) * VOCAB
    assert last > 2**31
    assert out.tolist() == [last, last]
