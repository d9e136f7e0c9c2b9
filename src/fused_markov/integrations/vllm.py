"""The vLLM plugin: DSpark drafting through `fused_markov.DraftSampler`.

vLLM calls `register` in every process (entry point group ``vllm.general_plugins``). It imports
nothing of vLLM: once vLLM itself imports its DSpark speculator, the class's ``load_draft_model`` is
wrapped, and the draft model that it loads gets our sampling. Where that cannot be done, vLLM runs
as it would without the plugin and one log line says why.

Environment: ``FUSED_MARKOV=0`` switches the plugin off; ``FUSED_MARKOV_ENGINE`` names an engine;
``FUSED_MARKOV_SUCCESSORS`` says how many successors to find for each token (0: none).
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
from types import ModuleType
from typing import Any

from fused_markov.integrations import vllm_versions
from fused_markov.integrations.post_import import when_imported
from fused_markov.integrations.vllm_versions import SPECULATOR_CLASS, SPECULATOR_MODULE, VllmVersion

SWITCH = "FUSED_MARKOV"
DRAFTER = "_fused_markov_drafter"

# vLLM configures the handlers of its own logger tree only.
logger = logging.getLogger("vllm.fused_markov")

_registered = False


def register() -> None:
    """Entry point of the ``vllm.general_plugins`` group; safe to call any number of times."""
    global _registered
    if _registered:
        return
    _registered = True
    reason = why_not()
    if reason is not None:
        logger.info("fused-markov is not installed into vLLM: %s", reason)
        return
    when_imported(SPECULATOR_MODULE, install)


def vllm_version() -> str | None:
    """The version of the vLLM in this process, or of the installed one, or None."""
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not() -> str | None:
    """Why the plugin leaves this vLLM alone, as far as can be told without importing it."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no"):
        return f"{SWITCH}={os.environ[SWITCH]}"
    version = vllm_version()
    if version is None:
        return "vLLM is not installed here"
    if vllm_versions.lookup(version) is None:
        return f"vLLM {version} is not one of the versions known ({vllm_versions.covered()})"
    return None


def coverage() -> str:
    """What the plugin does for the installed vLLM, in one line; imports nothing of vLLM."""
    reason = why_not()
    if reason is not None:
        return f"left alone: {reason}"
    version = vllm_version()
    row = vllm_versions.lookup(version or "")
    gap = None if row is None else vllm_versions.probabilistic_gap(row)
    return f"vLLM {version}: " + ("covered" if gap is None else f"greedy drafts covered; {gap}")


def install(module: ModuleType) -> None:
    """Wrap the DSpark speculator of an imported ``SPECULATOR_MODULE``; never raises."""
    version = vllm_versions.lookup(vllm_version() or "")
    if version is None:
        return
    reason = vllm_versions.changed(module, version)
    if reason is not None:
        logger.warning("fused-markov is not installed into vLLM: %s", reason)
        return
    speculator = getattr(module, SPECULATOR_CLASS)
    if getattr(speculator.load_draft_model, "_fused_markov", False):
        return
    speculator.load_draft_model = _loading(speculator.load_draft_model, version)
    speculator.propose = _proposing(speculator.propose)
    if version.hook == "speculator":
        speculator._sample_sequential = _sampling(speculator._sample_sequential)
    elif hasattr(speculator, "_sample_sequential_topk"):
        # Drafts from limited candidates (dspark_draft_topk) do not ask the hook.
        speculator._sample_sequential_topk = _sampling(speculator._sample_sequential_topk)


def _loading(original: Any, version: VllmVersion) -> Any:
    """``load_draft_model``, followed by giving the loaded model its drafter."""

    @functools.wraps(original)
    def load_draft_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        # Kernels and torch's libraries are loaded only where a DSpark draft is.
        from fused_markov.integrations.vllm_step import VllmDrafter

        drafter = VllmDrafter.for_speculator(self, model, version, logger)
        setattr(self, DRAFTER, drafter)
        if drafter is not None and version.hook == "model":
            _hook_model(type(model))
        return model

    load_draft_model._fused_markov = True  # type: ignore[attr-defined]
    return load_draft_model


def _proposing(original: Any) -> Any:
    """``propose``, which runs once a decode step, replayed graphs included: count it."""

    @functools.wraps(original)
    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, *args, **kwargs)
        drafter = getattr(self, DRAFTER, None)
        if drafter is not None and not kwargs.get("dummy_run"):
            drafter.counters.proposed()
        return drafts

    return propose


def _sampling(original: Any) -> Any:
    """A ``_sample_sequential`` that asks no hook: ours where it can, else vLLM's."""

    @functools.wraps(original)
    def _sample_sequential(self: Any, num_reqs: int, head_hidden: Any) -> None:
        drafter = getattr(self, DRAFTER, None)
        if drafter is None or not drafter.sample(self, num_reqs, head_hidden):
            original(self, num_reqs, head_hidden)

    return _sample_sequential


def _hook_model(model_class: type) -> None:
    """Set vLLM's hook ``sample_sequential`` on a draft class; one it has is asked after ours."""
    previous = getattr(model_class, "sample_sequential", None)
    if getattr(previous, "_fused_markov", False):
        return

    def sample_sequential(self: Any, speculator: Any, num_reqs: int, head_hidden: Any) -> bool:
        drafter = getattr(speculator, DRAFTER, None)
        if drafter is not None and drafter.sample(speculator, num_reqs, head_hidden):
            return True
        return previous is not None and bool(previous(self, speculator, num_reqs, head_hidden))

    sample_sequential._fused_markov = True  # type: ignore[attr-defined]
    model_class.sample_sequential = sample_sequential  # type: ignore[attr-defined]
