"""Types of tensors in GGUF files (`enum ggml_type` of ggml.h). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors that can be read.

    Attributes:
        name: ggml's: "Q4_K".
        elements: of a block; blocks follow each other along a row and never cross its end.
        nbytes: of a block.
    """

    name: str
    elements: int
    nbytes: int

    @property
    def is_plain(self) -> bool:
        """Whether each element is stored as one number."""
        return self.elements == 1


BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        30: BlockType("BF16", 1, 2),
    }
)
"""By the number in the file."""

OTHER_TYPES: Mapping[int, str] = MappingProxyType(
    {
        9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
        19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
        26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    }
)  # fmt: skip
"""Names of types that are not read."""

MATRIX_TYPES: Mapping[str, tuple[Literal["int4", "int8"], int]] = MappingProxyType(
    {
        "Q4_0": ("int4", 32), "Q4_1": ("int4", 32), "Q4_K": ("int4", 32),
        "Q5_0": ("int8", 32), "Q6_K": ("int8", 16), "Q8_0": ("int8", 32),
    }
)  # fmt: skip
"""Types whose matrices stay quantized: kind and group of their `QuantizedMatrix`. Types of 5 bits
with an offset have no such form and become plain numbers."""
