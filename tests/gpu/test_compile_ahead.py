"""Kernels of steps are compiled before one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hetero_llm.gpu.compile_ahead import compile_ahead, compiling_ahead
from hetero_llm.gpu.kernels.launch import INTERPRETED


@triton.jit
def fill_kernel(out, value, SIZE: tl.constexpr, SHIFT: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), value + SHIFT)


def test_the_interpreter_compiles_nothing() -> None:
    if not INTERPRETED:
        pytest.skip("a device compiles")
    calls: list[int] = []
    assert compile_ahead([lambda: calls.append(1)]) == 0
    assert calls == []


@pytest.mark.skipif(INTERPRETED, reason="needs a device that compiles")
def test_kernels_are_compiled_and_not_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    out = torch.zeros(64, dtype=torch.int32, device=device)

    def body(size: int, shift: int) -> None:
        for _ in range(3):
            fill_kernel[(1,)](out, 5, SIZE=size, SHIFT=shift)

    bodies = [lambda size=size, shift=shift: body(size, shift)
              for size in (16, 64) for shift in range(6)]  # fmt: skip
    assert compile_ahead(bodies) == 12
    assert int(out.sum()) == 0
    compiled: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    try:
        for one in bodies:
            one()
    finally:
        triton.knobs.compilation.listener = before
    assert compiled == []
    assert out.tolist() == [10] * 64, "the last one has run"
    assert compile_ahead(bodies) == 0


@pytest.mark.skipif(INTERPRETED, reason="needs a device that compiles")
def test_an_error_of_the_compiler_is_left_to_the_launch(device: torch.device) -> None:
    out = torch.zeros(64, dtype=torch.int32, device=device)

    def body() -> None:
        fill_kernel[(1,)](out, 1, SIZE=17, SHIFT=0)

    compile_ahead([body])
    with pytest.raises(Exception, match="power of 2"):
        body()
    fill_kernel[(1,)](out, 1, SIZE=16, SHIFT=100)
    assert int(out[0]) == 101, "launches run again"


def test_a_block_is_compiled_for_without_a_device() -> None:
    """In a process of its own: this one may interpret kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    module = f"import {__name__} as test; test.compile_beside_a_block()"
    with tempfile.TemporaryDirectory() as folder:
        environment["TRITON_CACHE_DIR"] = folder
        subprocess.run([sys.executable, "-c", module], check=True, env=environment)


class _Hopper:
    """A driver that compiles for a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_beside_a_block() -> None:
    driver.set_active(_Hopper())
    out, other = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    interval = sys.getswitchinterval()
    walked = []

    def body(shift: int, *tensors: torch.Tensor) -> None:
        walked.append(shift)
        for tensor in tensors:
            fill_kernel[(1,)](tensor, 5, SIZE=16, SHIFT=shift)

    def compiled() -> list[str]:
        return [kernel.src.name for kernel in fill_kernel.device_caches[0][0].values()]

    with compiling_ahead() as ahead:
        # Layers are alike: the same launch again is the same kernel, another type is another one.
        ahead.add([partial(body, 0, out, out, other), partial(body, 1, out), partial(body, 1, out)])
        assert walked == [0, 1, 1] and torch.is_inference_mode_enabled() is False
        waited = fill_kernel.run(out, 5, grid=(1,), warmup=True, SIZE=16, SHIFT=1)
        assert waited.result().src.name == "fill_kernel"
        fill_kernel.run(out, 5, grid=(1,), warmup=True, SIZE=17, SHIFT=1)  # does not compile
    assert ahead.num_compiled == 3 and len(compiled()) == 3
    assert sys.getswitchinterval() == interval

    fill_kernel.device_caches.clear()  # as a second process, which has the cache on disk
    walked.clear()
    bodies = [partial(body, 0, out), partial(body, 1, out)]
    assert compile_ahead(bodies) == 0
    assert walked == [0], "the first body finds all of its kernels, so do the others"
    with pytest.raises(Exception, match="power of 2"):
        fill_kernel.run(out, 5, grid=(1,), warmup=True, SIZE=17, SHIFT=1)
