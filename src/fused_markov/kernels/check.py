"""Check: one pass over W2 gives every active row-step's logits after its assumed previous token.

A tile multiplies embeddings [BLOCK_M, rank] by candidates [rank, BLOCK_V], adds the base, stores
the cache and leaves the tile's best score and token. The noise is gated: a token whose hash bounds
its noise below what the guess demands is never looked at again.
"""

import triton
import triton.language as tl

from fused_markov.kernels.logits import finish_logits
from fused_markov.kernels.noise import mix_key, noise_bound, scores
from fused_markov.kernels.rows import as_scalar, below_vocab, target_id

NO_ID = tl.constexpr(2147483647)


@triton.jit
def _load_rows(io, scratch, block, count, cfg: tl.constexpr):
    """Embeddings [BLOCK_M, rank] and records [BLOCK_M] of a block of listed row-steps.

    The records: row-step, whether there is one, offsets of base and cache, then temperature, what
    the gate demands, and the hash states.
    """
    i = block * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
    live = i < count
    m = tl.load(scratch.row_m + i, mask=live, other=0)
    prev = tl.load(scratch.row_prev + i, mask=live, other=0).to(tl.int64)
    base = tl.load(scratch.row_base + i, mask=live, other=0)
    cache, temp, need, state, state64 = base, m, m, m, m
    if cfg.CACHED:
        cache = tl.load(scratch.row_cache + i, mask=live, other=0)
    if cfg.ALIGNED:
        base, cache = tl.multiple_of(base, 8), tl.multiple_of(cache, 8)
    if cfg.NOISE:
        temp = tl.load(scratch.row_temp + i, mask=live, other=0.0)
        need = tl.load(scratch.row_need + i, mask=live, other=float("inf"))
        state = tl.load(scratch.row_state + i, mask=live, other=0).to(tl.uint32, bitcast=True)
        state64 = state
        if cfg.FP64:
            state64 = tl.load(scratch.row_state64 + i, mask=live, other=0)
            state64 = state64.to(tl.uint32, bitcast=True)
    k = tl.arange(0, cfg.RANK_P2)
    inside = live[:, None] & (k < cfg.RANK)[None, :]
    e = tl.load(io.w1 + prev[:, None] * cfg.RANK + k[None, :], mask=inside, other=0.0)
    return e, (m, live, base, cache, temp, need, state, state64)


@triton.jit
def _weights(io, v, cfg: tl.constexpr):
    k = tl.arange(0, cfg.RANK_P2)
    inside = (v < io.vocab)[:, None] & (k < cfg.RANK)[None, :]
    return tl.load(io.w2 + v.to(tl.int64)[:, None] * cfg.RANK + k[None, :], mask=inside, other=0.0)


@triton.jit
def _best_gated(x, reach, need, temp, state, state64, tid, inside, cfg: tl.constexpr):
    """Best score and id of each row among the tokens whose reach is at least the row's need.

    Mostly none or one passes in a row's part of a tile; then one score a row is computed exactly.
    Where a row has more, all of the tile is. No loop, so that the loop over tiles is pipelined.
    """
    dtype = tl.float64 if cfg.FP64 else tl.float32
    best = tl.full([cfg.BLOCK_M], float("-inf"), dtype)
    best_id = tl.full([cfg.BLOCK_M], NO_ID, tl.int32)
    passing = (reach >= need[:, None]) & (x > float("-inf")) & inside
    most = tl.max(tl.sum(passing.to(tl.int32), axis=1), axis=0)
    if most == 1:
        best_id = tl.min(tl.where(passing, tid[None, :], NO_ID), axis=1)
        logit = tl.max(tl.where(passing, x, float("-inf")), axis=1)
        z = scores(logit, temp, state, state64, best_id, cfg.FP64)
        best = tl.where(best_id < NO_ID, z, best)
    if most > 1:
        z = scores(x, temp[:, None], state[:, None], state64[:, None], tid[None, :], cfg.FP64)
        z = tl.where(passing, z, float("-inf"))
        best = tl.max(z, axis=1)
        best_id = tl.min(tl.where((z == best[:, None]) & passing, tid[None, :], NO_ID), axis=1)
    return best, best_id


