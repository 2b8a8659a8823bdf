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
        return any(
            len(one) == len(shape)
            and all(length in (ANY_LENGTH, found) for length, found in zip(one, shape, strict=True))
            for one in self.shapes
        )


class Scheme(Protocol):
    """How a format stores one matrix."""

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
