"""How our kernels are launched: overlap with the kernel before, and the interpreter's limits.

Programmatic dependent launch (Hopper, CUDA programming guide "Programmatic Dependent Launch and
Synchronization"): a kernel may start while the one before it still runs, and waits for that one's
results with `wait_for_inputs`. The rules here, which every kernel in this package follows:

- before `wait_for_inputs` a kernel writes nothing, and reads only what neither the kernel before
  it nor one that runs beside them writes: weights, and inputs of the step that are older;
- every program calls `wait_for_inputs`, so a kernel ends only after the one before it;
- `let_next_start` comes after `wait_for_inputs`, so all kernels but the last one have ended when a
  kernel starts; the earlier it comes, the sooner the next one's programs may take room.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors: for tests."""


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits until the kernel before has ended and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Lets the next kernel start once every program of this one has come here or ended."""
    if PDL:
        gdc_launch_dependents()


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel that has a `PDL` constexpr: on from Hopper onwards."""
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number in the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
