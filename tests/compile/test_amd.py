"""AMD: every kernel fits its chip, spills nothing, multiplies on the matrix unit, loads wide.

The rest of the matrix runs on demand: `pytest -m slow tests/compile/test_amd.py`; over other
Tritons: `make amd`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton
from amd_kernels import (
    DTYPES,
    ENGINES,
    GREEDY,
    MODES,
    NOISE,
    Mode,
    compiled,
    faults,
    launches,
)

from fused_markov.engines.amd import PROCESSORS
from fused_markov.engines.chips import AMD

CHECKS = {"one_pass": "check_kernel", "per_step": "step_kernel"}


def configs(arch: str, engine: str) -> tuple[Any, ...]:
    chip = AMD[arch]
    return chip.one_pass if engine == "one_pass" else chip.per_step


def in_ci(arch: str, index: int, mode: Mode, dtype: str) -> bool:
    """All configurations where products and noise are at their usual; one for everything else."""
    if arch == "gfx1100":
        return index == 0 and dtype == "bf16" and mode == NOISE
    if dtype == "bf16" and mode == NOISE:
        return True
    if arch == "gfx950":
        return False
    usual = mode in (NOISE, GREEDY) if dtype == "bf16" else mode == NOISE
    return index == 0 and (usual or (dtype == "bf16" and (mode.fp64 or mode.reduced)))


MATRIX = [
    pytest.param(
        arch,
        engine,
        index,
        mode,
        dtype,
        id=f"{arch}-{engine}-{index}-{mode.name}-{dtype}",
        marks=[] if in_ci(arch, index, mode, dtype) else [pytest.mark.slow],
    )
    for arch in PROCESSORS
    for engine in ENGINES
    for index in range(len(configs(arch, engine)))
    for mode in MODES
    for dtype in DTYPES
]


@pytest.mark.parametrize(("arch", "engine", "index", "mode", "dtype"), MATRIX)
def test_compiles_well(arch: str, engine: str, index: int, mode: Mode, dtype: str) -> None:
    if arch == "gfx1100" and triton.__version__.startswith("3.7."):
        pytest.xfail(
            "Triton 3.7 keeps 75 to 117 of gfx1100's registers in memory; 3.6, 3.8, 3.9 none"
        )
    config = configs(arch, engine)[index]
    for launch in launches(arch, engine, config, mode, dtype).values():
        wrong = faults(compiled(launch, arch), dtype)
        assert not wrong, f"{launch.name}: {wrong}"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_oversized_tile_is_caught(engine: str) -> None:
    config = replace(configs("gfx942", engine)[0], block_v=256)
    found = launches("gfx942", engine, config, GREEDY)
    wrong = faults(compiled(found[CHECKS[engine]], "gfx942"), "bf16")
    assert any("bytes of LDS of 65536" in fault for fault in wrong), wrong


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_added_in_one_order(arch: str, dtype: str) -> None:
    """Else a row's bits would depend on how many rows there are."""
    orders = set()
    for engine in ENGINES:
        for config in configs(arch, engine):
            launch = launches(arch, engine, config, GREEDY, dtype)[CHECKS[engine]]
            orders.add(compiled(launch, arch).orders)
    assert len(orders) == 1
    assert len(next(iter(orders))) == 1
