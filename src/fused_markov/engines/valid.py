"""Which values of a GPU engine's configuration the kernels can be built for at all."""

from __future__ import annotations

from dataclasses import asdict

from fused_markov.engines.configs import CANDIDATES, OnePassConfig, PerStepConfig

Config = OnePassConfig | PerStepConfig

# Fields that are lengths of tensors in device code, with the least; Triton wants powers of two, and
# a matrix unit 16 of most; row-steps are its short side.
LENGTHS = {
    "chunks": 1,
    "guess_m": 1,
    "lanes": 1,
    "guess_warps": 1,
    "predecessors": 16,
    "link_warps": 1,
    "chain_warps": 1,
    "block_m": 8,
    "block_v": 16,
    "check_warps": 1,
    "num_warps": 1,
}
MAX_REGISTERS = 512
# A lane of the guess keeps in 8 bits which of its tokens is the best.
MAX_ROUNDS = 256


def row_limit(config: Config) -> int:
    """The most row-steps (one-pass) or rows (per-step) that a configuration is for."""
    return config.max_row_steps if isinstance(config, OnePassConfig) else config.max_rows


def why_invalid(config: Config, vocab: int) -> str | None:
    """Why no kernel can be built with ``config`` for ``vocab`` candidates, or None.

    Whether it fits a GPU's registers and shared memory is the compiler's to say.
    """
    for name, value in asdict(config).items():
        least = LENGTHS.get(name, 0 if name == "check_registers" else 1)
        if value < least and not (name == "predecessors" and value == 0):  # 0: chains
            return f"{name} = {value} is below {least}"
        if name in LENGTHS and value & (value - 1):
            return f"{name} = {value} is no power of two"
    return _why_no_one_pass(config, vocab) if isinstance(config, OnePassConfig) else None


def _why_no_one_pass(config: OnePassConfig, vocab: int) -> str | None:
    if config.check_registers > MAX_REGISTERS:
        return f"check_registers = {config.check_registers} is above {MAX_REGISTERS}"
    if config.predecessors > CANDIDATES:
        return f"predecessors = {config.predecessors} is above {CANDIDATES}"
    # Each segment of a chunk gives its best two lanes.
    segments = CANDIDATES // config.chunks // 2
    if not 1 <= segments <= config.lanes // 2:
        return f"{config.chunks} chunks of {config.lanes} lanes do not give {CANDIDATES} candidates"
    if vocab > MAX_ROUNDS * config.chunks * config.lanes:
        return f"{config.chunks} chunks of {config.lanes} lanes do not reach over {vocab} tokens"
    return None
