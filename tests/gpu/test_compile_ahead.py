"""Kernels of steps are compiled before one runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from hetero_llm.gpu.compile_ahead import compile_ahead
from hetero_llm.gpu.kernels.launch import INTERPRETED


@triton.jit
def _fill(out, value, SIZE: tl.constexpr, SHIFT: tl.constexpr):
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
            _fill[(1,)](out, 5, SIZE=size, SHIFT=shift)

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
        _fill[(1,)](out, 1, SIZE=17, SHIFT=0)

    compile_ahead([body])
    with pytest.raises(Exception, match="power of 2"):
        body()
    _fill[(1,)](out, 1, SIZE=16, SHIFT=100)
    assert int(out[0]) == 101, "launches run again"
