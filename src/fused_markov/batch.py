"""One decode step's inputs and outputs, and every check of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov import masks
from fused_markov.errors import ArgumentError
from fused_markov.head import MarkovHead

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
CACHE_CONVENTIONS = ("logits", "tempered")
PADDING_TOKEN = 0


@dataclass(frozen=True)
class DraftBatch:
    """What one decode step drafts from. R rows, S draft steps, N request slots.

    Args:
        base_logits: ``[R, S, >=V]`` fp32, bf16 or fp16 base logits of the backbone; any strides but
            a unit last one. Columns past the head's candidates are ignored.
        anchors: ``[R]`` int32/int64 target ids of the last accepted tokens.
        positions: ``[R, S]`` int32/int64 position of each sampled token.
        temperature: ``[N]`` float temperatures by slot, 0 is greedy; ``None``: all greedy.
        seeds: ``[N]`` int64 request seeds by slot; needed where ``temperature`` is given.
        slots: ``[R]`` or ``[R, S]`` int32/int64 request slot of each row (and step); negative is
            padding: nothing of it is read or written and its token is 0. ``None``: row i is slot i.
            With a cache, live rows must not share a slot: which one it then holds is not defined.
        hidden: ``[R, S, H]`` fp32, bf16 or fp16 hidden states that the base logits were made of,
            any strides but a unit last one; needed by a head with a variant or a confidence head.
        min_confidence: ``[N]`` float, by slot, for a head with a confidence head: a row's draft
            ends before its first step whose confidence is below it (DeepSpec's
            ``confidence_threshold``; 0 never ends one). What is left of the row becomes padding;
            where the confidence head reads the Markov embedding, its cached logits are undefined.
        bans: ``[N, >=W]`` or ``[N, >=S, >=W]`` int32 bitmasks by slot (and step), W = ceil(target
            vocabulary / 32), as xgrammar makes them: where bit ``id % 32`` of word ``id // 32`` is
            0, that target id is banned: its logit is -inf, in the cache too. ``None``: no bans.
        top_k: ``[N]`` int32/int64 by slot: the draft distribution keeps logits not below the k-th
            largest; 0, or the number of candidates or more: off.
        top_p: ``[N]`` float by slot: it keeps logits above which less than this share of the mass
            lies; 1: off.
        min_p: ``[N]`` float by slot: it keeps tokens of at least this share of the likeliest one's
            probability; 0: off. These three shape a row of temperature above 0, as vLLM's sampler
            does: min-p first, top-p last, at its temperature; they need a cache.

    The tensors are borrowed, never copied. Checked when sampled, by `check_inputs`.
    """

    base_logits: Tensor
    anchors: Tensor
    positions: Tensor
    temperature: Tensor | None = None
    seeds: Tensor | None = None
    slots: Tensor | None = None
    hidden: Tensor | None = None
    min_confidence: Tensor | None = None
    bans: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.base_logits.shape[0]

    @property
    def steps(self) -> int:
        return self.base_logits.shape[1]

    @property
    def greedy(self) -> bool:
        return self.temperature is None

    def slot_matrix(self) -> Tensor:
        """int64 ``[R, S]`` slots, whatever form they were given in."""
        shape = (self.rows, self.steps)
        if self.slots is None:
            slots = torch.arange(self.rows, device=self.base_logits.device)
        else:
            slots = self.slots.to(torch.int64)
        return (slots.unsqueeze(1) if slots.dim() == 1 else slots).expand(shape)


@dataclass(frozen=True)
class DraftResult:
    """What a decode step drafted.

    Attributes:
        tokens: ``[R, S]`` target ids, int64 unless a tensor was given to fill; 0 where padded.
        nonfinite: ``[R, S]`` bool: the step's winning score was not a finite number. With no
            candidate above -inf the token is the lowest candidate id.
        engine: name of the engine that ran.
        passes_tensor: how often W2 was read (int64, one element, on the device).
        confidence: fp32 ``[R, S]`` each step's acceptance probability, given what was drafted
            before it, the step that ended a row's draft included; 0 past that and where padded.
            ``None`` without a confidence head.
        lengths: int64 ``[R]`` steps drafted before the first that was not; ``None`` where no
            ``min_confidence`` was given.

    The GPU engines keep all but the tokens at fixed addresses, for graphs: the
    sampler's next `sample` writes over them. Clone what shall outlive it.
    """

    tokens: Tensor
    nonfinite: Tensor
    engine: str
    passes_tensor: Tensor
    confidence: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def passes(self) -> int:
        """How often W2 was read in this step. Synchronises with the device."""
        return int(self.passes_tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """As people write it: ``bfloat16``, without the module."""
    return str(dtype).removeprefix("torch.")


def cache_is_target_wide(head: MarkovHead, cache_width: int) -> bool:
    """Whether a cache of this width is indexed by target id (not by candidate)."""
    return head.id_map is None or cache_width >= head.vocab_size


def logits_dtype(head: MarkovHead, batch: DraftBatch, cache: Tensor | None) -> torch.dtype:
    """The dtype that logits are rounded to before the argmax: the cache's, where there is one."""
    if cache is not None:
        return cache.dtype
    if head.logit_transform is not None:
        return torch.float32
    return torch.promote_types(batch.base_logits.dtype, head.dtype)