@triton.jit
def _best_greedy(x, tid, inside, cfg: tl.constexpr):
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, axis=1)
    best_id = tl.min(tl.where((x == best[:, None]) & inside, tid[None, :], NO_ID), axis=1)
    return best, best_id


@triton.jit
def _check_tile(io, tile, w, e, rows, cfg: tl.constexpr):
    """One tile of logits: cached, and reduced to a best score and id [BLOCK_M] a row-step."""
    _, live, base_at, cache_at, temp, need, state, state64 = rows
    v = tile * cfg.BLOCK_V + tl.arange(0, cfg.BLOCK_V)
    in_vocab = below_vocab(io, v, cfg)
    inside = live[:, None] & in_vocab[None, :]
    at = base_at[:, None] + v[None, :]
    base = tl.load(io.base + at, mask=inside, other=float("-inf")).to(tl.float32)
    acc = tl.dot(e, tl.trans(w), input_precision="ieee")
    x = finish_logits(acc, base, io.scale, io.soft_cap, cfg)
    tid = target_id(io, v, in_vocab, cfg)
    if cfg.CACHED:
        column = tid if cfg.TARGET_WIDE else v
        tl.store(io.cache + cache_at[:, None] + column[None, :], x.to(cfg.CACHE), mask=inside)
    if cfg.NOISE:
        key = mix_key(tid.to(tl.uint32))[None, :]
        bound = noise_bound(state[:, None], state64[:, None], key, cfg.FP64)
        cold = temp == 0.0
        inverse = 1.0 / tl.where(cold, 1.0, temp)
        reach = x * inverse[:, None] + tl.where(cold[:, None], 0.0, bound)
        best, best_id = _best_gated(x, reach, need, temp, state, state64, tid, inside, cfg)
    else:
        best, best_id = _best_greedy(x, tid, inside, cfg)
    return best, best_id


@triton.jit
def merge_best(best, best_id, other, other_id):
    """The better of two scores and its id; the lower id where they are equal."""
    take = (other > best) | ((other == best) & (other_id < best_id))
    return tl.where(take, other, best), tl.where(take, other_id, best_id)


@triton.jit
def _store_best(io, scratch, part, rows, best, best_id, cfg: tl.constexpr):
    m, live = rows[0], rows[1]
    at = part.to(tl.int64) * (io.rows * cfg.STEPS) + m
    tl.store(scratch.best + at, best, mask=live)
    tl.store(scratch.best_id + at, best_id, mask=live)


@triton.jit
def num_parts(io, programs, cfg: tl.constexpr):
    """Into how many parts `check_all` divides the vocabulary: one winner of each is kept."""
    if cfg.ONE_BLOCK:
        return programs
    else:
        return tl.cdiv(io.vocab, cfg.BLOCK_V)


@triton.jit
def check_all(io, scratch, pid, programs, count, cfg: tl.constexpr):
    """This program's tiles, for the first ``count`` row-steps of the list."""
    tiles = tl.cdiv(io.vocab, cfg.BLOCK_V)
    lane = tl.arange(0, cfg.BLOCK_V)
    if cfg.ONE_BLOCK:
        e, rows = _load_rows(io, scratch, 0, count, cfg)
        best = tl.full([cfg.BLOCK_M], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
        best_id = tl.full([cfg.BLOCK_M], NO_ID, tl.int32)
        for tile in tl.range(pid, tiles, programs, num_stages=cfg.STAGES):
            w = _weights(io, tile * cfg.BLOCK_V + lane, cfg)
            top, top_id = _check_tile(io, as_scalar(tile), w, e, rows, cfg)
            best, best_id = merge_best(best, best_id, top, top_id)
        _store_best(io, scratch, pid, rows, best, best_id, cfg)
    else:
        blocks = tl.cdiv(count, cfg.BLOCK_M)
        for tile in range(pid, tiles, programs):
            w = _weights(io, tile * cfg.BLOCK_V + lane, cfg)
            for block in range(0, blocks):
                e, rows = _load_rows(io, scratch, block, count, cfg)
                top, top_id = _check_tile(io, as_scalar(tile), w, e, rows, cfg)
                _store_best(io, scratch, as_scalar(tile), rows, top, top_id, cfg)
