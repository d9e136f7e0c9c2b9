"""One decode step of vLLM's DSpark speculator, drafted by a `DraftSampler`."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from fused_markov.batch import DraftBatch, DraftResult, logits_dtype
from fused_markov.errors import FusedMarkovError
from fused_markov.head import MarkovHead
from fused_markov.integrations.vllm_counters import Counters
from fused_markov.integrations.vllm_versions import VllmVersion, probabilistic_gap
from fused_markov.sampler import DraftSampler
from fused_markov.successors import COUNT, find_successors
from fused_markov.transforms import LogitTransform, scaled_soft_cap

ENGINE = "FUSED_MARKOV_ENGINE"  # names an engine to use instead of the sampler's own choice
PROBES = 6001  # logits that a model's transform is tried on
LIMITED = "FUSED_MARKOV_DRAFT_TOPK"  # takes dspark_draft_topk on a GPU too
SUCCESSORS = "FUSED_MARKOV_SUCCESSORS"  # how many to find for each token, 0 for none


class VllmDrafter:
    """A speculator's drafter: its head as a `MarkovHead`, a sampler, and what is left to vLLM.

    Built when the draft model has been loaded, before vLLM profiles memory and captures graphs, so
    that the sampler's scratch is counted and its kernels are compiled. It keeps no copy of any
    weight or buffer of vLLM's.
    """

    def __init__(
        self, speculator: Any, model: Any, version: VllmVersion, logger: logging.Logger
    ) -> None:
        self.version, self.model = version, model
        self.head = read_head(model, version)
        if draft_topk(speculator) is None:
            self._find_successors()
        self.counters = Counters(logger, self.head.device)
        self.sampler = DraftSampler(
            self.head,
            max_rows=speculator.max_num_reqs,
            steps=speculator.num_speculative_steps,
            engine=os.environ.get(ENGINE, "auto"),
            noise_dtype=torch.float64 if speculator.use_fp64_gumbel else torch.float32,
            noise_stream=version.stream,
            cache_convention=version.cache,
            draft_topk=draft_topk(speculator),
        )
        self.sampler.warmup(*self._example(speculator))

    @classmethod
    def for_speculator(
        cls, speculator: Any, model: Any, version: VllmVersion, logger: logging.Logger
    ) -> VllmDrafter | None:
        """A drafter, or None with the reason logged where this draft model cannot have one."""
        try:
            reason = why_not_model(model, version) or why_not_speculator(speculator, version)
            reason = reason or why_not_limited(speculator, read_head(model, version))
            if reason is None:
                drafter = cls(speculator, model, version, logger)
                logger.info("%s", drafter.describe(speculator))
                return drafter
        except Exception as error:  # Whatever it is, the server has to start without us.
            reason = f"{type(error).__name__}: {error}"
            logger.debug("building the drafter failed", exc_info=True)
        logger.warning("fused-markov leaves %s to vLLM: %s", type(model).__name__, reason)
        return None

    def _find_successors(self) -> None:
        """A trained head's guesses need them: without, most steps take several passes."""
        count = min(int(os.environ.get(SUCCESSORS, COUNT)), self.head.draft_vocab)
        if count > 0:
            self.head.successors = find_successors(self.head, count)

    def describe(self, speculator: Any) -> str:
        """The start-up line: shape, kind of drafts, engine."""
        known = 0 if self.head.successors is None else self.head.successors.shape[1]
        drafts = "greedy" if speculator.draft_logits is None else "probabilistic"
        return (
            f"fused-markov drafts for {type(self.model).__name__}: "
            f"{speculator.num_speculative_steps} steps, vocabulary {self.head.draft_vocab}, "
            f"rank {self.head.rank}, {known} successors a token, up to "
            f"{speculator.max_num_reqs} requests, {drafts} drafts, vLLM {self.version.series}; "
            f"{self.sampler.explain()}"
        )

    def sample(self, speculator: Any, num_reqs: int, head_hidden: Tensor) -> bool:
        """Draft one step into ``speculator.draft_tokens`` and its draft logits cache.

        Returns False where vLLM's own loop has to run, having written nothing. If the base logits
        have been computed by then, that loop gets them instead of computing them again.
        """
        _take_back(self.model)
        reason = why_not_step(speculator, num_reqs) or self._moved()
        if reason is not None:
            self.counters.left(reason)
            return False
        steps = speculator.num_speculative_steps
        hidden = head_hidden[speculator.sample_indices[: num_reqs * steps]]
        base = self.model.compute_draft_logits(hidden)
        batch = self._batch(speculator, num_reqs, base.view(num_reqs, steps, -1))
        reason = self._why_not_base(speculator, batch)
        if reason is None:
            try:
                result = self._draft(speculator, batch)
            except FusedMarkovError as error:
                reason = str(error)
            else:
                if self.version.confidence and getattr(speculator, self.version.confidence):
                    self._confidence(speculator, batch, hidden)
                self.counters.took(result)
                return True
        _hand_over(self.model, base)
        self.counters.left(reason)
        return False

    def _example(self, speculator: Any) -> tuple[DraftBatch, Tensor | None, Tensor]:
        """A step as this speculator will ask for it, so that nothing else is compiled."""
        shape = (1, speculator.num_speculative_steps, self.head.draft_vocab)
        base = torch.empty(shape, dtype=self.head.dtype, device=self.head.device)
        batch = self._batch(speculator, 1, base)
        tokens, cache = speculator.draft_tokens[:1], speculator.draft_logits
        estimated = getattr(speculator, "use_acceptance_estimator", False)
        if cache is None and estimated:
            return _own_rows(batch), base.to(self._result_dtype(batch)), tokens
        return batch, cache, tokens

    def _batch(self, speculator: Any, num_reqs: int, base: Tensor) -> DraftBatch:
        """The speculator's buffers as a batch; every tensor of it is a view."""
        steps = speculator.num_speculative_steps
        stride = speculator.num_query_per_req
        samples = slice(0, num_reqs * steps)
        probabilistic = speculator.draft_logits is not None
        return DraftBatch(
            base,
            # The input id at query offset 0, as speculator._anchor_idx has it.
            anchors=speculator.input_buffers.input_ids[: num_reqs * stride : stride],
            positions=speculator.sample_pos[samples].view(num_reqs, steps),
            temperature=speculator.temperature if probabilistic else None,
            seeds=speculator.seeds if probabilistic else None,
            slots=speculator.sample_idx_mapping[samples].view(num_reqs, steps),
        )

    def _draft(self, speculator: Any, batch: DraftBatch) -> DraftResult:
        """Sample; where vLLM estimates acceptance from the logits, give it those."""
        tokens = speculator.draft_tokens[: batch.rows]
        cache = speculator.draft_logits
        if _estimator(speculator) is None:
            return self.sampler.sample(batch, cache, tokens)
        if cache is not None:
            result = self.sampler.sample(batch, cache, tokens)
            self._estimate(speculator, batch, self._cached(batch, cache))
            return result
        # Greedy drafts have no cache, so the logits go to one of this step's rows.
        logits = torch.empty(
            batch.rows,
            batch.steps,
            self.head.draft_vocab,
            dtype=self._result_dtype(batch),
            device=batch.base_logits.device,
        )
        result = self.sampler.sample(_own_rows(batch), logits, tokens)
        self._estimate(speculator, batch, logits)
        return result

    def _cached(self, batch: DraftBatch, cache: Tensor) -> Tensor:
        """The logits [R, S, V] that a step has cached; rows of padding hold anything."""
        slots = batch.slot_matrix().clamp_min(0)
        steps = torch.arange(batch.steps, device=cache.device)
        logits = cache[slots, steps]
        return logits if self.head.id_map is None else logits[..., self.head.id_map]

    def _estimate(self, speculator: Any, batch: DraftBatch, logits: Tensor) -> None:
        """vLLM's acceptance estimate, all steps in one call as its parallel drafters make it."""
        samples = batch.rows * batch.steps
        speculator._maybe_predict_acceptance(
            logits.flatten(0, 1),
            speculator.sample_idx_mapping[:samples],
            speculator.sample_col[:samples],
        )

    def _confidence(self, speculator: Any, batch: DraftBatch, hidden: Tensor) -> None:
        """The confidence head on each step's hidden state and its previous token's embedding."""
        tokens = speculator.draft_tokens[: batch.rows]
        prev = torch.cat([batch.anchors.unsqueeze(1).to(tokens.dtype), tokens[:, :-1]], dim=1)
        embeds = self.model.markov_embed(prev.flatten())
        confidence = self.model.compute_confidence(hidden, embeds)
        speculator.draft_token_confidence_probs[: batch.rows] = confidence.view_as(tokens)

    def _result_dtype(self, batch: DraftBatch) -> torch.dtype:
        return logits_dtype(self.head, batch, None)

    def _why_not_base(self, speculator: Any, batch: DraftBatch) -> str | None:
        """Why base logits of this kind are vLLM's to sample from, or None."""
        if draft_topk(speculator) is not None and batch.base_logits.dtype != self.head.dtype:
            return f"dspark_draft_topk with {batch.base_logits.dtype} base logits"
        width = batch.base_logits.shape[-1]
        if width != self.head.draft_vocab:
            return f"base logits {width} wide for {self.head.draft_vocab} candidates"
        cache = speculator.draft_logits
        dtype = self._result_dtype(batch)
        if self.version.cache == "tempered":
            return (
                None  # vLLM divides in fp32, whatever the logits are; the sampler checks the rest
            )
        # Without a scatter buffer vLLM samples from the logits as they were before the cache.
        if cache is not None and self.head.id_map is None and cache.dtype != dtype:
            return f"{dtype} logits beside a {cache.dtype} cache"
        if cache is not None and cache.dtype != dtype and _estimator(speculator) is not None:
            return f"the acceptance estimator on {dtype} logits beside a {cache.dtype} cache"
        return None

    def _moved(self) -> str | None:
        """Weights that vLLM replaced after loading (a reload, for one) are no longer the head's."""
        weights = self.model.model.markov_head
        same = weights.markov_w1.weight.data_ptr() == self.head.w1.data_ptr()
        if same and weights.markov_w2.weight.data_ptr() == self.head.w2.data_ptr():
            return None
        return "the Markov weights were replaced after loading"


