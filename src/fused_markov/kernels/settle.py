"""Settle: what a check decided of a row, and its next guess where it is not finished.

A step is right if its predecessor was. Up to the first step whose winner differs from the guess all
is final, and that step's own winner is too; the steps after it are guessed again from it.
"""

import triton
import triton.language as tl

from fused_markov.kernels.chain import chain_row
from fused_markov.kernels.rows import NO_ID, as_scalar, load_slot, unpacked, winner_of_parts
from fused_markov.kernels.shape import shaped_winner

PARTS_AT_ONCE = tl.constexpr(512)  # of a table of fp64 scores


@triton.jit
def _settle_row(io, scratch, r, count, counter, cfg: tl.constexpr):
    # Asked for before it is known whether it is needed: one latency, not one after another.
    s = tl.arange(0, cfg.STEPS_P2)
    m = r * cfg.STEPS + s
    all_steps = s < cfg.STEPS
    start = tl.load(scratch.start + r)
    slot = load_slot(io, r + 0 * s, s, all_steps)
    guess = tl.load(scratch.guess + m, mask=all_steps, other=0)
    winner = tl.load(scratch.winner + m, mask=all_steps, other=0)
    sure_from = tl.load(scratch.sure + m, mask=all_steps, other=0.0)
    if start < cfg.STEPS:
        live = (s >= start) & (slot >= 0)
        if cfg.FP64:
            place = tl.load(scratch.place + m, mask=live, other=0)
            width = tl.cdiv(count, cfg.BLOCK_M) * cfg.BLOCK_M
            parts = tl.load(scratch.parts)
            best, token = winner_of_parts(
                scratch, 0, parts, width, place, live, PARTS_AT_ONCE, True
            )
        else:
            best, token = unpacked(winner)
        if cfg.SHAPED:
            best, token, taken = shaped_winner(scratch, m, live, best, token, cfg)
            sure_from = tl.where(taken, float("-inf"), sure_from)
        token = tl.where(token == NO_ID, io.lowest_id, token)
        # Where the best that passed the gate is not above it, something may have been missed.
        sure = best >= sure_from
        wrong = live & ((token != guess) | (sure == 0))
        first = tl.min(tl.where(wrong, s, cfg.STEPS), axis=0)
        unsure = tl.sum(tl.where((s == first) & (sure == 0), 1, 0), axis=0)
        end = tl.minimum(first + 1 - unsure, cfg.STEPS)
        done = live & (s < end)
        at = r.to(tl.int64) * io.token_row + s.to(tl.int64) * io.token_step
        tl.store(io.tokens + at, token, mask=done)
        tl.store(io.nonfinite + m, (tl.abs(best) < float("inf")) == 0, mask=done)
        if end < cfg.STEPS:
            if unsure > 0:
                prev = tl.load(scratch.before + r * cfg.STEPS + first)
            else:
                prev = tl.sum(tl.where(s == first, token, 0), axis=0)
            # Few: a guess here is rare, and its registers are the whole check's.
            STAGES: tl.constexpr = 2 if cfg.PTX else 1
            gated = unsure == 0
            chain_row(io, scratch, r, end, prev, gated, counter, False, cfg.LINK_K, STAGES, cfg)
        else:
            tl.store(scratch.start + r, end)


@triton.jit
def settle_all(io, scratch, pid, programs, count, counter, cfg: tl.constexpr):
    """This program's rows, after a check of ``count`` row-steps."""
    for r in range(pid, io.rows, programs):
        _settle_row(io, scratch, as_scalar(r), count, counter, cfg)
