"""Blocks of GGUF files against a reading of the format one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_llm.quantization.gguf.blocks import to_floats, to_matrix
from hetero_llm.quantization.gguf.types import BLOCK_TYPES, MATRIX_TYPES
from hetero_llm.quantization.matrix import dequantize
from tests.helpers.gguf_blocks import LAYOUTS, NUMBERS, numbers, random_tensor

NAMES = sorted(NUMBERS)
FLOAT16_ROUNDING = 2**-11  # of a scale and an offset that are products of two numbers


def blocks(name: str, rows: int = 5, columns: int = 768, seed: int = 0) -> np.ndarray:
    return random_tensor(name, rows, columns, np.random.default_rng(seed))


def test_the_table_has_these_types() -> None:
    assert {block.name: number for number, block in BLOCK_TYPES.items()} == NUMBERS
    sizes = {block.name: (block.nbytes, block.elements) for block in BLOCK_TYPES.values()}
    assert {name: sizes[name] for name in LAYOUTS} == {n: x[:2] for n, x in LAYOUTS.items()}


@pytest.mark.parametrize("name", NAMES)
def test_floats_are_exact(name: str) -> None:
    raw = blocks(name)
    assert np.array_equal(to_floats(name, torch.from_numpy(raw)).numpy(), numbers(name, raw))


@pytest.mark.parametrize("name", sorted(MATRIX_TYPES))
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 512), (65, 256)])
def test_matrices(name: str, rows: int, columns: int) -> None:
    raw = blocks(name, rows, columns, seed=rows)
    matrix = to_matrix(name, torch.from_numpy(raw))
    assert (matrix.kind, matrix.group) == MATRIX_TYPES[name]
    assert matrix.shape == (rows, columns) and matrix.scale.dtype == torch.float16
    expected = torch.from_numpy(numbers(name, raw))
    found = dequantize(matrix, torch.float32)
    if name.endswith("_K"):
        # Each term of code * scale + offset has its own rounding.
        offset = 0 if matrix.offset is None else matrix.offset.float().abs().max()
        bound = FLOAT16_ROUNDING * (expected.abs().max() + 2 * offset)
        assert (found - expected).abs().max() <= bound
        assert not torch.equal(found.round(decimals=2), torch.zeros_like(found))
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_scales_beyond_float16_stay_exact(name: str) -> None:
    raw = blocks(name, 2, 256)
    nbytes, _, halves = LAYOUTS[name]
    raw.reshape(-1, nbytes)[:, halves[0] : halves[0] + 2] = np.array([60000], np.float16).view(
        np.uint8
    )
    matrix = to_matrix(name, torch.from_numpy(raw))
    assert matrix.scale.dtype == torch.float32
    assert torch.equal(dequantize(matrix, torch.float32), torch.from_numpy(numbers(name, raw)))


@pytest.mark.parametrize("name", sorted(MATRIX_TYPES))
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(name: str, wrong: float) -> None:
    raw = blocks(name, 2, 256)
    _, _, halves = LAYOUTS[name]
    raw[1, halves[-1] : halves[-1] + 2] = np.array([wrong], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=f"{name} blocks with a scale that is no finite number"):
        to_matrix(name, torch.from_numpy(raw))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_as_the_gguf_package_reads_them(name: str) -> None:
    """An independent reading; the package is installed by `make test-published`."""
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    raw = blocks(name)
    expected = quants.dequantize(raw, gguf.GGMLQuantizationType(NUMBERS[name]))
    assert np.array_equal(to_floats(name, torch.from_numpy(raw)).numpy(), expected)
