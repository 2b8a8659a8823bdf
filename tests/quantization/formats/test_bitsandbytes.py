"""bitsandbytes: nf4, fp4, scales that are quantized themselves, and LLM.int8()."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.matrix import NF4_VALUES, dequantize
from tests.quantization.formats.stored import (
    Numbers,
    assert_is,
    draw,
    halves,
    matrix_of,
    numbers,
    scales,
    spread,
)

MODULE = "model.layers.3.mlp.up_proj"
FP4 = [0.0, 1 / 192, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
VALUES = {"nf4": list(NF4_VALUES), "fp4": FP4 + [-one for one in FP4]}
ROWS, COLUMNS = 6, 256


def config(**options: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
        **options,
    }


def text(state: dict[str, Any]) -> Tensor:
    """A quantization state as it is stored."""
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def packed(
    kind: str, size: int = 64, *, nested: bool = False
) -> tuple[dict[str, Tensor], Numbers, dict[str, Any]]:
    """Stored tensors, the matrix, and the quantization state."""
    codes = draw(1, 0, 16, ROWS, COLUMNS)
    blocks = ROWS * COLUMNS // size
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": "bfloat16",
        "shape": [ROWS, COLUMNS],
    }
    name = f"weight.quant_state.bitsandbytes__{kind}"
    stored = {
        "weight": halves(codes, high_first=True).reshape(-1, 1),
        "weight.quant_map": torch.tensor(VALUES[kind]),
    }
    if nested:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.046875}
        absmax = draw(2, 0, 256, blocks)
        outer = scales(3, -(-blocks // 16))
        table = torch.linspace(-1, 1, 256)
        stored |= {
            "weight.absmax": torch.from_numpy(absmax.astype(np.uint8)),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
        wide = np.repeat(numbers(outer), 16)[:blocks]
        scale = numbers(table)[absmax] * wide + 0.046875
    else:
        stored["weight.absmax"] = scales(2, blocks)
        scale = numbers(stored["weight.absmax"])
    stored[name] = text(state)
    wide = spread(scale.reshape(-1, 1), size).reshape(ROWS, COLUMNS)
    return stored, np.array(VALUES[kind])[codes] * wide, state


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits(kind: str, size: int, nested: bool) -> None:
    stored, expected, _ = packed(kind, size, nested=nested)
    scheme = read_format(config(bnb_4bit_quant_type=kind)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert (matrix.kind, matrix.group) == ("nf4" if kind == "nf4" else "fp8", size)
    assert matrix.scale.dtype == torch.float32
    if not nested:
        assert_is(matrix, expected)
        return
    # The sum of a scale and its offset may cancel, so their rounding is absolute.
    np.testing.assert_allclose(dequantize(matrix, torch.float32).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("form", [None, torch.tensor(0, dtype=torch.uint8), torch.tensor([0])])
def test_int8(form: Tensor | None) -> None:
    values, largest = draw(4, -127, 128, ROWS, COLUMNS), scales(5, ROWS)
    stored = {"weight": torch.from_numpy(values).to(torch.int8), "SCB": largest}
    if form is not None:
        stored["weight_format"] = form
    scheme = read_format(config(load_in_4bit=False, load_in_8bit=True)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert matrix.kind == "int8"
    assert_is(matrix, values * numbers(largest).reshape(-1, 1) / 127)
    for order in (1, 3):
        with pytest.raises(ValueError, match=f"weight_format: {order}, only 0"):
            matrix_of(scheme, stored | {"weight_format": torch.tensor(order)}, ROWS, COLUMNS)
    stored["SCB"][2] = float("nan")
    with pytest.raises(ValueError, match="SCB: 1 of 6 values are not finite"):
        matrix_of(scheme, stored, ROWS, COLUMNS)


def test_plain_modules() -> None:
    assert read_format(config()).scheme("lm_head") is None
    found = read_format(config(llm_int8_skip_modules=["model.layers.0.mlp"]))
    assert found.scheme("model.layers.0.mlp.up_proj") is None
    assert found.scheme("lm_head") is not None and found.scheme(MODULE) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_type": "fp4"}, r"fp4 of \[6, 256\], its matrix is nf4 of \[6, 256\]"),
        ({"shape": [256, 6]}, r"nf4 of \[256, 6\]"),
        ({"blocksize": 128}, "blocksize=128, stored are 64"),
        ({"nested_blocksize": 8}, "weight.nested_absmax: 2 values, for 24 blocks by 8"),
        ({"nested_blocksize": 0}, "24 blocks by 0"),
        ({"nested_blocksize": None}, "24 blocks by None"),
        ({"nested_offset": None}, "nested_offset=None"),
        ({"nested_offset": float("nan")}, "weight.absmax: 24 of 24 values are not finite"),
    ],
)
def test_states_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    stored, _, state = packed("nf4", nested=True)
    stored["weight.quant_state.bitsandbytes__nf4"] = text(state | changes)
    with pytest.raises(ValueError, match=message):
        matrix_of(read_format(config()).scheme(MODULE), stored, ROWS, COLUMNS)


def test_broken_parts() -> None:
    scheme = read_format(config()).scheme(MODULE)
    stored, _, _ = packed("nf4", nested=True)
    state = "weight.quant_state.bitsandbytes__nf4"
    for broken, message in (
        (torch.tensor([123], dtype=torch.uint8), "no JSON: "),
        (torch.tensor([255], dtype=torch.uint8), "no JSON: "),
        (torch.tensor([49], dtype=torch.uint8), "no JSON object"),
    ):
        with pytest.raises(ValueError, match=f"{state}: {message}"):
            matrix_of(scheme, stored | {state: broken}, ROWS, COLUMNS)
    turned = {"weight.quant_map": stored["weight.quant_map"].flip(0)}
    with pytest.raises(ValueError, match="weight.quant_map: not the values of nf4"):
        matrix_of(scheme, stored | turned, ROWS, COLUMNS)
    del stored["weight.nested_absmax"]
    with pytest.raises(ValueError, match="is quantized, and weight.nested_absmax missing"):
        matrix_of(scheme, stored, ROWS, COLUMNS)
    stored, _, _ = packed("nf4")
    stored["weight.absmax"][3] = float("inf")
    with pytest.raises(ValueError, match="weight.absmax: 1 of 24 values are not finite"):
        matrix_of(scheme, stored, ROWS, COLUMNS)


def test_blocks_that_do_not_divide_the_columns() -> None:
    scheme = read_format(config()).scheme(MODULE)
    assert scheme is not None
    with pytest.raises(ValueError, match="blocks of 64 columns do not divide its 48 columns"):
        scheme.parts(8, 48)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_8bit": True}, "load_in_4bit and load_in_8bit: both"),
        ({"load_in_4bit": False}, "load_in_4bit and load_in_8bit: neither"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4' is not supported, 'nf4' or"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
        (
            {"load_in_4bit": False, "load_in_8bit": True, "llm_int8_has_fp16_weight": True},
            "llm_int8_has_fp16_weight=True",
        ),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules='lm_head'"),
    ],
)
def test_options_that_are_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(config(**options))
