"""Variant heads: z of a row-step, which W2 then multiplies in place of W1's row.

With a variant, `Inputs.w1` is the scratch of z, and the index of a row-step's row in it is the
row-step's own number; `Inputs.table` is W1. So what reads rows of W1 need not know of variants.
See `fused_markov.variants` for what is computed.
"""

import triton
import triton.language as tl

from fused_markov.kernels.logits import rounded
from fused_markov.kernels.rows import as_scalar, load_slot

GATED = tl.constexpr(1)
RNN = tl.constexpr(2)
ROWS = tl.constexpr(16)  # row-steps computed together: a matrix unit takes 16 at the least
ROW_COLUMNS = tl.constexpr(64)  # of z, where one program computes a row's
STEP_COLUMNS = tl.constexpr(32)  # where each program computes as many
PIECE = tl.constexpr(64)  # of the inputs, multiplied at a time
STAGES = tl.constexpr(3)  # such pieces in flight


@triton.jit
def embed_index(m, prev, cfg: tl.constexpr):
    """Row of `Inputs.w1` for row-steps ``m`` after ``prev``."""
    if cfg.VARIANT > 0:
        return m
    else:
        return prev


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    # Near 0 the difference has lost its last places: a polynomial has them.
    y = x * x
    near = x - x * y * (1 / 3 - y * (2 / 15 - y * (17 / 315)))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -t, t))


@triton.jit
def _mixed(acc, source, row, live, weight, out, INPUTS: tl.constexpr, cfg: tl.constexpr):
    """``acc`` [ROWS, len(out)] and the product of rows ``row`` of ``source`` and rows ``out`` of
    ``weight``, whose rows have INPUTS columns. The rank goes in order, whatever the launch.
    """
    for k0 in tl.range(0, cfg.RANK, PIECE, num_stages=STAGES):
        k = k0 + tl.arange(0, PIECE)
        inside = (k < cfg.RANK)[None, :]
        at = row.to(tl.int64)[:, None] * cfg.RANK + k[None, :]
        a = tl.load(source + at, mask=live[:, None] & inside, other=0.0)
        b = tl.load(weight + out[:, None] * INPUTS + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def _layer(io, scratch, m, prev, live, carried, out, cfg: tl.constexpr):
    """Outputs ``out`` of the linear layer for row-steps ``m`` [ROWS] after ``prev``."""
    acc = tl.zeros([ROWS, out.shape[0]], tl.float32)
    if cfg.VARIANT == RNN:
        acc = _mixed(acc, scratch.state, m - 1, carried, io.mix, out, 2 * cfg.RANK, cfg)
        acc = _mixed(acc, io.table, prev, live, io.mix + cfg.RANK, out, 2 * cfg.RANK, cfg)
        at = m.to(tl.int64)[:, None] * (3 * cfg.RANK) + out[None, :]
    else:
        acc = _mixed(acc, io.table, prev, live, io.mix, out, cfg.RANK, cfg)
        at = m.to(tl.int64)[:, None] * cfg.RANK + out[None, :]
    context = tl.load(io.context + at, mask=live[:, None], other=0.0)
    return rounded(context + acc, cfg.WEIGHT, cfg.PTX)


@triton.jit
def embed_columns(
    io,
    scratch,
    m,
    prev,
    live,
    carried,
    stored,
    first,
    COLUMNS: tl.constexpr,
    cfg: tl.constexpr,
):
    """COLUMNS of z from ``first`` on, and with a carried state its next, of row-steps [ROWS].

    ``prev``: tokens before; ``carried``: whether the step before left a state; ``stored``: whose
    results to keep.
    """
    c = first + tl.arange(0, COLUMNS)
    inside = c < cfg.RANK
    out = tl.minimum(c, cfg.RANK - 1)
    mask = stored[:, None] & inside[None, :]
    at = m.to(tl.int64)[:, None] * cfg.RANK + c[None, :]
    if cfg.VARIANT == GATED:
        gate = _layer(io, scratch, m, prev, live, carried, out, cfg)
        gate = rounded(sigmoid(gate), cfg.WEIGHT, cfg.PTX)
        row = io.table + prev.to(tl.int64)[:, None] * cfg.RANK + c[None, :]
        embed = tl.load(row, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        z = rounded(gate * embed, cfg.WEIGHT, cfg.PTX)
    else:
        gate = _layer(io, scratch, m, prev, live, carried, out, cfg)
        gate = rounded(sigmoid(gate), cfg.WEIGHT, cfg.PTX)
        new = _layer(io, scratch, m, prev, live, carried, cfg.RANK + out, cfg)
        new = rounded(_tanh(new), cfg.WEIGHT, cfg.PTX)
        new = rounded(rounded(1.0 - gate, cfg.WEIGHT, cfg.PTX) * new, cfg.WEIGHT, cfg.PTX)
        before = scratch.state + at - cfg.RANK
        old = tl.load(before, mask=carried[:, None] & inside[None, :], other=0.0).to(tl.float32)
        old = rounded(gate * old, cfg.WEIGHT, cfg.PTX)
        tl.store(scratch.state + at, rounded(old + new, cfg.WEIGHT, cfg.PTX).to(cfg.WEIGHT), mask)
        z = _layer(io, scratch, m, prev, live, carried, 2 * cfg.RANK + out, cfg)
        z = rounded(_tanh(z), cfg.WEIGHT, cfg.PTX)
    tl.store(io.w1 + at, z.to(cfg.WEIGHT), mask)


@triton.jit
def embed_row(io, scratch, r, step, prev, cfg: tl.constexpr):
    """z of row ``r`` at a live step after token ``prev``; this program may read it afterwards."""
    m = r * cfg.STEPS + step + 0 * tl.arange(0, ROWS)
    live = m >= 0
    carried = load_slot(io, r, tl.maximum(step - 1, 0), True) >= 0
    carried = live & carried & (step > 0)
    only = tl.arange(0, ROWS) == 0  # they are all alike
    for first in range(0, cfg.RANK, ROW_COLUMNS):
        c = as_scalar(first)
        embed_columns(io, scratch, m, prev + 0 * m, live, carried, only, c, ROW_COLUMNS, cfg)
    tl.debug_barrier()
