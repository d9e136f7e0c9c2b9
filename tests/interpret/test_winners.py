"""A score and its id as one int64: the larger is the better score, of equal ones the lower id."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from fused_markov.kernels import rows

pytestmark = pytest.mark.interpret

SIZE = 64
NO_ID = int(rows.NO_ID.value)


@triton.jit
def there_and_back(best, best_id, winner, best_out, id_out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    packed = rows.packed(tl.load(best + i), tl.load(best_id + i))
    tl.store(winner + i, packed)
    score, token = rows.unpacked(packed)
    tl.store(best_out + i, score)
    tl.store(id_out + i, token)


def through_kernel(pairs: list[tuple[float, int]]) -> tuple[list[int], list[tuple[float, int]]]:
    pairs = pairs + [(0.0, 0)] * (SIZE - len(pairs))
    best = torch.tensor([score for score, _ in pairs], dtype=torch.float32)
    ids = torch.tensor([token for _, token in pairs], dtype=torch.int32)
    winner = torch.zeros(SIZE, dtype=torch.int64)
    best_out, id_out = torch.full_like(best, math.nan), torch.full_like(ids, -1)
    there_and_back[(1,)](best, ids, winner, best_out, id_out, SIZE)
    return winner.tolist(), list(zip(best_out.tolist(), id_out.tolist(), strict=True))


def test_order_and_values() -> None:
    draw = random.Random(0)
    scores = [-math.inf, -3.0e38, -2.5, -1e-45, 0.0, 1e-45, 2.5, 3.0e38, math.inf]
    pairs = [(s, t) for s in scores for t in (0, 1, 129279, NO_ID - 1)]
    pairs += [(draw.gauss(0, 9), draw.randrange(NO_ID)) for _ in range(20)]
    draw.shuffle(pairs)
    pairs = [(torch.tensor(s, dtype=torch.float32).item(), t) for s, t in pairs]
    winners, back = through_kernel(pairs)
    assert back[: len(pairs)] == pairs
    assert all(winner > 0 for winner in winners)
    by_winner = sorted(range(len(pairs)), key=lambda i: -winners[i])
    assert by_winner == sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], pairs[i][1]))


def test_zeros_are_one() -> None:
    winners, _ = through_kernel([(0.0, 7), (-0.0, 7), (-0.0, 6)])
    assert winners[0] == winners[1] < winners[2]


@triton.jit
def nothing(best_out, id_out):
    score, token = rows.unpacked(tl.zeros([1], tl.int64))
    tl.store(best_out + tl.arange(0, 1), score)
    tl.store(id_out + tl.arange(0, 1), token)


def test_zero_is_no_winner() -> None:
    best, token = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    nothing[(1,)](best, token)
    assert (best.item(), token.item()) == (-math.inf, NO_ID)
