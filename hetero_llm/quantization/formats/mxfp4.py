"""The "mxfp4" method of gpt-oss: experts stored together, as e2m1 with e8m0 scales.

Layout (transformers' `_convert_moe_packed_tensors`): of a module's bank of matrices "gate_up_proj",
`gate_up_proj_blocks` [E, R, K / 32, 16] uint8, the first column in the low half, and
`gate_up_proj_scales` [E, R, K / 32] e8m0, for [E, R, K]; "down_proj" likewise. All else is plain.
Banks are read as matrices of E x R rows. `Linear` layers in MXFP4 are those of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hetero_llm.quantization.formats.modules import PlainModules
from hetero_llm.quantization.formats.options import Config, names
from hetero_llm.quantization.formats.scheme import ANY_LENGTH, Scheme, StoredPart
from hetero_llm.quantization.formats.values import (
    E8M0_TYPES,
    scale_of_exponents,
    width_of_groups,
)
from hetero_llm.quantization.matrix import QuantizedMatrix

_GROUP = 32
_BANKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Mxfp4Bank:
    """A bank of matrices. Its module is called "...experts.gate_up_proj" here, to which the files
    join "blocks" and "scales" by "_"."""

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        """See `Scheme`. `rows`: of all experts."""
        groups = columns // width_of_groups(columns, _GROUP, 4)
        half = _GROUP // 2
        experts = (ANY_LENGTH, ANY_LENGTH, groups)
        return (
            StoredPart("blocks", ("U8",), ((*experts, half), (rows, groups, half)), joint="_"),
            StoredPart("scales", E8M0_TYPES, (experts, (rows, groups)), joint="_"),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        """See `Scheme`."""
        blocks, exponents = stored["blocks"], stored["scales"]
        if blocks.shape[:-1] != exponents.shape or blocks.numel() != rows * columns // 2:
            raise ValueError(
                f"blocks are {list(blocks.shape)} and scales {list(exponents.shape)}, their "
                f"matrices have {rows} rows of {columns} columns"
            )
        scale = scale_of_exponents("scales", exponents.reshape(rows, -1))
        return QuantizedMatrix("fp4", blocks.reshape(rows, columns // 2), scale, _GROUP)


class Mxfp4Format:
    """See `CheckpointFormat` and `read`."""

    name = "mxfp4"

    def __init__(self, plain: PlainModules) -> None:
        self._plain = plain

    def scheme(self, module: str) -> Scheme | None:
        """See `CheckpointFormat`."""
        parent, _, last = module.rpartition(".")
        banked = last in _BANKS and parent.rpartition(".")[2] == "experts"
        return Mxfp4Bank() if banked and module not in self._plain else None


def read(config: Config) -> Mxfp4Format:
    """The format of a config whose `quant_method` is "mxfp4".

    Raises:
        ValueError: an option is not supported.
    """
    key = "modules_to_not_convert"
    return Mxfp4Format(PlainModules(key, names(config, key)))
