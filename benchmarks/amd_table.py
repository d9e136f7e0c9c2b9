"""The tables of docs/amd.md: what the compiler makes for AMD GPUs, and what a model predicts.

    python benchmarks/amd_table.py                  print them
    python benchmarks/amd_table.py --write          put them into docs/amd.md

No GPU is needed. Kernels are those of bf16 with noise and cache at V=129280, rank 256, S=5. Exits
with 1, and writes nothing, where a kernel is not as tests/compile/test_amd.py wants it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "compile"))

from amd_kernels import NOISE, RANK, STEPS, VOCAB, Kernel, compiled, faults, launches  # noqa: E402

from fused_markov.bench import amdgcn  # noqa: E402
from fused_markov.bench.amd_model import MACHINES, Step, one_pass, per_step  # noqa: E402
from fused_markov.engines.amd import PROCESSORS  # noqa: E402
from fused_markov.engines.chips import AMD  # noqa: E402

DOCUMENT = ROOT / "docs" / "amd.md"
BEGIN, END = "<!-- begin {} -->\n", "<!-- end {} -->"
WAVE = 64
PUBLISHED_US = 220  # the loop at R=1, as published with vLLM's fused module


@dataclass(frozen=True)
class Line:
    """A kernel of an engine's configuration; ``tokens``: of a lane in a turn of its main loop."""

    engine: str
    index: int
    config: Any
    kernel: Kernel
    tokens: float | None

    @property
    def loop(self) -> amdgcn.Loop:
        return amdgcn.main_loop(self.kernel.assembly)

    def cells(self) -> list[str]:
        kernel, report, processor = self.kernel, self.kernel.report, PROCESSORS[self.kernel.arch]
        found = amdgcn.instructions(kernel.assembly)
        matrix = sorted({name for name in found if amdgcn.MATRIX.match(name)})
        wide = [
            sum(n for name, n in found.items() if kind.match(name))
            for kind in (amdgcn.WIDE_LOAD, amdgcn.WIDE_STORE)
        ]
        cells = [
            f"`{self.engine}` {self.index}",
            kernel.name.removesuffix("_kernel"),
            f"{report.vgprs} ({report.agprs})",
            f"{report.lds / 1024:.3g}",
            f"{report.programs(processor, kernel.warps)} × {kernel.warps}",
            str(kernel.waves_per_simd),
            f"{report.vgpr_spills} / {report.scratch}",
            str(report.sgpr_spills),
            matrix[0].removeprefix("v_mfma_") if matrix else "",
            f"{wide[0]} / {wide[1]}",
        ]
        if self.tokens is None:
            return [*cells, "", ""]
        vector = self.loop.count("v_") - self.loop.count(amdgcn.MATRIX)
        return [*cells, f"{vector / self.tokens:.0f}", f"{self.cycles():.0f}"]

    def cycles(self) -> float:
        assert self.tokens is not None
        return self.loop.vector_cycles() / self.tokens


HEADER = [
    "config", "kernel", "VGPRs (AGPRs)", "LDS KiB", "programs a CU × waves", "waves a SIMD",
    "VGPR spills / scratch", "SGPR spills", "MFMA", "16-byte loads / stores",
    "vector instructions a token", "cycles a token",
]  # fmt: skip


def lines(arch: str) -> list[Line]:
    """Both engines' kernels for an architecture, compiled; exits where one is at fault."""
    found = []
    for engine in ("one_pass", "per_step"):
        for index, config in enumerate(getattr(AMD[arch], engine)):
            for launch in launches(arch, engine, config, NOISE).values():
                kernel = compiled(launch, arch)
                if wrong := faults(kernel, "bf16"):
                    sys.exit(f"{arch} {engine} {index} {kernel.name}: {wrong}")
                found.append(Line(engine, index, config, kernel, _tokens(kernel, config)))
    return found


