"""How a decode step's time grows with rows, draft steps and vocabulary, beside the floor.

    python benchmarks/growth.py [--device cuda] [--temperature 1] [--out growth]

One of the three is varied at a time, the others stay (V=129280, S=5, one row). Every engine is
checked against the reference before it is timed, and has no time where the check fails. Writes
OUT.json, the lines of `fused-markov bench`, and OUT.png.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fused_markov.bench.plot import plot_growth
from fused_markov.bench.table import Spec, run

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEPS = (1, 2, 3, 5, 7, 11, 16)
VOCABULARIES = (32768, 65536, 129280, 151936, 163840, 248320, 262144)


def variations(
    base: Spec, rows: tuple[int, ...], steps: tuple[int, ...], vocab: tuple[int, ...]
) -> dict[str, list[Spec]]:
    """What is measured, by the name of what varies."""
    return {
        "rows": [replace(base, rows=rows)],
        "steps": [replace(base, steps=count) for count in steps],
        "vocab": [replace(base, vocab=size) for size in vocab],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--temperature", default="1", help='or "greedy": no cache')
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--out", type=Path, default=Path("growth"))
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    vocab = 129280 if 129280 in options.vocab else options.vocab[0]
    steps = 5 if 5 in options.steps else options.steps[0]
    base = Spec(
        (1,), (options.temperature,), steps, vocab, options.rank, dtype, options.device, seconds=0.5
    )
    specs = variations(base, tuple(options.rows), tuple(options.steps), tuple(options.vocab))
    lines: dict[str, list[dict[str, Any]]] = {key: [] for key in specs}
    for key, some in specs.items():
        for line in (line for spec in some for line in run(spec)):
            lines[key].append(line)
            print(json.dumps({"varied": key, **line}), flush=True)
    options.out.with_suffix(".json").write_text(json.dumps(lines, indent=1) + "\n")
    title = f"{options.device}, T={options.temperature}, r={options.rank}, {options.dtype}"
    plot_growth(lines, title, options.out.with_suffix(".png"))
    verdicts = [e["ok"] for some in lines.values() for x in some for e in x["engines"].values()]
    return int(not all(verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
