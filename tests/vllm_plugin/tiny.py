"""A tiny DSpark draft model and a filled speculator, with vLLM's names and shapes.

Weights and logits are small multiples of powers of two, so every product and sum is exact in fp32
and the tokens do not depend on anybody's order of summation.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, SLOTS, TARGET_VOCAB, RANK, HIDDEN = 4, 6, 96, 16, 8
REDUCED_VOCAB = 40


@dataclass(frozen=True)
class Case:
    """One way of drafting.

    Attributes:
        name: for messages.
        probabilistic: whether there is a draft logits cache.
        reduced: a reduced draft vocabulary with d2t offsets.
        confidence: the confidence head is used.
        estimator: vLLM's online acceptance estimator is on.
        dtype: of weights and base logits; base_dtype, cache_dtype: where those differ.
        fp64: fp64 Gumbel noise.
        soft_cap, scale: of the logits processor.
        padding: the rows of padding at the end.
        bonus_anchor: the 1 + N query layout.
        watermarker: a draft watermarker. topk: candidates a position.
        transform: some output logit transform; muse: Muse Spark's, multiplier and soft cap.
    """

    name: str
    probabilistic: bool = True
    reduced: bool = False
    confidence: bool = False
    estimator: bool = False
    dtype: torch.dtype = torch.bfloat16
    base_dtype: torch.dtype | None = None
    cache_dtype: torch.dtype | None = None
    fp64: bool = False
    soft_cap: float | None = None
    scale: float = 1.0
    rows: int = 5
    padding: int = 0
    bonus_anchor: bool = False
    watermarker: bool = False
    topk: int | None = None
    transform: bool = False
    muse: tuple[float, float | None] | None = None


CASES = [
    Case("probabilistic"),
    Case("greedy", probabilistic=False),
    Case("greedy d2t", probabilistic=False, reduced=True),
    Case("d2t", reduced=True),
    Case("d2t, fp32 cache", reduced=True, cache_dtype=torch.float32),
    Case("confidence head", confidence=True),
    Case("greedy confidence head", probabilistic=False, confidence=True),
    Case("estimator", estimator=True),
    Case("greedy estimator", probabilistic=False, estimator=True),
    Case("d2t estimator", reduced=True, estimator=True),
    Case("greedy d2t estimator", probabilistic=False, reduced=True, estimator=True),
    Case("inert rows", padding=2),
    Case("inert rows, estimator", padding=2, estimator=True),
    Case("greedy inert rows", probabilistic=False, padding=2),
    Case("only inert rows", padding=5),
    Case("one row", rows=1),
    Case("fp32", dtype=torch.float32),
    Case("fp16", dtype=torch.float16),
    Case("fp32 base", base_dtype=torch.float32, cache_dtype=torch.float32),
    Case("fp64 noise", fp64=True),
    Case("soft cap and scale", soft_cap=30.0, scale=0.5),
    Case("bonus anchor", bonus_anchor=True),
    Case("top k", topk=8, dtype=torch.float32),
    Case("greedy top k", topk=8, dtype=torch.float32, probabilistic=False),
    Case("top k, d2t, inert rows", topk=5, dtype=torch.float32, reduced=True, padding=2),
    Case("top k, scale, estimator", topk=40, dtype=torch.float32, scale=0.5, estimator=True),
    Case("muse", muse=(0.25, 30.0), reduced=True),
    Case("greedy muse", muse=(0.5, None), reduced=True, probabilistic=False),
    Case("muse, inert rows", muse=(2.0, 4.0), reduced=True, padding=2),
]

# Left to vLLM; the reason has to hold the word.
LEFT = {
    "a draft watermarker": Case("watermarker", watermarker=True),
    "dspark_draft_topk beside a soft cap": Case("capped top k", topk=8, soft_cap=30.0),
    "base_logits: expected fp32": Case(
        "fp64 base", base_dtype=torch.float64, cache_dtype=torch.float64
    ),
    "an output logit transform": Case("transform", transform=True, reduced=True),
}


class LogitsProcessor:
    """Projection, soft cap and scale, in vLLM's order."""

    def __init__(self, width: int, scale: float, soft_cap: float | None) -> None:
        self.org_vocab_size, self.scale, self.soft_cap = width, scale, soft_cap
        self.head_dtype = None

    def __call__(self, layer: Any, hidden: Tensor) -> Tensor:
        # Two rows at least: a lone row's product is summed in another order on the CPU.
        logits = F.linear(hidden, layer.weight)[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits * self.scale if self.scale != 1.0 else logits


class UnquantizedEmbeddingMethod:
    """vLLM names the method of plain weights so."""


class TinyDraft(nn.Module):
    """A draft model with the methods that DSparkSpeculator calls."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        super().__init__()
        width = REDUCED_VOCAB if case.reduced else TARGET_VOCAB
        padded = -(-width // 64) * 64
        self.model = nn.Module()
        head: Any = nn.Module()
        head.markov_w1 = nn.Embedding(TARGET_VOCAB, RANK)
        head.markov_w1.weight.data = grid((TARGET_VOCAB, RANK), generator, case.dtype)
        head.markov_w2 = nn.Module()
        head.markov_w2.weight = nn.Parameter(grid((padded, RANK), generator, case.dtype))
        head.markov_w2.quant_method = UnquantizedEmbeddingMethod()
        self.model.markov_head = head
        self.model.confidence_head = nn.Module() if case.confidence else None
        self.lm_head: Any = nn.Module()
        base_dtype = case.base_dtype or case.dtype
        self.lm_head.weight = nn.Parameter(grid((padded, HIDDEN), generator, base_dtype))
        self.logits_processor = LogitsProcessor(width, case.scale, case.soft_cap)
        self.confidence_weight = grid((1, HIDDEN + RANK), generator, torch.float32)
        self.draft_id_to_target_id: nn.Parameter | None = None
        if case.reduced:
            ids = torch.randperm(TARGET_VOCAB, generator=generator)[:width].sort().values
            offsets = ids - torch.arange(width)
            self.draft_id_to_target_id = nn.Parameter(offsets, requires_grad=False)
        if case.transform:
            self.apply_output_logit_transform = lambda logits: logits.float() * 0.5
        if case.muse:
            self.output_multiplier, self.output_soft_cap_temp = case.muse
            self.apply_output_logit_transform = self.muse_transform
        # Which of equal base logits are candidates is not defined: here are no equals.
        self.ranking = torch.arange(width) / 2048 if case.topk else None
        self.computed = 0

    def muse_transform(self, logits: Tensor) -> Tensor:
        logits = logits.float() * self.output_multiplier
        if (cap := self.output_soft_cap_temp) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        self.computed += 1
        logits = self.logits_processor(self.lm_head, hidden.to(self.lm_head.weight.dtype))
        return logits if self.ranking is None else logits + self.ranking.to(logits.dtype)

    def map_draft_to_target(self, ids: Tensor) -> Tensor:
        d2t = self.draft_id_to_target_id
        return ids if d2t is None else ids + d2t[ids]

    def markov_embed(self, ids: Tensor) -> Tensor:
        return self.model.markov_head.markov_w1(ids)

    def markov_bias(self, embed: Tensor) -> Tensor:
        return self.logits_processor(self.model.markov_head.markov_w2, embed)

    def apply_markov_bias_gathered(
        self, embed: Tensor, logits: Tensor, values: Tensor, index: Tensor
    ) -> Tensor:
        weight = self.model.markov_head.markov_w2.weight[index]
        corrected = values.unsqueeze(-1).clone()
        scale = self.logits_processor.scale
        corrected.baddbmm_(weight, embed.unsqueeze(-1), beta=1.0, alpha=scale)
        return logits.scatter_(1, index, corrected.squeeze(-1))

    def compute_confidence(self, hidden: Tensor, embed: Tensor) -> Tensor:
        x = torch.cat([hidden, embed], dim=-1).float()
        return torch.sigmoid((x @ self.confidence_weight.T).squeeze(-1))


def grid(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Values k/4 for k in -3..3: exact in every dtype, and so are their products' sums."""
    return (torch.randint(-3, 4, shape, generator=generator) / 4).to(dtype)


def make_model(case: Case, seed: int) -> TinyDraft:
    with torch.inference_mode(False):
        return TinyDraft(case, torch.Generator().manual_seed(seed)).requires_grad_(False)


def make_speculator(speculator_class: type, case: Case, seed: int) -> Any:
    """A speculator with the buffers that vLLM would have filled for one decode step."""
    g = torch.Generator().manual_seed(seed + 1)
    spec: Any = speculator_class.__new__(speculator_class)
    stride = STEPS + case.bonus_anchor
    spec.num_speculative_steps, spec.max_num_reqs, spec.num_query_per_req = STEPS, SLOTS, stride
    spec.vocab_size, spec.device = TARGET_VOCAB, torch.device("cpu")
    spec.use_fp64_gumbel = case.fp64
    spec._draft_topk = case.topk
    spec._step_cols = torch.arange(STEPS, dtype=torch.int32)
    spec.sample_col = torch.arange(STEPS, dtype=torch.int32).repeat(SLOTS)
    spec._anchor_idx = torch.arange(SLOTS) * stride
    spec._d2t_scatter_index = spec._draft_scatter_buf = None
    spec.use_confidence_head = False
    spec.enable_adaptive_verification = case.confidence
    spec.use_acceptance_estimator = case.estimator
    spec.acceptance_estimator = None
    spec.draft_watermarker = Watermarker() if case.watermarker else None
    ids = torch.randint(0, TARGET_VOCAB, (SLOTS * stride,), generator=g)
    spec.input_buffers = types.SimpleNamespace(input_ids=ids.to(torch.int32))
    spec.sample_indices = torch.arange(SLOTS * STEPS)
    spec.sample_pos = torch.randint(1, 1 << 20, (SLOTS * STEPS,), generator=g)
    slots = torch.randperm(SLOTS, generator=g)
    slots[max(case.rows - case.padding, 0) :] = -1
    spec.sample_idx_mapping = slots.repeat_interleave(STEPS)
    spec.temperature = torch.tensor([0.0, 0.6, 1.0, 1.0, 1.5, 0.3])
    spec.seeds = torch.randint(-(1 << 62), 1 << 62, (SLOTS,), generator=g)
    spec.draft_tokens = torch.full((SLOTS, STEPS), -7)
    spec.draft_token_confidence_probs = torch.full((SLOTS, STEPS), -7.0)
    spec.draft_logits = None
    if case.probabilistic:
        dtype = case.cache_dtype or torch.promote_types(case.base_dtype or case.dtype, case.dtype)
        spec.draft_logits = torch.full((SLOTS, STEPS, TARGET_VOCAB), 12345.0).to(dtype)
    return spec


class Watermarker:
    """Any sampler but vLLM's: the lowest logit wins."""

    def sample(self, logits: Tensor, *rest: Any, **options: Any) -> Tensor:
        return logits.argmin(dim=-1)


def make_hidden(case: Case, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed + 2)
    return grid((SLOTS * STEPS, HIDDEN), g, case.dtype)


def outputs(spec: Any, case: Case) -> dict[str, Tensor]:
    """What a step leaves behind for others to read: padded rows count for nothing."""
    live = max(case.rows - case.padding, 0)
    out = {"tokens": spec.draft_tokens[:live], "rest": spec.draft_tokens[case.rows :]}
    out["confidence"] = spec.draft_token_confidence_probs[:live]
    if spec.draft_logits is not None:
        out["cache"] = spec.draft_logits
    if spec.acceptance_estimator is not None:
        out["features"] = spec.acceptance_estimator.features
        out["predictions"] = spec.acceptance_estimator.predictions
    return {name: value.clone() for name, value in out.items()}