def read_head(model: Any, version: VllmVersion) -> MarkovHead:
    """The `MarkovHead` over a draft model's own weights."""
    weights = model.model.markov_head
    processor = model.logits_processor
    width = processor.org_vocab_size
    d2t = getattr(model, "draft_id_to_target_id", None)
    return MarkovHead(
        weights.markov_w1.weight.data,
        weights.markov_w2.weight.data,
        d2t=None if d2t is None else d2t.data[:width],
        scale=processor.scale,
        soft_cap=processor.soft_cap,
        logit_transform=known_transform(model) if version.transforms else None,
        vocab_size=width if d2t is None else _target_vocab(weights.markov_w1),
    )


def known_transform(model: Any) -> LogitTransform | None:
    """A draft model's output logit transform, if it is that of vLLM 0.33's Muse Spark.

    Known by its two numbers and by what it makes of logits over their whole range, to the bit.
    """
    multiplier = getattr(model, "output_multiplier", None)
    if not isinstance(multiplier, int | float) or not hasattr(model, "output_soft_cap_temp"):
        return None
    cap = model.output_soft_cap_temp
    if cap is not None and not isinstance(cap, int | float):
        return None
    transform = scaled_soft_cap(multiplier, cap)
    weights = model.model.markov_head.markov_w2.weight
    probe = torch.linspace(-300.0, 300.0, PROBES, device=weights.device)
    ends = probe.new_tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, torch.inf, -torch.inf])
    for dtype in {weights.dtype, torch.float32}:
        logits = torch.cat([probe, ends]).to(dtype)
        theirs = model.apply_output_logit_transform(logits.clone())
        if theirs.dtype != torch.float32 or not torch.equal(theirs, transform(logits)):
            return None
    return transform


