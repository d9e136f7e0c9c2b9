"""The kernels of the older noise streams and of a tempered cache, compiled; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aot import SHARED, Launch, distinct, recorded, target

import fused_markov as fm
from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.chips import NVIDIA
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine

STEPS, VOCAB, RANK = 5, 4096, 256
ENGINES = {"one_pass": OnePassEngine, "per_step": PerStepEngine}


def launches(engine: str, plan: Plan, cache_dtype: torch.dtype | None) -> list[Launch]:
    """One launch of each kernel of a plan; greedy without a cache."""
    weights = torch.zeros(1, RANK, dtype=torch.bfloat16).expand(VOCAB, RANK)
    head = fm.MarkovHead(weights.contiguous(), weights.contiguous())
    base = torch.empty(1, dtype=torch.bfloat16).expand(3, STEPS, VOCAB)
    index = torch.zeros(3, STEPS, dtype=torch.int64)
    batch, cache = DraftBatch(base, index[:, 0], index), None
    if cache_dtype is not None:
        batch = replace(batch, temperature=torch.ones(3), seeds=index[:, 0])
        cache = torch.empty(1, dtype=cache_dtype).expand(3, STEPS, VOCAB)
    with recorded() as found:
        ENGINES[engine](head, plan, chip=NVIDIA).warmup(batch, cache)
    return list(distinct(found).values())


@pytest.mark.parametrize("noise_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_philox_and_tempered(engine: str, noise_dtype: torch.dtype) -> None:
    found = launches(engine, Plan(3, STEPS, noise_dtype, "vllm-0.25", "tempered"), torch.float32)
    for launch in found:
        compiled = launch.compile(target(90))
        assert compiled.metadata.shared <= SHARED[90], launch.name
        if launch.name in ("passes_kernel", "step_kernel"):
            assert "mul.hi.u32" in compiled.asm["ptx"], "no Philox in it"
            assert "div.rn.f32" in compiled.asm["ptx"], "no exact division in it"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_greedy_batch_of_an_fp64_plan(engine: str) -> None:
    """Whose table of winners is fp64 while its scores are fp32."""
    for launch in launches(engine, Plan(3, STEPS, torch.float64), None):
        assert launch.compile(target(90)).metadata.shared <= SHARED[90]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_default_is_untouched(engine: str) -> None:
    """Nothing of the other streams is in the kernels of the newest."""
    for launch in launches(engine, Plan(3, STEPS, torch.float32), torch.bfloat16):
        ptx = launch.compile(target(90)).asm["ptx"]
        assert "mul.hi.u32" not in ptx
        assert "div.rn.f32" not in ptx
