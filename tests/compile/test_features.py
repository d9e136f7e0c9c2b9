"""Kernels with bans, a logit transform, shaping and limited candidates compile for a chip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import amd_kernels
import pytest
import torch
from aot import distinct, recorded
from test_compile import CONFIGS, MODES, STEPS, VOCAB, check, engine_of, examples, head

import fused_markov as fm
from fused_markov.engines import Plan
from fused_markov.engines.chips import AMD
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.transforms import scaled_soft_cap

ENGINES = ("one_pass", "per_step")


def compile_launches(
    name: str, of: fm.MarkovHead, mode: str, extra: dict[str, Any], plan: Plan
) -> set[str]:
    """Compile what a warm-up launches; the kernels' names."""
    with recorded() as found:
        engine = engine_of(name, len(CONFIGS[name]) - 1, plan, of)
        batch, cache = examples(mode, of, 3, of.dtype)
        engine.warmup(replace(batch, **extra), cache)
    launches = list(distinct(found).values())
    check(90, launches)
    return {launch.name for launch in launches}


@pytest.mark.parametrize("name", ENGINES)
def test_bans_and_transform_compile(name: str) -> None:
    plain = head()
    of = fm.MarkovHead(plain.w1, plain.w2, logit_transform=scaled_soft_cap(0.5, 30.0))
    bans = torch.zeros(3, STEPS, -(-VOCAB // 32), dtype=torch.int32)
    compile_launches(name, of, MODES[0], {"bans": bans}, Plan(3, STEPS, torch.float32))


def shaping(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Parameters of three slots, as the kernels are given them."""
    ones = torch.ones(3, dtype=dtype)
    return {"top_k": torch.ones(3, dtype=torch.int32), "top_p": ones, "min_p": ones}


@pytest.mark.parametrize("name", ENGINES)
def test_shaping_compiles(name: str) -> None:
    plan = Plan(3, STEPS, torch.float32)
    names = compile_launches(name, head(), MODES[0], shaping(), plan)
    assert names & {"shape_step_kernel", "passes_kernel"}


@pytest.mark.parametrize("mode", MODES)
def test_limited_candidates_compile(mode: str) -> None:
    plan = Plan(3, STEPS, torch.float64, draft_topk=100)
    extra = shaping() if mode == MODES[0] else {}
    names = compile_launches("per_step", head(), mode, extra, plan)
    assert names == {"select_kernel", "limited_kernel"}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("draft_topk", [None, 100])
def test_all_together_compile_for_amd(name: str, draft_topk: int | None) -> None:
    plain = head()
    of = fm.MarkovHead(plain.w1, plain.w2, logit_transform=scaled_soft_cap(0.5, 30.0))
    chip, plan = AMD["gfx942"], Plan(3, STEPS, torch.float32, draft_topk=draft_topk)
    bans = torch.zeros(3, -(-VOCAB // 32), dtype=torch.int32)
    with amd_kernels.recorded() as found:
        if name == "per_step":
            engine: Any = PerStepEngine(of, plan, chip.per_step[:1], chip)
        else:
            engine = OnePassEngine(of, plan, chip.one_pass[:1], False, chip)
        batch, cache = examples(MODES[0], of, 3, of.dtype)
        engine.warmup(replace(batch, bans=bans, **shaping()), cache)
    names = set()
    for launch in found:
        if launch.name not in names:
            launch.compile(amd_kernels.TARGETS["gfx942"])
        names.add(launch.name)
    assert names & {"shape_kernel", "shape_step_kernel", "limited_kernel"}
