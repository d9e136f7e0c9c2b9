"""Markov and confidence heads out of DSpark checkpoints, without loading the backbone.

Three published layouts are read, each as a file, a directory or a sharded directory:

- DeepSpec's dense drafters (Qwen3, Gemma4, Kimi-K3) and speculators' format:
  ``markov_head.markov_w1.weight`` and ``markov_head.markov_w2.weight``, with or without a prefix
  such as ``model.``; a reduced draft vocabulary comes as offsets in ``d2t``.
- DeepSeek-V4: the same names under ``mtp.N.``, within the target's own checkpoint.
- DeepSeek-V4.1: ``mtp.N.markov_head.embed.weight`` and ``mtp.N.markov_head.head.weight``.

W2 may be in fewer bits; it stays so. fp8 and int8 have ``weight_scale``, ``weight_scale_inv`` or
``scale`` beside ``weight``, of the whole, of rows or of blocks; NVFP4 has ``weight`` (uint8),
``weight_scale`` and ``weight_scale_2`` (ModelOpt), or ``weight_packed``, ``weight_scale`` and
``weight_global_scale``, by which values are divided (compressed-tensors).

Beside W1 and W2, a gated head has ``markov_head.gate_proj`` and an rnn head
``markov_head.joint_proj``, each with weight and bias.

``config.json`` beside the weights says what the tensors cannot: the true vocabulary where they are
padded, ``logit_scale``, a soft cap, and what the confidence head reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_markov.checkpoint_files import Store, open_store
from fused_markov.confidence import ConfidenceHead
from fused_markov.errors import ArgumentError, CheckpointError
from fused_markov.head import MarkovHead
from fused_markov.successors import load_successors
from fused_markov.variants import GatedVariant, RnnVariant, Variant
from fused_markov.weights import PLAIN_DTYPES, stored_weights

_FACTOR = re.compile(
    r"(?P<prefix>(?:.*\.)?)markov_head\.(?P<factor>markov_w1|markov_w2|embed|head)\."
    r"(?P<field>weight|weight_packed|weight_scale|weight_scale_inv|scale|weight_scale_2"
    r"|weight_global_scale)"
)
_FIELDS = {
    "weight": "",
    "weight_packed": "",
    "weight_scale": "_scale",
    "weight_scale_inv": "_scale",
    "scale": "_scale",
    "weight_scale_2": "_global_scale",
    "weight_global_scale": "_divisor",
}
_LAYERS = {"gated": "gate_proj", "rnn": "joint_proj"}
_FACTOR_NAMES = {"markov_w1": "w1", "embed": "w1", "markov_w2": "w2", "head": "w2"}
_CONFIDENCE = re.compile(r"(?P<prefix>(?:.*\.)?)confidence_head\.proj\.(?P<field>weight|bias)")
_STAGE = re.compile(r"mtp\.(\d+)\.$")
_ID_MAP_NAMES = ("d2t", "draft_id_to_target_id")
_EXPECTED = (
    "markov_head.markov_w1.weight and markov_head.markov_w2.weight, "
    "or mtp.N.markov_head.embed.weight and mtp.N.markov_head.head.weight"
)


def load_markov_head(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    confidence: bool = False,
) -> MarkovHead:
    """Read the Markov head of a DSpark checkpoint; nothing else of the file is read.

    It may be of any kind that `fused_markov.variants` knows. Its successors are read too where a
    directory holds them (see `fused_markov.successors`).

    Args:
        path: a ``.safetensors`` file, or a directory of them, sharded or not.
        device: where the head shall live; ``None``: the CPU.
        dtype: what to convert the weights to, but for a w2 in fewer bits; ``None``: as stored.
        confidence: also read the confidence head, where there is one, to be computed with every
            draft; such a head asks for hidden states.

    Raises:
        CheckpointError: naming the file and the tensor, what was expected and what was found.

    Example:
        >>> head = load_markov_head("dspark_qwen3_8b_block7")  # doctest: +SKIP
    """
    store = open_store(path)
    names = _factor_names(store)
    config = store.config
    shapes = {key: store.shape(names[key]) for key in ("w1", "w2")}
    _check_shapes(store, names, shapes)
    vocab = config.number("vocab_size") or shapes["w1"][0]
    if vocab > shapes["w1"][0]:
        raise store.error(names["w1"], f"{vocab} rows (vocab_size)", f"shape {shapes['w1']}")
    draft_vocab = config.number("draft_vocab_size") or shapes["w2"][0]
    if draft_vocab > shapes["w2"][0]:
        raise store.error(
            names["w2"], f"{draft_vocab} rows (draft_vocab_size)", f"shape {shapes['w2']}"
        )
    d2t = _offsets(store, draft_vocab) if draft_vocab < vocab else None

    def load(key: str) -> Tensor:
        w = store.tensor(names[key])
        wanted = dtype if w.dtype in PLAIN_DTYPES else None
        return w.to(device=device, dtype=wanted).contiguous()

    try:
        w2, scales = load("w2"), _scales(store, names, device)
        return MarkovHead(
            load("w1"),
            stored_weights(w2, **scales) if scales else w2,
            d2t=d2t,
            successors=load_successors(path),
            scale=config.real("logit_scale", 1.0),
            soft_cap=config.soft_cap(),
            vocab_size=vocab,
            variant=_variant(store, names["w1"], device, dtype),
            confidence=load_confidence_head(path, device=device) if confidence else None,
        )
    except ArgumentError as e:
        names["id_map"] = names["d2t"] = store.find(_ID_MAP_NAMES) or e.argument
        name = names.get(e.argument, e.argument)
        raise store.error(name, e.expected, e.got + (f"; {e.remedy}" if e.remedy else "")) from e


def _scales(
    store: Store, names: dict[str, str], device: torch.device | str | None
) -> dict[str, Any]:
    """The arguments of `stored_weights` beside w2 itself."""
    found: dict[str, Any] = {}
    if "w2_scale" in names:
        found["scale"] = store.tensor(names["w2_scale"]).to(device)
    if "w2_global_scale" in names:
        found["global_scale"] = store.tensor(names["w2_global_scale"]).to(device)
    elif "w2_divisor" in names:
        found["global_scale"] = 1.0 / store.tensor(names["w2_divisor"]).float().to(device)
    elif "scale" in found:
        found["block"] = _block(store, found["scale"])
    return found


def _block(store: Store, scale: Tensor) -> tuple[int, int] | None:
    """Block sizes that config.json names, where the scales are of blocks."""
    config = store.config.get("quantization_config")
    sizes = config.get("weight_block_size") if isinstance(config, dict) else None
    if sizes is None or scale.dim() != 2 or 1 in scale.shape:
        return None
    if not isinstance(sizes, list) or [type(n) for n in sizes] != [int, int] or min(sizes) < 1:
        raise CheckpointError(
            f"{store.config.path}: weight_block_size: expected two whole numbers, got {sizes!r}"
        )
    return sizes[0], sizes[1]


def load_confidence_head(
    path: str | Path, *, device: torch.device | str | None = None
) -> ConfidenceHead | None:
    """Read the confidence head of a DSpark checkpoint, in fp32; ``None`` where it has none.

    Raises:
        CheckpointError: naming the file and the tensor, what was expected and what was found.
    """
    store = open_store(path)
    if store.config.get("enable_confidence_head") is False:
        return None
    found = [(m["prefix"], name) for name in store.names if (m := _CONFIDENCE.fullmatch(name))]
    if not found:
        return None
    prefix = max((p for p, _ in found), key=_stage)
    names = {name.rsplit(".", 1)[1]: name for p, name in found if p == prefix}
    if "weight" not in names:
        raise store.missing(f"{prefix}confidence_head.proj.weight")
    shape = store.shape(names["weight"])
    if len(shape) != 2 or shape[0] != 1:
        raise store.error(names["weight"], "shape [1, inputs]", f"shape {shape}")
    with_markov = _confidence_reads_markov(store, names["weight"], shape[1], prefix)
    weight = store.tensor(names["weight"]).float().flatten().to(device)
    bias = torch.zeros((), device=weight.device)
    if "bias" in names:
        if store.shape(names["bias"]) != [1]:
            shown = f"shape {store.shape(names['bias'])}"
            raise store.error(names["bias"], "shape [1]", shown)
        bias = store.tensor(names["bias"]).float()[0].to(device)
    return ConfidenceHead(weight, bias, with_markov)


def _variant(
    store: Store, w1: str, device: torch.device | str | None, dtype: torch.dtype | None
) -> Variant | None:
    """The variant beside tensor ``w1``, which the config's kind and the tensors must agree on."""
    prefix = w1[: w1.rindex("markov_head.") + len("markov_head.")]
    found = [k for k, layer in _LAYERS.items() if f"{prefix}{layer}.weight" in store.names]
    kind = store.config.get("markov_head_type") or store.config.get("dspark_markov_head_type")
    kind = str(kind).lower() if kind is not None else (found[0] if found else "vanilla")
    if kind not in ("vanilla", *_LAYERS):
        raise CheckpointError(
            f"{store.path}: markov_head_type: expected vanilla, gated or rnn, got {kind!r}"
        )
    layers = [_LAYERS[k] for k in found]
    if found != ([] if kind == "vanilla" else [kind]):
        expected = f"{prefix}{_LAYERS[kind]}" if kind in _LAYERS else "no further layer"
        raise CheckpointError(
            f"{store.path}: a {kind} Markov head (markov_head_type) should have {expected}; "
            f"found {layers or 'none'}"
        )
    if kind == "vanilla":
        return None
    name = f"{prefix}{_LAYERS[kind]}"
    if f"{name}.bias" not in store.names:
        raise store.missing(f"{name}.bias")
    weight, bias = (
        store.tensor(f"{name}.{field}").to(device=device, dtype=dtype)
        for field in ("weight", "bias")
    )
    try:
        return GatedVariant(weight, bias) if kind == "gated" else RnnVariant(weight, bias)
    except ArgumentError as e:
        raise store.error(f"{name}.{e.argument}", e.expected, e.got) from e


