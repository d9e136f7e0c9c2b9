"""Kernels for W2 in fewer bits compile for every chip, within its shared memory and registers.

The rest of the matrix runs on demand: `pytest -m slow tests/compile/test_stored_weights.py`.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import amd_kernels
import pytest
import torch
from aot import SHARED, Launch, distinct, recorded, target
from test_compile import CONFIGS, ENGINES, MODES, engine_of, examples

import fused_markov as fm
from fused_markov.engines import Plan
from fused_markov.engines.chips import AMD
from fused_markov.quantize import BLOCKS, quantize
from fused_markov.successors import COUNT

# No byte of a vocabulary is read: a small one compiles to the same.
VOCAB, STEPS, RANK = 2048, 5, 256
MULTIPLYING = {"step_kernel", "passes_kernel", "link_kernel", "check_kernel"}
# In CI: the chip without fp8 types, the one with least shared memory, and AMD's, one tile each.
MATRIX = [
    pytest.param(
        capability,
        engine,
        weights,
        index,
        marks=[]
        if (capability, engine, index) in ((80, "per_step", 1), (90, "per_step", 0))
        or (capability, engine, index, weights) == (120, "one_pass", 2, "nvfp4")
        else [pytest.mark.slow],
    )
    for capability in SHARED
    for engine in ENGINES
    for weights in BLOCKS
    for index in range(len(CONFIGS[engine]))
]


@functools.cache
def head(weights: str, dtype: torch.dtype = torch.bfloat16, rank: int = RANK) -> fm.MarkovHead:
    w = torch.zeros(VOCAB, rank, dtype=dtype)
    return fm.MarkovHead(w, quantize(w, weights))


def check(capability: int, found: list[Launch]) -> None:
    found = [launch for launch in found if launch.name in MULTIPLYING]
    assert found
    for launch in found:
        compiled = launch.compile(target(capability))
        shared, limit = compiled.metadata.shared, SHARED[capability]
        assert shared <= limit, f"{launch.name}: {shared} bytes shared, sm_{capability} has {limit}"


def launches(engine: str, index: int, of: fm.MarkovHead) -> list[Launch]:
    with recorded() as found:
        runner = engine_of(engine, index, Plan(3, STEPS, torch.float32), of)
        runner.warmup(*examples(MODES[0], of, 3, of.dtype))
    return list(distinct(found).values())


@pytest.mark.parametrize(("capability", "engine", "weights", "index"), MATRIX)
def test_compiles(capability: int, engine: str, weights: str, index: int) -> None:
    check(capability, launches(engine, index, head(weights)))


@pytest.mark.parametrize("weights", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        pytest.param(torch.float16, 256, id="fp16"),
        pytest.param(torch.float32, 256, id="fp32", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 512, id="rank 512", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 16, id="rank 16", marks=pytest.mark.slow),
    ],
)
def test_other_embeddings_compile(weights: str, dtype: torch.dtype, rank: int) -> None:
    check(90, launches("per_step", 0, head(weights, dtype, rank)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", BLOCKS)
def test_compiles_for_amd(weights: str, engine: str) -> None:
    """gfx942: within its LDS, on the matrix unit of bf16, no register in memory."""
    arch, config = "gfx942", getattr(AMD["gfx942"], engine)[0]

    def stored(*_: Any, **__: Any) -> fm.MarkovHead:
        return head(weights)

    with mock.patch.object(amd_kernels, "head", stored):
        found = amd_kernels.launches(arch, engine, config, amd_kernels.NOISE)
    for name in MULTIPLYING & found.keys():
        kernel = amd_kernels.compiled(found[name], arch)
        limit = amd_kernels.PROCESSORS[arch].lds_limit
        assert kernel.report.lds <= limit, f"{name}: {kernel.report.lds} bytes of LDS of {limit}"
        assert not kernel.report.vgpr_spills, f"{name}: {kernel.report.vgpr_spills} VGPRs spilled"
        assert amd_kernels.MATRIX[arch, "bf16"] in kernel.assembly


@pytest.mark.parametrize("weights", ["fp8-block", "nvfp4"])
def test_chains_compile(weights: str) -> None:
    of = head(weights)
    known = torch.zeros(1, COUNT, dtype=torch.int32).expand(VOCAB, -1)
    chained = fm.MarkovHead(of.w1, of.weights, successors=known)
    found = [x for x in launches("one_pass", 0, chained) if x.name == "chain_kernel"]
    assert found
    for launch in found:
        assert launch.compile(target(90)).metadata.shared <= SHARED[90]
