"""A model of a decode step's time on AMD GPUs, where none is at hand to measure it.

Every launch moves bytes and issues instructions; it takes as long as the slower of the two, and a
start. What is assumed of the machine is in `Machine`, and docs/amd.md lists it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What is assumed of a GPU; rates are a microsecond's.

    Attributes:
        hbm: bytes from memory: the datasheet's rate times a share that is assumed to be reached.
        last_level: bytes from the last-level cache, likewise.
        last_level_bytes: size of that cache.
        simds: SIMDs of the GPU.
        cycles: cycles of a SIMD.
        launch_us: from a graph's kernel to the next one, an idle one included.
        start_us: what a launch with work takes beyond its bytes: first loads, last tiles.
        link_us: the linking launch, a chain of dependent loads.
        cooperative_us: what a cooperative launch costs beyond a plain one.
    """

    name: str
    hbm: float
    last_level: float
    last_level_bytes: int
    simds: int
    cycles: float
    launch_us: float = 3.9  # measured on a W7900 (ROCm/rocm-systems issue 10834)
    start_us: float = 3.0
    link_us: float = 6.0
    cooperative_us: float = 20.0


# Datasheet: 5.3 TB/s of HBM, 17.2 TB/s of Infinity Cache, 304 compute units of 4 SIMDs at 2.1 GHz.
# Assumed to be reached of them: 0.81 and 0.6.
MI300X = Machine("MI300X", 4.3e6, 10e6, 256 << 20, 304 * 4, 2100.0)
# 8 TB/s, 256 compute units at 2.4 GHz; the same shares.
MI355X = Machine("MI355X", 6.5e6, 10e6, 256 << 20, 256 * 4, 2400.0)
MACHINES = {"gfx942": MI300X, "gfx950": MI355X}


@dataclass(frozen=True)
class Step:
    """A decode step: R rows, S steps, V candidates, rank r, bytes of a number, rows of a tile."""

    rows: int
    steps: int
    vocab: int
    rank: int
    width: int
    block_m: int

    @property
    def weights(self) -> int:
        """Bytes of W2."""
        return self.vocab * self.rank * self.width

    @property
    def logits(self) -> int:
        """Bytes of one draft step's base logits, and of its cache."""
        return self.rows * self.vocab * self.width


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a decode step, the bytes it moves, and its launches."""

    us: float
    bytes: int
    launches: int


def _issue(machine: Machine, row_tokens: int, cycles: float) -> float:
    """Microseconds to issue ``cycles`` of a SIMD a token for a lane, waves of 64 lanes."""
    return row_tokens * cycles / 64 / (machine.simds * machine.cycles)


def _padded(rows: int, block: int) -> int:
    return -(-rows // block) * block


def _read_again(machine: Machine, size: int, between: int) -> float:
    """Microseconds to read ``size`` bytes that were read ``between`` bytes ago."""
    return size / (
        machine.last_level if size + between <= machine.last_level_bytes else machine.hbm
    )


def per_step(machine: Machine, step: Step, check_cycles: float) -> Prediction:
    """S launches over W2 and a small one; ``check_cycles``: of a SIMD, a token of a lane."""
    blocks = _padded(step.rows, step.block_m) // step.block_m
    logits = 2 * step.logits / machine.hbm
    again = _read_again(machine, step.weights, 2 * step.logits)
    issue = _issue(machine, _padded(step.rows, step.block_m) * step.vocab, check_cycles)
    # A block of rows after the first one finds W2 in the last-level cache.
    first = step.weights / machine.hbm + (blocks - 1) * again
    us = max(first + logits, issue) + (step.steps - 1) * max(blocks * again + logits, issue)
    launches = step.steps + 1
    us += launches * machine.launch_us + step.steps * machine.start_us
    return Prediction(us, step.steps * (step.weights + 2 * step.logits), launches)


def one_pass(
    machine: Machine, step: Step, check_cycles: float, guess_cycles: float, cooperative: bool
) -> Prediction:
    """Guess, link, and one pass of check and settle; the passes that are not needed are idle."""
    row_steps, base = step.rows * step.steps, step.steps * step.logits
    padded = _padded(row_steps, step.block_m)
    guess = max(base / machine.hbm, _issue(machine, row_steps * step.vocab, guess_cycles))
    # The rows of one part of W2 walk side by side; the base was read by the guess.
    blocks = padded // step.block_m
    read = step.weights / machine.hbm + (blocks - 1) * step.weights / machine.last_level
    read += _read_again(machine, base, 0) + base / machine.hbm
    check = max(read, _issue(machine, padded * step.vocab, check_cycles))
    launches = 3 if cooperative else 2 + 2 * 2 * step.steps
    us = guess + machine.link_us + check + 3 * machine.start_us
    us += launches * machine.launch_us + (machine.cooperative_us if cooperative else 0.0)
    return Prediction(us, step.weights + 3 * base, launches)
