"""Bans, shaping, transforms and successors for synthetic decode steps."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from fused_markov import masks
from fused_markov.problems import Problem
from fused_markov.successors import find_successors
from fused_markov.transforms import LogitTransform

# By slot, in turns: all at once, nothing, each alone, values that are off.
TOP_K = (9, 0, 3, 0, 0, 10**6, 1)
TOP_P = (0.8, 1.0, 1.0, 0.9, 1.0, 1.0, 0.5)
MIN_P = (0.001, 0.0, 0.0, 0.0, 0.05, 0.0, 1.0)
SHAPING = ("top_k", "top_p", "min_p")


def with_bans(problem: Problem, share: float, *, by_step: bool = True, seed: int = 1) -> Problem:
    """The problem with about ``share`` of the target ids banned, others in each slot (and step).

    Bits past the vocabulary are 0. The last of several slots has no grammar: words of -1.
    """
    gen = torch.Generator().manual_seed(seed)
    width = masks.words(problem.head.vocab_size)
    shape = (problem.num_slots, problem.batch.steps, width, masks.BITS)
    bits = torch.rand(shape if by_step else (shape[0], *shape[2:]), generator=gen) >= share
    bits.view(*bits.shape[:-2], -1)[..., problem.head.vocab_size :] = False
    words = (bits.to(torch.int64) << torch.arange(masks.BITS)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    if problem.num_slots > 1:
        words[-1] = -1
    return replace(problem, batch=replace(problem.batch, bans=words.to(problem.head.device)))


def with_shaping(problem: Problem, only: tuple[str, ...] = SHAPING) -> Problem:
    """The problem with top-k, top-p and min-p (or ``only`` some) that differ between the slots."""

    def by_slot(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        some = [values[i % len(values)] for i in range(problem.num_slots)]
        return torch.tensor(some, dtype=dtype, device=problem.head.device)

    given = {
        "top_k": by_slot(TOP_K, torch.int32),
        "top_p": by_slot(TOP_P, torch.float32),
        "min_p": by_slot(MIN_P, torch.float32),
    }
    given = {name: x for name, x in given.items() if name in only}
    return replace(problem, batch=replace(problem.batch, **given))


def with_transform(problem: Problem, transform: LogitTransform) -> Problem:
    """The problem with a head whose logits go through ``transform``."""
    head = copy.copy(problem.head)
    head.logit_transform = transform
    return replace(problem, head=head)


def with_successors(problem: Problem, count: int) -> Problem:
    """The problem with a head that knows ``count`` successors of a token: those of its bias as a
    vanilla head's.
    """
    head = copy.copy(problem.head)
    head.successors = find_successors(head, count)
    return replace(problem, head=head)
