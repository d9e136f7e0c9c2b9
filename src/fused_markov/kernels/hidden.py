"""What is made of the backbone's hidden states: a variant's context, confidences, cut drafts."""

import triton
import triton.language as tl

from fused_markov.kernels.rows import load_anchor, load_slot
from fused_markov.kernels.variant import sigmoid

ROWS = tl.constexpr(16)
OUTS = tl.constexpr(32)
PIECE = tl.constexpr(64)
WIDTH = tl.constexpr(512)


@triton.jit
def _hidden_offset(io, m, cfg: tl.constexpr):
    row, step = (m // cfg.STEPS).to(tl.int64), (m % cfg.STEPS).to(tl.int64)
    return row * io.hidden_row + step * io.hidden_step


@triton.jit(do_not_specialize=["io"])
def context_kernel(io, cfg: tl.constexpr):
    """fp32 [M, outs]: hidden states times the layer's weights for them, and its bias.

    One program makes [ROWS, OUTS] of it. The width goes in order, so that a row's bits do not
    depend on the others.
    """
    blocks = tl.cdiv(io.outs, OUTS)
    m = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(0) % blocks * OUTS + tl.arange(0, OUTS)
    live, wanted = m < io.rows * cfg.STEPS, out < io.outs
    row = _hidden_offset(io, m, cfg)
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for k0 in tl.range(0, io.width, PIECE, num_stages=3):
        k = k0 + tl.arange(0, PIECE)
        inside = (k < io.width)[None, :]
        a = tl.load(io.hidden + row[:, None] + k[None, :], mask=live[:, None] & inside, other=0.0)
        at = out.to(tl.int64)[:, None] * io.width + k[None, :]
        b = tl.load(io.hidden_weight + at, mask=wanted[:, None] & inside, other=0.0)
        acc = tl.dot(a.to(cfg.WEIGHT), tl.trans(b), acc, input_precision="ieee")
    bias = tl.load(io.hidden_bias + out, mask=wanted, other=0.0).to(tl.float32)
    at = m.to(tl.int64)[:, None] * io.outs + out[None, :]
    tl.store(io.context + at, acc + bias[None, :], mask=live[:, None] & wanted[None, :])


@triton.jit
def _token_before(io, r, s):
    """The token before step ``s`` of row ``r``, once all are sampled."""
    token = load_anchor(io, r, s == 0)
    at = r.to(tl.int64) * io.token_row + (s - 1).to(tl.int64) * io.token_step
    drafted = tl.load(io.tokens + at, mask=s > 0, other=0).to(tl.int32)
    return tl.where(s == 0, token, drafted)


@triton.jit(do_not_specialize=["io"])
def confidence_kernel(io, cfg: tl.constexpr):
    """The confidence of one row-step; 0 where it is padding."""
    m = tl.program_id(0)
    r, s = m // cfg.STEPS, m % cfg.STEPS
    p = tl.full([], 0.0, tl.float32)
    if load_slot(io, r, s, True) >= 0:
        row = io.hidden + _hidden_offset(io, m, cfg)
        acc = tl.zeros([WIDTH], tl.float32)
        for k0 in range(0, io.width, WIDTH):
            k = k0 + tl.arange(0, WIDTH)
            h = tl.load(row + k, mask=k < io.width, other=0.0).to(tl.float32)
            acc += h * tl.load(io.confidence_weight + k, mask=k < io.width, other=0.0)
        if cfg.WITH_MARKOV:
            embed = io.w1 + _token_before(io, r, s).to(tl.int64) * cfg.RANK
            for k0 in range(0, cfg.RANK, WIDTH):
                k = k0 + tl.arange(0, WIDTH)
                e = tl.load(embed + k, mask=k < cfg.RANK, other=0.0).to(tl.float32)
                at = io.confidence_weight + io.width + k
                acc += e * tl.load(at, mask=k < cfg.RANK, other=0.0)
        p = sigmoid(tl.sum(acc, axis=0) + tl.load(io.confidence_bias))
    tl.store(io.confidence + m, p)


@triton.jit(do_not_specialize=["io"])
def cut_kernel(io, cfg: tl.constexpr):
    """End a row's draft before its first step of too low a confidence.

    What is left becomes padding: in a copy of the slots, and where the draft is already there, in
    its tokens and flags too.
    """
    r = tl.program_id(0)
    s = tl.arange(0, cfg.STEPS_P2)
    m = r * cfg.STEPS + s
    inside = s < cfg.STEPS
    slot = load_slot(io, r + 0 * s, s, inside)
    live = inside & (slot >= 0)
    p = tl.load(io.confidence + m, mask=live, other=0.0)
    at = tl.where(live, slot, 0) * io.limit_slot
    least = tl.load(io.limit + at, mask=live, other=0.0).to(tl.float32)
    end = tl.min(tl.where(live & (p < least), s, cfg.STEPS), axis=0)
    gone = inside & (s >= end)
    tl.store(io.cut_slots + m, tl.where(gone, -1, slot), mask=inside)
    tl.store(io.confidence + m, 0.0, mask=inside & (s > end))
    drafted = live & (s < end)
    length = tl.min(tl.where(inside & (drafted == 0), s, cfg.STEPS), axis=0)
    tl.store(io.lengths + r, length.to(tl.int64))
    if cfg.WITH_MARKOV:
        token_at = r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step
        tl.store(io.tokens + token_at, 0, mask=gone)
        tl.store(io.nonfinite + m, 0, mask=gone)
