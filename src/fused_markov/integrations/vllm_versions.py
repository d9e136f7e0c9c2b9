"""What the plugin knows of each vLLM release: one table, in this file alone.

A release that is not in the table, or whose hooked functions have other parameters than the table
says, is left alone. docs/vllm-versions.md names the files that these facts were read from.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from fused_markov import noise

SPECULATOR_MODULE = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
SPECULATOR_CLASS = "DSparkSpeculator"


@dataclass(frozen=True)
class VllmVersion:
    """Facts of one series of releases.

    Attributes:
        series: major.minor, all its patch releases.
        hook: "model": the speculator asks the draft model's ``sample_sequential`` first;
            "speculator": there is no hook, ``_sample_sequential`` itself is wrapped.
        stream: name of the noise stream of its ``gumbel_sample``.
        cache: what the draft logits cache holds, "logits" before temperature or "tempered" after.
        confidence: the speculator's attribute that says the confidence head is used, or None
            where there is no confidence head.
        gumbel: parameters of ``gumbel_sample``.
        transforms: whether a draft model's ``apply_output_logit_transform`` is applied.
    """

    series: str
    hook: Literal["model", "speculator"]
    stream: str
    cache: Literal["logits", "tempered"]
    confidence: str | None
    gumbel: tuple[str, ...]
    transforms: bool = False


_GUMBEL = ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature")
_GUMBEL_25 = (*_GUMBEL, "output_processed_logits", "output_processed_logits_col", "use_fp64")
_GUMBEL_28 = (*_GUMBEL, "logits_cache", "logits_cache_col", "use_fp64")
_GUMBEL_29 = (*_GUMBEL, "is_drafting", "logits_cache", "logits_cache_col", "use_fp64")
_GUMBEL_32 = (*_GUMBEL_29, "logits_cache_source")

TABLE = (
    VllmVersion("0.25", "speculator", "vllm-0.25", "tempered", None, _GUMBEL_25),
    VllmVersion("0.26", "speculator", "vllm-0.25", "tempered", None, _GUMBEL_25),
    VllmVersion("0.27", "speculator", "vllm-0.25", "tempered", None, _GUMBEL_25),
    VllmVersion(
        "0.28", "speculator", "vllm-0.25", "logits", "enable_adaptive_verification", _GUMBEL_28
    ),
    VllmVersion(
        "0.29", "speculator", "vllm-0.29", "logits", "enable_adaptive_verification", _GUMBEL_29
    ),
    VllmVersion("0.30", "speculator", "vllm-0.29", "logits", "use_confidence_head", _GUMBEL_29),
    VllmVersion("0.31", "speculator", "vllm-0.31", "logits", "use_confidence_head", _GUMBEL_29),
    VllmVersion("0.32", "speculator", "vllm-0.31", "logits", "use_confidence_head", _GUMBEL_32),
    VllmVersion("0.33", "model", "vllm-0.33", "logits", "use_confidence_head", _GUMBEL_32, True),
)

_METHODS = {
    "_sample_sequential": ("self", "num_reqs", "head_hidden"),
    "load_draft_model": ("self", "target_model", "target_attn_layer_names"),
}


def lookup(version: str) -> VllmVersion | None:
    """The table's row for a version string such as "0.33.0", or None."""
    # A pre-release or a build between two releases may hold either one's code: not known.
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?", version)
    series = release[1] if release else None
    return next((row for row in TABLE if row.series == series), None)


def covered() -> str:
    """The series of the table, for messages."""
    return ", ".join(row.series for row in TABLE)


def probabilistic_gap(version: VllmVersion) -> str | None:
    """Why a release's probabilistic drafts are left to vLLM (greedy ones are not), or None."""
    if version.stream not in noise.STREAMS:
        return f"noise stream {version.stream} of vLLM {version.series} is not in the library"
    return None


def changed(module: ModuleType, version: VllmVersion) -> str | None:
    """What in the speculator's module is not as the table says, or None."""
    speculator = getattr(module, SPECULATOR_CLASS, None)
    if speculator is None:
        return f"{SPECULATOR_MODULE} has no {SPECULATOR_CLASS}"
    for name, expected in _METHODS.items():
        reason = _differs(f"{SPECULATOR_CLASS}.{name}", getattr(speculator, name, None), expected)
        if reason is not None:
            return reason
    asks = "sample_sequential" in speculator._sample_sequential.__code__.co_consts
    if asks != (version.hook == "model"):
        has, wants = ("asks", "it not to") if asks else ("does not ask", "it to")
        return (
            f"{SPECULATOR_CLASS}._sample_sequential {has} the draft model for "
            f"sample_sequential, the table for {version.series} wants {wants}"
        )
    return _differs("gumbel_sample", getattr(module, "gumbel_sample", None), version.gumbel)


def _differs(
    name: str, function: Callable[..., Any] | None, expected: tuple[str, ...]
) -> str | None:
    if function is None:
        return f"{name} is missing"
    got = tuple(inspect.signature(function).parameters)
    if got == expected:
        return None
    return f"{name} has parameters ({', '.join(got)}), expected ({', '.join(expected)})"
