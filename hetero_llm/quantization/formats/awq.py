"""AWQ, version "gemm": what AutoAWQ, GPTQModel and AutoRound ("auto_awq" packing) write.

Layout (AutoAWQ's `WQLinear_GEMM.from_linear`): `qweight` [K, N / 8] int32 and `qzeros`
[K / g, N / 8] int32 are packed along N, and position i of a word, its lowest 4 bits being position
0, has code (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight; `scales` [K / g, N]. Element (k, n) of the
transposed matrix is scales[k // g, n] * (code - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_llm.quantization.formats.modules import PlainModules, UniformFormat
from hetero_llm.quantization.formats.options import Config, first_of, group_of, names, refused
from hetero_llm.quantization.formats.scheme import FLOATS, Scheme, StoredPart
from hetero_llm.quantization.formats.values import (
    bytes_of_words,
    finite_scale,
    width_of_groups,
)
from hetero_llm.quantization.matrix import INT4_ZERO, QuantizedMatrix, pack_codes


@dataclass(frozen=True, slots=True)
class AwqScheme(Scheme):
    """One matrix; see the head of this file.

    Attributes:
        group: columns of a group; -1: all.
    """

    group: int

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        if rows % 8:
            raise ValueError(
                f"4 bits are packed 8 to a word, which does not divide its {rows} rows"
            )
        groups = columns // width_of_groups(columns, self.group, 4)
        return (
            StoredPart("qweight", ("I32",), ((columns, rows // 8),)),
            StoredPart("qzeros", ("I32",), ((groups, rows // 8),)),
            StoredPart("scales", FLOATS, ((groups, rows),)),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        group = width_of_groups(columns, self.group, 4)
        scale = finite_scale("scales", stored["scales"].t().contiguous())
        codes = _codes(stored["qzeros"])
        zero = None if bool((codes == INT4_ZERO).all()) else codes.t().contiguous()
        data = pack_codes(_codes(stored["qweight"]).t()).contiguous()
        return QuantizedMatrix("int4", data, scale, group, zero=zero)

    def column_step(self, columns: int) -> int:
        return 2 if self.group == -1 else self.group

    def slice_steps(self, columns: int) -> tuple[int, int]:
        return 8, self.column_step(columns)


def _codes(words: Tensor) -> Tensor:
    """[A, B] int32 -> [A, 8 B] uint8."""
    height = words.shape[0]
    halves = bytes_of_words(words).view(height, -1, 4)
    # Low halves are codes 0, 4, 1, 5 of the eight, high halves 2, 6, 3, 7.
    low, high = halves & 15, halves >> 4
    both = torch.stack((low[..., 0::2], high[..., 0::2], low[..., 1::2], high[..., 1::2]), dim=2)
    return both.reshape(height, -1)


def read(config: Config) -> UniformFormat:
    """The format of a config whose `quant_method` is "awq", or of the older quant_config.json,
    where keys are "w_bit" and "q_group_size".

    Raises:
        ValueError: an option is not supported.
    """
    version = first_of(config, ("version", "format", "checkpoint_format"), "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise refused("version", version, ("gemm",))
    key = "modules_to_not_convert"
    return UniformFormat("awq", scheme_of(config), PlainModules(key, names(config, key)))


def scheme_of(config: Config) -> AwqScheme:
    """The scheme of a module with these options.

    Raises:
        ValueError: one of them is not supported.
    """
    bits = first_of(config, ("bits", "w_bit"), 4)
    if type(bits) is not int or bits != 4:
        raise refused("bits", bits, (4,))
    return AwqScheme(group_of("group_size", first_of(config, ("group_size", "q_group_size"), 128)))
