"""GPTQ: zero points of both formats, the order of columns, options of single modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.quantization.formats.read import read_format
from tests.quantization.formats.stored import (
    Numbers,
    assert_is,
    draw,
    matrix_of,
    numbers,
    read_quantize_config,
    scales,
    words,
)

MODULE = "model.layers.3.mlp.up_proj"
ROWS, COLUMNS = 24, 64


def config(**options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, **options}


def zeros_less_one(zeros: Numbers, bits: int) -> Tensor:
    """qzeros of format "gptq": as GPTQModel takes one off each zero point of a word at once."""
    packed = words(zeros, bits).numpy().view(np.uint32)
    ones = sum(1 << (bits * place) for place in range(32 // bits))
    less = ((packed.astype(np.int64) - ones) % 2**32).astype(np.uint32)
    return torch.from_numpy(less.view(np.int32))


def packed(
    *,
    bits: int = 4,
    group: int = 16,
    zeros: Numbers | None = None,
    group_of: Numbers | None = None,
    v2: bool = False,
    seed: int = 1,
) -> tuple[dict[str, Tensor], Numbers]:
    """Stored tensors and the matrix [ROWS, COLUMNS]. `zeros`: [groups, ROWS]."""
    groups = COLUMNS // group
    codes = draw(seed, 0, 2**bits, COLUMNS, ROWS)
    scale = scales(seed + 1, groups, ROWS, dtype=torch.float16)
    if zeros is None:
        zeros = np.full((groups, ROWS), 2 ** (bits - 1))
    stored = {
        "qweight": words(codes.T, bits).T.contiguous(),
        "qzeros": words(zeros, bits) if v2 else zeros_less_one(zeros, bits),
        "scales": scale,
    }
    if group_of is None:
        group_of = np.repeat(np.arange(groups), group)
    stored["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return stored, (numbers(scale)[group_of] * (codes - zeros[group_of])).T


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric(bits: int, group: int, v2: bool) -> None:
    stored, expected = packed(bits=bits, group=group, v2=v2)
    form = {"checkpoint_format": "gptq_v2"} if v2 else {}
    size = -1 if group == COLUMNS else group
    scheme = read_format(config(bits=bits, group_size=size, **form)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert (matrix.kind, matrix.group) == (f"int{bits}", group)
    assert matrix.zero is None and matrix.order is None and matrix.scale.dtype == torch.float16
    assert_is(matrix, expected)


@pytest.mark.parametrize("v2", [False, True])
def test_asymmetric(v2: bool) -> None:
    """Zero points from 0 to 15: those of 0 borrow from their neighbours in format "gptq"."""
    zeros = draw(2, 0, 16, 4, ROWS)
    zeros[0, :8] = 0
    zeros[1, :8] = 15
    stored, expected = packed(zeros=zeros, v2=v2)
    form = "gptq_v2" if v2 else "gptq"
    scheme = read_format(config(sym=False, format=form)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert matrix.zero is not None
    assert_is(matrix, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("desc_act", [False, True])
def test_columns_in_another_order(bits: int, desc_act: bool) -> None:
    """`g_idx` counts, whatever `desc_act` says."""
    group_of = np.random.default_rng(3).permutation(np.repeat(np.arange(4), 16))
    zeros = draw(4, 0, 16, 4, ROWS) if bits == 4 else None
    stored, expected = packed(bits=bits, zeros=zeros, group_of=group_of)
    scheme = read_format(config(bits=bits, desc_act=desc_act)).scheme(MODULE)
    matrix = matrix_of(scheme, stored, ROWS, COLUMNS)
    assert matrix.order is not None
    assert_is(matrix, expected)


@pytest.mark.parametrize("index", ["missing", "zeros", "wide"])
def test_an_index_that_says_nothing(index: str) -> None:
    stored, expected = packed()
    if index == "missing":
        del stored["g_idx"]
    else:
        kept = stored["g_idx"]
        stored["g_idx"] = torch.zeros_like(kept) if index == "zeros" else kept.long()
    matrix = matrix_of(read_format(config()).scheme(MODULE), stored, ROWS, COLUMNS)
    assert matrix.order is None
    assert_is(matrix, expected)


def test_options_of_single_modules() -> None:
    """The first rule that a name begins with counts."""
    found = read_format(
        config(
            dynamic={
                r"-:.*\.1\..*": {},
                r"+:.*\.mlp\..*": {"bits": 8, "group_size": 32},
                r".*down_proj": {"group_size": 64},
                r"down": {"bits": 8},
            }
        )
    )
    assert found.scheme("model.layers.1.mlp.up_proj") is None
    assert found.scheme("lm_head") is None
    eight = found.scheme(MODULE)
    assert eight is not None
    shapes = {part.suffix: part.shapes[0] for part in eight.parts(ROWS, COLUMNS)}
    assert shapes["qweight"] == (16, ROWS) and shapes["scales"] == (2, ROWS)
    for module, groups in (("layers.2.down_proj", 1), ("layers.2.q_proj", 4)):
        scheme = found.scheme(module)
        assert scheme is not None
        shapes = {part.suffix: part.shapes[0] for part in scheme.parts(ROWS, COLUMNS)}
        assert shapes["qweight"] == (8, ROWS) and shapes["scales"] == (groups, ROWS)


def test_a_quantized_head() -> None:
    found = read_format(config(lm_head=True))
    assert found.scheme("lm_head") is not None and found.scheme("model.embed_tokens") is None


def test_the_older_file() -> None:
    """quantize_config.json of AutoGPTQ names no method."""
    content = {"bits": 4, "group_size": 16, "damp_percent": 0.1, "desc_act": False, "sym": True}
    found = read_quantize_config(content)
    stored, expected = packed()
    assert found.name == "gptq"
    assert_is(matrix_of(found.scheme(MODULE), stored, ROWS, COLUMNS), expected)


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize(
    ("part", "place", "value", "message"),
    [
        ("scales", 3, float("inf"), "scales: 1 of 96 values are not finite"),
        ("scales", 3, float("nan"), "scales: 1 of 96 values are not finite"),
        ("g_idx", 5, 4, "g_idx: names groups 0 to 4, there are 4"),
        ("g_idx", 5, -1, "g_idx: names groups -1 to 3"),
        ("g_idx", 5, 2, "g_idx: groups have 15 to 17 columns, not 16"),
    ],
)
def test_values_that_cannot_be(
    part: str, place: int, value: float, message: str, desc_act: bool
) -> None:
    stored, _ = packed()
    stored[part].view(-1)[place] = value
    scheme = read_format(config(desc_act=desc_act)).scheme(MODULE)
    with pytest.raises(ValueError, match=message):
        matrix_of(scheme, stored, ROWS, COLUMNS)


def test_zero_points_of_8_bits() -> None:
    stored, _ = packed(bits=8, zeros=np.full((4, ROWS), 127))
    scheme = read_format(config(bits=8)).scheme(MODULE)
    with pytest.raises(ValueError, match="qzeros: of 8 bits, zero points other than 128"):
        matrix_of(scheme, stored, ROWS, COLUMNS)


def test_parts() -> None:
    scheme = read_format(config(desc_act=True)).scheme(MODULE)
    assert scheme is not None
    parts = {part.suffix: part for part in scheme.parts(ROWS, COLUMNS)}
    assert not parts["g_idx"].optional and parts["qweight"].types == ("I32",)
    assert not parts["qweight"].admits((COLUMNS, ROWS // 8))
    for rows, columns, message in (
        (20, 64, "8 to a word, which does not divide its 20 rows"),
        (24, 60, "its 24 rows and 60 columns"),
        (24, 72, "groups of 16 columns do not divide its 72 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            scheme.parts(rows, columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits=3 is not supported, 4 or 8 is"),
        ({"bits": True}, "bits=True"),
        ({"bits": None}, "bits=None"),
        ({"bits": 8, "sym": False}, "sym=False is not supported for bits=8"),
        ({"sym": "yes"}, "sym='yes' is not supported, False or True is"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": None}, "group_size=None"),
        (
            {"checkpoint_format": "marlin"},
            "checkpoint_format='marlin' is not .* 'gptq' or 'gptq_v2'",
        ),
        ({"is_marlin_format": True}, "is_marlin_format=True"),
        ({"pack_dtype": "int16"}, "pack_dtype='int16'"),
        ({"dynamic": {"+:.*": {"bits": 2}}}, "bits=2"),
        ({"dynamic": {"+:(": {}}}, "dynamic: '.' is no regular expression"),
        ({"dynamic": {".*": 4}}, "dynamic..*=4"),
        ({"dynamic": []}, None),
        ({"dynamic": [1]}, r"dynamic=\[1\]"),
    ],
)
def test_options_that_are_not_supported(options: dict[str, Any], message: str | None) -> None:
    if message is None:  # an empty one says nothing
        assert read_format(config(**options)).scheme(MODULE) is not None
        return
    with pytest.raises(ValueError, match=message):
        read_format(config(**options))
