"""What the GPU engines share: turning a batch into the kernels' arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_markov import noise
from fused_markov.batch import DraftBatch, cache_is_target_wide, logits_dtype
from fused_markov.engines import Plan
from fused_markov.engines.amd import processor_of, read_report, unsized
from fused_markov.engines.chips import Chip, architecture
from fused_markov.head import MarkovHead
from fused_markov.kernels.args import HiddenInputs, Inputs, Shape
from fused_markov.shaping import is_shaped
from fused_markov.successors import successor_biases
from fused_markov.weights import NVFP4

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LACKED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of fp32's
VARIANTS = {"gated": 1, "rnn": 2}  # as `kernels.variant` knows them
MAX_RANK = 1024
REGISTERS = 65536  # of a multiprocessor, on every NVIDIA GPU that Triton knows
WEIGHTS = frozenset(("w1", "w2"))


def why_not_triton(head: MarkovHead) -> str | None:
    """Why this head's device cannot run Triton kernels, or None."""
    interpreted = triton.knobs.runtime.interpret
    if head.device.type != "cuda" and not (interpreted and head.device.type == "cpu"):
        return f"the head is on {head.device}, Triton needs a GPU"
    if interpreted and head.dtype == torch.bfloat16:
        return "Triton's interpreter computes bf16 wrongly"
    if head.logit_transform is not None and head.logit_transform.triton_fn is None:
        return f"the logit transform {head.logit_transform.name!r} has no Triton function"
    if head.rank > MAX_RANK:
        return f"rank {head.rank} is above {MAX_RANK}"
    return None


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; a few on the CPU, where the interpreter runs."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def compiled_for(kernel: Any, io: Inputs | HiddenInputs, *rest: Any, **options: Any) -> Any:
    """The one compiled kernel for all sizes and strides of these types.

    Triton specialises on the numbers in a tuple whatever `do_not_specialize` says: on 1, and on
    multiples of 16. So it is shown numbers that are neither.
    """
    numbers = {f: _plain(n) for f, n in zip(io._fields, io, strict=True) if type(n) is int}
    shown = [io._replace(**numbers), *rest]
    if torch.version.hip is not None:
        shown = [unsized(argument, but=WEIGHTS) for argument in shown]
    return kernel.run(*shown, grid=None, warmup=True, **options)


def _plain(number: int) -> int:
    return 3 if -(2**31) <= number < 2**31 else 2**40 + 3


def launch(
    kernel: Any, programs: int, io: Inputs | HiddenInputs, *rest: Any, **options: Any
) -> None:
    """Launch a kernel of `compiled_for`; under the interpreter there is nothing to compile."""
    if triton.knobs.runtime.interpret:
        kernel[(programs,)](io, *rest, **options)
    else:
        compiled_for(kernel, io, *rest, **options)[(programs, 1, 1)](io, *rest)


def resident_programs(kernel: Any, num_warps: int, device: torch.device) -> int:
    """Programs of a compiled kernel that fit on a multiprocessor at once."""
    if torch.version.hip is not None:
        report = read_report(kernel.asm["amdgcn"], kernel.metadata.shared)
        return max(1, report.programs(processor_of(architecture(device)), num_warps))
    kernel._init_handles()
    limits = torch.cuda.get_device_properties(device)
    threads = limits.warp_size * num_warps
    # Registers are given out 8 to a thread; each program's shared memory costs 1 KiB more.
    registers = -(-kernel.n_regs // 8) * 8 * threads
    fit = min(
        REGISTERS // registers,
        limits.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024),
        limits.max_threads_per_multi_processor // threads,
    )
    return max(1, int(fit))


