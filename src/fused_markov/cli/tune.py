"""``fused-markov tune``: the fastest configurations of a GPU engine here, kept for samplers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fused_markov.batch import dtype_name
from fused_markov.bench.search import LEAST_GAIN, Outcome, Trial, changes_of
from fused_markov.bench.table import Spec
from fused_markov.cli.bench import DTYPES, parse_dtype, parse_temperatures
from fused_markov.engines import Plan, engine_types
from fused_markov.errors import ArgumentError, EngineUnavailableError
from fused_markov.head import MarkovHead

if TYPE_CHECKING:
    from fused_markov.bench.tune import Bucket, Shape

GPU_ENGINES = ("one_pass", "per_step")


def tune(
    vocab: Annotated[int, typer.Option(help="Vocabulary V.", min=1)] = Spec.vocab,
    rank: Annotated[int, typer.Option(help="Rank r of the head.", min=1)] = Spec.rank,
    steps: Annotated[int, typer.Option(help="Draft steps S.", min=1)] = Spec.steps,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    rows: Annotated[int, typer.Option(help="Most rows R of the sampler.", min=1)] = 64,
    temperature: Annotated[
        str, typer.Option(help="A number, or 'greedy': no temperatures, no cache.")
    ] = "1",
    engine: Annotated[
        str, typer.Option(help="one_pass or per_step; default: the one that runs here.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Try other configurations of a GPU engine on this GPU, and keep what is faster.

    Each candidate is checked against the reference before it is timed. What is faster by more than
    2 % goes into a file of the user's cache, and samplers of the same shape take it from there
    (FUSED_MARKOV_TUNED=0 ignores it). Exits with 1 where nothing runs for some number of rows. Run
    it on an idle GPU; every candidate is compiled, which takes some minutes for each range of rows.
    """
    if len(parse_temperatures("--temperature", temperature)) != 1:
        raise ArgumentError("--temperature", "one number or 'greedy'", repr(temperature))
    weights = parse_dtype(dtype)
    engine = _engine_here(engine)
    from fused_markov.bench import tune as tuning
    from fused_markov.engines.tuned import store

    shape = tuning.Shape(rows, steps, vocab, rank, weights, temperature)
    console = Console(stderr=as_json)
    trials: list[dict[str, Any]] = []
    with console.status("measuring ..."):

        def show(bucket: Bucket[Any], trial: Trial[Any]) -> None:
            trials.append(trial_facts(bucket, trial))
            console.print(_line(trials[-1]), highlight=False)

        configs, found, chosen, path = tuning.built_in(engine), [], [], None
        for bucket, outcome in tuning.tune(configs, shape, show):
            found.append((bucket, outcome))
            chosen.append(outcome_facts(bucket, outcome))
            if chosen[-1]["gain"]:  # at once: who stops here keeps what there is
                facts = {"temperature": temperature, "torch": torch.__version__}
                best = tuning.tuned(configs, found)
                path = store(tuning.key_for(engine, shape), best, {**facts, "buckets": chosen})
    if as_json:
        written = None if path is None else str(path)
        result = {"engine": engine, "trials": trials, "chosen": chosen, "written": written}
        print(json.dumps(result, indent=2))
    else:
        console.print(trials_table(trials, _title(engine, shape)))
        console.print(chosen_table(chosen))
        nothing = f"Nothing is faster by {LEAST_GAIN:.0%}: nothing written."
        console.print(f"Written: {path}" if path else nothing)
    if any(facts["us"] is None for facts in chosen):
        raise typer.Exit(1)


def _engine_here(wanted: str) -> str:
    """The GPU engine to tune, or the error that says why there is none."""
    if wanted and wanted not in GPU_ENGINES:
        raise ArgumentError("--engine", f"one of {GPU_ENGINES}", repr(wanted))
    types = engine_types()
    names = [wanted] if wanted else [name for name in types if name in GPU_ENGINES]
    if not torch.cuda.is_available():
        reason = "there is no GPU here, and tune measures on the GPU that is to serve"
        raise EngineUnavailableError(names[0], reason, [n for n in types if n not in GPU_ENGINES])
    head = MarkovHead(*(torch.zeros(64, 16, device="cuda") for _ in range(2)))
    reasons = {n: types[n].why_not(head, Plan(1, 1, torch.float32)) for n in names}
    usable = [name for name in names if reasons[name] is None]
    if usable:
        return usable[0]
    raise EngineUnavailableError(names[0], str(reasons[names[0]]), ["reference"])


def trial_facts(bucket: Bucket[Any], trial: Trial[Any]) -> dict[str, Any]:
    """A trial as plain data."""
    return {
        "rows": [bucket.low, bucket.high],
        "changes": changes_of(trial.config, bucket.config) or "default",
        "us": trial.us,
        "rejected": trial.rejected,
    }


def outcome_facts(bucket: Bucket[Any], outcome: Outcome[Any]) -> dict[str, Any]:
    """What was chosen for a bucket, as plain data; no time where a configuration does not run."""
    times = {"default_us": outcome.default_us, "us": outcome.best_us}
    return {
        "rows": [bucket.low, bucket.high],
        "changes": changes_of(outcome.best, bucket.config) or "default",
        **{name: us if math.isfinite(us) else None for name, us in times.items()},
        "gain": outcome.gain,
    }


def trials_table(trials: list[dict[str, Any]], title: str) -> Table:
    """All that was tried, and what came of it."""
    table = Table("R", "configuration", "µs", "", title=title)
    for trial in trials:
        table.add_row(_rows(trial), trial["changes"], _us(trial["us"]), trial["rejected"])
    return table


def chosen_table(chosen: list[dict[str, Any]]) -> Table:
    """The chosen configuration of each bucket against the default."""
    table = Table("R", "chosen", "default µs", "chosen µs", "less", title="Chosen")
    for facts in chosen:
        times = (_us(facts["default_us"]), _us(facts["us"]))
        table.add_row(_rows(facts), facts["changes"], *times, f"{facts['gain']:.1%}")
    return table


def _title(engine: str, shape: Shape) -> str:
    dtype = dtype_name(shape.dtype)
    size = f"V={shape.vocab} r={shape.rank} S={shape.steps} {dtype} T={shape.temperature}"
    return f"{engine}, {size}, {torch.cuda.get_device_name()}"


def _line(trial: dict[str, Any]) -> str:
    result = trial["rejected"] or f"{_us(trial['us'])} µs"
    return f"R={_rows(trial)} {trial['changes']}: {result}"


def _rows(facts: dict[str, Any]) -> str:
    low, high = facts["rows"]
    return str(low) if low == high else f"{low}-{high}"


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"
