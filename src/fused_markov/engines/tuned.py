"""Configurations that ``fused-markov tune`` found on this machine, in a file of the user's cache.

An entry is for one engine, GPU, shape and version of this library and of Triton, and holds whole
configurations: were a field to be added or to go, the entry counts no more. Nothing is measured
here.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import triton

import fused_markov
from fused_markov.batch import dtype_name
from fused_markov.engines import Plan
from fused_markov.engines.chips import architecture
from fused_markov.engines.configs import OnePassConfig, PerStepConfig
from fused_markov.engines.valid import row_limit, why_invalid
from fused_markov.errors import ArgumentError
from fused_markov.head import MarkovHead

SWITCH = "FUSED_MARKOV_TUNED"
AGAIN = "run `fused-markov tune` again"

C = TypeVar("C", OnePassConfig, PerStepConfig)
logger = logging.getLogger("fused_markov")


@dataclass(frozen=True)
class Choice(Generic[C]):
    """Configurations, and where they are from unless they are built in."""

    configs: tuple[C, ...]
    note: str = ""


def choose(engine: str, head: MarkovHead, plan: Plan, built_in: tuple[C, ...]) -> Choice[C]:
    """The tuned configurations for this head and plan where there are any, else ``built_in``."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no"):
        return Choice(built_in)
    key, path = key_of(engine, head, plan), cache_file()
    entry = _read(path).get(key)
    if entry is None:
        return Choice(built_in)
    try:
        configs = _configs_in(entry, built_in, head.draft_vocab)
    except ValueError as e:
        _warn_once(f"{path}: the entry for {key} is not used: {e}; {AGAIN}")
        return Choice(built_in)
    return Choice(configs, f"tuned configurations from {path} ({SWITCH}=0 ignores them)")


def store(key: str, configs: Sequence[C], measured: dict[str, Any]) -> Path:
    """Write an entry, in place of an older one for the same key; the file's path.

    Args:
        key: as `key_of` gives it.
        configs: one for each built-in configuration, with the same limits.
        measured: what was measured, for whoever reads the file.

    Raises:
        ArgumentError: the file cannot be written.
    """
    path = cache_file()
    entries = _read(path)
    entries[key] = {"configs": [asdict(config) for config in configs], "measured": measured}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads meanwhile sees the old file or the new one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as f:
            json.dump(entries, f, indent=2)
        os.replace(f.name, path)
    except OSError as e:
        raise ArgumentError(
            "XDG_CACHE_HOME", f"a folder where {path} can be written", str(e), "set another one"
        ) from e
    return path


def key_of(engine: str, head: MarkovHead, plan: Plan) -> str:
    """What an entry is for: all that the fastest configuration depends on."""
    dtype = dtype_name(head.dtype)
    if head.weights.quantized:
        dtype += f" with w2 in {head.weights.format}"
    return (
        f"{engine} on {_describe(head.device)}, V={head.draft_vocab} r={head.rank} "
        f"S={plan.steps} {dtype}, fused-markov {fused_markov.__version__}, "
        f"triton {triton.__version__}"
    )


def cache_file() -> Path:
    """``fused-markov/tuned.json`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(folder) / "fused-markov" / "tuned.json"


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return "the interpreter"
    p = torch.cuda.get_device_properties(device)
    kind = f"sm_{p.major}{p.minor}" if torch.version.hip is None else architecture(device)
    return f"{p.name} ({kind})"


def _read(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        _warn_once(f"{path}: not used, it cannot be read: {e}; {AGAIN}")
        return {}
    if not isinstance(entries, dict):
        _warn_once(f"{path}: not used, expected a JSON object; {AGAIN}")
        return {}
    return entries


def _configs_in(entry: Any, built_in: tuple[C, ...], vocab: int) -> tuple[C, ...]:
    """The configurations of an entry, or ValueError with what is wrong with them."""
    kind = type(built_in[0])
    found = entry.get("configs") if isinstance(entry, dict) else None
    if not isinstance(found, list) or not all(isinstance(values, dict) for values in found):
        raise ValueError("it holds no list of configurations")
    names = {field.name for field in fields(kind)}
    configs = []
    for values in found:
        if different := names.symmetric_difference(values):
            raise ValueError(f"fields are missing or unknown: {', '.join(sorted(different))}")
        if not all(type(value) is int for value in values.values()):
            raise ValueError("a field is no whole number")
        configs.append(kind(**values))
        if reason := why_invalid(configs[-1], vocab):
            raise ValueError(reason)
    if [row_limit(config) for config in configs] != [row_limit(config) for config in built_in]:
        raise ValueError("it is for other numbers of rows than the built-in configurations are")
    return tuple(configs)


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("fused-markov: %s", text)
