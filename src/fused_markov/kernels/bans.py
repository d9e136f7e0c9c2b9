"""Token bans: words of 32 tokens, a bit each, by request slot (and step)."""

import triton
import triton.language as tl

from fused_markov.kernels.rows import load_slot, target_id


@triton.jit
def ban_offset(io, slot, s):
    """Offset of a row-step's mask; ``slot`` is not negative."""
    return slot.to(tl.int64) * io.ban_slot + s.to(tl.int64) * io.ban_step


@triton.jit
def without_banned(io, x, at, tid, mask, lowest):
    """``x``, but ``lowest`` where the mask at ``at`` has no bit for ``tid``; all of one shape."""
    word = tl.load(io.bans + at + (tid >> 5), mask=mask, other=-1)
    return tl.where(((word >> (tid & 31)) & 1) != 0, x, lowest)


@triton.jit
def ban_tile(io, x, at, v, live, in_vocab, lowest, cfg: tl.constexpr):
    """A tile of logits [rows, candidates]; ``at``, ``live`` by row, ``v``, ``in_vocab`` else."""
    tid = target_id(io, v, in_vocab, cfg)
    inside = live[:, None] & in_vocab[None, :]
    return without_banned(io, x, at[:, None], tid[None, :], inside, lowest)


@triton.jit
def ban_candidates(io, x, m, tid, inside, cfg: tl.constexpr):
    """Logits [n, candidates] of row-step ``m``."""
    s = m % cfg.STEPS
    slot = load_slot(io, m // cfg.STEPS, s, True)
    at = ban_offset(io, tl.maximum(slot, 0), s)
    return without_banned(io, x, at, tid[None, :], inside[None, :], float("-inf"))
