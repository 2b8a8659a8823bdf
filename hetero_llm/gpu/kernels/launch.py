"""How our kernels are launched: overlap with the previous kernel, and the interpreter's limits.

Programmatic dependent launch (Hopper, CUDA programming guide "Programmatic Dependent Launch and
Synchronization"): a kernel may start while the previous one still runs, and waits for its results
with `wait_for_inputs`. Every kernel in this package follows these rules:

- before `wait_for_inputs` a kernel writes nothing, and reads only what neither the previous kernel
  nor one that runs beside the two writes: weights, and inputs of the step that are older;
- every program calls `wait_for_inputs`, so a kernel ends only after the previous one;
- `let_next_start` comes after `wait_for_inputs`, so when a kernel starts, all kernels but the
  previous one have ended; the earlier it comes, the sooner the next kernel's programs get room.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors: for tests."""

IN_INTERPRETER = tl.constexpr(INTERPRETED)
"""The same inside kernels: the interpreter's tl.dot takes the bits of bf16 for integers."""


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits until the previous kernel has ended and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Lets the next kernel start once every program of this one has called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_and_release(PDL: tl.constexpr):
    """`wait_for_inputs`, then `let_next_start`: of kernels that need not keep the next one out."""
    wait_for_inputs(PDL)
    let_next_start(PDL)


class _Launches:
    number = 0


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel that has a `PDL` constexpr. Called for each launch, or once for
    several in a row, right before it: it counts them."""
    _Launches.number += 1
    return overlap_options(device)


def num_launches() -> int:
    """Calls of `pdl_options` so far. Where a launch is number n and a later one not n + 1, at least
    one kernel that follows the rules above lies between them."""
    return _Launches.number


@functools.cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """What `pdl_options` returns: the overlap of kernels is on from Hopper onwards."""
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number in the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def strided_grid(tiles: int, programs_per_sm: int, device: torch.device) -> tuple[int]:
    """The grid of a kernel whose programs take tiles with a fixed stride."""
    return (min(tiles, programs_per_sm * num_multiprocessors(device)),)


@dataclass(frozen=True)
class Launch:
    """A kernel with everything it is launched with: `kernel[grid](*arguments, **options)`."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)
