"""Both engines' kernels for AMD GPUs that are not there, and what their code must be like."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from aot import Launch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import fused_markov as fm
from fused_markov.batch import DraftBatch
from fused_markov.bench import amdgcn
from fused_markov.engines import Plan, one_pass
from fused_markov.engines.amd import PROCESSORS, Report, read_report
from fused_markov.engines.chips import AMD
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.engines.per_step import PerStepEngine
from fused_markov.successors import COUNT

TARGETS = {
    name: GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32) for name in PROCESSORS
}
ENGINES = ("one_pass", "per_step")
VOCAB, DRAFT_VOCAB, STEPS, RANK = 129280, 32000, 5, 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# The matrix instruction of each dtype's products; gfx1100 has none for fp32. One shape in all
# tiles: it decides in which order products are added.
MATRIX = {
    ("gfx942", "bf16"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "fp16"): "v_mfma_f32_16x16x16_f16",
    ("gfx942", "fp32"): "v_mfma_f32_16x16x4_f32",
    ("gfx950", "bf16"): "v_mfma_f32_16x16x32_bf16",
    ("gfx950", "fp16"): "v_mfma_f32_16x16x32_f16",
    ("gfx950", "fp32"): "v_mfma_f32_16x16x4_f32",
    ("gfx1100", "bf16"): "v_wmma_f32_16x16x16_bf16",
    ("gfx1100", "fp16"): "v_wmma_f32_16x16x16_f16",
}
# Spilled scalars moved to and from lanes, as a share of the instructions of the loop over tokens.
MOST_LANE_MOVES = 0.08
TOKEN_KERNELS = ("guess_kernel", "check_kernel", "step_kernel")
MULTIPLYING = (
    "link_kernel",
    "chain_kernel",
    "check_kernel",
    "settle_kernel",
    "passes_kernel",
    "step_kernel",
)


@dataclass(frozen=True)
class Mode:
    """A kind of decode step that compiles apart."""

    name: str
    noise: bool = True
    cached: bool = True
    fp64: bool = False
    reduced: bool = False
    successors: bool = False


NOISE = Mode("noise, cache")
GREEDY = Mode("greedy", noise=False, cached=False)
MODES = (
    NOISE,
    GREEDY,
    Mode("noise", cached=False),
    Mode("greedy, cache", noise=False),
    Mode("fp64 noise, cache", fp64=True),
    Mode("reduced, noise, cache", reduced=True),
    Mode("successors, noise, cache", successors=True),
)


@functools.cache
def head(
    dtype: str, reduced: bool = False, successors: bool = False, rank: int = RANK
) -> fm.MarkovHead:
    w1 = torch.empty(VOCAB, rank, dtype=DTYPES[dtype])
    if not reduced:
        known = torch.zeros(1, COUNT, dtype=torch.int32).expand(VOCAB, -1) if successors else None
        return fm.MarkovHead(w1, torch.empty_like(w1), successors=known)
    w2 = torch.empty(DRAFT_VOCAB, rank, dtype=DTYPES[dtype])
    return fm.MarkovHead(w1, w2, id_map=torch.arange(DRAFT_VOCAB) * 2, vocab_size=VOCAB)


def example(of: fm.MarkovHead, mode: Mode) -> tuple[DraftBatch, torch.Tensor | None]:
    rows = 3
    index = torch.zeros(rows, STEPS, dtype=torch.int64)
    one = torch.empty(1, dtype=of.dtype)
    base = one.expand(rows, STEPS, of.draft_vocab)
    cache = one.expand(rows, STEPS, of.vocab_size) if mode.cached else None
    if not mode.noise:
        return DraftBatch(base, index[:, 0], index), cache
    return DraftBatch(base, index[:, 0], index, torch.ones(rows), index[:, 0]), cache


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches as `aot.recorded` does, on a PyTorch that seems to be built for ROCm."""
    found: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(Launch(self, args, options))
        return mock.MagicMock()

    fits = mock.patch.object(one_pass, "resident_programs", return_value=1)
    rocm = mock.patch.object(torch.version, "hip", "6.4")
    with mock.patch.object(JITFunction, "run", record), fits, rocm:
        yield found


def launches(
    arch: str, engine: str, config: Any, mode: Mode, dtype: str = "bf16", cooperative: bool = False
) -> dict[str, Launch]:
    """The launches of an engine with one configuration, by kernel."""
    chip, of = AMD[arch], head(dtype, mode.reduced, mode.successors)
    plan = Plan(3, STEPS, torch.float64 if mode.fp64 else torch.float32)
    with recorded() as found:
        if engine == "per_step":
            PerStepEngine(of, plan, (config,), chip).warmup(*example(of, mode))
        else:
            OnePassEngine(of, plan, (config,), cooperative, chip).warmup(*example(of, mode))
    apart = {launch.name: launch for launch in found}
    assert len(apart) == len({launch.key(TARGETS[arch]) for launch in found})
    return apart


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, with the compiler's report and its assembly."""

    name: str
    arch: str
    warps: int
    report: Report
    assembly: str
    orders: frozenset[str]  # how its products over the rank are laid out, and so added up

    @property
    def waves_per_simd(self) -> int:
        """Waves that share a SIMD, for registers and for LDS."""
        processor = PROCESSORS[self.arch]
        resident = self.report.programs(processor, self.warps) * self.warps
        return min(self.report.waves_per_simd(processor), -(-resident // processor.simds))


def compiled(launch: Launch, arch: str) -> Kernel:
    kernel = launch.compile(TARGETS[arch])
    assembly = kernel.asm["amdgcn"]
    code = kernel.asm["ttgir"]
    shapes = re.findall(r"instrShape = (\[[^\]]*\])", code)
    widths = re.findall(r"kWidth = (\d+)", code)
    orders = frozenset(f"{shape}, {width} a lane" for shape in shapes for width in widths)
    report = read_report(assembly, kernel.metadata.shared)
    return Kernel(launch.name, arch, launch.options["num_warps"], report, assembly, orders)


def faults(kernel: Kernel, dtype: str) -> list[str]:
    """What is wrong with a kernel's code; nothing, if it is as it must be."""
    report, found = kernel.report, amdgcn.instructions(kernel.assembly)
    processor = PROCESSORS[kernel.arch]
    wrong = []
    if report.lds > processor.lds_limit:
        wrong.append(f"{report.lds} bytes of LDS of {processor.lds_limit}")
    if report.vgpr_spills or report.scratch:
        wrong.append(f"{report.vgpr_spills} VGPRs spilled, {report.scratch} bytes of scratch")
    if report.programs(processor, kernel.warps) < 1:
        wrong.append("no program fits")
    if kernel.name in TOKEN_KERNELS:
        loop = amdgcn.main_loop(kernel.assembly)
        moves, total = loop.count("v_readlane|v_writelane"), loop.instructions.total()
        if moves > MOST_LANE_MOVES * total:
            wrong.append(f"{moves} of {total} instructions of the main loop move spilled scalars")
    if kernel.name in MULTIPLYING:
        wrong += _product_faults(kernel, dtype, set(found))
    return wrong


def _product_faults(kernel: Kernel, dtype: str, found: set[str]) -> list[str]:
    wrong = []
    expected = MATRIX.get((kernel.arch, dtype))
    matrix = {name for name in found if amdgcn.MATRIX.match(name)}
    if matrix != ({expected} if expected else set()):
        wrong.append(f"multiplies with {sorted(matrix)}, not {expected}")
    if not any(amdgcn.WIDE_LOAD.match(name) for name in found):
        wrong.append("no loads of 16 bytes")
    return wrong
