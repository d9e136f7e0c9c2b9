"""``torch.ops.fused_markov.sample``: draft sampling as an operator that torch.compile sees through.

Importing this module registers it. The operator plans by itself: it keeps a few samplers, by
weights and plan. Code that can hold on to a `fused_markov.DraftSampler` is better off with that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch
from fused_markov.errors import FusedMarkovError
from fused_markov.head import MarkovHead
from fused_markov.noise import STREAM
from fused_markov.sampler import DraftSampler

# Samplers kept. Each holds on to its weights, so an address that names some cannot name others.
MAX_SAMPLERS = 4
LEAST_ROWS = 64

_lock = threading.Lock()
_samplers: OrderedDict[Hashable, _Kept] = OrderedDict()


@dataclass(frozen=True)
class _Kept:
    sampler: DraftSampler
    tensors: tuple[Tensor, ...]  # keeps the addresses in the key taken


def clear() -> None:
    """Let go of all samplers, and with them of the weights and scratch they hold."""
    with _lock:
        _samplers.clear()


@torch.library.custom_op("fused_markov::sample", mutates_args=("logits_cache",))
def sample(
    w1: Tensor,
    w2: Tensor,
    base_logits: Tensor,
    anchors: Tensor,
    positions: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    slots: Tensor | None = None,
    logits_cache: Tensor | None = None,
    id_map: Tensor | None = None,
    vocab_size: int | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    fp64: bool = False,
    noise_stream: str = STREAM,
    cache_convention: str = "logits",
    w2_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w2_block: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft S tokens a row; the arguments are `MarkovHead`'s and `DraftBatch`'s.

    Args:
        w1, w2: ``[w1_rows, r]``, ``[w2_rows, r]`` Markov head. Of the id map's contents the first
            call with these tensors decides: do not change it in place.
        base_logits: ``[R, S, >=V]``. anchors: ``[R]``. positions: ``[R, S]``.
        temperature, seeds: ``[N]`` by slot, or ``None``: greedy. slots: ``[R]`` or ``[R, S]``.
        logits_cache: ``[N, >=S, vocab]``, filled in place.
        id_map: ``[draft_vocab]`` target ids of a reduced vocabulary.
        vocab_size, scale, soft_cap: as in `MarkovHead`.
        fp64: fp64 instead of fp32 noise.
        noise_stream, cache_convention: as in `DraftSampler`.
        w2_scale, w2_global_scale, w2_block: of a w2 in fewer bits, as in `MarkovHead`; the block
            as two numbers. Of their contents too the first call decides.

    Returns:
        tokens int64 ``[R, S]``, nonfinite bool ``[R, S]``, passes over ``w2`` int64 ``[]``.

    Graphs: call it once with the same weights and at least as many rows before capturing. Calls
    with the same weights share scratch, so they must be ordered on one stream.

    Raises:
        ArgumentError: where the inputs do not fit together.
        FusedMarkovError: where a CUDA graph is being captured and there is no sampler yet.
    """
    weights = _Weights(w1, w2, id_map, w2_scale, w2_global_scale)
    block = None if w2_block is None else tuple(w2_block)
    head_args = (vocab_size, scale, soft_cap, block)
    names = (noise_stream, cache_convention)
    sampler = _sampler_for(weights, head_args, base_logits.shape[:2], fp64, names)
    batch = DraftBatch(base_logits, anchors, positions, temperature, seeds, slots)
    result = sampler.sample(batch, logits_cache)
    # An operator's results must be its own: these two are the sampler's scratch.
    return result.tokens, result.nonfinite.clone(), result.passes_tensor.clone()


@sample.register_fake
def _fake(
    w1: Tensor,
    w2: Tensor,
    base_logits: Tensor,
    anchors: Tensor,
    positions: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    slots: Tensor | None = None,
    logits_cache: Tensor | None = None,
    id_map: Tensor | None = None,
    vocab_size: int | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    fp64: bool = False,
    noise_stream: str = STREAM,
    cache_convention: str = "logits",
    w2_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w2_block: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = base_logits.shape[:2]
    return (
        base_logits.new_empty(shape, dtype=torch.int64),
        base_logits.new_empty(shape, dtype=torch.bool),
        base_logits.new_empty((), dtype=torch.int64),
    )


class _Weights(NamedTuple):
    """A head's tensors, as the operator is given them."""

    w1: Tensor
    w2: Tensor
    id_map: Tensor | None
    w2_scale: Tensor | None
    w2_global_scale: Tensor | None


def _sampler_for(
    weights: _Weights,
    head_args: tuple[Any, ...],
    shape: torch.Size,
    fp64: bool,
    names: tuple[str, str],
) -> DraftSampler:
    """The kept sampler for these weights and up to the next power of two rows, or a new one."""
    rows, steps = shape
    max_rows = max(LEAST_ROWS, 1 << (rows - 1).bit_length() if rows else 0)
    key = (*map(_identity, weights), head_args, max_rows, steps, fp64, names)
    with _lock:
        if key in _samplers:
            _samplers.move_to_end(key)
            return _samplers[key].sampler
        if weights.w1.is_cuda and torch.cuda.is_current_stream_capturing():
            raise FusedMarkovError(
                "fused_markov::sample has no sampler for these weights and rows yet, and making "
                "one allocates: call it once before capturing a CUDA graph"
            )
        vocab_size, scale, soft_cap, block = head_args
        head = MarkovHead(
            **weights._asdict(),
            vocab_size=vocab_size,
            scale=scale,
            soft_cap=soft_cap,
            w2_block=block,
        )
        noise_dtype = torch.float64 if fp64 else torch.float32
        noise_stream, cache_convention = names
        sampler = DraftSampler(
            head,
            max_rows=max_rows,
            steps=steps,
            noise_dtype=noise_dtype,
            noise_stream=noise_stream,
            cache_convention=cache_convention,
        )
        _samplers[key] = _Kept(sampler, tuple(t.detach() for t in weights if t is not None))
        if len(_samplers) > MAX_SAMPLERS:
            _samplers.popitem(last=False)
        return sampler


def _identity(x: Tensor | None) -> Hashable:
    if x is None:
        return None
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.device
