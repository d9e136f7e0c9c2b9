"""`DraftSampler`: plans once, owns the scratch, chooses an engine and explains the choice."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fused_markov import noise
from fused_markov.batch import (
    DraftBatch,
    DraftResult,
    check_convention,
    check_inputs,
    dtype_name,
)
from fused_markov.engines import Engine, Plan, engine_types
from fused_markov.errors import ArgumentError, EngineUnavailableError
from fused_markov.head import MarkovHead
from fused_markov.limited import check_draft_topk
from fused_markov.traffic import peak_bytes_a_us, traffic

logger = logging.getLogger("fused_markov")


class DraftSampler:
    """Samples DSpark drafts with a Markov head.

    Args:
        head: the Markov head; its device is the sampler's.
        max_rows: most rows R a batch may have; scratch is laid out for it.
        steps: draft steps S of every batch.
        engine: an engine's name, or ``"auto"``: the fastest that can run here.
        noise_dtype: float32 or float64 Gumbel noise (vLLM's ``use_fp64_gumbel``).
        noise_stream: which releases of vLLM to draw the noise of: a name of
            `fused_markov.noise.STREAMS`.
        cache_convention: ``"logits"``: the logits cache holds them before temperature;
            ``"tempered"``: after, in an fp32 cache, as vLLM 0.25 to 0.27 had it.
        draft_topk: candidates that a position is drafted from, those of the best base logits, the
            lowest candidates among equals; every other logit is -inf. vLLM's ``dspark_draft_topk``.
            ``None``: all.

    Raises:
        ArgumentError: for a bad size, dtype or name.
        EngineUnavailableError: where the engine asked for cannot run, with the reason.

    Example:
        >>> import torch, fused_markov as fm
        >>> head = fm.MarkovHead(torch.randn(50, 8), torch.randn(50, 8))
        >>> sampler = fm.DraftSampler(head, max_rows=2, steps=3)
        >>> batch = fm.DraftBatch(torch.randn(2, 3, 50), torch.tensor([1, 2]),
        ...                       torch.tensor([[7, 8, 9], [4, 5, 6]]))
        >>> sampler.sample(batch).tokens.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        head: MarkovHead,
        *,
        max_rows: int = 64,
        steps: int,
        engine: str = "auto",
        noise_dtype: torch.dtype = torch.float32,
        noise_stream: str = noise.STREAM,
        cache_convention: str = "logits",
        draft_topk: int | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("steps", steps)):
            if value < 1:
                raise ArgumentError(name, "a number above 0", str(value))
        if noise_dtype not in noise.NOISE_DTYPES:
            raise ArgumentError("noise_dtype", "torch.float32 or torch.float64", str(noise_dtype))
        noise.stream_of(noise_stream)
        check_convention(cache_convention)
        self.head = head
        check_draft_topk(head, draft_topk, cache_convention)
        self.plan = Plan(max_rows, steps, noise_dtype, noise_stream, cache_convention, draft_topk)
        types = engine_types()
        self._reasons = {name: t.why_not(head, self.plan) for name, t in types.items()}
        usable = [name for name, reason in self._reasons.items() if reason is None]
        if engine == "auto":
            chosen = usable[0]
        elif engine in usable:
            chosen = engine
        else:
            reason = self._reasons.get(engine) or "there is no engine of that name"
            raise EngineUnavailableError(engine, reason, usable)
        self._engine: Engine = types[chosen](head, self.plan)
        logger.info("%s", self.explain())

    @property
    def engine(self) -> str:
        """Name of the engine that `sample` runs."""
        return self._engine.name

    def sample(
        self,
        batch: DraftBatch,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> DraftResult:
        """Draft S tokens a row: what `fused_markov.reference.sample` gives for the same inputs.

        Args:
            batch: R <= max_rows rows of S steps.
            logits_cache: ``[N, >=S, vocab]`` to fill, or ``None`` where nobody reads the logits.
            tokens: ``[R, S]`` int32/int64 to fill, or ``None`` for a new tensor.

        Raises:
            ArgumentError: where the inputs do not fit the head, the plan or each other.
        """
        self._check(batch, logits_cache, tokens)
        return self._engine.sample(batch, logits_cache, tokens)

    def warmup(
        self,
        example: DraftBatch | None = None,
        logits_cache: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Compile, load and allocate all that the plan can need; call it before capturing a graph.

        Afterwards `sample` compiles nothing, and allocates nothing but the tokens it is not given,
        for any number of rows of the plan.

        Args:
            example: a batch like those to come: its dtypes, its alignment, and whether it has
                temperatures are prepared for, and nothing else. ``None``: with temperatures and
                greedy, each with and without a target-wide cache; base logits, cache and
                temperatures are then of the head's dtype and fp32, indices int64, rows aligned.
            logits_cache, tokens: what `sample` will be given beside such a batch.

        No contents are read or written.
        """
        if example is not None:
            convention = self.plan.cache_convention
            check_inputs(
                self.head,
                example,
                logits_cache,
                tokens,
                values=False,
                cache_convention=convention,
            )
        self._engine.warmup(example, logits_cache, tokens)

    def explain(self, batch: DraftBatch | None = None, logits_cache: Tensor | None = None) -> str:
        """Which engine runs, why the ones preferred to it do not, and with what was tuned.

        Args:
            batch: also say of such a batch what it moves at the least, how long that takes at the
                peak of the GPU's memory, and how the engine goes about it. Contents are not read.
            logits_cache: what `sample` is given beside it.

        Raises:
            ArgumentError: where the batch does not fit, as `sample` does.
        """
        lines = [f"fused-markov: engine {self.engine!r} for {self.head}, {self.plan}"]
        if self.plan.noise_stream != noise.STREAM:
            lines.append(f"  noise stream {self.plan.noise_stream}")
        if self.plan.cache_convention != "logits":
            lines.append(f"  {self.plan.cache_convention} logits in the cache")
        if self.plan.draft_topk is not None:
            lines.append(f"  drafts from the {self.plan.draft_topk} best base logits a position")
        if note := getattr(self._engine, "note", ""):
            lines.append(f"  {note}")
        for name, reason in self._reasons.items():
            if name == self.engine:
                break
            lines.append(f"  not {name}: {reason or 'another engine was asked for'}")
        if batch is not None:
            self._check(batch, logits_cache, None, values=False)
            lines += [f"  {line}" for line in self._explain_batch(batch, logits_cache)]
        return "\n".join(lines)

    def _check(
        self,
        batch: DraftBatch,
        logits_cache: Tensor | None,
        tokens: Tensor | None,
        values: bool | None = None,
    ) -> None:
        convention = self.plan.cache_convention
        check_inputs(
            self.head, batch, logits_cache, tokens, values=values, cache_convention=convention
        )
        if batch.steps != self.plan.steps:
            raise ArgumentError(
                "base_logits", f"{self.plan.steps} draft steps as planned", f"{batch.steps}"
            )
        if batch.rows > self.plan.max_rows:
            raise ArgumentError(
                "base_logits",
                f"at most {self.plan.max_rows} rows as planned",
                f"{batch.rows}",
                "build the sampler with a larger max_rows",
            )

    def _explain_batch(self, batch: DraftBatch, cache: Tensor | None) -> list[str]:
        least = traffic(self.head, batch, cache, self.plan.draft_topk)
        peak = peak_bytes_a_us(self.head.device)
        at_peak = "" if peak is None else f", {least.total / peak:.1f} us at the memory's peak"
        drafts = "greedy" if batch.greedy else "with temperatures"
        kept = (
            "no cache" if cache is None else f"{dtype_name(cache.dtype)} cache of {cache.shape[2]}"
        )
        return [
            f"{batch.rows} rows of {batch.steps} steps, {drafts}, "
            f"{dtype_name(batch.base_logits.dtype)} base logits, {kept}",
            f"moves at least {least}{at_peak}",
            *self._engine.explain(batch, cache),
        ]
