"""Load a vLLM's own DSpark speculator and gumbel sampler from its unpacked Python files.

Only those two files run; small stubs take the place of what they import (configuration, logging,
the parallel drafter they extend). Use it in a process of its own; without a GPU, with
TRITON_INTERPRET=1 set.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
ESTIMATOR = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"


def log1p(x: Any) -> Any:
    """libdevice's, which the interpreter lacks, in numpy."""
    handle = x.handle
    return tl.tensor(TensorHandle(np.log1p(handle.data), handle.dtype), x.type)


class DFlashSpeculator:
    """What DSparkSpeculator needs of its base class here."""

    def propose(self, num_reqs: int, head_hidden: torch.Tensor, dummy_run: bool = False) -> Any:
        self._sample_sequential(num_reqs, head_hidden)  # type: ignore[attr-defined]
        return self.draft_tokens[:num_reqs]  # type: ignore[attr-defined]

    def _maybe_predict_acceptance(self, logits: Any, idx_mapping: Any, draft_step: Any) -> None:
        if self.acceptance_estimator is not None:  # type: ignore[attr-defined]
            self.acceptance_estimator.predict(  # type: ignore[attr-defined]
                logits,
                idx_mapping,
                draft_step,
                self.draft_token_confidence_probs,  # type: ignore[attr-defined]
                self.temperature,  # type: ignore[attr-defined]
            )


def install(version: str) -> None:
    """Put the stub modules into sys.modules."""
    names = [
        "vllm",
        "vllm.config",
        "vllm.config.compilation",
        "vllm.logger",
        "vllm.triton_utils",
        "vllm.v1",
        "vllm.v1.worker",
        "vllm.v1.worker.gpu",
        "vllm.v1.worker.gpu.sample",
        "vllm.v1.worker.gpu.spec_decode",
        "vllm.v1.worker.gpu.spec_decode.dflash",
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "vllm.v1.worker.gpu.spec_decode.dspark",
        "vllm.v1.worker.gpu.spec_decode.dspark.utils",
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
    ]
    for name in names:
        module: Any = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    m: Any = sys.modules
    m["vllm"].__version__ = version
    m["vllm.config"].VllmConfig = object
    m["vllm.config.compilation"].CUDAGraphMode = types.SimpleNamespace(NONE=0)
    m["vllm.logger"].init_logger = logging.getLogger
    utils = m["vllm.triton_utils"]
    utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    utils.tldevice = types.SimpleNamespace(log1p=log1p) if interpreted else libdevice
    m["vllm.v1.worker.gpu.spec_decode.dflash.speculator"].DFlashSpeculator = DFlashSpeculator
    m["vllm.v1.worker.gpu.spec_decode.dspark.utils"].load_dspark_model = None


def load(package: Path, name: str) -> Any:
    """Run one file of the package under its own name, through the import system."""
    path = package.joinpath(*name.split(".")[1:]).with_suffix(".py")
    parent: Any = sys.modules[name.rpartition(".")[0]]
    parent.__path__ = [str(path.parent)]
    return importlib.import_module(name)


def load_speculator(package: Path, version: str) -> tuple[Any, Any]:
    """The speculator module and the gumbel module of an unpacked vLLM."""
    install(version)
    gumbel = load(package, GUMBEL)
    return load(package, SPECULATOR), gumbel
