"""Check: one pass over W2 gives every listed row-step's logits after its assumed previous token.

A tile multiplies embeddings [BLOCK_M, rank] by candidates [rank, BLOCK_V], adds the base and stores
the cache. The noise is gated: a token whose hash bounds its noise below what the guess demands is
never looked at again. What passes goes into each row-step's winner.
"""

import triton
import triton.language as tl

from fused_markov.kernels.bans import ban_tile
from fused_markov.kernels.link import product, rows_of
from fused_markov.kernels.logits import finish_logits
from fused_markov.kernels.noise import bound_terms, gumbel, reach, scores, tempered_logits
from fused_markov.kernels.rows import (
    LOWEST_NEED,
    NO_ID,
    as_scalar,
    below_vocab,
    merge_best,
    packed,
    target_id,
    token_key,
)
from fused_markov.kernels.weights import bias_of, embed_of, stored_product


@triton.jit
def _load_rows(scratch, block, count, cfg: tl.constexpr):
    """Records [BLOCK_M] of a block of listed row-steps; see `check_tiles`."""
    i = block * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
    live = i < count
    prev = tl.load(scratch.row_prev + i, mask=live, other=0)
    base = tl.load(scratch.row_base + i, mask=live, other=0)
    need = tl.load(scratch.row_need + i, mask=live, other=float("inf"))
    cache, temp, state, state64, ban = base, i, i, i, base
    if cfg.CACHED:
        cache = tl.load(scratch.row_cache + i, mask=live, other=0)
    if cfg.BANNED:
        ban = tl.load(scratch.row_ban + i, mask=live, other=0)
    if cfg.ALIGNED:
        base, cache = tl.multiple_of(base, 8), tl.multiple_of(cache, 8)
    if cfg.NOISE:
        temp = tl.load(scratch.row_temp + i, mask=live, other=0.0)
        state = tl.load(scratch.row_state + i, mask=live, other=0).to(tl.uint32, bitcast=True)
        state64 = state
        if cfg.FP64:
            state64 = tl.load(scratch.row_state64 + i, mask=live, other=0)
            state64 = state64.to(tl.uint32, bitcast=True)
    guess = tl.load(scratch.row_guess + i, mask=live, other=NO_ID)
    step = tl.load(scratch.row_step + i, mask=live, other=0)
    return prev, live, base, cache, temp, need, state, state64, ban, guess, step


@triton.jit
def gate(best):
    """What a token must be able to reach to beat ``best``: a little less, for rounding."""
    best = best.to(tl.float32)
    finite = tl.abs(best) < 3.0e38
    return tl.maximum(tl.where(finite, best - tl.abs(best) * 1e-5 - 1e-3, best), LOWEST_NEED)


@triton.jit
def _demand(need, best):
    """``need``, raised to what ``best`` demands; finite, so that +inf still passes beside +inf."""
    return tl.minimum(tl.maximum(need, gate(best)), 3.0e38)


@triton.jit
def _best_gated(x, need, temp, state, state64, tid, key, cfg: tl.constexpr):
    """Best score and id of each row among the tokens whose reach is at least the row's need.

    Few pass, mostly none in a row's part of a tile. Each round takes every row's furthest reaching
    token, computes its score exactly, and asks the others to reach that.
    """
    best = tl.full([cfg.BLOCK_M], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    best_id = tl.full([cfg.BLOCK_M], NO_ID, tl.int32)
    far = reach(x, bound_terms(temp), state, state64, key, False, cfg)
    while tl.max(far - need[:, None]) >= 0.0:
        top = tl.max(far, axis=1)
        active = top >= need
        furthest = (far == top[:, None]) & active[:, None]
        token = tl.min(tl.where(furthest, tid[None, :], NO_ID), axis=1)
        here = tid[None, :] == token[:, None]
        logit = tl.max(tl.where(here, x, float("-inf")), axis=1)
        z = scores(logit, temp, gumbel(state, state64, token, cfg), cfg)
        best, best_id = merge_best(best, best_id, tl.where(active, z, float("-inf")), token)
        # Without noise the first round's token is the row's: the lowest id of the largest logits.
        raised = tl.where(temp == 0.0, float("inf"), tl.maximum(need, gate(best)))
        need = tl.where(active, raised, need)
        far = tl.where(here, float("-inf"), far)
    return best, best_id


@triton.jit
def _best_greedy(x, tid, in_vocab, cfg: tl.constexpr):
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, axis=1)
    # A row with nothing above -inf has no winner here, or its id would depend on the tile.
    winners = (x == best[:, None]) & in_vocab[None, :] & (best > float("-inf"))[:, None]
    return best, tl.min(tl.where(winners, tid[None, :], NO_ID), axis=1)


@triton.jit
def _either(bits, other):
    return bits | other


