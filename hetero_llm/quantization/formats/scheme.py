"""What a reader of a checkpoint format returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hetero_llm.quantization.matrix import QuantizedMatrix

FLOATS = ("F64", "F32", "F16", "BF16")
"""Names of safetensors for the types of plain weights."""

ANY_LENGTH = -1


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor that a quantized matrix has in the files.

    Attributes:
        suffix: behind the module's name and `joint`: "qweight".
        types: names of safetensors for the types it may have.
        shapes: that it may have, `ANY_LENGTH` for a length that only the stored values tell; the
            first one is what an error says.
        optional: the matrix may lack it.
        joint: between the module's name and the suffix; only banks of experts have another one.
    """

    suffix: str
    types: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False
    joint: str = "."

    def name_in(self, module: str) -> str:
        """The tensor's name in the files."""
        return f"{module}{self.joint}{self.suffix}"

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether it may have this shape."""
        return any(admits(one, shape) for one in self.shapes)


def admits(wanted: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` may stand where one of `StoredPart.shapes` is wanted."""
    return len(wanted) == len(shape) and all(
        length in (ANY_LENGTH, found) for length, found in zip(wanted, shape, strict=True)
    )


class Scheme(Protocol):
    """How a format stores one matrix. Schemes derive from it."""

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        """The tensors of a matrix of this size.

        Raises:
            ValueError: no such matrix can be stored so, with the reason and the numbers: a number
                of columns that the group does not divide.
        """
        ...

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        """The matrix, on the device of the stored tensors.

        Args:
            stored: by suffix, types and shapes as of `parts`; float8 and integer types as torch
                has them, e8m0 scales as uint8.

        Raises:
            ValueError: the values cannot be those of a matrix, with the reason: scales that are
                not finite, an order of columns that names one twice.
        """
        ...

    def column_step(self, columns: int) -> int:
        """What the first column and the number of columns of a rank's part are multiples of.

        Raises:
            ValueError: columns cannot be cut, with the reason: they are in an order of their own.
        """
        ...

    def slice_steps(self, columns: int) -> tuple[int, int]:
        """What the first one and the number of rows, and of columns, must be multiples of where
        `convert` makes a part of the matrix from the same part of its tensors; 0: it makes a part
        from the whole tensors alone. Tensors are cut along the dims that `parts` makes longer for a
        larger matrix."""
        return 1, self.column_step(columns)


class CheckpointFormat(Protocol):
    """How a checkpoint stores its matrices."""

    @property
    def name(self) -> str:
        """What users call it: "gptq"."""
        ...

    def scheme(self, module: str) -> Scheme | None:
        """Of the matrix of a module ("model.layers.0.self_attn.q_proj"); None: it is stored as a
        plain weight."""
        ...
