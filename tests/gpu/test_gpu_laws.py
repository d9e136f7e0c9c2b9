"""Drafts of the GPU engines, then verification, have the target's law: chi-square."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import test_heads
from test_bans import BannedWorld
from test_limited import LimitedWorld
from test_rejection import NEVER, World, chi_square
from test_shaping import ShapedWorld

pytestmark = pytest.mark.gpu

ENGINES = ("one_pass", "per_step")
ROWS = 20_000
DEVICE = "cuda"


def on(device: str, x: Any) -> Any:
    """``x`` with all tensors in it on ``device``."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if not type(x).__module__.startswith(("fused_markov", "test_")):
        return x
    twin = copy.copy(x)
    vars(twin).update({name: on(device, value) for name, value in vars(x).items()})
    return twin


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [World, ShapedWorld, BannedWorld, LimitedWorld])
def test_law_is_the_targets(engine: str, kind: type[World]) -> None:
    world = on(DEVICE, kind())
    with torch.device(DEVICE):  # what the world makes while decoding
        samples = world.decode(1.0, ROWS, engine=engine)
    assert chi_square(samples.cpu(), kind().expected(1.0)) > NEVER


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", ["gated", "rnn"])
@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_law_of_variants_and_cut_drafts(engine: str, variant: str, limit: float) -> None:
    world = test_heads.World(variant, limit=limit)
    with torch.device(DEVICE):
        samples = on(DEVICE, world).decode(ROWS, engine)
    assert world.p_value(samples.cpu()) > NEVER