def _factor_names(store: Store) -> dict[str, str]:
    """Tensor names of w1, w2 and, where there are any, its scales ``w2_scale`` and on top."""
    by_prefix: dict[str, dict[str, str]] = {}
    for name in store.names:
        if m := _FACTOR.fullmatch(name):
            key = _FACTOR_NAMES[m["factor"]] + _FIELDS[m["field"]]
            by_prefix.setdefault(m["prefix"], {})[key] = name
    if not by_prefix:
        near = [n for n in store.names if "markov" in n][:6]
        raise CheckpointError(
            f"{store.path}: no Markov head: expected {_EXPECTED}; "
            f"found {len(store.names)} tensors, "
            + (f"of which {near} come nearest" if near else "none with 'markov' in its name")
        )
    # The last stage's head is the one engines run.
    names = by_prefix[max(by_prefix, key=_stage)]
    for key in ("w1", "w2"):
        if key not in names:
            raise CheckpointError(
                f"{store.path}: the Markov head has no {key}: expected {_EXPECTED}; "
                f"found only {sorted(names.values())}"
            )
    return names


def _stage(prefix: str) -> tuple[int, str]:
    m = _STAGE.search(prefix)
    return (int(m[1]) if m else -1, prefix)


def _check_shapes(store: Store, names: dict[str, str], shapes: dict[str, list[int]]) -> None:
    for key in ("w1", "w2"):
        if len(shapes[key]) != 2 or 0 in shapes[key]:
            raise store.error(names[key], "shape [rows, rank]", f"shape {shapes[key]}")
    rank = store.config.number("markov_rank") or store.config.number("dspark_markov_rank")
    if rank is not None and shapes["w1"][1] != rank:
        raise store.error(names["w1"], f"rank {rank} (config.json)", f"shape {shapes['w1']}")
    packed = 2 if "w2_global_scale" in names or "w2_divisor" in names else 1
    if shapes["w2"][1] * packed != shapes["w1"][1]:
        expected = f"rank {shapes['w1'][1]} as {names['w1']}"
        raise store.error(names["w2"], expected, f"shape {shapes['w2']}")


def _offsets(store: Store, draft_vocab: int) -> Tensor:
    """The d2t offsets of a reduced draft vocabulary."""
    name = store.find(_ID_MAP_NAMES)
    if name is None:
        raise CheckpointError(
            f"{store.path}: the draft vocabulary of {draft_vocab} is smaller than the target's, "
            "so a tensor 'd2t' of offsets to target ids was expected; found none"
        )
    if store.shape(name) != [draft_vocab]:
        raise store.error(name, f"shape [{draft_vocab}]", f"shape {store.shape(name)}")
    return store.tensor(name)


def _confidence_reads_markov(store: Store, name: str, width: int, prefix: str) -> bool:
    config = store.config
    flag = config.get("confidence_head_with_markov")
    with_markov = bool(flag) if flag is not None else _STAGE.search(prefix) is not None
    hidden = config.number("hidden_size")
    if hidden is None:
        return with_markov
    rank = store.shape(_factor_names(store)["w1"])[1] if with_markov else 0
    if width != hidden + rank:
        parts = f"{hidden} (hidden_size)" + (f" + {rank} (rank)" if rank else "")
        raise store.error(name, f"{parts} inputs", f"shape {[1, width]}")
    return with_markov
