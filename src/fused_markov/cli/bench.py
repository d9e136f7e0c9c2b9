"""``fused-markov bench``: the loop against the engines, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fused_markov.bench import table as benchmark
from fused_markov.errors import ArgumentError
from fused_markov.quantize import BLOCKS
from fused_markov.weights import PLAIN

CPU_ROWS = "1,4,16,64"
GPU_ROWS = "1,2,4,8,16,32,64,128,256"
TEMPERATURES, PAIR_TEMPERATURES = "0,0.6,1,greedy", "0.8,greedy"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def bench(
    device: Annotated[
        str, typer.Option(help="cpu or cuda; default: cuda where there is one.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Rows R, with commas.")] = "",
    temperatures: Annotated[
        str,
        typer.Option(
            help="With commas; 'greedy': no temperatures, no cache. "
            f"Default: {TEMPERATURES}; {PAIR_TEMPERATURES} with --pair."
        ),
    ] = "",
    vocab: Annotated[int, typer.Option(help="Vocabulary V.")] = benchmark.Spec.vocab,
    rank: Annotated[int, typer.Option(help="Rank r of the head.")] = benchmark.Spec.rank,
    steps: Annotated[int, typer.Option(help="Draft steps S.")] = benchmark.Spec.steps,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    pair: Annotated[
        bool, typer.Option("--pair", help="Decode steps of the real pair, not random ones.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(help="Rounds of the pair to record, with --pair.", min=1)
    ] = 256,
    engines: Annotated[str, typer.Option(help="With commas; default: all that can run.")] = "",
    seconds: Annotated[float, typer.Option(help="Time a line on the CPU, at least 3 runs.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Image file to draw the result into.")] = None,
    weights: Annotated[
        str, typer.Option(help=f"How W2 is stored: one of {', '.join((PLAIN, *BLOCKS))}.")
    ] = PLAIN,
) -> None:
    """Time the reference loop and every engine here; each is checked before it is timed.

    Exits with 1, and gives no time for it, where an engine is not equal to the loop. On a GPU the
    times are of CUDA-graph replays over rotated weights (cold L2), less an empty replay.

    With --pair the problems are what `generate` drafts from while it answers held-out prompts; the
    shape is the pair's. Passes are the mean over several such problems.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    spec = benchmark.Spec(
        rows=_numbers("--rows", rows or (CPU_ROWS if device == "cpu" else GPU_ROWS)),
        temperatures=parse_temperatures(
            "--temperatures", temperatures or (PAIR_TEMPERATURES if pair else TEMPERATURES)
        ),
        steps=steps,
        vocab=vocab,
        rank=rank,
        dtype=parse_dtype(dtype),
        device=device,
        engines=tuple(name for name in engines.split(",") if name),
        seconds=seconds,
        weights=weights,
    )
    console = Console(stderr=as_json)
    lines = []
    with console.status("measuring ..."):
        for line in _recorded(spec, rounds) if pair else benchmark.run(spec):
            lines.append(line)
            console.print(_summary(line), highlight=False)
    if as_json:
        print(json.dumps({"torch": torch.__version__, "lines": lines}, indent=2))
    else:
        console.print(_table(lines))
    if plot is not None:
        from fused_markov.bench.plot import plot as draw

        draw(lines, plot)
    if not all(engine["ok"] for line in lines for engine in line["engines"].values()):
        raise typer.Exit(1)


def _recorded(spec: benchmark.Spec, rounds: int) -> Iterator[dict[str, Any]]:
    given = (spec.vocab, spec.rank, spec.steps, spec.dtype, spec.weights)
    default = benchmark.Spec
    if given != (default.vocab, default.rank, default.steps, default.dtype, default.weights):
        raise ArgumentError(
            "--pair",
            "no --vocab, --rank, --steps, --dtype or --weights: the head is the pair's",
            str(given),
        )
    from fused_markov.bench.recorded import Recorder, load_prompts
    from fused_markov.pair.generate import Pair

    recorder = Recorder(Pair.load(), load_prompts(), rounds, spec.device)
    return benchmark.run_problems(spec, recorder.problems)


def _table(lines: list[dict[str, Any]]) -> Table:
    shape = "V={vocab} r={rank} S={steps}, {device}".format(**lines[0])
    table = Table("R", "T", "engine", "median µs", "best µs", "passes", "speed-up", title=shape)
    table.add_column("floor MB")
    table.add_column("floor µs")
    for line in lines:
        floor = (f"{line['floor_bytes'] / 1e6:.0f}", f"{line['floor_us']:.0f}")
        for name, e in sorted(line["engines"].items(), key=lambda item: item[0] != benchmark.LOOP):
            head = (str(line["rows"]), line["temperature"], name)
            if not e["ok"]:
                table.add_row(*head, "[red]wrong[/red]", "", "", "", *floor)
                continue
            times = (f"{e['median_us']:.0f}", f"{e['best_us']:.0f}", f"{e['passes']:.3g}")
            gain = "" if name == benchmark.LOOP else f"{e['speed_up']:.2f}x"
            table.add_row(*head, *times, gain, *floor)
    return table


def _summary(line: dict[str, Any]) -> str:
    """One line as it is measured; what went wrong is shown here in full."""
    parts = [f"R={line['rows']} T={line['temperature']}:"]
    for name, e in line["engines"].items():
        parts.append(f"{name} {e['median_us']:.0f} µs" if e["ok"] else f"{name}: {e['problem']}")
    return "  ".join(parts)


def parse_dtype(text: str) -> torch.dtype:
    """The dtype that ``--dtype`` names."""
    if text not in DTYPES:
        raise ArgumentError("--dtype", f"one of {list(DTYPES)}", repr(text))
    return DTYPES[text]


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ArgumentError(name, "whole numbers above 0, with commas", repr(text))
    return values


def parse_temperatures(name: str, text: str) -> tuple[str, ...]:
    """Temperatures with commas between; ``name`` is the option's, for the error."""
    values = tuple(text.split(","))
    for value in values:
        try:
            good = value == benchmark.NO_CACHE or float(value) >= 0
        except ValueError:
            good = False
        if not good:
            raise ArgumentError(name, "numbers from 0 or 'greedy'", repr(value))
    return values
