"""Time a vLLM's own _sample_sequential, CUDA-graph captured, without and with the plugin.

    python bench.py PATH_OF_VLLM_PACKAGE VERSION [--rows 1 4 8 64] [--vocab 129280] ...

Only gumbel.py and dspark/speculator.py of that vLLM run (see `stubs`). Base logits stand ready in a
buffer, so the times are those of the sequential sampling alone. Weights and logits are small
multiples of 1/4, whose sums are exact in any order, so the tokens of both must be equal; a run in
which they are not prints no time. One JSON line a shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import types
from pathlib import Path
from typing import Any

import stubs
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_markov.integrations import vllm as plugin


class BigDraft(nn.Module):
    """A draft model of a real size whose base logits are given."""

    def __init__(self, vocab: int, rank: int, base: Tensor) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.model = nn.Module()
        head: Any = nn.Module()
        head.markov_w1 = nn.Embedding(1, 1)
        head.markov_w1.num_embeddings = vocab
        head.markov_w1.weight = nn.Parameter(tiny.grid((vocab, rank), g, base.dtype))
        head.markov_w2 = nn.Module()
        head.markov_w2.weight = nn.Parameter(tiny.grid((vocab, rank), g, base.dtype))
        head.markov_w2.quant_method = tiny.UnquantizedEmbeddingMethod()
        self.model.markov_head = head
        self.model.confidence_head = None
        self.logits_processor = tiny.LogitsProcessor(vocab, 1.0, None)
        self.draft_id_to_target_id = None
        self.base = base

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        return self.base[: hidden.shape[0]]

    def map_draft_to_target(self, ids: Tensor) -> Tensor:
        return ids

    def markov_embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.model.markov_head.markov_w1.weight)

    def markov_bias(self, embed: Tensor) -> Tensor:
        return self.logits_processor(self.model.markov_head.markov_w2, embed)


def make_speculator(module: Any, options: argparse.Namespace, rows: int, greedy: bool) -> Any:
    """A speculator on the device, filled for one decode step of ``rows`` requests."""
    device, steps, vocab = torch.device(options.device), options.steps, options.vocab
    g = torch.Generator().manual_seed(rows)
    spec: Any = module.DSparkSpeculator.__new__(module.DSparkSpeculator)
    spec.num_speculative_steps, spec.num_query_per_req = steps, steps
    spec.max_num_reqs, spec.vocab_size, spec.device = rows, vocab, device
    spec.use_fp64_gumbel = False
    spec._draft_topk = spec._d2t_scatter_index = spec._draft_scatter_buf = None
    spec._step_cols = torch.arange(steps, dtype=torch.int32, device=device)
    spec._anchor_idx = torch.arange(rows, device=device) * steps
    spec.use_confidence_head = spec.enable_adaptive_verification = False
    spec.acceptance_estimator = spec.draft_watermarker = spec.vllm_config = None
    ids = torch.randint(0, vocab, (rows * steps,), generator=g).to(device, torch.int32)
    spec.input_buffers = types.SimpleNamespace(input_ids=ids)
    spec.sample_indices = torch.arange(rows * steps, device=device)
    spec.sample_pos = torch.randint(1, 1 << 20, (rows * steps,), generator=g).to(device)
    spec.sample_idx_mapping = torch.arange(rows, device=device).repeat_interleave(steps)
    spec.temperature = torch.ones(rows, device=device)
    spec.seeds = torch.randint(0, 1 << 62, (rows,), generator=g).to(device)
    spec.draft_tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)
    spec.draft_logits = None
    dtype = getattr(torch, options.dtype)
    if not greedy:
        spec.draft_logits = torch.zeros(rows, steps, vocab, dtype=dtype, device=device)
    base = (torch.randn(rows * steps, vocab, generator=g) * 8).round() / 4
    model = BigDraft(vocab, options.rank, base.to(dtype)).to(device).requires_grad_(False)
    module.load_dspark_model = lambda target, config: model
    spec.model = spec.load_draft_model(None, set())
    return spec


def time_step(spec: Any, rows: int, options: argparse.Namespace) -> float | None:
    """Microseconds a decode step, the median of graph replays; None without a GPU."""
    hidden = torch.zeros(rows * options.steps, 1, device=spec.device)

    def step() -> None:
        with torch.inference_mode():
            spec._sample_sequential(rows, hidden)

    step()
    if spec.device.type != "cuda":
        return None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    times = []
    for _ in range(options.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(options.replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / options.replays)
    return statistics.median(times)


def run(module: Any, options: argparse.Namespace, rows: int, greedy: bool) -> dict[str, Any]:
    """One shape without and with the plugin."""
    spec = make_speculator(module, options, rows, greedy)
    drafter = getattr(spec, plugin.DRAFTER)
    result: dict[str, Any] = {"rows": rows, "greedy": greedy}
    if drafter is None:
        return {**result, "error": "the plugin has no drafter here"}
    setattr(spec, plugin.DRAFTER, None)
    without = time_step(spec, rows, options)
    tokens, cache = spec.draft_tokens.clone(), spec.draft_logits
    cache = None if cache is None else cache.clone()
    spec.draft_tokens.zero_()
    setattr(spec, plugin.DRAFTER, drafter)
    ours = time_step(spec, rows, options)
    result |= {
        "engine": drafter.sampler.engine,
        "left": [reason for reason in drafter.counters.decided if reason],
        "tokens_equal": bool(torch.equal(tokens, spec.draft_tokens)),
        "cache_equal": cache is None or bool(torch.equal(cache, spec.draft_logits)),
    }
    if result["tokens_equal"] and result["cache_equal"] and not result["left"]:
        result |= {"vllm_us": without, "fused_markov_us": ours}
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("version")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    stubs.install(options.version)
    plugin.register()
    stubs.load(options.package, stubs.GUMBEL)
    module = stubs.load(options.package, stubs.SPECULATOR)
    red = 0
    for rows in options.rows:
        for greedy in (False, True):
            result = run(module, options, rows, greedy)
            red += "fused_markov_us" not in result
            print(json.dumps({"vllm": options.version, **result}), flush=True)
    return int(red > 0)


if __name__ == "__main__":
    raise SystemExit(main())
