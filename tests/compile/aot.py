"""Kernels compiled without a GPU: an engine runs on the CPU, and its launches are only recorded.

Signature, specialisation and options of a launch are thus the engine's own; nothing of them is
written down a second time here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from fused_markov.engines import launch, one_pass

# Bytes of shared memory that a block can have.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Launch:
    """A kernel with all that the compiler is told about one launch of it."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def bound(self, target: GPUTarget) -> tuple[Any, Any, Any, Any]:
        """Backend, arguments, specialisation and options, as Triton's launcher finds them."""
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        debug = {"debug": False, "instrumentation_mode": ""}
        return (backend, *bind(*self.arguments, **self.options, **debug))

    def key(self, target: GPUTarget) -> str:
        """What Triton looks compiled kernels up by."""
        _, _, specialization, options = self.bound(target)
        return f"{self.name} {specialization} {options}"

    def compile(self, target: GPUTarget) -> Any:
        backend, bound, specialization, given = self.bound(target)
        options, signature, constexprs, attrs = self.kernel._pack_args(
            backend, given, bound, specialization, given
        )
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        return triton.compile(source, target=target, options=options.__dict__)


def target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record every launch inside instead of running it; no device is asked what fits on it, and
    nothing is computed that only launched kernels would read.
    """
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launches.append(Launch(self, args, options))
        return mock.MagicMock()  # in place of the compiled kernel

    fits = mock.patch.object(one_pass, "resident_programs", return_value=1)
    unread = mock.patch.object(
        launch, "successor_biases", lambda head: torch.empty(16, dtype=head.dtype)
    )
    with mock.patch.object(JITFunction, "run", record), fits, unread:
        yield launches


def distinct(launches: list[Launch], capability: int = 90) -> dict[str, Launch]:
    """One launch of each that compiles apart, by key."""
    return {launch.key(target(capability)): launch for launch in launches}
