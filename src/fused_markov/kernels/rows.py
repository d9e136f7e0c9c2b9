"""Reading what belongs to a row and step: slot, temperature, seed, noise state, offsets."""

import triton
import triton.language as tl

from fused_markov.kernels.noise import FP64_DOMAIN, row_state

NO_ID = tl.constexpr(2147483647)
# fp32's lowest number: what passes a gate is above -inf.
LOWEST_NEED = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def as_scalar(i):
    """A loop's counter as a tensor: the interpreter counts in Python's integers."""
    return i + tl.full([], 0, tl.int32)


@triton.jit
def below_vocab(io, v, cfg: tl.constexpr):
    """Mask of candidates ``v`` inside the vocabulary."""
    vocab = io.vocab
    if cfg.ALIGNED:
        # Says that whole vectors are inside or outside; a hint on an argument is lost by inlining.
        vocab = vocab // 8 * 8
    return v < vocab


@triton.jit
def load_slot(io, r, s, mask):
    """Request slot (int64) of rows ``r`` and steps ``s``; -1 where masked."""
    r, s = r.to(tl.int64), s.to(tl.int64)
    return tl.load(io.slots + r * io.slot_row + s * io.slot_step, mask=mask, other=-1).to(tl.int64)


@triton.jit
def load_noise(io, r, s, slot, mask, cfg: tl.constexpr):
    """Temperature (fp32) and the two hash states of row-steps; temperature 0 where masked."""
    slot = tl.where(mask, slot, 0)
    temp = tl.load(io.temperature + slot * io.temperature_slot, mask=mask, other=0.0)
    seed = tl.load(io.seeds + slot * io.seed_slot, mask=mask, other=0)
    at = r.to(tl.int64) * io.position_row + s.to(tl.int64) * io.position_step
    position = tl.load(io.positions + at, mask=mask, other=0)
    state = row_state(seed, s, position, 0, cfg)
    state64 = state
    if cfg.FP64:
        state64 = row_state(seed, s, position, FP64_DOMAIN, cfg)
    return temp.to(tl.float32), state, state64


@triton.jit
def load_anchor(io, r, mask):
    """Previous token of step 0, clamped into the vocabulary."""
    anchor = tl.load(io.anchors + r.to(tl.int64) * io.anchor_row, mask=mask, other=0)
    return tl.minimum(tl.maximum(anchor, 0), io.vocab_size - 1).to(tl.int32)


@triton.jit
def base_offset(io, r, s, cfg: tl.constexpr):
    """Offset of a base row, in int64: R * S * V passes 2**31."""
    at = r.to(tl.int64) * io.base_row + s.to(tl.int64) * io.base_step
    if cfg.ALIGNED:
        at = tl.multiple_of(at, 8)
    return at


@triton.jit
def cache_offset(io, slot, s, cfg: tl.constexpr):
    at = slot * io.cache_slot + s.to(tl.int64) * io.cache_step
    if cfg.ALIGNED:
        at = tl.multiple_of(at, 8)
    return at


@triton.jit
def target_id(io, v, mask, cfg: tl.constexpr):
    """Target ids (int32) of candidates ``v``."""
    if cfg.MAPPED:
        return tl.load(io.id_map + v, mask=mask, other=0).to(tl.int32)
    else:
        return v


@triton.jit
def token_key(io, v, mask):
    """`mix_key` of the target ids of candidates ``v``, from a table: cheaper than to mix them."""
    return tl.load(io.keys + v, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def winner_of_parts(
    scratch, first_part, parts, width, column, live, AT_ONCE: tl.constexpr, FP64: tl.constexpr
):
    """Best score and lowest id over ``parts`` rows of the winners' table, for ``column`` [n].

    ``width``: columns of the table. ``AT_ONCE``: parts read side by side.
    """
    best = tl.full([column.shape[0]], float("-inf"), tl.float64 if FP64 else tl.float32)
    best_id = tl.full([column.shape[0]], NO_ID, tl.int32)
    for first in range(0, parts, AT_ONCE):
        part = as_scalar(first) + tl.arange(0, AT_ONCE)
        at = (first_part + part).to(tl.int64)[None, :] * width + column[:, None]
        inside = live[:, None] & (part < parts)[None, :]
        z = tl.load(scratch.best + at, mask=inside, other=float("-inf"))
        ids = tl.load(scratch.best_id + at, mask=inside, other=NO_ID)
        # The table of a plan for fp64 noise holds a greedy batch's fp32 scores.
        z = z.to(best.dtype)
        top = tl.max(z, axis=1)
        top_id = tl.min(tl.where(z == top[:, None], ids, NO_ID), axis=1)
        best, best_id = merge_best(best, best_id, top, top_id)
    return best, best_id


@triton.jit
def packed(best, best_id):
    """fp32 scores and ids as one int64 each, which rises with the score and falls with the id.

    Always above 0, which stands for none. One zero, as for scores that are compared.
    """
    bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)
    # As integers, floats rise where they are positive and fall below.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + (1 << 31)
    return (key << 31) | (-best_id + NO_ID).to(tl.int64)


@triton.jit
def unpacked(winner):
    """Scores and ids that `packed` made."""
    key = ((winner >> 31) - (1 << 31)).to(tl.int32)
    best = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    none = winner == 0
    best_id = -(winner & 0x7FFFFFFF).to(tl.int32) + NO_ID
    return tl.where(none, float("-inf"), best), tl.where(none, NO_ID, best_id)


@triton.jit
def merge_best(best, best_id, other, other_id):
    """The better of two scores and its id; the lower id where they are equal."""
    take = (other > best) | ((other == best) & (other_id < best_id))
    return tl.where(take, other, best), tl.where(take, other_id, best_id)