def why_not_model(model: Any, version: VllmVersion) -> str | None:
    """Why a draft model's head is not one that the library samples, or None."""
    weights = getattr(getattr(model, "model", None), "markov_head", None)
    processor = getattr(model, "logits_processor", None)
    if weights is None or processor is None:
        return "no Markov head (model.markov_head) or logits processor"
    transforms = version.transforms and hasattr(model, "apply_output_logit_transform")
    if transforms and known_transform(model) is None:
        return "an output logit transform"
    w1, w2 = weights.markov_w1, weights.markov_w2
    method = type(getattr(w2, "quant_method", None)).__name__
    if method not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
        # ModelOpt's, for one; vLLM's own fp8 leaves a ParallelLMHead as it is.
        return (
            f"a quantized Markov head ({method}): vLLM keeps its weights in a kernel's own layout, "
            "and plain ones beside them only for dspark_draft_topk"
        )
    head_dtype = getattr(processor, "head_dtype", None)
    if head_dtype is not None and head_dtype != w2.weight.dtype:
        return f"a {head_dtype} projection of {w2.weight.dtype} Markov weights"
    if max(getattr(w1, "tp_size", 1), getattr(w2, "tp_size", 1)) > 1:
        return "a Markov head sharded over tensor parallel ranks"
    width = processor.org_vocab_size
    if getattr(model, "draft_id_to_target_id", None) is None and _target_vocab(w1) != width:
        return f"{width} candidates for {_target_vocab(w1)} tokens without an id map"
    return None


