"""Which part of a quantized matrix's tensors a rank reads."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.models.layers import Linear
from hetero_llm.models.quantized_slices import matrix_slices
from hetero_llm.models.quantized_weights import LayerWeight, MatrixPlan
from hetero_llm.models.sharding import Cut
from hetero_llm.models.weight_files import StoredTensor, WeightFile
from hetero_llm.quantization.formats.awq import AwqScheme
from hetero_llm.quantization.formats.bitsandbytes import FourBits
from hetero_llm.quantization.formats.compressed_tensors import Packed
from hetero_llm.quantization.formats.fp8 import Fp8Blocks
from hetero_llm.quantization.formats.gptq import GptqScheme
from hetero_llm.quantization.formats.scheme import Scheme
from hetero_llm.quantization.online import OnlineScheme
from tests.models.weights_in_memory import MemoryFile

ROWS, COLUMNS = 512, 768
BY_ROWS = Cut(0, ROWS, ((128, 128), (384, 128)))
BY_COLUMNS = Cut(1, COLUMNS, ((384, 384),))


def slices(scheme: Scheme, cut: Cut, *, rows: int = ROWS) -> dict[str, tuple[int, object]] | None:
    """The cuts by suffix; None: the tensors are read whole."""
    parts = scheme.parts(rows, COLUMNS)
    file: WeightFile = MemoryFile({})
    shapes = {part.name_in("m"): part.shapes[0] for part in parts}
    stored = {n: (file, StoredTensor(n, "", torch.uint8, s, 0)) for n, s in shapes.items()}
    linear = Linear(8, 8, bias=False)
    plan = MatrixPlan("m", 0, 0, rows, COLUMNS, None, False, scheme, parts)
    found = matrix_slices([plan], [LayerWeight(linear, "weight")], {0: cut}, stored)
    return dict(found["m"].cuts) if found else None


@pytest.mark.parametrize(
    ("scheme", "cut", "expected"),
    [
        (AwqScheme(128), BY_COLUMNS,
         {"qweight": (0, ((384, 384),)), "qzeros": (0, ((3, 3),)), "scales": (0, ((3, 3),))}),
        (AwqScheme(128), BY_ROWS,
         {"qweight": (1, ((16, 16), (48, 16))), "qzeros": (1, ((16, 16), (48, 16))),
          "scales": (1, ((128, 128), (384, 128)))}),
        (GptqScheme(4, 128, False, True), BY_ROWS,
         {"qweight": (1, ((128, 128), (384, 128))), "qzeros": (1, ((16, 16), (48, 16))),
          "scales": (1, ((128, 128), (384, 128))), "bias": (0, ((128, 128), (384, 128)))}),
        (GptqScheme(4, 128, False, True), BY_COLUMNS, None),
        (FourBits("nf4"), BY_ROWS, None),
        (FourBits("nf4"), BY_COLUMNS, None),
        (OnlineScheme("fp8"), BY_COLUMNS, None),
        (OnlineScheme("fp8"), BY_ROWS, {"weight": (0, ((128, 128), (384, 128)))}),
        (OnlineScheme("int4"), BY_COLUMNS, {"weight": (1, ((384, 384),))}),
    ],
)  # fmt: skip
def test_parts(scheme: Scheme, cut: Cut, expected: object) -> None:
    assert slices(scheme, cut) == expected


def test_blocks_and_words() -> None:
    blocks = Fp8Blocks((128, 128))
    found = slices(blocks, BY_ROWS)
    assert found is not None and found["weight_scale"] == (0, ((1, 1), (3, 1)))
    assert slices(blocks, Cut(0, ROWS, ((64, 128),))) is None
    assert slices(blocks, BY_ROWS, rows=ROWS + 64) is None  # a block with a rest
    packed = Packed(4, 128, symmetric=False, ordered=False)
    found = slices(packed, BY_COLUMNS)
    assert found is not None and "weight_shape" not in found
    assert found["weight_packed"] == (1, ((48, 48),))
    assert found["weight_zero_point"] == (1, ((3, 3),))
