"""One decode step through a vLLM's own _sample_sequential, without and with the plugin.

    TRITON_INTERPRET=1 python compare.py PATH_OF_VLLM_PACKAGE VERSION     files alone, with stubs
    TRITON_INTERPRET=1 python compare.py installed                        the vLLM of this Python

Prints one JSON line: for every case whether the plugin drafted it or left it (and why), and what
differed. The exit status is 1 if anything did.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import stubs
import tiny
import torch

from fused_markov import DraftSampler
from fused_markov.integrations import vllm as plugin

SEEDS = (0, 1)
make_model: Any = None  # makes a draft of the installed vLLM's own classes, where there is one
logged: list[str] = []  # the plugin's warnings


class Collector(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            logged.append(record.getMessage())


def speculator_module(arguments: list[str]) -> Any:
    """The speculator's module, imported after the plugin has registered."""
    if arguments == ["installed"]:
        import vllm.plugins

        vllm.plugins.load_general_plugins()
        assert plugin._registered, "vLLM's loader did not call register()"
        return importlib.import_module(stubs.SPECULATOR)
    package, version = arguments
    stubs.install(version)
    # vLLM's own loader finds the entry point and calls `register`.
    stubs.load(Path(package), "vllm.envs")
    stubs.load(Path(package), "vllm.plugins").load_general_plugins()
    assert plugin._registered, "vLLM's loader did not call register()"
    gumbel = stubs.load(Path(package), stubs.GUMBEL)
    assert gumbel is not None
    return stubs.load(Path(package), stubs.SPECULATOR)


def load_estimator(arguments: list[str]) -> Any:
    """OnlineAcceptanceEstimator of this vLLM, or None where it has none."""
    if arguments == ["installed"]:
        return importlib.import_module(stubs.ESTIMATOR).OnlineAcceptanceEstimator
    path = Path(arguments[0]) / "v1/worker/gpu/spec_decode"
    if not (path / "acceptance_estimator.py").exists():
        return None
    source = (path / "rejection_sampler_utils.py").read_text()
    function = source[source.index("@triton.jit\ndef _compute_max_and_sumexp") :]
    function = function[: function.index("\n@triton.jit", 20)]
    utils: Any = sys.modules["vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"]
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "max_sumexp.py"
        file.write_text("import triton\nimport triton.language as tl\n\n\n" + function)
        sys.path.insert(0, folder)
        utils._compute_max_and_sumexp = importlib.import_module(
            "max_sumexp"
        )._compute_max_and_sumexp
        sys.path.remove(folder)
    return stubs.load(Path(arguments[0]), stubs.ESTIMATOR).OnlineAcceptanceEstimator


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter_tensor",
    "send",
)


@contextmanager
def no_collectives() -> Iterator[None]:
    """Drafting asks no other rank: data parallel ranks need not draft together, or at all."""
    with ExitStack() as patches:
        for name in COLLECTIVES:
            refused = AssertionError(f"torch.distributed.{name} while drafting")
            patches.enter_context(mock.patch.object(torch.distributed, name, side_effect=refused))
        yield


def kinds(batch: Any, cache: Any = None, tokens: Any = None) -> list[str]:
    """What compiles apart: the dtypes of a step's tensors, and which there are.

    Not those of the logits: some cases have others than their weights, to see that it is right.
    """
    some = (batch.anchors, batch.positions, batch.temperature, batch.seeds, batch.slots, tokens)
    return ["" if x is None else str(x.dtype) for x in some] + ["cache" * (cache is not None)]


@contextmanager
def warmed_up() -> Iterator[None]:
    """What is sampled is what the sampler was warmed up for."""
    warm, sample = DraftSampler.warmup, DraftSampler.sample
    seen: list[list[str]] = []

    def warmup(self: Any, *example: Any) -> None:
        seen.append(kinds(*example))
        warm(self, *example)

    def sampled(self: Any, *step: Any) -> Any:
        assert kinds(*step) in seen, f"warmed up for {seen}, asked for {kinds(*step)}"
        return sample(self, *step)

    with (
        mock.patch.object(DraftSampler, "warmup", warmup),
        mock.patch.object(DraftSampler, "sample", sampled),
    ):
        yield


def run(
    module: Any, estimator: Any, case: tiny.Case, seed: int, plugged: bool
) -> tuple[dict[str, Any], Any]:
    """Draft one step; the outputs and the speculator."""
    spec = tiny.make_speculator(module.DSparkSpeculator, case, seed)
    model = (make_model and make_model(case, seed)) or tiny.make_model(case, seed)
    module.load_dspark_model = lambda target, config: model
    spec.vllm_config = None
    spec.model = spec.load_draft_model(None, set())
    if not plugged:
        setattr(spec, plugin.DRAFTER, None)
    if case.estimator:
        spec.acceptance_estimator = estimator(tiny.SLOTS, tiny.STEPS, spec.device)
    with torch.inference_mode(), no_collectives():
        spec._sample_sequential(case.rows, tiny.make_hidden(case, seed))
    computed = getattr(model, "computed", 1)
    assert computed == 1, f"base logits computed {computed} times"
    return tiny.outputs(spec, case), spec


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Outputs that are not equal to the bit, each with the first place."""
    found = []
    for name, expected in theirs.items():
        got = ours[name]
        if not torch.equal(got, expected):
            where = (got != expected).nonzero()[0].tolist()
            found.append(f"{name}{where}: {got[tuple(where)]} instead of {expected[tuple(where)]}")
    return found


def compare(module: Any, estimator: Any, case: tiny.Case) -> dict[str, Any]:
    """A case without and with the plugin."""
    found: list[str] = []
    drafted, engine = 0, None
    logged.clear()
    for seed in SEEDS:
        theirs, _ = run(module, estimator, case, seed, plugged=False)
        with warmed_up():
            ours, spec = run(module, estimator, case, seed, plugged=True)
        drafter = getattr(spec, plugin.DRAFTER)
        if drafter is not None:
            engine = drafter.sampler.engine
            drafted += drafter.counters.decided[""]
            assert drafter.counters.decided.total() == 1
        found += [f"seed {seed}: {text}" for text in differences(ours, theirs)]
    left = sorted(set(logged))
    return {
        "drafted": drafted == len(SEEDS),
        "engine": engine,
        "left": left,
        "different": found,
    }


def main(arguments: list[str]) -> int:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    logging.getLogger("vllm.fused_markov").addHandler(Collector())
    if arguments == ["installed"]:
        import real

        globals()["make_model"] = real.make_model
    module = speculator_module(arguments)
    assert hasattr(module.DSparkSpeculator.load_draft_model, "_fused_markov"), "not installed"
    estimator = load_estimator(arguments)
    version = plugin.vllm_versions.lookup(plugin.vllm_version() or "")
    assert version is not None
    results = {}
    for case in [*tiny.CASES, *tiny.LEFT.values()]:
        if case.confidence and version.confidence is None:
            continue
        if case.topk and not hasattr(module.DSparkSpeculator, "_sample_sequential_topk"):
            continue
        if case.estimator and estimator is None:
            continue
        if case.watermarker and estimator is None:
            continue
        if version.cache == "tempered":
            case = replace(case, cache_dtype=torch.float32)
        results[case.name] = compare(module, estimator, case)
    print(json.dumps({"version": plugin.vllm_version(), "cases": results}))
    return int(any(result["different"] for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
