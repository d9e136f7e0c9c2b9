"""Write noise_vllm_older.json: whole draft draws of the noise streams before vLLM 0.33's.

The numbers come from each release's own ``v1/worker/gpu/sample/gumbel.py`` under Triton's
interpreter; libdevice's log1p, which the interpreter lacks, is numpy's. Usage, with the package
directories of unpacked vLLM 0.28, 0.29 and 0.31 (the first releases of their cache convention)::

    TRITON_INTERPRET=1 python make_older_draws.py vllm-0.25=PATH_OF_0.28 vllm-0.29=... vllm-0.31=...
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm_plugin"))

VOCABS = [64, 1000]
TEMPERATURES = [0.0, 0.6, 1.0]
SEEDS = [0, -1, 2**40 + 5]
SLOTS = [2, 0, 1]
STEPS = 4
POSITIONS = [1, 2, 77, 4095, 100000]
LOGITS_FORMULA = "((v*104729 + row*7919 + step*31) % 251) / 32 - 4"


def make_logits(vocab: int, step: int) -> torch.Tensor:
    """Logits by LOGITS_FORMULA, [3, vocab], fp32."""
    v = torch.arange(vocab)
    row = torch.arange(3)[:, None]
    return ((v * 104729 + row * 7919 + step * 31) % 251) / 32 - 4


def draw(sample: Any, vocab: int, position: int, step: int, fp64: bool) -> list[int]:
    """One draft step's tokens, by row."""
    drafting = (
        {"is_drafting": True} if "is_drafting" in inspect.signature(sample).parameters else {}
    )
    cache = torch.zeros(3, STEPS, vocab)
    drawn = sample(
        make_logits(vocab, step),
        torch.tensor(SLOTS),
        torch.tensor(TEMPERATURES),
        torch.tensor(SEEDS),
        torch.full((3,), position - 1),
        apply_temperature=True,
        logits_cache=cache,
        logits_cache_col=torch.tensor(step, dtype=torch.int32),
        use_fp64=fp64,
        **drafting,
    )
    return [int(token) for token in drawn]


def stream(package: Path) -> dict[str, Any]:
    """All draws of one release."""
    import stubs

    stubs.install("0")
    sample = stubs.load(package, stubs.GUMBEL).gumbel_sample
    del sys.modules[stubs.GUMBEL]
    return {
        f"{vocab}-{'fp64' if fp64 else 'fp32'}": [
            [draw(sample, vocab, position, step, fp64) for step in range(STEPS)]
            for position in POSITIONS
        ]
        for vocab in VOCABS
        for fp64 in (False, True)
    }


def main(arguments: list[str]) -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's wrapping products
    document: dict[str, Any] = {
        "order": "streams[name][vocab-noise][position][step][row]",
        "logits": LOGITS_FORMULA,
        "slots": SLOTS,
        "temperature_by_slot": TEMPERATURES,
        "seed_by_slot": SEEDS,
        "positions": POSITIONS,
        "streams": {},
    }
    for argument in arguments:
        name, _, package = argument.partition("=")
        document["streams"][name] = stream(Path(package))
    text = json.dumps(document, separators=(",", ":")).replace('"streams"', '\n"streams"')
    Path(__file__).with_name("noise_vllm_older.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
