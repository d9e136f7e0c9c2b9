"""Time a vLLM's own _sample_sequential, CUDA-graph captured, without and with the plugin.

    python bench.py PATH_OF_VLLM_PACKAGE VERSION [--rows 1 4 8 64] [--vocab 129280] ...

Only gumbel.py and dspark/speculator.py of that vLLM run (see `stubs`). Base logits stand ready in a
buffer, so the times are those of the sequential sampling alone: medians of graph replays over
several models in rotation (cold L2), less an empty replay. Weights and logits are small multiples
of 1/8, whose sums are exact in any order, so tokens and cache of both must be equal; a run in which
they are not prints no time. One JSON line a shape.
"""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path
from typing import Any

import stubs
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_markov.bench.timing import cold_copies, time_on_gpu
from fused_markov.integrations import vllm as plugin

PEAKS = 24


def _weights(shape: tuple[int, int], g: torch.Generator, dtype: torch.dtype) -> nn.Parameter:
    """Steps of 1/8 and a deviation that gives the bias one of about 1 at rank 256."""
    values = torch.randn(shape, generator=g, device=g.device) * 2
    return nn.Parameter((values.round() / 8).to(dtype), requires_grad=False)


class BigDraft(nn.Module):
    """A draft model of a real size whose base logits are given."""

    def __init__(self, vocab: int, rank: int, base: Tensor, g: torch.Generator) -> None:
        super().__init__()
        self.model = nn.Module()
        head: Any = nn.Module()
        head.markov_w1 = nn.Embedding(1, 1)
        head.markov_w1.num_embeddings = vocab
        head.markov_w1.weight = _weights((vocab, rank), g, base.dtype)
        head.markov_w2 = nn.Module()
        head.markov_w2.weight = _weights((vocab, rank), g, base.dtype)
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


def make_speculator(module: Any, options: argparse.Namespace, rows: int, seed: int) -> Any:
    """A speculator on the device, filled for one decode step of ``rows`` requests."""
    device, steps, vocab = torch.device(options.device), options.steps, options.vocab
    g = torch.Generator(device).manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device=device)

    spec: Any = module.DSparkSpeculator.__new__(module.DSparkSpeculator)
    spec.num_speculative_steps, spec.num_query_per_req = steps, steps
    spec.max_num_reqs, spec.vocab_size, spec.device = rows, vocab, device
    spec.use_fp64_gumbel = False
    spec._draft_topk = spec._d2t_scatter_index = spec._draft_scatter_buf = None
    spec._step_cols = torch.arange(steps, dtype=torch.int32, device=device)
    spec._anchor_idx = torch.arange(rows, device=device) * steps
    spec.use_confidence_head = spec.enable_adaptive_verification = False
    spec.acceptance_estimator = spec.draft_watermarker = spec.vllm_config = None
    ids = numbers(0, vocab, rows * steps).to(torch.int32)
    spec.input_buffers = types.SimpleNamespace(input_ids=ids)
    spec.sample_indices = torch.arange(rows * steps, device=device)
    spec.sample_pos = numbers(1, 1 << 20, rows * steps)
    spec.sample_idx_mapping = torch.arange(rows, device=device).repeat_interleave(steps)
    spec.temperature = torch.full((rows,), options.temperature, device=device)
    spec.seeds = numbers(0, 1 << 62, rows)
    spec.draft_tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)
    dtype = getattr(torch, options.dtype)
    spec.draft_logits = None
    if not options.greedy:
        spec.draft_logits = torch.zeros(rows, steps, vocab, dtype=dtype, device=device)
    # A bulk and, as real logits have, a few peaks; both in steps whose sums are exact.
    base = torch.randn(rows * steps, vocab, generator=g, device=device) * 2
    heights = 12 + 2 * torch.randn(rows * steps, PEAKS, generator=g, device=device)
    base.scatter_(1, numbers(0, vocab, rows * steps, PEAKS), heights)
    model = BigDraft(vocab, options.rank, ((base * 8).round() / 8).to(dtype), g)
    module.load_dspark_model = lambda target, config: model
    spec.model = spec.load_draft_model(None, set())
    return spec


def time_steps(specs: list[Any], rows: int, options: argparse.Namespace) -> float | None:
    """Microseconds a decode step, by CUDA-graph replays over ``specs`` in rotation."""
    hidden = torch.zeros(rows * options.steps, 1, device=specs[0].device)

    def step_of(spec: Any) -> Any:
        def step() -> None:
            with torch.inference_mode():
                spec._sample_sequential(rows, hidden)

        return step

    steps = [step_of(spec) for spec in specs]
    for step in steps:
        step()
    return time_on_gpu(steps).median_us if specs[0].device.type == "cuda" else None


def run(module: Any, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """One shape without and with the plugin."""
    size = options.vocab * (options.rank + rows * options.steps * (1 if options.greedy else 2)) * 2
    device = torch.device(options.device)
    copies = cold_copies(size, device) if device.type == "cuda" else 1
    specs = [make_speculator(module, options, rows, seed) for seed in range(copies)]
    drafters = [getattr(spec, plugin.DRAFTER) for spec in specs]
    result: dict[str, Any] = {"rows": rows, "greedy": options.greedy, "t": options.temperature}
    if None in drafters:
        return {**result, "error": "the plugin has no drafter here"}
    for spec in specs:
        setattr(spec, plugin.DRAFTER, None)
    without = time_steps(specs, rows, options)
    want = [(spec.draft_tokens.clone(), spec.draft_logits) for spec in specs]
    for spec, drafter in zip(specs, drafters, strict=True):
        spec.draft_tokens = torch.full_like(spec.draft_tokens, -1)
        if spec.draft_logits is not None:
            spec.draft_logits = torch.full_like(spec.draft_logits, torch.nan)
        setattr(spec, plugin.DRAFTER, drafter)
    ours = time_steps(specs, rows, options)
    pairs = list(zip(specs, want, strict=True))
    result |= {
        "engine": drafters[0].sampler.engine,
        "left": [reason for reason in drafters[0].counters.decided if reason],
        "tokens_equal": all(bool(torch.equal(s.draft_tokens, w[0])) for s, w in pairs),
        "cache_equal": all(
            w[1] is None or bool(torch.equal(s.draft_logits, w[1])) for s, w in pairs
        ),
    }
    if result["tokens_equal"] and result["cache_equal"] and not result["left"]:
        result |= {"vllm_us": without, "fused_markov_us": ours}
        if without and ours:
            result["speed_up"] = round(without / ours, 2)
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
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    stubs.install(options.version)
    plugin.register()
    stubs.load(options.package, stubs.GUMBEL)
    module = stubs.load(options.package, stubs.SPECULATOR)
    red = 0
    for rows in options.rows:
        for options.greedy in (False, True):
            result = run(module, options, rows)
            red += "fused_markov_us" not in result
            print(json.dumps({"vllm": options.version, **result}), flush=True)
    return int(red > 0)


if __name__ == "__main__":
    raise SystemExit(main())
