"""What the host code does on a PyTorch built for ROCm, with a device that is only pretended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fused_markov.bench.timing import cold_copies
from fused_markov.cli import info
from fused_markov.engines import chips, engine_types
from fused_markov.engines.amd import (
    PROCESSORS,
    UNKNOWN_RANGE,
    Report,
    Unsized,
    read_report,
    unsized,
)
from fused_markov.kernels.args import StepScratch

GPU = torch.device("cuda:0")
METADATA = """
amdhsa.kernels:
  - .agpr_count:     8
    .private_segment_fixed_size: 0
    .sgpr_count:     106
    .sgpr_spill_count: 31
    .vgpr_count:     240
    .vgpr_spill_count: 0
"""


def pretend(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName=architecture,
        multi_processor_count=304,
        total_memory=192 << 30,
        L2_cache_size=4 << 20,
        warp_size=64,
        major=9,
        minor=4,
    )
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx950:sramecc+:xnack-", "gfx950"),
        ("gfx90a:sramecc+:xnack-", "gfx942"),
        ("gfx1100", "gfx1100"),
        ("gfx1201", "gfx1100"),
    ],
)
def test_chip(monkeypatch: pytest.MonkeyPatch, architecture: str, name: str) -> None:
    pretend(monkeypatch, architecture)
    chip = chips.chip_of(GPU)
    assert chip is chips.AMD[name]
    assert not chip.cooperative
    assert not chip.ptx
    options = chip.options(4, registers=128)
    assert options["waves_per_eu"] == PROCESSORS[name].vgprs // 128
    assert "maxnreg" not in options


def test_the_engine_with_fewer_launches_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu_engines() -> list[str]:
        return [name for name in engine_types() if name in ("one_pass", "per_step")]

    assert gpu_engines() == ["one_pass", "per_step"]
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert gpu_engines() == ["per_step", "one_pass"]


def test_info_and_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gfx942:sramecc+:xnack-")
    text = info._describe("cuda:0")
    assert text == "AMD Instinct MI300X, gfx942, 304 multiprocessors, 192 GiB, last cache 256 MiB"
    # HIP tells the 4 MiB L2 of a die; weights stay in the cache behind it.
    assert cold_copies(70 << 20, GPU) * (70 << 20) >= 3 * (256 << 20)


def test_report() -> None:
    report = read_report(METADATA, lds=32768)
    assert report == Report(240, 8, 106, 0, 31, 0, 32768)
    processor = PROCESSORS["gfx942"]
    assert report.waves_per_simd(processor) == 2
    assert report.programs(processor, num_warps=2) == 2  # LDS
    assert report.programs(processor, num_warps=8) == 1  # registers
    assert report.programs(PROCESSORS["gfx950"], num_warps=2) == 4
    assert report.programs(PROCESSORS["gfx1100"], num_warps=4) == 4


def test_unsized() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    shown = unsized(StepScratch(tensor, tensor), but=frozenset(("best",)))
    assert shown.best is tensor
    assert isinstance(shown.best_id, Unsized)
    assert shown.best_id.dtype == torch.bfloat16
    assert shown.best_id.data_ptr() == tensor.data_ptr()
    assert shown.best_id.ptr_range() == UNKNOWN_RANGE > 2**31
    assert unsized(3) == 3


def test_resident_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("fused_markov.engines.launch")
    pretend(monkeypatch, "gfx942:sramecc+:xnack-")
    kernel = SimpleNamespace(asm={"amdgcn": METADATA}, metadata=SimpleNamespace(shared=32768))
    assert launch.resident_programs(kernel, 2, GPU) == 2