@triton.jit
def _turns_with_guesses(rows, first, stride, cfg: tl.constexpr):
    """Bit i of 64: some row's guess is in the i-th tile of a walk, or 64, 128... tiles later."""
    tile = rows[9] // cfg.BLOCK_V
    turn = ((tile - first) // stride) % 64
    mine = rows[1] & (rows[9] != NO_ID) & (tile % stride == first)
    bits = tl.full([], 1, tl.uint64) << turn.to(tl.uint64)
    return tl.reduce(tl.where(mine, bits, 0), 0, _either)


@triton.jit
def _score_guesses(io, x, tile, rows, best, best_id, cfg: tl.constexpr):
    """The rows' guesses in this tile beside their best scores and ids, and ``x`` without them.

    A guess is what would pass the gate: alone it would cost a look at the whole tile.
    """
    live, temp, state, state64, guess = rows[1], rows[4], rows[6], rows[7], rows[9]
    v = tile * cfg.BLOCK_V + tl.arange(0, cfg.BLOCK_V)
    mine = live & (guess // cfg.BLOCK_V == tile)
    here = mine[:, None] & (v[None, :] == guess[:, None])
    z = tl.max(tl.where(here, x, float("-inf")), axis=1)
    tid = target_id(io, guess, mine, cfg)
    if cfg.NOISE:
        z = scores(z, temp, gumbel(state, state64, tid, cfg), cfg)
    z = tl.where(mine, z, float("-inf"))
    best, best_id = merge_best(best, best_id, z, tl.where(z > float("-inf"), tid, NO_ID))
    return tl.where(here, float("-inf"), x), best, best_id


@triton.jit
def _bias(io, w2_tiles, embed, prev, live, tile, in_vocab, cfg: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_V] products; ``embed``: W1's rows where a block is the whole rank."""
    lane = tl.arange(0, cfg.BLOCK_V)
    if cfg.FORMAT != "plain":
        if cfg.BLOCK_K < cfg.RANK:
            v = tile * cfg.BLOCK_V + lane
            return stored_product(io, prev, v, live, in_vocab, cfg.BLOCK_K, 1, cfg)
        else:
            return bias_of(io, embed, tile, in_vocab, cfg)
    elif cfg.BLOCK_K < cfg.RANK:
        v = tile * cfg.BLOCK_V + lane
        return product(io, prev, v, live, in_vocab, cfg.BLOCK_K, 1, cfg)
    else:
        if cfg.DESCRIBED:
            weights = w2_tiles.load([tile * cfg.BLOCK_V, 0])
        else:
            # The tile's own offset stands apart, so that its rows differ by constants.
            weights = io.w2 + tile.to(tl.int64) * (cfg.BLOCK_V * cfg.RANK)
            weights = rows_of(weights, lane, in_vocab, cfg)
        if cfg.BLOCK_M < 64:
            # The matrix unit of few rows: candidates take the long side, and no lane idles.
            return tl.trans(tl.dot(weights, tl.trans(embed), input_precision="ieee"))
        else:
            return tl.dot(embed, tl.trans(weights), input_precision="ieee")


@triton.jit
def _finish_tile(io, x, key, tile, in_vocab, rows, best, best_id, need, guessed, cfg: tl.constexpr):
    """A tile's logits into the cache; best score, its id and what the gate demands from here on.

    ``guessed``: whether a row's guess may be here.
    """
    live, cache_at, temp, state, state64 = rows[1], rows[3], rows[4], rows[6], rows[7]
    lane = tl.arange(0, cfg.BLOCK_V)
    v = tile * cfg.BLOCK_V + lane
    if cfg.CACHED:
        inside = live[:, None] & in_vocab[None, :]
        if cfg.TARGET_WIDE:
            at = cache_at[:, None] + target_id(io, v, in_vocab, cfg)[None, :]
        else:
            at = (cache_at + tile.to(tl.int64) * cfg.BLOCK_V)[:, None] + lane[None, :]
        kept = x
        if cfg.TEMPERED and cfg.NOISE:
            kept = tempered_logits(x, temp[:, None], cfg)
        tl.store(io.cache + at, kept.to(cfg.CACHE), mask=inside)
    if not cfg.EVEN:
        x = tl.where(in_vocab[None, :], x, float("-inf"))
    if cfg.GUESS_APART:
        if guessed:
            x, best, best_id = _score_guesses(io, x, tile, rows, best, best_id, cfg)
            need = _demand(need, best)
    if cfg.NOISE:
        inverse, most, per_bit = bound_terms(temp)
        terms = (inverse, most - need, per_bit)
        above = reach(x, terms, state, state64, key, False, cfg)
    else:
        above = x - need[:, None]
    # Not-a-number is ignored by max beside numbers, and passes no comparison alone.
    if tl.max(above) >= 0.0:
        tid = target_id(io, v, in_vocab, cfg)
        if cfg.NOISE:
            top, top_id = _best_gated(x, need, temp, state, state64, tid, key, cfg)
        else:
            top, top_id = _best_greedy(x, tid, in_vocab, cfg)
        best, best_id = merge_best(best, best_id, top, top_id)
        need = _demand(need, best)
    return best, best_id, need


@triton.jit
def check_tiles(io, w2_tiles, rows, first, stride, cfg: tl.constexpr):
    """Every ``stride``-th tile of logits from ``first`` on: cached, and reduced to the best score
    and id [BLOCK_M] of each row.

    One loop without loads that wait for others, so that the next tiles' W2 and base are on their
    way while this one is finished.

    ``w2_tiles``: a tensor descriptor of W2's tiles where DESCRIBED says so, and not read otherwise.
    ``rows``: previous tokens, whether there is a row, offsets of base and cache, temperatures, what
    the gate demands, hash states, offsets of bans, guesses; of listed row-steps also their
    numbers.
    """
    prev, live, base_at, need = rows[0], rows[1], rows[2], rows[5]
    embed = tl.zeros([16, 16], cfg.WEIGHT)
    if cfg.BLOCK_K >= cfg.RANK:
        if cfg.FORMAT == "plain":
            embed = rows_of(io.w1, prev, live, cfg)
        else:
            embed = embed_of(io, prev, live, cfg)
    best = tl.full([cfg.BLOCK_M], float("-inf"), tl.float64 if cfg.FP64 else tl.float32)
    best_id = tl.full([cfg.BLOCK_M], NO_ID, tl.int32)
    turns = tl.full([], 0, tl.uint64)
    if cfg.GUESS_APART:
        turns = _turns_with_guesses(rows, first, stride, cfg)
    lane = tl.arange(0, cfg.BLOCK_V)
    for i in tl.range(first, tl.cdiv(io.vocab, cfg.BLOCK_V), stride, num_stages=cfg.STAGES):
        tile = as_scalar(i)
        in_vocab = lane >= 0
        if not cfg.EVEN:
            in_vocab = below_vocab(io, tile * cfg.BLOCK_V + lane, cfg)
        at = (base_at + tile.to(tl.int64) * cfg.BLOCK_V)[:, None] + lane[None, :]
        # Zeros outside cost no look at the mask afterwards.
        base = tl.load(io.base + at, mask=live[:, None] & in_vocab[None, :], other=0.0)
        key = lane.to(tl.uint32)
        if cfg.NOISE:
            key = token_key(io, tile * cfg.BLOCK_V + lane, in_vocab)
        acc = _bias(io, w2_tiles, embed, prev, live, tile, in_vocab, cfg)
        x = finish_logits(acc, base.to(tl.float32), io.scale, io.soft_cap, cfg)
        if cfg.BANNED:
            v = tile * cfg.BLOCK_V + lane
            x = ban_tile(io, x, rows[8], v, live, in_vocab, float("-inf"), cfg)
        if io.vocab > 0:  # always; what is under an `if` comes after the loads of the tiles ahead
            best, best_id, need = _finish_tile(
                io, x, key, tile, in_vocab, rows, best, best_id, need, turns & 1 != 0, cfg
            )
        turns = (turns >> 1) | (turns << 63)
    return best, best_id


@triton.jit
def parts_of(count, programs, cfg: tl.constexpr):
    """Parts of the vocabulary that as many programs check apart, for ``count`` row-steps."""
    return tl.maximum(programs // tl.cdiv(count, cfg.BLOCK_M), 1)


@triton.jit
def check_all(io, w2_tiles, scratch, pid, programs, count, cfg: tl.constexpr):
    """This program's part of the vocabulary, for a block of the ``count`` listed row-steps.

    Programs of different blocks and the same part walk side by side, and find W2 in L2.
    """
    blocks = tl.cdiv(count, cfg.BLOCK_M)
    parts = parts_of(count, programs, cfg)
    for item in range(pid, parts * blocks, programs):
        part, block = as_scalar(item) // blocks, as_scalar(item) % blocks
        rows = _load_rows(scratch, block, count, cfg)
        best, best_id = check_tiles(io, w2_tiles, rows, part, parts, cfg)
        i = block * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
        if cfg.FP64:
            at = part * blocks * cfg.BLOCK_M + i
            tl.store(scratch.best + at, best, mask=rows[1])
            tl.store(scratch.best_id + at, best_id, mask=rows[1])
        else:
            # Most programs found nothing that passed the gate.
            found = rows[1] & (best_id != NO_ID)
            winner = packed(best, best_id)
            tl.atomic_max(scratch.winner + rows[10], winner, mask=found, sem="relaxed")
    if cfg.FP64 and pid == 0:
        tl.store(scratch.parts, parts)
