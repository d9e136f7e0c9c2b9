"""The noise streams of `fused_markov.noise` on the device, and a cheap upper bound of it.

Which stream is a constexpr, ``cfg.STREAM``. The murmur3 streams are here; `philox` has the others.
"""

import triton
import triton.language as tl

from fused_markov.kernels.philox import bound_word, philox_gumbel, request_word

DRAFT_SALT = tl.constexpr(1 << 30)
FP64_DOMAIN = tl.constexpr(0x9E3779B9)
LN2_PER_BIT = tl.constexpr(0.6931471805599453 / (1 << 23))
BITS_A_DOUBLING = tl.constexpr(float(1 << 23))
BITS_AT_ONE = tl.constexpr(float(127 << 23))
# 159 * ln 2 (127 of the float's exponent bias and 32 of the hash's width), rounded up.
BOUND_AT_ZERO = tl.constexpr(110.2106)


@triton.constexpr_function
def is_philox(stream):
    """Whether a stream's words come from Philox; they come from murmur3 otherwise."""
    return stream in ("vllm-0.25", "vllm-0.29")


@triton.jit
def rotl(x, shift: tl.constexpr):
    return (x << shift) | (x >> (32 - shift))


@triton.jit
def mix_key(key):
    """A word as `mix` takes it: turned by 13, as is the hash, so that their xor need not be."""
    return rotl(rotl(key * 0xCC9E2D51, 15) * 0x1B873593, 13)


@triton.jit
def mix(h, mixed_key):
    return (rotl(h, 13) ^ mixed_key) * 5 + 0xE6546B64


@triton.jit
def row_words(seed, step, position, cfg: tl.constexpr):
    """The two int64 words of a row and step."""
    seed = seed.to(tl.int64)
    if cfg.STREAM == "vllm-0.33":
        seed = seed ^ (step.to(tl.int64) << 32)
    word = position.to(tl.int64) - 1
    if cfg.STREAM != "vllm-0.25":
        word += DRAFT_SALT
    return seed, word


@triton.jit
def row_state(seed, step, position, DOMAIN: tl.constexpr, cfg: tl.constexpr):
    """State of a row and step before the token id is mixed in (uint32)."""
    seed, word = row_words(seed, step, position, cfg)
    if is_philox(cfg.STREAM):
        return request_word(seed, word)
    else:
        return murmur_state(seed, word, DOMAIN)


@triton.jit
def murmur_state(seed, word, DOMAIN: tl.constexpr):
    h = (seed * 0).to(tl.uint32) ^ DOMAIN
    h = mix(h, mix_key((seed & 0xFFFFFFFF).to(tl.uint32)))
    h = mix(h, mix_key(((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)))
    return mix(h, mix_key((word & 0xFFFFFFFF).to(tl.uint32)))


@triton.jit
def token_hash_high(state, mixed_token):
    """As `token_hash`, right in its upper half only."""
    h = mix(state, mixed_token) ^ 16
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    return h * 0xC2B2AE35


@triton.jit
def token_hash(state, mixed_token):
    """uint32 hash of a token id (given as `mix_key` of it) after a row's state."""
    h = token_hash_high(state, mixed_token)
    return h ^ (h >> 16)


@triton.jit
def bound_terms(temp):
    """Per row: what `reach` multiplies logits by, adds, and takes away per bit of the hash.

    Without noise (temperature 0) the last two are 0, so that one expression serves all rows.
    """
    cold = temp == 0.0
    inverse = 1.0 / tl.where(cold, 1.0, temp)
    return inverse, tl.where(cold, 0.0, BOUND_AT_ZERO), tl.where(cold, 0.0, LN2_PER_BIT)


@triton.jit
def rough_log2(x):
    asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def reach(x, terms, state, state64, mixed_token, ROUGH: tl.constexpr, cfg: tl.constexpr):
    """An upper bound, within 0.06 for large noise, of the score of logits ``x`` [rows, tokens].

    What is taken from the second of ``terms`` is taken from the bound. ``ROUGH``: cheaper, and no
    bound where noise is large.

    fp32 noise grows as its uniform goes to 0 and is below -ln(u); fp64 noise grows as its uniform,
    whose high word is the second hash, goes to 1, and is below -ln(1 - u). A float's bits, read as
    an integer, are a piecewise linear function of its log2 that never exceeds it: two conversions
    and one multiply-add instead of a logarithm.
    """
    inverse, top, per_bit = terms
    if cfg.FP64:
        state = state64
    if is_philox(cfg.STREAM):
        h = bound_word(state[:, None], mixed_token[None, :], cfg.FP64)
    elif ROUGH:
        h = token_hash_high(state[:, None], mixed_token[None, :])
    else:
        h = token_hash(state[:, None], mixed_token[None, :])
    if cfg.FP64 and not is_philox(cfg.STREAM):
        h ^= 0xFFFFFFFF
    value = h.to(tl.float32)
    if ROUGH and cfg.PTX:
        # The unit for slow functions has time; the one for integers has not.
        bits = rough_log2(value) * BITS_A_DOUBLING + BITS_AT_ONE
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.float32)
        if cfg.FP64 and is_philox(cfg.STREAM):
            # The one uniform of 1 gives infinite noise; finite here, for the rows without a need.
            bits = tl.where(value == 0.0, -3.0e38, bits)
    return x * inverse[:, None] + (top[:, None] - bits * per_bit[:, None])


