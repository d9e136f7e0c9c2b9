"""The search for a better configuration; what one costs is for its caller to measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, TypeVar

from fused_markov.engines.configs import OnePassConfig, PerStepConfig
from fused_markov.engines.valid import why_invalid
from fused_markov.errors import FusedMarkovError

C = TypeVar("C", OnePassConfig, PerStepConfig)
Coordinate = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]

# A gain below this is not worth an entry.
LEAST_GAIN = 0.02
# A candidate must beat the best so far by this to take its place: repeated timings differ by it.
NOISE = 0.005

# The check takes most of the time, so its best tiles are found first. Tiles and how many are in
# flight decide together about shared memory; programs, warps and registers about the register file:
# 65536 of an NVIDIA multiprocessor, 32 threads a warp.
TILES = ((32, 2), (32, 3), (32, 4), (64, 1), (64, 2), (64, 3), (64, 4), (128, 1), (128, 2))
OCCUPANCY = ((1, 4, 255), (2, 4, 240), (3, 4, 168), (4, 4, 128), (1, 8, 240), (2, 8, 128))
# Three or four programs fit with small tiles only, and large tiles want a program for themselves.
TOGETHER = ((32, 2, 3, 4, 168), (32, 2, 4, 4, 128), (64, 1, 3, 4, 168), (128, 2, 1, 8, 240))
# AMD: one stage, and no limit on registers but what the compiler takes by itself, for the reasons
# in `configs_amd`.
AMD_TILES = ((16, 1), (32, 1), (64, 1), (128, 1), (32, 2))
AMD_OCCUPANCY = ((2, 2, 0), (3, 2, 0), (4, 2, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0), (2, 8, 0))

GUESS_AND_LINK: tuple[Coordinate, ...] = (
    (("guess_m", "lanes"), ((1, 1024), (1, 2048), (2, 512), (2, 1024), (4, 256), (4, 512))),
    (("chunks",), ((16,), (32,), (64,))),
    (("predecessors", "link_warps"), ((16, 2), (16, 4), (32, 4), (64, 4), (64, 8), (0, 4))),
    (("chain_warps",), ((4,), (8,), (16,))),
)


class Rejected(FusedMarkovError):
    """A candidate that cannot be chosen, whatever its speed."""


class Wrong(Rejected):
    """It does not give what the reference gives."""


class DoesNotRun(Rejected):
    """It does not compile or launch: mostly too much shared memory, or too many registers."""


@dataclass(frozen=True)
class Trial(Generic[C]):
    """A candidate with its microseconds, or with the reason why it is out."""

    config: C
    us: float | None
    rejected: str = ""


@dataclass
class Outcome(Generic[C]):
    """What a search found.

    Attributes:
        default: the configuration it began with; ``default_us`` is inf where that does not run.
        best: the fastest right one, which is ``default`` where nothing was faster by LEAST_GAIN.
        trials: all that was tried, in order, the default first.
    """

    default: C
    default_us: float
    best: C
    best_us: float
    trials: list[Trial[C]] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """How much less time the best takes: 0.1 for a tenth less; 0 where it is the default."""
        if self.best == self.default:
            return 0.0
        return 1 - self.best_us / self.default_us if math.isfinite(self.default_us) else 1.0


def coordinates_of(config: OnePassConfig | PerStepConfig, amd: bool) -> tuple[Coordinate, ...]:
    """Fields that are varied together, and the values to try for them, in the order to try them."""
    tile = ("block_v", "stages")
    if isinstance(config, OnePassConfig):
        occupancy: tuple[str, ...] = ("programs_per_sm", "check_warps", "check_registers")
        rest = GUESS_AND_LINK
    else:
        occupancy, rest = ("programs_per_sm", "num_warps"), ()
    check: tuple[Coordinate, ...] = (
        (tile, AMD_TILES),
        (occupancy, _first(AMD_OCCUPANCY, occupancy)),
    )
    if not amd:
        together = (*tile, *occupancy)
        check = (
            (tile, TILES),
            (occupancy, _first(OCCUPANCY, occupancy)),
            (together, _first(TOGETHER, together)),
        )
    return (*check, *rest)


def _first(
    rows: tuple[tuple[int, ...], ...], names: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """The values that there are names for: the per-step engine has no limit on registers."""
    return tuple(row[: len(names)] for row in rows)


def alternatives(config: C, coordinate: Coordinate, vocab: int) -> Iterator[C]:
    """``config`` with other values along one coordinate, those that no kernel can have left out."""
    names, rows = coordinate
    for row in rows:
        changes: dict[str, Any] = dict(zip(names, row, strict=True))
        other = replace(config, **changes)
        if other != config and why_invalid(other, vocab) is None:
            yield other


def changes_of(config: C, default: C) -> str:
    """The fields in which ``config`` differs from ``default``."""
    before = asdict(default)
    changed = {name: value for name, value in asdict(config).items() if value != before[name]}
    return ", ".join(f"{name}={value}" for name, value in changed.items())


def search(
    default: C,
    coordinates: tuple[Coordinate, ...],
    vocab: int,
    measure: Callable[[C], float],
    admit: Callable[[C], None] = lambda config: None,
    on_trial: Callable[[Trial[C]], None] = lambda trial: None,
) -> Outcome[C]:
    """Coordinate by coordinate, keep the fastest; at the end time it and the default once more.

    Args:
        default: where to begin.
        coordinates: as `coordinates_of` gives them.
        vocab: the candidates V.
        measure: microseconds of a configuration that is right; raises `Rejected` for one that is
            not, or that does not run.
        admit: raises `Rejected` for one that must not be chosen for another reason; asked about
            those alone that are faster than all before them.
        on_trial: called with each trial.

    Raises:
        Wrong: the default is: then there is more to see to than speed.
    """
    trials: list[Trial[C]] = []

    def attempt(config: C, below: float) -> float:
        try:
            us = measure(config)
            if us < below:
                admit(config)
            trial = Trial(config, us)
        except Rejected as e:
            if config == default and isinstance(e, Wrong):
                raise
            kind = "wrong" if isinstance(e, Wrong) else "does not run"
            us, trial = math.inf, Trial(config, None, f"{kind}: {e}")
        trials.append(trial)
        on_trial(trial)
        return us

    best, best_us = default, attempt(default, -math.inf)
    default_us = best_us
    for coordinate in coordinates:
        for config in alternatives(best, coordinate, vocab):
            us = attempt(config, best_us * (1 - NOISE))
            if us < best_us * (1 - NOISE):
                best, best_us = config, us
    if best != default:
        best_us = measure(best)
        default_us = measure(default) if math.isfinite(default_us) else default_us
    if not best_us < default_us * (1 - LEAST_GAIN):
        best, best_us = default, default_us
    return Outcome(default, default_us, best, best_us, trials)
