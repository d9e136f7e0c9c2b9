"""Two tensor parallel ranks of an installed vLLM draft the same tokens with the plugin.

    TRITON_INTERPRET=1 python tensor_parallel.py

The lm_head is sharded and its logits gathered by vLLM; the Markov head is replicated. Every rank's
tokens and cache must equal those of one rank without the plugin.
"""

from __future__ import annotations

import importlib
import multiprocessing
from typing import Any

import real
import stubs
import tiny
import torch
import torch.distributed as dist

from fused_markov.integrations import vllm as plugin

WORLD = 2
CASES = [c for c in tiny.CASES if c.base_dtype is None and not c.estimator]


def step(module: Any, case: tiny.Case, model: Any, plugged: bool) -> dict[str, torch.Tensor]:
    """One decode step's outputs."""
    spec = tiny.make_speculator(module.DSparkSpeculator, case, seed=0)
    module.load_dspark_model = lambda target, config: model
    spec.vllm_config = None
    spec.model = spec.load_draft_model(None, set())
    drafter = getattr(spec, plugin.DRAFTER)
    assert drafter is not None, case.name
    if not plugged:
        setattr(spec, plugin.DRAFTER, None)
    with torch.inference_mode():
        spec._sample_sequential(case.rows, tiny.make_hidden(case, seed=0))
    assert drafter.counters.decided[""] == int(plugged), case.name
    return tiny.outputs(spec, case)


def rank_main(rank: int, port: int) -> None:
    import vllm.plugins

    vllm.plugins.load_general_plugins()
    module = importlib.import_module(stubs.SPECULATOR)
    real.config(rank, WORLD, port)
    for case in CASES:
        model = real.make_model(case, seed=0)
        assert model.lm_head.tp_size == WORLD
        ours = step(module, case, model, plugged=True)
        alone = step(module, case, tiny.make_model(case, seed=0), plugged=False)
        for name, expected in alone.items():
            assert torch.equal(ours[name], expected), f"rank {rank}, {case.name}: {name}"
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, ours["tokens"].tolist())
        assert everyone[0] == everyone[1], f"{case.name}: {everyone}"
        if rank == 0:
            print(f"{case.name}: equal on {WORLD} ranks", flush=True)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    port = real.free_port()
    ranks = [context.Process(target=rank_main, args=(rank, port)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
    if any(process.exitcode != 0 for process in ranks):
        raise SystemExit(f"exit codes {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