def block_v(configured: int, head: MarkovHead) -> int:
    """Candidates a tile, where the configured number is for rows of W2 of up to 512 bytes.

    Rows in fewer bits count as what they become: that is what takes registers.
    """
    row_bytes = int(triton.next_power_of_2(head.rank)) * head.dtype.itemsize
    return max(16, configured * 512 // max(row_bytes, 512))


def block_k(head: MarkovHead, chip: Chip) -> int:
    """Part of the rank that a check multiplies at a time: all of it where that fits on chip."""
    whole = int(triton.next_power_of_2(head.rank))
    if head.dtype.itemsize == 2 and whole * 2 <= chip.row_bytes:
        return max(least_piece(head), whole)
    return piece_of_rank(head)


def piece_of_rank(head: MarkovHead) -> int:
    """Part of the rank that a loop multiplies at a time; one scale is for all of it."""
    piece = min(64, max(least_piece(head), int(triton.next_power_of_2(head.rank))))
    return min(piece, head.weights.block[1]) if head.weights.parts > 1 else piece


def least_piece(head: MarkovHead) -> int:
    """A matrix unit takes 16 at the least; NVFP4's even and odd neighbours are multiplied apart."""
    return 32 if head.weights.format == NVFP4 else 16


def piece_of_chain(head: MarkovHead, chip: Chip) -> int:
    """Part of the rank that a chain's step multiplies at a time: ``chip.chain_bytes`` a row."""
    whole = max(least_piece(head), int(triton.next_power_of_2(head.rank)))
    piece = min(max(chip.chain_bytes // head.dtype.itemsize, least_piece(head)), whole)
    return min(piece, head.weights.block[1]) if head.weights.parts > 1 else piece


def chain_ahead(head: MarkovHead, chip: Chip) -> bool:
    """Whether a chain's step finds its rows of W2 on chip, asked for a step ahead."""
    whole = int(triton.next_power_of_2(head.rank))
    return (
        head.rank == whole >= 16
        and whole * head.dtype.itemsize <= chip.ahead_bytes
        and head.variant is None
        and not head.weights.quantized
    )


@dataclass(frozen=True)
class HeadData:
    """What the kernels read of a head beside W1."""

    id_map: Tensor
    holes: Tensor
    keys: Tensor
    w2: Tensor
    w2_scale: Tensor
    w2_groups: Tensor
    w2_words: Tensor
    successor_biases: Tensor


def head_data(head: MarkovHead, stream: str = noise.STREAM) -> HeadData:
    """Id map (a dummy where there is none), unmapped target ids, and the candidates' noise keys."""
    if head.id_map is None:
        none = torch.zeros(1, dtype=torch.int64, device=head.device)
        keys = noise.token_keys(torch.arange(head.draft_vocab, device=head.device), stream)
        return HeadData(none, none.to(torch.int32), keys, *_stored(head, keys), _biases(head, keys))
    unmapped = torch.ones(head.vocab_size, dtype=torch.bool, device=head.device)
    unmapped[head.id_map] = False
    holes = unmapped.nonzero().squeeze(1).to(torch.int32)
    keys = noise.token_keys(head.id_map, stream)
    ids = head.id_map.contiguous()
    return HeadData(ids, holes, keys, *_stored(head, keys), _biases(head, keys))


def _biases(head: MarkovHead, unused: Tensor) -> Tensor:
    known = head.successors is not None and head.variant is None
    return successor_biases(head) if known else unused


def _stored(head: MarkovHead, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W2, its scales and NVFP4's, as pointers of types that every chip has."""
    weights = head.weights
    if weights.scale is None:
        return weights.data, unused, unused, unused
    groups = unused if weights.groups is None else weights.groups.view(torch.int8)
    words = weights.data.view(torch.int32) if _whole_words(weights.data) else unused
    return weights.data.view(torch.int8), weights.scale, groups, words


def _whole_words(codes: Tensor) -> bool:
    return codes.shape[1] % 4 == 0 and codes.data_ptr() % 4 == 0 and codes.storage_offset() % 4 == 0


def per_word(head: MarkovHead, chip: Chip, block_m: int, block_k: int) -> int:
    """Values in a word, where a check decodes words; 0: it decodes bytes.

    Words are for few rows, whose products take W2 out of registers (see `check._bias`), on NVIDIA's
    GPUs; the interpreter follows. A matrix unit takes 16 of each part of the rank at the least.
    """
    weights = head.weights
    count = 8 if weights.format == NVFP4 else 4
    width = head.rank // weights.parts
    fits = (
        weights.quantized
        and (chip.ptx or triton.knobs.runtime.interpret)
        and block_m < 64
        and block_k == head.rank
        and width * weights.parts == head.rank
        and (weights.parts == 1 or width == weights.block[1])
        and width >= 16 * count
        and head.dtype.itemsize == 2
        and _whole_words(weights.data)
    )
    return count if fits else 0


def described(head: MarkovHead, chip: Chip, block_k: int) -> bool:
    """Whether W2's tiles can be loaded through a tensor descriptor: rows of a power of two."""
    return (
        chip.descriptors
        and not head.weights.quantized
        and block_k == head.rank
        and head.weights.data.data_ptr() % 16 == 0
    )


def w2_tiles(head: MarkovHead, io: Inputs, shape: Shape) -> Any:
    """The descriptor of W2's tiles, or what stands in for it."""
    if not shape.DESCRIBED:
        return io.w2
    rows = head.weights.data[: head.draft_vocab]
    return TensorDescriptor.from_tensor(rows, [shape.BLOCK_V, shape.BLOCK_K])


def make_inputs(
    head: MarkovHead,
    data: HeadData,
    batch: DraftBatch,
    cache: Tensor | None,
    tokens: Tensor,
    nonfinite: Tensor,
    row_slots: Tensor,
) -> Inputs:
    """The kernels' view of a checked batch. ``row_slots`` stands in where slots are not given."""
    base = batch.base_logits
    slots = row_slots if batch.slots is None else batch.slots
    temperature = nonfinite if batch.temperature is None else batch.temperature
    seeds = nonfinite if batch.seeds is None or batch.temperature is None else batch.seeds
    width = 0 if cache is None else cache.shape[2]
    fill_from, num_holes = head.draft_vocab, 0
    if head.id_map is not None and cache is not None and cache_is_target_wide(head, width):
        fill_from, num_holes = head.vocab_size, data.holes.shape[0]
    return Inputs(
        w1=head.w1,
        w2=data.w2,
        id_map=data.id_map,
        holes=data.holes,
        keys=data.keys,
        successors=data.keys if head.successors is None else head.successors,
        successor_biases=data.successor_biases,
        base=base,
        anchors=batch.anchors,
        positions=batch.positions,
        slots=slots,
        temperature=temperature,
        seeds=seeds,
        cache=base if cache is None else cache,
        tokens=tokens,
        nonfinite=nonfinite,
        base_row=base.stride(0),
        base_step=base.stride(1),
        anchor_row=batch.anchors.stride(0),
        position_row=batch.positions.stride(0),
        position_step=batch.positions.stride(1),
        slot_row=slots.stride(0),
        slot_step=slots.stride(1) if slots.dim() == 2 else 0,
        temperature_slot=temperature.stride(0),
        seed_slot=seeds.stride(0),
        cache_slot=0 if cache is None else cache.stride(0),
        cache_step=0 if cache is None else cache.stride(1),
        token_row=tokens.stride(0),
        token_step=tokens.stride(1),
        rows=batch.rows,
        vocab=head.draft_vocab,
        vocab_size=head.vocab_size,
        lowest_id=head.lowest_id,
        num_holes=num_holes,
        num_fill=num_holes + max(width - fill_from, 0),
        fill_from=fill_from,
        scale=head.scale,
        soft_cap=head.soft_cap or 1.0,
        table=head.w1,
        context=head.w1,
        mix=head.w1,
        bans=base if batch.bans is None else batch.bans,
        ban_slot=0 if batch.bans is None else batch.bans.stride(0),
        ban_step=0 if batch.bans is None or batch.bans.dim() == 2 else batch.bans.stride(1),
        **_shaping_inputs(batch, nonfinite),
        cache_width=width,
        w2_scale=data.w2_scale,
        w2_groups=data.w2_groups,
        w2_words=data.w2_words,
    )


def aligned(head: MarkovHead, batch: DraftBatch, cache: Tensor | None) -> bool:
    """Whether V and all rows of base and cache are in steps of 8 elements, so vectors fit."""
    tensors = [batch.base_logits] if cache is None else [batch.base_logits, cache]
    return head.draft_vocab % 8 == 0 and all(
        t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 for t in tensors
    )


def make_shape(
    head: MarkovHead, chip: Chip, batch: DraftBatch, cache: Tensor | None, plan: Plan, **tiles: Any
) -> Shape:
    """What the compiler must know of a checked batch, with the engine's tile sizes."""
    noisy = batch.temperature is not None
    wide = cache is not None and cache_is_target_wide(head, cache.shape[2])
    filled = cache is not None and cache.shape[2] > (
        head.draft_vocab if head.id_map is None or wide else cache.shape[2]
    )
    return Shape(
        STEPS=batch.steps,
        STEPS_P2=triton.next_power_of_2(batch.steps),
        RANK=head.rank,
        NOISE=noisy,
        FP64=noisy and plan.noise_dtype == torch.float64,
        CACHED=cache is not None,
        MAPPED=head.id_map is not None,
        TARGET_WIDE=wide,
        FILL=filled,
        SCALED=head.scale != 1.0,
        CAPPED=head.soft_cap is not None,
        EVEN=head.draft_vocab % tiles["BLOCK_V"] == 0,
        PTX=chip.ptx,
        ALIGNED=aligned(head, batch, cache),
        WEIGHT=DTYPES[head.dtype],
        LOGIT=DTYPES[torch.promote_types(batch.base_logits.dtype, head.dtype)],
        CACHE=DTYPES[logits_dtype(head, batch, cache)],
        PASSES=2 * batch.steps,
        # Without noise the stream is nobody's: one kernel for all.
        STREAM=plan.noise_stream if noisy else noise.STREAM,
        TEMPERED=noisy and plan.cache_convention == "tempered",
        VARIANT=0 if head.variant is None else VARIANTS[head.variant.kind],
        BANNED=batch.bans is not None,
        **_transform_fields(head),
        **_shaping_fields(batch, cache),
        BASE_SHIFT=LACKED_BITS[batch.base_logits.dtype],
        FORMAT=head.weights.format,
        SCALE_ROWS=0 if head.weights.block[0] == head.weights.rows else head.weights.block[0],
        SCALE_RANK=head.weights.block[1] if head.weights.parts > 1 else 0,
        SCALE_PARTS=head.weights.parts,
        PER_WORD=per_word(head, chip, tiles["BLOCK_M"], tiles["BLOCK_K"]),
        DESCRIBED=described(head, chip, tiles["BLOCK_K"]),
        **tiles,
    )


def _transform_fields(head: MarkovHead) -> dict[str, Any]:
    transform = head.logit_transform
    if transform is None:
        return {}
    return {
        "TRANSFORM": transform.triton_fn,
        "TRANSFORM_PARAMETERS": transform.parameters,
        "TRANSFORM_KEY": str(getattr(transform.triton_fn, "cache_key", transform.name)),
    }


def _shaping_inputs(batch: DraftBatch, none: Tensor) -> dict[str, Any]:
    """The tensors that shape a batch, ``none`` in place of those not given, and their strides."""
    given = {"top_k": batch.top_k, "top_p": batch.top_p, "min_p": batch.min_p}
    tensors = {name: none if x is None else x for name, x in given.items()}
    strides = {f"{name}_slot": x.stride(0) for name, x in tensors.items()}
    return {**tensors, **strides}


def _shaping_fields(batch: DraftBatch, cache: Tensor | None) -> dict[str, Any]:
    if not is_shaped(batch) or cache is None:
        return {}
    return {
        "SHAPED": True,
        "TOP_K": batch.top_k is not None,
        "TOP_P": batch.top_p is not None,
        "MIN_P": batch.min_p is not None,
        "CACHE_SHIFT": LACKED_BITS[cache.dtype],
    }
