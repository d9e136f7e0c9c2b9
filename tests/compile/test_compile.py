"""Every kernel compiles for every supported chip and fits its shared memory; no GPU is needed."""

from __future__ import annotations

import functools

import pytest
import torch
from aot import SHARED, Launch, distinct, recorded, target

import fused_markov as fm
from fused_markov.batch import DraftBatch
from fused_markov.engines import Plan
from fused_markov.engines.chips import nvidia
from fused_markov.engines.configs import CANDIDATES, ONE_PASS, PER_STEP
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.successors import COUNT

VOCAB, STEPS, RANK = 129280, 5, 256
ENGINES = ("one_pass", "per_step")
CONFIGS = {"one_pass": ONE_PASS, "per_step": PER_STEP}
MODES = ("noise, cache", "greedy")

# All configurations for one chip, the extremes for the others, the rest only where time allows.
MATRIX = [
    pytest.param(
        capability,
        engine,
        index,
        mode,
        id=f"sm_{capability}-{engine}-{index}-{mode}",
        marks=[]
        if capability == 90 or (mode == MODES[0] and index == len(CONFIGS[engine]) - 1)
        else [pytest.mark.slow],
    )
    for capability in SHARED
    for engine in ENGINES
    for index in range(len(CONFIGS[engine]))
    for mode in MODES
]


@functools.cache
def head(
    rank: int = RANK, dtype: torch.dtype = torch.bfloat16, successors: int = 0
) -> fm.MarkovHead:
    w1, w2 = (torch.empty(VOCAB, rank, dtype=dtype) for _ in range(2))
    known = torch.zeros(1, successors, dtype=torch.int32).expand(VOCAB, -1) if successors else None
    return fm.MarkovHead(w1, w2, successors=known)


def engine_of(
    name: str, index: int, plan: Plan, of: fm.MarkovHead, capability: int = 90
) -> OnePassEngine | PerStepEngine:
    """The engine as on an NVIDIA GPU, with one configuration."""
    config, chip = CONFIGS[name][index], nvidia(capability // 10)
    if name == "per_step":
        return PerStepEngine(of, plan, (config,), chip=chip)
    return OnePassEngine(of, plan, (config,), chip=chip)


def examples(
    mode: str, of: fm.MarkovHead, rows: int, dtype: torch.dtype
) -> tuple[DraftBatch, torch.Tensor | None]:
    index = torch.zeros(rows, STEPS, dtype=torch.int64)
    base = torch.empty(1, dtype=dtype).expand(rows, STEPS, of.draft_vocab)
    if mode == "greedy":
        return DraftBatch(base, index[:, 0], index), None
    batch = DraftBatch(base, index[:, 0], index, torch.ones(rows), index[:, 0])
    return batch, torch.empty(1, dtype=dtype).expand(rows, STEPS, of.vocab_size)


@functools.cache
def launches(
    name: str,
    index: int,
    mode: str,
    rank: int = RANK,
    dtype: torch.dtype = torch.bfloat16,
    noise_dtype: torch.dtype = torch.float32,
    successors: int = 0,
    capability: int = 90,
) -> list[Launch]:
    """What the engine launches to warm up for a mode: one launch of each kernel."""
    of = head(rank, dtype, successors)
    with recorded() as found:
        engine = engine_of(name, index, Plan(3, STEPS, noise_dtype), of, capability)
        engine.warmup(*examples(mode, of, 3, dtype))
    return list(distinct(found).values())


def check(capability: int, found: list[Launch]) -> None:
    assert found
    for launch in found:
        compiled = launch.compile(target(capability))
        shared, limit = compiled.metadata.shared, SHARED[capability]
        assert shared <= limit, f"{launch.name}: {shared} bytes shared, sm_{capability} has {limit}"


@pytest.mark.parametrize(("capability", "engine", "index", "mode"), MATRIX)
def test_compiles(capability: int, engine: str, index: int, mode: str) -> None:
    check(capability, launches(engine, index, mode, capability=capability))


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("index", [0, len(ONE_PASS) - 1])
def test_chains_compile(index: int, capability: int) -> None:
    found = launches("one_pass", index, MODES[0], successors=COUNT, capability=capability)
    chains = [launch for launch in found if launch.name == "chain_kernel"]
    assert chains
    check(capability, chains)


@pytest.mark.parametrize("rank", [128, 256])
def test_a_chain_asks_for_rows_of_w2_a_step_ahead(rank: int) -> None:
    """Two steps' rows lie in shared memory, and the loop over steps copies into it."""
    found = launches("one_pass", -1, MODES[0], rank, successors=COUNT)
    chain = next(launch for launch in found if launch.name == "chain_kernel")
    compiled = chain.compile(target(90))
    assert compiled.metadata.shared >= 2 * CANDIDATES * rank * 2
    loop = compiled.asm["ttgir"].split("scf.for")[1]
    assert "async_copy_global_to_local" in loop


@pytest.mark.parametrize("successors", [0, 4 * COUNT])
def test_settling_again_takes_no_more_than_a_check(successors: int) -> None:
    """What settling again multiplies stays within what its program has for tiles."""
    for dtype in (torch.bfloat16, torch.float32):
        found = launches("one_pass", -1, MODES[0], dtype=dtype, successors=successors)
        passes = next(launch for launch in found if launch.name == "passes_kernel")
        shared = passes.compile(target(90)).metadata.shared
        # Two programs a multiprocessor, and a KiB that each costs.
        assert 2 * (shared + 1024) <= SHARED[90] + 1024, f"{dtype}: {shared} bytes"


# What has code or tiles of its own: wide rows of W2, fp32 products, fp64 noise.
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rank", "dtype", "noise"),
    [
        pytest.param(1024, torch.bfloat16, torch.float32, id="rank 1024"),
        pytest.param(256, torch.float32, torch.float64, id="fp32, fp64 noise"),
    ],
)
def test_other_weights_compile(
    engine: str, rank: int, dtype: torch.dtype, noise: torch.dtype
) -> None:
    # sm_120 has the least shared memory.
    check(120, launches(engine, -1, MODES[0], rank, dtype, noise, capability=120))


@pytest.mark.parametrize("engine", ENGINES)
def test_no_product_starts_from_the_base_logits(engine: str) -> None:
    """An fp32 bias is added to the base when it is summed: base + (a + b), not (base + a) + b."""
    for launch in launches(engine, -1, MODES[0], 64, torch.float32):
        lines = launch.compile(target(90)).asm["ttir"].splitlines()
        zeros = {line.split("=")[0].strip() for line in lines if "dense<0.000000e+00>" in line}
        products = [line for line in lines if "tt.dot " in line]
        assert products or launch.name not in ("passes_kernel", "step_kernel")
        for line in products:
            start = line.split("tt.dot ")[1].split(",")[2].split()[0]
            assert start in zeros or start.startswith("%acc"), f"{launch.name}: {line.strip()}"
