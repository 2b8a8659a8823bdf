"""Which variants of kernels Triton would compile on an NVIDIA GPU, found without one.

Triton compiles a kernel once more for each combination of types, of pointers and integers that are
divisible by 16 or not, of integers that are 1 or not, and of constants. Triton's own code finds the
combination here, for launches that its interpreter is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from hetero_llm.gpu.kernels import exchange, tree_verify

Variant = tuple[str, str]
"""A kernel's name, and what its variant is compiled for: argument by argument."""


@contextmanager
def only_recorded(*, exchanges: bool) -> Iterator[set[Variant]]:
    """Launches of the block leave their variants in the set that it gets, and run nothing but the
    kernels of `exchange`: operators of torch index by what those write. They index by sampled
    tokens, too, so new tensors hold zeros."""
    found: set[Variant] = set()
    run = InterpretedFunction.run
    running = (exchange.__name__, tree_verify.__name__) if exchanges else ()

    def record(self: Any, *args: Any, **options: Any) -> None:
        chosen = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        found.add((self.fn.__name__, _described(self, args, chosen)))
        if self.fn.__module__ in running:
            run(self, *args, **options)

    with (
        mock.patch.object(InterpretedFunction, "run", record),
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield found


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