def check_inputs(
    head: MarkovHead,
    batch: DraftBatch,
    cache: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    values: bool | None = None,
    cache_convention: str = "logits",
) -> None:
    """Check one decode step's tensors against each other and the head.

    Args:
        values: also look at the values of anchors, slots and temperatures. That synchronises with
            a GPU, so by default only CPU tensors are looked at; kernels clamp ids and slots, so a
            bad value there gives a wrong draft, never a fault.
        cache_convention: what the cache is to hold, a name of `CACHE_CONVENTIONS`.

    Raises:
        ArgumentError: naming the argument, what was expected and what came.
    """
    base = batch.base_logits
    _dims("base_logits", base, 3)
    if base.dtype not in LOGIT_DTYPES:
        raise ArgumentError("base_logits", "fp32, bf16 or fp16", str(base.dtype))
    rows, steps, width = base.shape
    if steps < 1:
        raise ArgumentError("base_logits", "at least one draft step", str(list(base.shape)))
    if width < head.draft_vocab:
        raise ArgumentError(
            "base_logits",
            f"last dimension >= {head.draft_vocab} (the head's candidates)",
            str(list(base.shape)),
        )
    _unit_stride("base_logits", base)
    _same_device("base_logits", base, head)
    _indices("anchors", batch.anchors, (rows,), base, head)
    _indices("positions", batch.positions, (rows, steps), base, head)
    if batch.slots is not None:
        shape = (rows, steps) if batch.slots.dim() == 2 else (rows,)
        _indices("slots", batch.slots, shape, base, head)
    num_slots = min(_check_slot_tensors(head, batch), _check_heads(head, batch))
    num_slots = min(num_slots, _check_bans(head, batch))
    num_slots = min(num_slots, _check_shaping(head, batch, cache, cache_convention))
    if cache is not None:
        num_slots = min(num_slots, _check_cache(head, batch, cache, cache_convention))
    if batch.slots is None and num_slots < rows:
        raise ArgumentError(
            "slots",
            f"given, or at least {rows} slots (row i is slot i)",
            f"None and {num_slots} slots",
        )
    if tokens is not None:
        _indices("tokens", tokens, (rows, steps), base, head)
    if values if values is not None else base.device.type == "cpu":
        _check_values(head, batch, num_slots)


def _check_slot_tensors(head: MarkovHead, batch: DraftBatch) -> int:
    if batch.temperature is None:
        return 1 << 62
    _dims("temperature", batch.temperature, 1)
    if not batch.temperature.is_floating_point():
        raise ArgumentError("temperature", "a float dtype", str(batch.temperature.dtype))
    _same_device("temperature", batch.temperature, head)
    if batch.seeds is None:
        raise ArgumentError(
            "seeds", "[N] int64 where temperature is given", "None", "give seeds, or no temperature"
        )
    if batch.seeds.dtype != torch.int64:
        raise ArgumentError("seeds", "int64", str(batch.seeds.dtype))
    if batch.seeds.shape != batch.temperature.shape:
        raise ArgumentError(
            "seeds",
            f"shape {list(batch.temperature.shape)} as temperature",
            str(list(batch.seeds.shape)),
        )
    _same_device("seeds", batch.seeds, head)
    return batch.temperature.shape[0]


def check_convention(cache_convention: str) -> None:
    """An `ArgumentError` where there is no cache convention of that name."""
    if cache_convention not in CACHE_CONVENTIONS:
        names = " or ".join(map(repr, CACHE_CONVENTIONS))
        raise ArgumentError("cache_convention", names, repr(cache_convention))


def _check_heads(head: MarkovHead, batch: DraftBatch) -> int:
    """Hidden states and confidences asked for; the slots that there are of the latter."""
    hidden, least = batch.hidden, batch.min_confidence
    if head.hidden_size is not None:
        if hidden is None:
            raise ArgumentError(
                "hidden",
                f"[R, S, {head.hidden_size}] for a head with a variant or a confidence head",
                "None",
                "give the hidden states that the base logits were made of",
            )
        shape = [batch.rows, batch.steps, head.hidden_size]
        if list(hidden.shape) != shape:
            raise ArgumentError("hidden", f"shape {shape}", str(list(hidden.shape)))
        if hidden.dtype not in LOGIT_DTYPES:
            raise ArgumentError("hidden", "fp32, bf16 or fp16", str(hidden.dtype))
        _unit_stride("hidden", hidden)
        _same_device("hidden", hidden, head)
    if least is None:
        return 1 << 62
    if head.confidence is None:
        raise ArgumentError("min_confidence", "None without a confidence head", "a tensor")
    _dims("min_confidence", least, 1)
    if not least.is_floating_point():
        raise ArgumentError("min_confidence", "a float dtype", str(least.dtype))
    _same_device("min_confidence", least, head)
    return least.shape[0]