def why_not_speculator(speculator: Any, version: VllmVersion) -> str | None:
    """Why a speculator's whole way of drafting is left to vLLM, or None."""
    steps, stride = speculator.num_speculative_steps, speculator.num_query_per_req
    anchors = torch.arange(speculator.max_num_reqs) * stride
    if not torch.equal(speculator._anchor_idx.cpu(), anchors):
        return f"anchors not at every {stride}th query"
    if stride < steps:
        return f"{stride} queries a request for {steps} draft steps"
    return None if speculator.draft_logits is None else probabilistic_gap(version)


def draft_topk(speculator: Any) -> int | None:
    """vLLM's ``dspark_draft_topk``: the candidates a position is drafted from, or None: all."""
    count = getattr(speculator, "_draft_topk", None)
    return None if count is None else int(count)


def why_not_limited(speculator: Any, head: MarkovHead) -> str | None:
    """Why drafts from limited candidates are left to vLLM, or None."""
    if draft_topk(speculator) is None:
        return None
    if head.device.type != "cpu" and not os.environ.get(LIMITED):
        # 0.97 ms at one row of 5 x 129280 on an H200: no gain until its selection is faster.
        return f"dspark_draft_topk, which is not yet faster here on a GPU ({LIMITED}=1 takes it)"
    # Its gathered bias knows neither, though its drafts from all candidates do.
    if head.soft_cap is not None:
        return "dspark_draft_topk beside a soft cap"
    if head.logit_transform is not None:
        return "dspark_draft_topk beside an output logit transform"
    return None


def why_not_step(speculator: Any, num_reqs: int) -> str | None:
    """Why this decode step is left to vLLM, or None."""
    if num_reqs < 1:
        return "no requests"
    if getattr(speculator, "draft_watermarker", None) is not None:
        return "a draft watermarker"
    return None


def _estimator(speculator: Any) -> Any:
    """vLLM's online acceptance estimator where it is on (0.30 and later), or None."""
    return getattr(speculator, "acceptance_estimator", None)


def _target_vocab(w1: Any) -> int:
    """Tokens of the Markov embedding: nn.Embedding, or vLLM's with padded rows."""
    return int(getattr(w1, "org_vocab_size", None) or w1.num_embeddings)


def _own_rows(batch: DraftBatch) -> DraftBatch:
    """The batch with each live row its own slot."""
    assert batch.slots is not None
    rows = torch.arange(batch.rows, device=batch.slots.device).unsqueeze(1)
    return DraftBatch(
        batch.base_logits,
        batch.anchors,
        batch.positions,
        slots=torch.where(batch.slots >= 0, rows, -1),
    )


def _hand_over(model: Any, base: Tensor) -> None:
    """Let the next ``compute_draft_logits`` of a draft model return ``base``, once."""

    def compute_draft_logits(hidden: Tensor) -> Tensor:
        _take_back(model)
        return base

    model.__dict__["compute_draft_logits"] = compute_draft_logits


def _take_back(model: Any) -> None:
    model.__dict__.pop("compute_draft_logits", None)