@triton.jit
def _log1p_neg(u):
    poly = 1.0 / 7.0 + u * (1.0 / 8.0)
    poly = 1.0 / 6.0 + u * poly
    poly = 1.0 / 5.0 + u * poly
    poly = 1.0 / 4.0 + u * poly
    poly = 1.0 / 3.0 + u * poly
    poly = 1.0 / 2.0 + u * poly
    poly = 1.0 + u * poly
    direct = tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))
    return tl.where(u < 0.25, -u * poly, direct)


@triton.jit
def gumbel32(h):
    """fp32 Gumbel noise of a hash: its midpoint uniform, then the u -> 0 tail."""
    high = (h >> 16).to(tl.int32).to(tl.float32) * 1.52587890625e-05
    low = (h & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5
    return -tl.log(-_log1p_neg(high + low * 2.3283064365386963e-10))


@triton.jit
def gumbel64(high, low):
    """fp64 Gumbel noise of the two hashes of a token."""
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    u = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    u = tl.where(u == 1.0, u - 1.1102230246251565e-16, u)
    return -tl.log(-tl.log(u))


@triton.jit
def gumbel(state, state64, tid, cfg: tl.constexpr):
    """Exact noise of target ids ``tid``; ``state64``, the second hash's, is read in fp64 only."""
    if is_philox(cfg.STREAM):
        return philox_gumbel(state, tid.to(tl.uint32), cfg.FP64)
    else:
        return murmur_gumbel(state, state64, tid, cfg.FP64)


@triton.jit
def murmur_gumbel(state, state64, tid, FP64: tl.constexpr):
    key = mix_key(tid.to(tl.uint32))
    low = token_hash(state, key)
    if FP64:
        return gumbel64(token_hash(state64, key), low)
    else:
        return gumbel32(low)


@triton.jit
def tempered_logits(x, temp, cfg: tl.constexpr):
    """x / temp, or x where temp is 0; rounded as the reference does where it is cached."""
    divisor = tl.where(temp == 0.0, 1.0, temp)
    if cfg.TEMPERED:
        return tl.div_rn(x, divisor)
    else:
        return x / divisor


@triton.jit
def scores(x, temp, noise, cfg: tl.constexpr):
    """What the argmax compares: x / temp + noise, or x where temp is 0. NaN becomes -inf."""
    tempered = tempered_logits(x, temp, cfg)
    if cfg.FP64:
        z = tl.where(temp == 0.0, x.to(tl.float64), tempered.to(tl.float64) + noise)
    else:
        z = tl.where(temp == 0.0, x, tempered + noise)
    return tl.where(z == z, z, float("-inf"))
