"""Safetensors checkpoints as one lazy store of named tensors, with the ``config.json`` beside."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fused_markov.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Config:
    """What a checkpoint's ``config.json`` says about its heads; empty where there is none."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """A value, from the top level or from the nested configs that formats use.

        Speculators keep the drafter's transformer under ``transformer_layer_config``, multimodal
        models the language model under ``text_config``.
        """
        for scope in (
            self.values,
            *map(self.values.get, ("transformer_layer_config", "text_config")),
        ):
            if isinstance(scope, dict) and scope.get(key) is not None:
                return scope[key]
        return None

    def number(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(
                f"{self.path}: {key}: expected a whole number above 0, got {value!r}"
            )
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {key}: expected a number, got {value!r}")
        return float(value)

    def soft_cap(self) -> float | None:
        """Gemma4's cap; the other architectures' DSpark heads are not capped, whatever they say."""
        architectures = self.get("architectures") or []
        capped = any(str(a).startswith("Gemma4") for a in architectures)
        return (self.real("final_logit_softcapping", 0.0) or None) if capped else None


class Store:
    """Tensors by name, out of one or more safetensors files; only what is asked for is read.

    Args:
        path: the file or directory, for messages.
        files: tensor name -> file.
        config: the checkpoint's config.
    """

    def __init__(self, path: Path, files: dict[str, Path], config: Config) -> None:
        self.path, self.config = path, config
        self._files = files
        self.names = sorted(files)

    def find(self, names: tuple[str, ...]) -> str | None:
        """The first tensor with one of these last names, under any prefix."""
        return next((n for n in self.names if n.rsplit(".", 1)[-1] in names), None)

    def shape(self, name: str) -> list[int]:
        with self._open(name) as f:
            return list(f.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        with self._open(name) as f:
            tensor: Tensor = f.get_tensor(name)
            return tensor

    def error(self, name: str, expected: str, got: str) -> CheckpointError:
        file = self._files.get(name, self.path)
        return CheckpointError(f"{file}: tensor {name!r}: expected {expected}, found {got}")

    def missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tensor {name!r} is missing")

    def _open(self, name: str) -> Any:
        file = self._files[name]
        handle = _open(file)
        if name not in handle.keys():  # noqa: SIM118 - the handle is no mapping
            raise CheckpointError(
                f"{file}: tensor {name!r} is missing, though {INDEX} places it here"
            )
        return handle


def open_store(path: str | Path) -> Store:
    """Find the tensors of a checkpoint: headers and index are read, no tensor.

    Raises:
        CheckpointError: where a file is missing or damaged.
    """
    path = Path(path)
    if path.is_dir():
        config = _read_config(path / "config.json")
        if (path / INDEX).exists():
            return Store(path, _indexed(path), config)
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path}: expected *.safetensors files, found none")
        files = {name: file for file in found for name in _open(file).keys()}  # noqa: SIM118
        return Store(path, files, config)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    files = dict.fromkeys(_open(path).keys(), path)
    return Store(path, files, _read_config(path.parent / "config.json"))


def _indexed(path: Path) -> dict[str, Path]:
    index = _read_json(path / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()
    ):
        raise CheckpointError(f"{path / INDEX}: expected a 'weight_map' of tensor names to files")
    return {name: path / file for name, file in weight_map.items()}


def _open(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise CheckpointError(
            f"{file}: reading it takes safetensors: pip install 'fused-markov[checkpoints]'"
        ) from e
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as e:
        raise CheckpointError(f"{file}: no such file, though the checkpoint needs it") from e
    except (SafetensorError, OSError) as e:
        size = file.stat().st_size if file.is_file() else 0
        raise CheckpointError(
            f"{file}: damaged or truncated, or not a safetensors file ({size} bytes): {e}"
        ) from e


def _read_config(path: Path) -> Config:
    return Config(path, _read_json(path) if path.exists() else {})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as e:
        raise CheckpointError(f"{path}: not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
