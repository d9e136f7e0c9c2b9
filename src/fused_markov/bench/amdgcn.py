"""Reading AMD assembly as LLVM writes it: its loops, and the instructions and cycles in them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

INSTRUCTION = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)")
LABEL = re.compile(r"^\.LBB\d+_(\d+):")
# Left in a block's comment lines: the loop it heads, or the innermost loop it is in.
HEADER = re.compile(r"Loop Header: Depth=\d+")
INSIDE = re.compile(r"in Loop: Header=BB\d+_(\d+) Depth=\d+")
PARENT = re.compile(r"Parent Loop BB\d+_(\d+) Depth=(\d+)")

MATRIX = re.compile(r"v_s?(mfma|wmma)_")
WIDE_LOAD = re.compile(r"(global|buffer|flat)_load_(dwordx4|b128)$")
WIDE_STORE = re.compile(r"(global|buffer|flat)_store_(dwordx4|b128)$")
# 16 lanes a cycle for a wave of 64, and a quarter of that for these (CDNA 3 ISA guide).
QUARTER_RATE = re.compile(
    r"v_(mul_(lo|hi)_[iu]32|mad_[iu]64|log|exp|rcp|rsq|sqrt|sin|cos|div_scale)"
)


@dataclass
class Loop:
    """A loop's own instructions (those of loops inside it are not among them)."""

    parent: int | None = None
    instructions: Counter[str] = field(default_factory=Counter)

    def count(self, pattern: str | re.Pattern[str]) -> int:
        """How many of its instructions start as ``pattern`` says."""
        return sum(n for name, n in self.instructions.items() if re.match(pattern, name))

    def vector_cycles(self) -> int:
        """Cycles of a SIMD that its vector instructions take, matrix instructions not counted."""
        return sum(
            n * (16 if QUARTER_RATE.match(name) else 4)
            for name, n in self.instructions.items()
            if name.startswith("v_") and not MATRIX.match(name)
        )


def instructions(assembly: str) -> Counter[str]:
    """All instructions by name."""
    found = map(INSTRUCTION.match, assembly.splitlines())
    return Counter(match.group(1) for match in found if match)


def loops(assembly: str) -> dict[int, Loop]:
    """Every loop by the number of the block that heads it; 0 stands for what is in no loop."""
    found: dict[int, Loop] = {0: Loop()}
    block, here, parents = 0, 0, dict[int, int]()
    for line in assembly.splitlines():
        if label := LABEL.match(line):
            block, here, parents = int(label.group(1)), 0, {}
        elif line.startswith("; %bb."):
            here, parents = 0, {}
        if parent := PARENT.search(line):
            parents[int(parent.group(2))] = int(parent.group(1))
        if HEADER.search(line):
            here = block
            found.setdefault(here, Loop()).parent = parents[max(parents)] if parents else None
        elif inside := INSIDE.search(line):
            here = int(inside.group(1))
            found.setdefault(here, Loop())
        elif match := INSTRUCTION.match(line):
            found.setdefault(here, Loop()).instructions[match.group(1)] += 1
    return found


def main_loop(assembly: str) -> Loop:
    """The loop over tokens: that of most matrix instructions, or the innermost that hashes most.

    Loops inside it are left out: they are entered for few tiles.
    """
    every = {head: loop for head, loop in loops(assembly).items() if head}
    matrix = max(every.values(), key=lambda loop: loop.count(MATRIX), default=Loop())
    if matrix.count(MATRIX):
        return matrix
    parents = {loop.parent for loop in every.values()}
    innermost = [loop for head, loop in every.items() if head not in parents]
    return max(innermost, key=lambda loop: loop.count("v_mul_lo_u32"), default=Loop())
