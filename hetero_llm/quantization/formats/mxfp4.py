"""The "mxfp4" method of gpt-oss: experts stored together, as e2m1 with e8m0 scales.

Layout (transformers' `_convert_moe_packed_tensors`): of a module's bank of matrices "gate_up_proj",
`gate_up_proj_blocks` [E, R, K / 32, 16] uint8, the first column in the low half, and
`gate_up_proj_scales` [E, R, K / 32] e8m0, for [E, R, K]; "down_proj" likewise. All else is plain.
Banks are read as matrices of E x R rows. `Linear` layers in MXFP4 are those of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_llm.quantization.formats.modules import PlainModules
from hetero_llm.quantization.formats.options import Config, names
from hetero_llm.quantization.formats.scheme import ANY_LENGTH, Scheme, StoredPart
from hetero_llm.quantization.formats.values import (
    E8M0_TYPES,
    scale_of_exponents,
    width_of_groups,
)
from hetero_llm.quantization.matrix import FP4_VALUES, QuantizedMatrix, pack_codes

_GROUP = 32
_BANKS = ("gate_up_proj", "down_proj")
_ROWS_AT_ONCE = 1 << 12
_LEAST = 2.0**-120  # of a group's largest number: its scale is a normal number of bfloat16


@dataclass(frozen=True, slots=True)
class Mxfp4Bank(Scheme):
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
        blocks, exponents = stored["blocks"], stored["scales"]
        if blocks.shape[:-1] != exponents.shape or blocks.numel() != rows * columns // 2:
            raise ValueError(
                f"blocks are {list(blocks.shape)} and scales {list(exponents.shape)}, their "
                f"matrices have {rows} rows of {columns} columns"
            )
        scale = scale_of_exponents("scales", exponents.reshape(rows, -1))
        return QuantizedMatrix("fp4", blocks.reshape(rows, columns // 2), scale, _GROUP)

    def column_step(self, columns: int) -> int:
        return _GROUP


class Mxfp4Format:
    """See `CheckpointFormat` and `read`."""

    name = "mxfp4"

    def __init__(self, plain: PlainModules) -> None:
        self._plain = plain

    def scheme(self, module: str) -> Scheme | None:
        parent, _, last = module.rpartition(".")
        banked = last in _BANKS and parent.rpartition(".")[2] == "experts"
        return Mxfp4Bank() if banked and module not in self._plain else None


def quantize(weight: Tensor) -> QuantizedMatrix:
    """The matrix that MXFP4 makes of [N, K] floats: a group's scale is the power of two that
    brings its largest number to 4 and more, and beyond 6 numbers are cut (OCP Microscaling Formats
    1.0, section 6.3). For random weights: checkpoints come quantized.

    Raises:
        ValueError: groups do not divide the columns.
    """
    width_of_groups(weight.shape[1], _GROUP, 4)
    parts = [_quantized_rows(rows) for rows in weight.split(_ROWS_AT_ONCE)]
    codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedMatrix("fp4", codes, scales, _GROUP)


def _quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes [N, K / 2], scales [N, K / 32] bfloat16."""
    groups = weight.float().view(len(weight), -1, _GROUP)
    largest = groups.abs().amax(2, keepdim=True).clamp_(min=_LEAST)
    scale = (largest.log2().floor() - 2).exp2()
    values = torch.tensor(FP4_VALUES[:8], device=weight.device)
    codes = torch.bucketize(groups.abs() / scale, (values[1:] + values[:-1]) / 2)
    codes = torch.where(groups < 0, codes + 8, codes)
    return pack_codes(codes.view(weight.shape)), scale.squeeze(2).bfloat16()


def read(config: Config) -> Mxfp4Format:
    """The format of a config whose `quant_method` is "mxfp4".

    Raises:
        ValueError: an option is not supported.
    """
    key = "modules_to_not_convert"
    return Mxfp4Format(PlainModules(key, names(config, key)))
