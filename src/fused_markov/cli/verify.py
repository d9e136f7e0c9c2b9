"""``fused-markov verify``: every engine that can run here against the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fused_markov.bench.compare import compare, usable_engines
from fused_markov.cli.info import device_names
from fused_markov.engines import Plan
from fused_markov.problems import make_problem
from fused_markov.quantize import BLOCKS
from fused_markov.sampler import DraftSampler


@dataclass(frozen=True)
class Case:
    """One line of the table: a problem, and how it is sampled."""

    name: str
    shape: tuple[int, int, int, int]  # R, S, V, r
    options: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    noise_dtype: torch.dtype = torch.float32


SMALL = (3, 5, 2000, 64)
CASES = (
    Case("T=1", SMALL),
    Case("T=0.6", SMALL, {"temperature": 0.6}),
    Case("T=0", SMALL, {"temperature": 0.0}),
    Case("greedy", SMALL, {"temperature": "greedy"}),
    Case("greedy, no cache", SMALL, {"temperature": "greedy"}, cached=False),
    Case("mixed temperatures", (8, 5, 2000, 64), {"temperature": "mixed"}),
    Case("one row, one step", (1, 1, 2000, 64)),
    Case("odd sizes", (5, 7, 1999, 24), {"temperature": "mixed"}),
    Case("many rows", (64, 3, 500, 32), {"temperature": "mixed"}),
    Case("padding rows", (7, 5, 2000, 64), {"slots": "padded"}),
    Case("padding steps", (7, 5, 2000, 64), {"slots": "padded-steps"}),
    Case("all padding", SMALL, {"slots": "none-live"}),
    Case("wide strides", SMALL, {"strides": "wide"}),
    Case("step-major", SMALL, {"strides": "step-major"}),
    Case("reduced, target-wide cache", SMALL, {"draft_vocab": 700}),
    Case("reduced, draft-wide cache", SMALL, {"draft_vocab": 700, "cache": "draft"}),
    Case("fp32", SMALL, {"dtype": torch.float32}),
    Case("fp16", SMALL, {"dtype": torch.float16}),
    Case("bf16 head, fp32 base", SMALL, {"base_dtype": torch.float32}),
    Case(
        "bf16 cache of fp32 logits", SMALL, {"dtype": torch.float32, "cache_dtype": torch.bfloat16}
    ),
    Case("scale and soft cap", SMALL, {"scale": 0.5, "soft_cap": 3.0}),
    Case("all ties", SMALL, {"base_std": 0.0, "bias_std": 0.0, "temperature": "greedy"}),
    Case("strong head", SMALL, {"bias_std": 30.0, "base_std": 0.5}),
    Case("fp64 noise", SMALL, noise_dtype=torch.float64),
    *(
        Case(f"W2 in {weights}", (3, 5, 2000, 256), {"weights": weights, "exact_sums": True})
        for weights in BLOCKS
    ),
)
PUBLIC_CASES = (
    Case("DeepSeek-V4-Flash, T=1", (2, 5, 129280, 256)),
    Case("DeepSeek-V4-Flash, greedy", (2, 5, 129280, 256), {"temperature": "greedy"}),
    Case("DeepSeek-V4-Pro, T=1", (1, 5, 129280, 512)),
    Case("Qwen3, T=1", (1, 7, 151936, 256)),
    Case("Kimi-K3, T=0.6", (1, 7, 163840, 256), {"temperature": 0.6}),
    Case("Gemma4-12B, T=1", (1, 7, 262144, 256)),
)


def verify(
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ... or 'all'.")] = "all",
    engine: Annotated[str, typer.Option(help="One engine, or 'all'.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the public shapes.")] = False,
    seeds: Annotated[int, typer.Option(help="Problems a line.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check every engine here against the reference loop; exits with 1 on a mismatch."""
    console = Console(stderr=as_json)
    table = Table(
        "device", "engine", "case", "R S V r", "passes", "ulps", "", title="Against the loop"
    )
    results = []
    cases = CASES if quick else CASES + PUBLIC_CASES
    with console.status("checking ...") as status:
        for result in run_cases(device, engine, cases, seeds):
            status.update(f"{result['device']} {result['engine']}: {result['case']} done")
            results.append(result)
            verdict = "[green]equal[/green]" if result["ok"] else f"[red]{result['problem']}[/red]"
            shape = " ".join(map(str, result["shape"]))
            cells = (result["passes"], result["cache_ulps"])
            table.add_row(
                result["device"], result["engine"], result["case"], shape, *map(str, cells), verdict
            )
    failed = sum(not r["ok"] for r in results)
    if as_json:
        print(json.dumps({"ok": bool(results) and not failed, "results": results}, indent=2))
    else:
        console.print(table)
        console.print(f"{len(results) - failed} of {len(results)} equal the reference")
    if failed or not results:
        raise typer.Exit(1)


def run_cases(
    device: str, engine: str, cases: tuple[Case, ...], seeds: int
) -> Iterator[dict[str, Any]]:
    """Check each case on each device and engine that can run it."""
    for where in device_names() if device == "all" else [device]:
        for case in cases:
            for seed in range(seeds):
                problem = make_problem(*case.shape, seed=seed, device=where, **case.options)
                plan = Plan(case.shape[0], case.shape[1], case.noise_dtype)
                for name in usable_engines(problem.head, plan) if engine == "all" else [engine]:
                    sampler = DraftSampler(
                        problem.head,
                        max_rows=plan.max_rows,
                        steps=plan.steps,
                        engine=name,
                        noise_dtype=plan.noise_dtype,
                    )
                    verdict = compare(problem, sampler, cached=case.cached)
                    keys = {"device": where, "engine": name, "case": case.name, "seed": seed}
                    yield {**keys, "shape": case.shape, "ok": verdict.ok, **asdict(verdict)}
