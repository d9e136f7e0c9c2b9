"""Philox 4x32 with 10 rounds on the device, and the noise that vLLM 0.25 to 0.30 make of it.

See `fused_markov.philox` for the layout. The key is a row's and the counter a token's, with zeros
beside: products of the first two rounds belong to a row or a token alone, and are computed so.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fused_markov.kernels.interpreted import INTERPRETED, numpy_log1p

KEY_A = tl.constexpr(0x9E3779B9)
KEY_B = tl.constexpr(0xBB67AE85)
ROUND_A = tl.constexpr(0xD2511F53)
ROUND_B = tl.constexpr(0xCD9E8D57)
STEP32 = tl.constexpr(4.6566127342e-10)  # Triton's, from 31 bits to a uniform
LEAST64 = tl.constexpr(2.2250738585072014e-308)  # the smallest normal number

log1p = numpy_log1p if INTERPRETED else libdevice.log1p


@triton.jit
def _later_rounds(k0, k1, c0, c1, c2, c3):
    """The nine rounds after the first; two words of the four."""
    for _ in tl.static_range(9):
        k0 += KEY_A
        k1 += KEY_B
        upper_a, lower_a = tl.umulhi(c0, ROUND_A), c0 * ROUND_A
        upper_b, lower_b = tl.umulhi(c2, ROUND_B), c2 * ROUND_B
        c0, c1 = upper_b ^ c1 ^ k0, lower_b
        c2, c3 = upper_a ^ c3 ^ k1, lower_a
    return c0, c1


@triton.jit
def request_word(seed, word):
    """uint32 key of a row's and step's tokens, of its int64 words."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high = (word & 0xFFFFFFFF).to(tl.uint32), ((word >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = tl.umulhi(low, ROUND_A) ^ k1, low * ROUND_A
    first, _ = _later_rounds(k0, k1, high ^ k0, low * 0, c2, c3)
    return first


@triton.jit
def token_words(state, token):
    """The two words of target ids after a row's request word; uint32, broadcast."""
    c2, c3 = tl.umulhi(token, ROUND_A), token * ROUND_A
    return _later_rounds(state, state * 0, state, token * 0, c2, c3)


@triton.jit
def fold(word):
    """A word as an int32 with its sign folded away: 31 bits."""
    x = word.to(tl.int32, bitcast=True)
    return x ^ (x >> 31)


@triton.jit
def bound_word(state, token, FP64: tl.constexpr):
    """32 bits, small where noise is large, that bound it as a murmur3 hash does.

    fp32 noise is large where the folded word is small, fp64 noise where the upper word is large.
    """
    low, high = token_words(state, token)
    if FP64:
        return high ^ 0xFFFFFFFF
    else:
        return fold(low).to(tl.uint32, bitcast=True) << 1


@triton.jit
def philox_gumbel(state, token, FP64: tl.constexpr):
    """Exact noise of target ids ``token`` (uint32)."""
    low, high = token_words(state, token)
    if FP64:
        u = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.float64) * 5.421010862427522e-20
        return -tl.log(-tl.log(tl.maximum(u, LEAST64)))
    else:
        u = tl.maximum(fold(low).to(tl.float32) * STEP32, STEP32)
        return -tl.log(-log1p(-u))
