"""The kinds of GPU that there are configurations for, and the one look-up of a device's kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fused_markov.engines.amd import PROCESSORS, nearest, processor_of
from fused_markov.engines.configs import ONE_PASS, PER_STEP, OnePassConfig, PerStepConfig
from fused_markov.engines.configs_amd import AMD_CONFIGS


@dataclass(frozen=True)
class Chip:
    """What the engines must know of a kind of GPU.

    Attributes:
        name: compute capability (``sm_90``) or architecture (``gfx942``) the data was made for.
        one_pass: configurations of the one-pass engine, ascending.
        per_step: configurations of the per-step engine, ascending.
        cooperative: whether the one-pass engine launches cooperatively.
        row_bytes: the longest rows of W1 that a check keeps in registers.
        chain_bytes: bytes of a row of W2 that a chain's step multiplies at a time.
        ahead_bytes: the longest rows of W2 that a chain loads a step ahead, whole.
        ptx: whether kernels may hold NVIDIA's instructions.
        descriptors: whether tiles can be loaded through tensor descriptors.
        guess_apart: whether a check scores a row's guess before it looks for better tokens.
    """

    name: str
    one_pass: tuple[OnePassConfig, ...]
    per_step: tuple[PerStepConfig, ...]
    cooperative: bool
    ptx: bool
    descriptors: bool = False
    row_bytes: int = 1024
    chain_bytes: int = 128
    ahead_bytes: int = 0
    guess_apart: bool = True

    def options(self, num_warps: int, registers: int = 0) -> dict[str, Any]:
        """Launch options of a kernel; ``registers``: the most of a thread, 0 for no limit."""
        if self.name not in PROCESSORS:
            return {"num_warps": num_warps} | ({"maxnreg": registers} if registers else {})
        # One shape of the matrix instruction everywhere: it decides in which order products are
        # added, and a row's bits must not depend on the tile.
        options = {"num_warps": num_warps, "matrix_instr_nonkdim": 16}
        if registers:
            options["waves_per_eu"] = PROCESSORS[self.name].vgprs // registers
        return options


# Measured on sm_90 and used for every NVIDIA GPU; the interpreter takes the same tiles.
# A chain's step waits for each piece: the fewer the better. gfx1100 spills with 256 bytes.
NVIDIA = Chip(
    "sm_90",
    ONE_PASS,
    PER_STEP,
    cooperative=True,
    ptx=True,
    descriptors=True,
    chain_bytes=256,
    ahead_bytes=512,
)
# By the capability's major number, where a newer chip's data would not do: before sm_90 there are
# no descriptors; sm_86, sm_89 and sm_120 have 99 KiB of shared memory, two steps of a chain 128.
OTHER_NVIDIA = {
    8: replace(NVIDIA, name="sm_80", descriptors=False, ahead_bytes=0),
    12: replace(NVIDIA, name="sm_120", ahead_bytes=0),
}
INTERPRETER = Chip("interpreter", ONE_PASS, PER_STEP, cooperative=False, ptx=False)

# HIP runs a cooperative launch on another queue, between two barriers across queues: not before
# somebody has seen what that costs inside a graph. Checks and settlings are launched apart. Scoring
# guesses apart takes 20 registers more, and half the programs of gfx950 with them.
AMD = {
    name: Chip(name, *configs, cooperative=False, ptx=False, guess_apart=False)
    for name, configs in AMD_CONFIGS.items()
}
# See `configs_amd`.
AMD["gfx1100"] = replace(AMD["gfx1100"], row_bytes=0)


def chip_of(device: torch.device) -> Chip:
    """The kind of GPU that ``device`` is; the CPU stands for the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    if torch.version.hip is None:
        return nvidia(torch.cuda.get_device_capability(device)[0])
    return AMD[nearest(architecture(device))]


def nvidia(major: int) -> Chip:
    """The kind of an NVIDIA GPU of compute capability ``major``."""
    return OTHER_NVIDIA[8] if major < 8 else OTHER_NVIDIA.get(major, NVIDIA)


def architecture(device: torch.device) -> str:
    """Architecture of an AMD GPU, without its features (``gfx942`` of ``gfx942:sramecc+``)."""
    return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]


def last_cache_bytes(device: torch.device) -> int:
    """Bytes of the last cache before memory: the L2, and on AMD GPUs the one behind it."""
    if torch.version.hip is not None:
        return processor_of(architecture(device)).last_level
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
