"""Check: one pass over W2 gives every listed row-step's logits after its assumed previous token.

A tile multiplies embeddings [BLOCK_M, rank] by candidates [rank, BLOCK_V], adds the base, stores
the cache and leaves the tile's best score and token. The noise is gated: a token whose hash bounds
its noise below what the guess demands is never looked at again.
"""

import triton
import triton.language as tl

from fused_markov.kernels.link import product
from fused_markov.kernels.logits import finish_logits
from fused_markov.kernels.noise import bound_terms, gumbel, mix_key, reach, scores
from fused_markov.kernels.rows import NO_ID, as_scalar, below_vocab, merge_best, target_id


@triton.jit
def _load_rows(scratch, block, count, cfg: tl.constexpr):
    """Records [BLOCK_M] of a block of listed row-steps; see `check_tile`."""
    i = block * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
    live = i < count
    m = tl.load(scratch.active + i, mask=live, other=0)
    prev = tl.load(scratch.row_prev + m, mask=live, other=0)
    base = tl.load(scratch.row_base + m, mask=live, other=0)
    cache, temp, need, state, state64 = base, m, m, m, m
    if cfg.CACHED:
        cache = tl.load(scratch.row_cache + m, mask=live, other=0)
    if cfg.ALIGNED:
        base, cache = tl.multiple_of(base, 8), tl.multiple_of(cache, 8)
    if cfg.NOISE:
        temp = tl.load(scratch.row_temp + m, mask=live, other=0.0)
        need = tl.load(scratch.row_need + m, mask=live, other=float("inf"))
        state = tl.load(scratch.row_state + m, mask=live, other=0).to(tl.uint32, bitcast=True)
        state64 = state
        if cfg.FP64:
            state64 = tl.load(scratch.row_state64 + m, mask=live, other=0)
            state64 = state64.to(tl.uint32, bitcast=True)
    return m, (prev, live, base, cache, temp, need, state, state64)


@triton.jit
def gate(best):
    """What a token must be able to reach to beat ``best``: a little less, for rounding."""
    best = best.to(tl.float32)
    finite = tl.abs(best) < 3.0e38
    # Finite from below, so that a logit of -inf never passes.
    return tl.maximum(tl.where(finite, best - tl.abs(best) * 1e-5 - 1e-3, best), -3.0e38)


@triton.jit
def _best_gated(x, rows, tid, cfg: tl.constexpr):
    """Best score and id of each row among the tokens whose reach is at least the row's need.

    Few pass, mostly none in a row's part of a tile. Each round takes every row's furthest reaching
    token, computes its score exactly, and asks the others to reach that.
    """
    temp, need, state, state64 = rows[4], rows[5], rows[6], rows[7]
    best = tl.full([cfg.BLOCK_M], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    best_id = tl.full([cfg.BLOCK_M], NO_ID, tl.int32)
    key = mix_key(tid.to(tl.uint32))
    far = reach(x, bound_terms(temp), state, state64, key, cfg.FP64)
    # Not-a-number is ignored by max beside numbers, and passes no comparison alone.
    while tl.max(tl.max(far - need[:, None], axis=1), axis=0) >= 0.0:
        top = tl.max(far, axis=1)
        active = top >= need
        furthest = (far == top[:, None]) & active[:, None]
        token = tl.min(tl.where(furthest, tid[None, :], NO_ID), axis=1)
        here = tid[None, :] == token[:, None]
        logit = tl.max(tl.where(here, x, float("-inf")), axis=1)
        z = scores(logit, temp, gumbel(state, state64, token, cfg.FP64), cfg.FP64)
        best, best_id = merge_best(best, best_id, tl.where(active, z, float("-inf")), token)
        # Without noise the first round's token is the row's: the lowest id of the largest logits.
        raised = tl.where(temp == 0.0, float("inf"), tl.maximum(need, gate(best)))
        need = tl.where(active, raised, need)
        far = tl.where(here, float("-inf"), far)
    return best, best_id


@triton.jit
def _best_greedy(x, tid, inside, cfg: tl.constexpr):
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, axis=1)
    best_id = tl.min(tl.where((x == best[:, None]) & inside, tid[None, :], NO_ID), axis=1)
    return best, best_id


@triton.jit
def check_tile(io, tile, rows, cfg: tl.constexpr):
    """One tile of logits: cached, and reduced to a best score and id [BLOCK_M] a row-step.

    ``rows``: previous tokens, whether there is a row, offsets of base and cache, temperatures, what
    the gate demands, hash states.
    """
    prev, live, base_at, cache_at = rows[0], rows[1], rows[2], rows[3]
    v = tile * cfg.BLOCK_V + tl.arange(0, cfg.BLOCK_V)
    in_vocab = below_vocab(io, v, cfg)
    inside = live[:, None] & in_vocab[None, :]
    at = base_at[:, None] + v[None, :]
    base = tl.load(io.base + at, mask=inside, other=float("-inf"))
    acc = product(io, prev, v, live, in_vocab, cfg)
    x = finish_logits(acc, base.to(tl.float32), io.scale, io.soft_cap, cfg)
    tid = target_id(io, v, in_vocab, cfg)
    if cfg.CACHED:
        column = tid if cfg.TARGET_WIDE else v
        tl.store(io.cache + cache_at[:, None] + column[None, :], x.to(cfg.CACHE), mask=inside)
    if cfg.NOISE:
        return _best_gated(x, rows, tid, cfg)
    else:
        return _best_greedy(x, tid, inside, cfg)


@triton.jit
def check_all(io, scratch, pid, programs, count, cfg: tl.constexpr):
    """This program's tiles, for the first ``count`` row-steps of the list.

    The row blocks of one tile are neighbours, so that they find its part of W2 in L2.
    """
    blocks = tl.cdiv(count, cfg.BLOCK_M)
    tiles = tl.cdiv(io.vocab, cfg.BLOCK_V)
    for item in range(pid, tiles * blocks, programs):
        tile = as_scalar(item) // blocks
        m, rows = _load_rows(scratch, item % blocks, count, cfg)
        best, best_id = check_tile(io, tile, rows, cfg)
        at = tile.to(tl.int64) * (io.rows * cfg.STEPS) + m
        tl.store(scratch.best + at, best, mask=rows[1])
        tl.store(scratch.best_id + at, best_id, mask=rows[1])
