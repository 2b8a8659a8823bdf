"""The PTX of every conversion, executed on the host, and its plain counterpart, over all codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels import quantized_elements as op
from hetero_llm.quantization.matrix import FP4_VALUES, KINDS, NF4_VALUES, Kind
from tests.gpu.kernels.ptx import run_ptx

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
NUM_PARTS = {"fp8": 2, "int8": 2, "int4": 4, "fp4": 4, "nf4": 4}


def expected_parts(kind: Kind, lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[parts, lanes] in `dtype`, from int32 lanes, by the words of the contract."""
    if kind in ("fp8", "int8"):
        codes = torch.stack((lanes & 255, lanes >> 8 & 255)).to(torch.uint8)
        stored = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
        return stored.float().to(dtype)
    codes = torch.stack([lanes >> shift & 15 for shift in (0, 4, 8, 12)])
    if kind == "int4":
        return (codes + (128 if dtype == torch.bfloat16 else 1024)).to(dtype)
    values = torch.tensor(FP4_VALUES if kind == "fp4" else NF4_VALUES)
    return values[codes.long()].to(dtype)


def all_words() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Every lane as the first and, in another order, as the second one of a word."""
    first = torch.arange(1 << 16)
    second = first[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    return first, second, (first | second << 16).numpy().astype(np.uint32)


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_ptx_of_all_lanes(kind, bits):
    first, second, words = all_words()
    outputs = run_ptx(op.parts_asm(kind, bits), [words], NUM_PARTS[kind])
    for lanes, shift in ((first, 0), (second, 16)):
        got = torch.stack([torch.from_numpy(o.astype(np.int64) >> shift) for o in outputs])
        values = (got & 65535).to(torch.int16).view(DTYPES[bits]).float()
        expected = expected_parts(kind, lanes, DTYPES[bits]).float()
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_ptx_of_all_bytes(kind):
    first, second, words = all_words()
    outputs = run_ptx(op.words_asm(kind), [words], 4)
    expected = [
        *expected_parts(kind, first, torch.float32),
        *expected_parts(kind, second, torch.float32),
    ]
    for output, values in zip(outputs, expected, strict=True):
        got = torch.from_numpy(output.view(np.float32).copy())
        torch.testing.assert_close(got, values, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _convert(lanes, out, KIND: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    inner = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = op.parts(tl.load(lanes + inner), KIND, out.dtype.element_ty)
    for part in tl.static_range(PARTS):
        tl.store(out + part * 65536 + inner, values[part].to(out.dtype.element_ty))


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_in_a_kernel(device, kind, bits):
    """The plain functions in the interpreter, the PTX on a device."""
    lanes = torch.arange(1 << 16, device=device)
    out = torch.zeros(NUM_PARTS[kind], 1 << 16, dtype=DTYPES[bits], device=device)
    _convert[(16,)](lanes.to(torch.int16), out, op.KIND_CODES[kind], NUM_PARTS[kind], 1 << 12)
    expected = expected_parts(kind, lanes.cpu().int(), DTYPES[bits]).float()
    torch.testing.assert_close(out.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)
