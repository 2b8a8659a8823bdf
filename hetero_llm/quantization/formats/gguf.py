"""GGUF: a matrix is one tensor of blocks, whose type may differ from matrix to matrix.

There is no such quantization_config in any file: `models.gguf.config` writes it for a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hetero_llm.quantization.formats.options import Config, refused
from hetero_llm.quantization.formats.scheme import Scheme, StoredPart
from hetero_llm.quantization.gguf.blocks import to_matrix
from hetero_llm.quantization.gguf.types import BLOCK_TYPES, MATRIX_TYPES, BlockType
from hetero_llm.quantization.matrix import QuantizedMatrix

_BLOCKS = {block.name: block for block in BLOCK_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufScheme(Scheme):
    """See `Scheme`. The stored tensor is [rows, bytes of a row] of type `block.name`."""

    block: BlockType

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        if columns % self.block.elements:
            raise ValueError(
                f"rows of {columns} are no multiple of the {self.block.elements} elements of a "
                f"{self.block.name} block"
            )
        shape = (rows, columns // self.block.elements * self.block.nbytes)
        return (StoredPart("weight", (self.block.name,), (shape,)),)

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        return to_matrix(self.block.name, stored["weight"])

    def column_step(self, columns: int) -> int:
        return MATRIX_TYPES[self.block.name][1]

    def slice_steps(self, columns: int) -> tuple[int, int]:
        return 1, self.block.elements


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """See `CheckpointFormat`.

    Attributes:
        types: the block type of each quantized module, by its name.
    """

    types: Mapping[str, str]
    name: str = "gguf"

    def scheme(self, module: str) -> GgufScheme | None:
        name = self.types.get(module)
        return None if name is None else GgufScheme(_BLOCKS[name])


def read(config: Config) -> GgufFormat:
    """The format of a file whose modules have the types that `types` says.

    Raises:
        ValueError: `types` is no mapping, or names a type that has no quantized form.
    """
    types = config.get("types")
    if not isinstance(types, Mapping):
        raise refused("types", types, "an object with the type of each module")
    for name in types.values():
        if not isinstance(name, str) or name not in MATRIX_TYPES:
            raise refused("types", name, MATRIX_TYPES)
    return GgufFormat(types)
