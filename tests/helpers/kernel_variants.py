"""Which variants of kernels Triton would compile on an NVIDIA GPU, found without one.

Triton compiles a kernel once more for each combination of types, of pointers and integers that are
divisible by 16 or not, of integers that are 1 or not, and of constants. Triton's own code finds the
combination here, for launches that its interpreter is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from hetero_llm.gpu import device_step
from hetero_llm.gpu.kernels import exchange, tree_verify

Variant = tuple[str, str]
"""A kernel's name, and what its variant is compiled for: argument by argument."""


@contextmanager
def only_recorded() -> Iterator[set[Variant]]:
    """Launches of the block run nothing: they leave their variants in the set that it gets.
    Operators of torch may index by what kernels would have written, so new tensors hold zeros."""
    found: set[Variant] = set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add((self.fn.__name__, _described(self, args, options)))

    with (
        mock.patch.object(InterpretedFunction, "run", record),
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield found


def use_references_for_step_inputs(patch: pytest.MonkeyPatch) -> None:
    """What brings a step's inputs to the device and its results back is computed, beside the
    launches of its kernels: the host depends on it."""

    def apply(*args: Any, turn: Any, ring_size: int, out: torch.Tensor) -> torch.Tensor:
        exchange.apply_step_inputs(*args, turn=turn, ring_size=ring_size, out=out)
        return out.copy_(exchange.apply_step_inputs_reference(*args, turn, ring_size))

    def both(module: ModuleType, name: str) -> None:
        kernel, reference = getattr(module, name), getattr(module, f"{name}_reference")

        def call(*args: Any, **named: Any) -> None:
            kernel(*args, **named)
            reference(*args, **named)

        patch.setattr(device_step, name, call)

    patch.setattr(device_step, "apply_step_inputs", apply)
    both(exchange, "fetch_pinned")
    both(exchange, "send_results")
    both(tree_verify, "verify_trees")


@cache
def _binder(kernel: InterpretedFunction[Any]) -> Callable[..., Any]:
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(compiled.signature, compiled.params, backend)


def _described(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    bound, specialization, others = _binder(kernel)(*args, **options)
    parts = [
        f"{name}={value if kind == 'constexpr' else f'{kind}/{attribute}'}"
        for (name, value), (kind, attribute) in zip(bound.items(), specialization, strict=True)
    ]
    return ", ".join([*parts, *(f"{name}={value}" for name, value in sorted(others.items()))])


class BodiesAgain:
    """In the place of `GraphSet`: a replay runs the body."""

    def __init__(self) -> None:
        self._bodies: dict[Any, Callable[[], None]] = {}

    @torch.inference_mode()
    def capture(self, key: Any, body: Callable[[], None]) -> None:
        body()
        self._bodies[key] = body

    @torch.inference_mode()
    def replay(self, key: Any) -> None:
        self._bodies[key]()
