"""Methods "fp8" and "fbgemm_fp8": e4m3 weights with a scale of the matrix, of rows, or of blocks.

Layout (transformers' `FineGrainedFP8Config` and `FP8Linear`, vLLM's `Fp8LinearMethod`):
`weight` [N, K] float8_e4m3fn; its scale is what the stored number is multiplied with, although the
block scale of DeepSeek and Qwen is called `weight_scale_inv`. With `weight_block_size` [b, c] the
scale is [ceil(N / b), ceil(K / c)], the last blocks ragged, float32, bfloat16 or e8m0; without, it
is one number (AutoFP8, Mistral) or [N] or [N, 1] (FBGEMM). Scales of activations (`input_scale`,
`activation_scale`, of "activation_scheme": "static") are read over: products are weight-only, or
quantize activations with scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_llm.quantization.formats.modules import PlainModules, UniformFormat
from hetero_llm.quantization.formats.options import Config, choice, first_of, names, refused
from hetero_llm.quantization.formats.scheme import FLOATS, Scheme, StoredPart
from hetero_llm.quantization.formats.values import (
    E8M0_TYPES,
    check_unused_zeros,
    finite_scale,
    read_over,
    scale_of_exponents,
    scale_of_rows,
    scale_part,
    unused_zeros,
)
from hetero_llm.quantization.matrix import BLOCK_ROWS, QuantizedMatrix

_SPELLINGS = ("weight_scale", "weight_scale_inv")
_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_inv", "input_scale_ub")
_FMTS = ("e4m3", "float8_e4m3fn")
_OF_EXPERTS = ("gate_up_proj_scale_inv", "down_proj_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8Rows(Scheme):
    """One scale, or one for each row.

    Attributes:
        spellings: suffixes that the scale may have.
        activations: suffixes of scales of activations.
    """

    spellings: tuple[str, ...] = ("weight_scale",)
    activations: tuple[str, ...] = ("input_scale",)

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        one = len(self.spellings) > 1
        scales = tuple(scale_part(suffix, rows, optional=one) for suffix in self.spellings)
        return (
            StoredPart("weight", ("F8_E4M3",), ((rows, columns),)),
            *scales,
            unused_zeros(scales[0]),
            *read_over(*self.activations),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        check_unused_zeros(stored)
        suffix = _only(stored, self.spellings)
        scale = scale_of_rows(suffix, stored[suffix], rows)
        return QuantizedMatrix("fp8", stored["weight"], scale, columns)

    def column_step(self, columns: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Fp8Blocks(Scheme):
    """One scale for each block of rows and columns; see `Fp8Rows`.

    Attributes:
        block: rows and columns of a block.
        flat: whether the scale is [blocks, blocks]; False: [blocks, 1, blocks, 1].
    """

    block: tuple[int, int]
    spellings: tuple[str, ...] = ("weight_scale",)
    activations: tuple[str, ...] = ("input_scale",)
    flat: bool = True

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        high, wide = -(-rows // self.block[0]), -(-columns // self.block[1])
        shape = (high, wide) if self.flat else (high, 1, wide, 1)
        one, types = len(self.spellings) > 1, (*FLOATS, *E8M0_TYPES)
        scales = tuple(StoredPart(suffix, types, (shape,), one) for suffix in self.spellings)
        return (
            StoredPart("weight", ("F8_E4M3",), ((rows, columns),)),
            *scales,
            unused_zeros(scales[0]),
            *read_over(*self.activations),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        """See `Scheme`. Blocks of other than `BLOCK_ROWS` rows become a scale of each row."""
        check_unused_zeros(stored)
        suffix = _only(stored, self.spellings)
        scale = stored[suffix].flatten(1)
        if scale.dtype == torch.uint8:
            scale = scale_of_exponents(suffix, scale)
        scale = finite_scale(suffix, scale)
        high, wide = self.block
        if high != BLOCK_ROWS:
            scale = scale.repeat_interleave(high, 0)[:rows]
        height = BLOCK_ROWS if high == BLOCK_ROWS else 1
        return QuantizedMatrix("fp8", stored["weight"], scale.contiguous(), wide, height)

    def column_step(self, columns: int) -> int:
        return self.block[1]

    def slice_steps(self, columns: int) -> tuple[int, int]:
        return self.block[0], self.column_step(columns)


def _only(stored: Mapping[str, Tensor], spellings: tuple[str, ...]) -> str:
    """The one of several suffixes that is stored."""
    found = [suffix for suffix in spellings if suffix in stored]
    if len(found) != 1:
        many = "both" if found else "neither"
        raise ValueError(f"{many} of {' and '.join(spellings)} is stored, one is needed")
    return found[0]


def is_unused_scale(config: Config, name: str, is_plain: Callable[[str], bool]) -> bool:
    """Whether a stored tensor is a scale beside a plain weight. transformers' writer leaves a
    matrix plain that its blocks do not divide, and its `FP8Linear` multiplies with it as it is.

    Args:
        is_plain: whether a stored tensor has a float type of 16 bits or more.
    """
    module, _, suffix = name.rpartition(".")
    fp8 = config.get("quant_method") == "fp8" and suffix in _SPELLINGS
    return fp8 and is_plain(f"{module}.weight")


def is_scale_of_experts(name: str) -> bool:
    """Whether a stored tensor has the scales of all experts of a layer, while their weights are
    stored one by one: transformers 5.23 writes mixtures so that it quantizes itself."""
    parent, _, last = name.rpartition(".")
    return parent.endswith(".experts") and last in _OF_EXPERTS


def read(config: Config) -> UniformFormat:
    """The format of a config whose `quant_method` is "fp8" or "fbgemm_fp8".

    Raises:
        ValueError: an option is not supported.
    """
    choice(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    choice(config, "fmt", _FMTS, _FMTS[0])
    choice(config, "expert_dtype", ("fp8",), "fp8")
    key = "modules_to_not_convert"
    if not config.get(key):
        key = "ignored_layers"
    plain = PlainModules(key, names(config, key))
    size = first_of(config, ("weight_block_size",))
    if size is None:
        return UniformFormat("fp8", Fp8Rows(_SPELLINGS, _ACTIVATIONS), plain)
    blocks = Fp8Blocks(block_of("weight_block_size", size), _SPELLINGS, _ACTIVATIONS)
    return UniformFormat("fp8", blocks, plain)


def block_of(key: str, value: object) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        ValueError: it is something else.
    """
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(type(one) is int and one > 0 for one in value)
    ):
        raise refused(key, value, "[rows, columns]")
    return value[0], value[1]