def _tokens(kernel: Kernel, config: Any) -> float | None:
    """Tokens of a lane in a turn of a kernel's main loop; None where that is not over tokens."""
    lanes = kernel.warps * WAVE
    if kernel.name == "guess_kernel":
        return float(config.guess_m * config.lanes / lanes)
    if kernel.name in ("check_kernel", "step_kernel"):
        return float(config.block_m * config.block_v / lanes)
    return None


def table(header: list[str], rows: list[list[str]]) -> str:
    every = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in every)


def predictions(arch: str, found: list[Line], row_counts: tuple[int, ...]) -> str:
    """Predicted times of both engines, and the bytes they move."""
    machine, rows = MACHINES[arch], []
    for count in row_counts:
        step_line = _line(found, "per_step", "step_kernel", count)
        check = _line(found, "one_pass", "check_kernel", count * STEPS)
        guess = _line(found, "one_pass", "guess_kernel", count * STEPS)
        sizes = (count, STEPS, VOCAB, RANK, 2)
        by_step = per_step(machine, Step(*sizes, step_line.config.block_m), step_line.cycles())
        cycles = check.cycles(), guess.cycles()
        apart, together = (
            one_pass(machine, Step(*sizes, check.config.block_m), *cycles, cooperative)
            for cooperative in (False, True)
        )
        rows.append(
            [
                str(count),
                *(f"{p.us:.0f}" for p in (by_step, apart, together)),
                *(f"{p.bytes / 1e6:.0f}" for p in (by_step, apart)),
                f"{PUBLISHED_US / by_step.us:.1f}" if count == 1 else "",
            ]
        )
    header = [
        "R", "`per_step` µs", "`one_pass` µs, launches apart", "`one_pass` µs, cooperative",
        "MB `per_step`", "MB `one_pass`", "times faster than 220 µs",
    ]  # fmt: skip
    return table(header, rows)


def cheap_launches(arch: str, found: list[Line], launch_us: tuple[float, ...]) -> str:
    """The same at R=1 for other times from one kernel of a graph to the next."""
    step_line = _line(found, "per_step", "step_kernel", 1)
    check = _line(found, "one_pass", "check_kernel", STEPS)
    guess = _line(found, "one_pass", "guess_kernel", STEPS)
    step, rows = Step(1, STEPS, VOCAB, RANK, 2, step_line.config.block_m), []
    for each in launch_us:
        machine = replace(MACHINES[arch], launch_us=each)
        apart = one_pass(machine, step, check.cycles(), guess.cycles(), cooperative=False)
        by_step = per_step(machine, step, step_line.cycles())
        rows.append([f"{each}", f"{by_step.us:.0f}", f"{apart.us:.0f}"])
    return table(["µs a launch", "`per_step` µs", "`one_pass` µs, launches apart"], rows)


def _line(found: list[Line], engine: str, kernel: str, size: int) -> Line:
    limit = "max_rows" if engine == "per_step" else "max_row_steps"
    return next(
        line
        for line in found
        if line.engine == engine
        and line.kernel.name == kernel
        and size <= getattr(line.config, limit)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name}")
    arguments = parser.parse_args()
    text = DOCUMENT.read_text() if arguments.write else ""
    for arch in MACHINES:
        found = lines(arch)
        parts = {
            arch: f"Triton {triton.__version__}.\n\n" + table(HEADER, [x.cells() for x in found]),
            f"{arch} model": predictions(arch, found, (1, 2, 4, 8, 16, 32, 64, 128, 256))
            + "\nAt R=1, were launches cheaper or dearer:\n\n"
            + cheap_launches(arch, found, (1.3, 2.6, 3.9, 5.2)),
        }
        for name, part in parts.items():
            if not arguments.write:
                print(f"{name}\n\n{part}")
                continue
            before, rest = text.split(BEGIN.format(name))
            after = rest.split(END.format(name))[1]
            text = before + BEGIN.format(name) + part + END.format(name) + after
    if arguments.write:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
