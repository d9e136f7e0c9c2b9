"""AMD GPUs: what their compiler reports of a kernel, and how many of its programs fit.

Sources: the AMD Instinct MI300 and CDNA 4 ISA guides and LLVM's AMDGPU usage guide (registers,
waves, LDS and their granules).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

UNKNOWN_RANGE = 1 << 40


@dataclass(frozen=True)
class Processor:
    """What one multiprocessor, as HIP counts them, shares out among programs.

    Attributes:
        simds: its SIMDs.
        max_waves: most waves that a SIMD holds.
        vgprs: vector registers of a lane that a SIMD's waves share, accumulation registers among
            them.
        vgpr_granule: they are given out in multiples of this.
        lds: bytes of LDS.
        lds_limit: most of them that one program may have.
        lds_granule: they are given out in multiples of this.
        last_level: bytes of the GPU's last cache before memory, which HIP does not tell.
    """

    simds: int
    max_waves: int
    vgprs: int
    vgpr_granule: int
    lds: int
    lds_limit: int
    lds_granule: int
    last_level: int


PROCESSORS = {
    "gfx942": Processor(4, 8, 512, 8, 64 << 10, 64 << 10, 512, 256 << 20),
    "gfx950": Processor(4, 8, 512, 8, 160 << 10, 160 << 10, 1280, 256 << 20),
    # Two compute units that share their LDS: a work-group processor.
    "gfx1100": Processor(4, 16, 1536, 24, 128 << 10, 64 << 10, 512, 96 << 20),
}


def nearest(architecture: str) -> str:
    """The architecture there is data for that is most like another one."""
    if architecture in PROCESSORS:
        return architecture
    return "gfx942" if architecture.startswith("gfx9") else "gfx1100"


def processor_of(architecture: str) -> Processor:
    """What a multiprocessor of ``architecture`` shares out."""
    return PROCESSORS[nearest(architecture)]


@dataclass(frozen=True)
class Report:
    """What the compiler says of a kernel in its assembly's metadata.

    Attributes:
        vgprs: vector registers of a lane, with the accumulation registers.
        agprs: accumulation registers among them.
        sgprs: scalar registers of a wave.
        vgpr_spills: vector registers kept in memory.
        sgpr_spills: scalar registers kept in lanes of vector registers.
        scratch: bytes of memory of a lane.
        lds: bytes of LDS of a program.
    """

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int

    def waves_per_simd(self, processor: Processor) -> int:
        """Waves that a SIMD's registers have room for."""
        granule = processor.vgpr_granule
        each = max(1, -(-self.vgprs // granule)) * granule
        return min(processor.max_waves, processor.vgprs // each)

    def programs(self, processor: Processor, num_warps: int) -> int:
        """Programs of ``num_warps`` waves that a multiprocessor holds at once."""
        # A program's waves are dealt out over the SIMDs.
        waves = self.waves_per_simd(processor) * processor.simds
        granules = -(-self.lds // processor.lds_granule)
        by_lds = processor.lds // (granules * processor.lds_granule) if granules else waves
        return min(waves // num_warps, by_lds)


def read_report(assembly: str, lds: int) -> Report:
    """The figures in a kernel's assembly; ``lds`` is Triton's, as LLVM does not know it."""

    def figure(key: str) -> int:
        found = re.search(rf"^[ -]*\.{key}:\s+(\d+)", assembly, re.MULTILINE)
        return int(found.group(1)) if found else 0

    return Report(
        vgprs=figure("vgpr_count"),
        agprs=figure("agpr_count"),
        sgprs=figure("sgpr_count"),
        vgpr_spills=figure("vgpr_spill_count"),
        sgpr_spills=figure("sgpr_spill_count"),
        scratch=figure("private_segment_fixed_size"),
        lds=lds,
    )


class Unsized:
    """Shown to the compiler in place of a tensor of which only dtype and alignment may matter.

    For memory below 2 GiB Triton's HIP backend makes other code: a larger logits cache would
    compile anew after the warm-up. That code also forgets that a loaded row offset is a multiple
    of 8, and so reads two bytes at a time (Triton 3.6 to 3.9), and wants four scalar registers a
    pointer.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return UNKNOWN_RANGE


def unsized(argument: Any, but: frozenset[str] = frozenset()) -> Any:
    """A kernel's argument; of a named tuple, the tensors unsized except for the fields ``but``."""
    if not hasattr(argument, "_fields"):
        return argument
    shown = {
        field: Unsized(value)
        for field, value in zip(argument._fields, argument, strict=True)
        if isinstance(value, Tensor) and field not in but
    }
    return argument._replace(**shown)
