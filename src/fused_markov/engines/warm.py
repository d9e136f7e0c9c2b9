"""Batches of padding only: they compile and load kernels, and touch nobody's data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.head import MarkovHead

Call = tuple[DraftBatch, Tensor | None, Tensor | None]


def bucket_rows(limits: Sequence[int], max_rows: int) -> list[int]:
    """A row count of every bucket that a batch of 1 to ``max_rows`` rows can fall into.

    Args:
        limits: the most rows of each bucket, ascending.
    """
    counts = {min(limit, max_rows) for limit in limits if limit > 0}
    return sorted(counts)


def padding_calls(
    head: MarkovHead,
    plan: Plan,
    rows: int,
    example: DraftBatch | None = None,
    logits_cache: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Iterator[Call]:
    """What to call ``sample`` with so that real batches of ``rows`` rows compile nothing new.

    Without an example: with temperatures and greedy, each with and without a target-wide cache, for
    base and cache of the head's dtype, int64 indices and rows that lie aligned. With one: what
    compiles to the same as ``sample(example, logits_cache, tokens)``.
    """
    if example is not None:
        yield _padding_call(head, plan, rows, example, logits_cache, tokens)
        return
    for noise, cached in itertools.product((True, False), repeat=2):
        default = _default_example(head, plan, noise)
        cache = None
        if cached:
            tempered = plan.cache_convention == "tempered"
            dtype = torch.float32 if tempered else head.dtype
            cache = torch.empty(1, dtype=dtype, device=head.device)
            cache = cache.expand(1, plan.steps, head.vocab_size)
        yield _padding_call(head, plan, rows, default, cache, tokens)


def _default_example(head: MarkovHead, plan: Plan, noise: bool) -> DraftBatch:
    # Strides of 0 lie aligned whatever the vocabulary; whether that is, the engine sees itself.
    base = torch.empty(1, dtype=head.dtype, device=head.device)
    index = torch.empty(1, plan.steps, dtype=torch.int64, device=head.device)
    temperature = torch.empty(1, device=head.device) if noise else None
    return DraftBatch(
        base.expand(1, plan.steps, head.draft_vocab),
        index[:, 0],
        index,
        temperature,
        index[:, 0] if noise else None,
        None,
        *_default_heads(head, plan),
    )


def _default_heads(head: MarkovHead, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
    """Hidden states and confidences asked for, of a head that reads them."""
    if head.hidden_size is None:
        return None, None
    hidden = torch.empty(1, dtype=head.dtype, device=head.device)
    limits = None if head.confidence is None else torch.empty(1, device=head.device)
    return hidden.expand(1, plan.steps, head.hidden_size), limits


def _padding_call(
    head: MarkovHead,
    plan: Plan,
    rows: int,
    example: DraftBatch,
    logits_cache: Tensor | None,
    tokens: Tensor | None,
) -> Call:
    steps = plan.steps
    if example.slots is None:
        slots = torch.full((rows,), -1, device=head.device)
    else:
        shape = (rows, steps) if example.slots.dim() == 2 else (rows,)
        slots = _stand_in(example.slots, shape, -1)
    noise = example.temperature is not None
    given = {name: getattr(example, name) for name in ("top_k", "top_p", "min_p")}
    shaping = {name: _stand_in(x, (1,)) for name, x in given.items() if x is not None}
    batch = DraftBatch(
        _stand_in(example.base_logits, (rows, steps, head.draft_vocab)),
        _stand_in(example.anchors, (rows,)),
        _stand_in(example.positions, (rows, steps)),
        _stand_in(example.temperature, (1,)) if example.temperature is not None else None,
        _stand_in(example.seeds, (1,)) if noise and example.seeds is not None else None,
        slots,
        *_stand_in_heads(head, plan, rows, example),
        _bans_like(example.bans, steps),
        **shaping,
    )
    cache = None
    if logits_cache is not None:
        cache = _stand_in(logits_cache, (1, steps, logits_cache.shape[2]))
    return batch, cache, None if tokens is None else _stand_in(tokens, (rows, steps))


def _stand_in_heads(
    head: MarkovHead, plan: Plan, rows: int, example: DraftBatch
) -> tuple[Tensor | None, Tensor | None]:
    hidden, limits = example.hidden, example.min_confidence
    if hidden is not None:
        hidden = _stand_in(hidden, (rows, plan.steps, hidden.shape[2]))
    return hidden, None if limits is None else _stand_in(limits, (1,))


def _bans_like(bans: Tensor | None, steps: int) -> Tensor | None:
    if bans is None:
        return None
    return _stand_in(bans, (1, bans.shape[1]) if bans.dim() == 2 else (1, steps, bans.shape[2]))


def _stand_in(like: Tensor, shape: tuple[int, ...], value: int = 0) -> Tensor:
    """A tensor for which kernels compile to what they do for ``like``.

    It has the dtype, the address modulo 16 and the strides modulo 8 of ``like``: all that code is
    specialised on. Such strides overlap, so that no more than a row takes memory.
    """
    strides = [stride % 8 for stride in like.stride()[:-1]] + [1]
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    home = torch.full((size + 16,), value, dtype=like.dtype, device=like.device)
    skip = (like.data_ptr() - home.data_ptr()) % 16 // like.element_size()
    return home.as_strided(shape, strides, skip)