def _check_bans(head: MarkovHead, batch: DraftBatch) -> int:
    bans = batch.bans
    if bans is None:
        return 1 << 62
    if bans.dtype != torch.int32:
        raise ArgumentError("bans", "int32 words of 32 bits", str(bans.dtype))
    width = masks.words(head.vocab_size)
    shape, steps = list(bans.shape), batch.steps
    if bans.dim() not in (2, 3) or shape[-1] < width or (bans.dim() == 3 and shape[1] < steps):
        raise ArgumentError(
            "bans",
            f"[slots, >={width}] or [slots, >={steps}, >={width}] for {head.vocab_size} target ids",
            str(shape),
        )
    _unit_stride("bans", bans)
    _same_device("bans", bans, head)
    return shape[0]


def _check_shaping(
    head: MarkovHead, batch: DraftBatch, cache: Tensor | None, convention: str
) -> int:
    num_slots = 1 << 62
    for name in ("top_k", "top_p", "min_p"):
        x = getattr(batch, name)
        if x is None:
            continue
        _dims(name, x, 1)
        if name == "top_k" and x.dtype not in INDEX_DTYPES:
            raise ArgumentError(name, "int32 or int64", str(x.dtype))
        if name != "top_k" and not x.is_floating_point():
            raise ArgumentError(name, "a float dtype", str(x.dtype))
        _same_device(name, x, head)
        if convention != "logits":
            raise ArgumentError(
                name, "None beside a tempered cache", "a tensor", "cache logits before temperature"
            )
        if batch.temperature is not None and cache is None:
            raise ArgumentError(
                "logits_cache",
                f"given beside {name} and temperatures",
                "None",
                "the rejection sampler needs the shaped logits",
            )
        num_slots = min(num_slots, x.shape[0])
    return num_slots


def _check_cache(head: MarkovHead, batch: DraftBatch, cache: Tensor, convention: str) -> int:
    _dims("logits_cache", cache, 3)
    if cache.dtype not in LOGIT_DTYPES:
        raise ArgumentError("logits_cache", "fp32, bf16 or fp16", str(cache.dtype))
    if convention == "tempered" and cache.dtype != torch.float32:
        raise ArgumentError(
            "logits_cache",
            "fp32 for logits divided by temperature, or the token would not be the argmax of them",
            str(cache.dtype),
            "give an fp32 cache, or keep logits (cache_convention='logits')",
        )
    if cache.shape[1] < batch.steps:
        raise ArgumentError(
            "logits_cache",
            f"[slots, >={batch.steps}, vocab] for {batch.steps} draft steps",
            str(list(cache.shape)),
        )
    width = cache.shape[2]
    if width < head.vocab_size and (head.id_map is None or width != head.draft_vocab):
        wide = f">= {head.vocab_size} (target ids)"
        either = wide if head.id_map is None else f"{head.draft_vocab} (candidates) or {wide}"
        raise ArgumentError("logits_cache", f"last dimension {either}", str(list(cache.shape)))
    _unit_stride("logits_cache", cache)
    _same_device("logits_cache", cache, head)
    return cache.shape[0]


def _check_values(head: MarkovHead, batch: DraftBatch, num_slots: int) -> None:
    slots = batch.slot_matrix()
    if slots.numel() and int(slots.max()) >= num_slots:
        raise ArgumentError("slots", f"below {num_slots}", f"a slot {int(slots.max())}")
    live = batch.anchors[(slots >= 0).any(dim=1)]
    if live.numel() and not 0 <= int(live.min()) <= int(live.max()) < head.vocab_size:
        raise ArgumentError(
            "anchors",
            f"target ids in [0, {head.vocab_size}) in live rows",
            f"ids from {int(live.min())} to {int(live.max())}",
        )
    if batch.temperature is not None:
        used = batch.temperature[slots[slots >= 0]]
        if bool((~(used >= 0) | used.isinf()).any()):
            raise ArgumentError("temperature", "finite numbers >= 0", f"{used.tolist()[:8]}")
    for name in ("top_p", "min_p"):
        x = getattr(batch, name)
        if x is not None and bool((~((x >= 0) & (x <= 1)))[slots[slots >= 0]].any()):
            raise ArgumentError(name, "numbers from 0 to 1", f"{x.tolist()[:8]}")


def _dims(name: str, x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise ArgumentError(name, f"{dims} dimensions", f"shape {list(x.shape)}")


def _unit_stride(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ArgumentError(
            name, "a unit last stride", f"strides {x.stride()}", "call .contiguous() first"
        )


def _same_device(name: str, x: Tensor, head: MarkovHead) -> None:
    if x.device != head.device:
        raise ArgumentError(name, f"the head's device {head.device}", str(x.device))


def _indices(name: str, x: Tensor, shape: tuple[int, ...], base: Tensor, head: MarkovHead) -> None:
    if tuple(x.shape) != shape:
        raise ArgumentError(
            name,
            f"shape {list(shape)} to go with base_logits {list(base.shape)}",
            str(list(x.shape)),
        )
    if x.dtype not in INDEX_DTYPES:
        raise ArgumentError(name, "int32 or int64", str(x.dtype))
    _same_device(name, x, head)
