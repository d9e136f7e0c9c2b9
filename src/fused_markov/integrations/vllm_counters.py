"""Counters of the plugin: decode steps drafted, W2 reads, steps left to vLLM and why."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from fused_markov.batch import DraftResult

PREFIX = "fused_markov"
POLL_STEPS = 256  # the passes are fetched from the device this often, without waiting for it


class Counters:
    """Counts of one drafter, also in Prometheus's registry where prometheus_client is installed.

    A CUDA graph replays a step without passing through Python, so steps are counted where vLLM
    proposes (``proposed``), as what was last decided; the passes are added up on the device.
    vLLM's workers are processes of their own: their counters are shown at the API server's /metrics
    where ``PROMETHEUS_MULTIPROC_DIR`` names an empty directory.

    Attributes:
        decided: decisions made in Python, by reason, "" for a step drafted here.
        steps: decode steps, replayed ones included, by reason.
        passes: W2 reads of the steps drafted here, as last fetched.
    """

    def __init__(self, logger: logging.Logger, device: torch.device) -> None:
        self.logger = logger
        self.decided: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.passes = 0
        self._last: str | None = None
        self._total = torch.zeros(1, dtype=torch.int64, device=device)
        self._fetched = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._event: Any = None

    def took(self, result: DraftResult) -> None:
        """A step was drafted here; in a graph's capture, every replay of it will be."""
        self._last = ""
        self.decided[""] += 1
        self._total.add_(result.passes_tensor)

    def left(self, reason: str) -> None:
        """A step was left to vLLM."""
        self._last = reason
        if reason not in self.decided:
            self.logger.warning("fused-markov leaves steps to vLLM: %s", reason)
        self.decided[reason] += 1

    def proposed(self) -> None:
        """vLLM has proposed drafts of one decode step."""
        if self._last is None:
            return
        self.steps[self._last] += 1
        if self._last:
            _prometheus("steps_left", "Decode steps left to vLLM", 1, reason=self._last)
        else:
            _prometheus("steps", "Decode steps drafted by fused-markov", 1)
        if self.steps.total() % POLL_STEPS == 0:
            self.fetch()

    def fetch(self) -> None:
        """Take the passes that an earlier call asked the device for, and ask again."""
        if self._total.device.type == "cuda":
            if self._event is not None and self._event.query():
                self._set_passes(int(self._fetched))
                self._event = None
            if self._event is None:
                self._fetched.copy_(self._total, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()
        else:
            self._set_passes(int(self._total))

    def _set_passes(self, passes: int) -> None:
        _prometheus("passes", "Reads of the Markov head's W2", passes - self.passes)
        self.passes = passes


_metrics: dict[str, Any] = {}


def _prometheus(name: str, text: str, amount: int, **labels: str) -> None:
    """Add to a Prometheus counter, made on first use."""
    metric = _metrics.get(name)
    if metric is None:
        try:
            from prometheus_client import Counter as Metric  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return
        metric = _metrics[name] = Metric(f"{PREFIX}_{name}", text, list(labels))
    (metric.labels(**labels) if labels else metric).inc(amount)
