"""bitsandbytes: nf4, fp4, and int8 of LLM.int8().

Layout of 4 bits (`QuantState.as_dict`, `quantize_4bit` of bitsandbytes 0.50): the matrix is
flattened, so a block of 64 (or another number of) values that follow one another is of one row
where blocks divide the columns. `weight` [N x K / 2, 1] uint8, the first value in the *high* half;
`weight.absmax` [blocks], which is the block's scale; `weight.quant_map` [16], the values of the
codes; `weight.quant_state.bitsandbytes__nf4` the bytes of a JSON object with the size of a block.
Quantized twice, `absmax` is uint8: block i has the scale nested_quant_map[absmax[i]] x
nested_absmax[i // nested_blocksize] + nested_offset.

fp4 of bitsandbytes is not e2m1: its values are 0, 1/192, 2/12, 3/12, 4/12, 6/12, 8/12 and 1. Times
twelve all are e4m3 numbers, so it becomes fp8 with scales of blocks, but for a rounding of the
scales in float32 exactly, in twice the bytes.

int8: `weight` [N, K] int8, `SCB` [N] float32, which is 127 times the scale of a row. Products are
weight-only, so outliers of activations need no products of their own, and `llm_int8_threshold` has
no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hetero_llm.quantization.formats.modules import PlainModules, UniformFormat
from hetero_llm.quantization.formats.options import Config, choice, flag, names
from hetero_llm.quantization.formats.scheme import ANY_LENGTH, Scheme, StoredPart
from hetero_llm.quantization.formats.values import check_finite, finite_scale
from hetero_llm.quantization.matrix import NF4_VALUES, QuantizedMatrix

_FP4_TIMES_12 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4_LARGEST = 12.0
_INT8_LARGEST = 127.0
_BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
_MAP_TOLERANCE = 1e-4
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class FourBits(Scheme):
    """nf4 or fp4; see the head of this file."""

    kind: Literal["nf4", "fp4"]

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        """See `Scheme`. The config does not name the size of blocks: all that divide the columns
        are allowed."""
        sizes = [size for size in _BLOCKS if columns % size == 0]
        if not sizes:
            raise ValueError(f"blocks of {_BLOCKS[0]} columns do not divide its {columns} columns")
        blocks = tuple((rows * columns // size,) for size in sizes)
        nested = tuple(
            StoredPart(f"weight.{name}", ("F32",), (shape,), optional=True)
            for name, shape in (("nested_absmax", (ANY_LENGTH,)), ("nested_quant_map", (256,)))
        )
        return (
            StoredPart("weight", ("U8",), ((rows * columns // 2, 1), (rows * columns // 2,))),
            StoredPart("weight.absmax", ("F32", "U8"), blocks),
            StoredPart("weight.quant_map", ("F32",), ((16,),)),
            StoredPart(self._state, ("U8",), ((ANY_LENGTH,),)),
            *nested,
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        state = self._read_state(stored[self._state])
        if state.get("quant_type") != self.kind or state.get("shape") != [rows, columns]:
            raise ValueError(
                f"{self._state}: {state.get('quant_type')} of {state.get('shape')}, its matrix is "
                f"{self.kind} of {[rows, columns]}"
            )
        absmax = stored["weight.absmax"]
        size = rows * columns // absmax.numel()
        if state.get("blocksize") != size:
            raise ValueError(
                f"{self._state}: blocksize={state.get('blocksize')}, stored are {size}"
            )
        values: tuple[float, ...] = NF4_VALUES
        if self.kind == "fp4":
            positive = tuple(one / _FP4_LARGEST for one in _FP4_TIMES_12)
            values = positive + tuple(-one for one in positive)
        found = stored["weight.quant_map"].float()
        if not torch.allclose(found, found.new_tensor(values), rtol=0, atol=_MAP_TOLERANCE):
            raise ValueError(f"weight.quant_map: not the values of {self.kind}")
        scale = _unnested(stored, state) if absmax.dtype == torch.uint8 else absmax
        check_finite("weight.absmax", scale)
        scale = scale.float().reshape(rows, -1).contiguous()
        data = stored["weight"].reshape(rows, -1)
        if self.kind == "nf4":
            return QuantizedMatrix("nf4", (data >> 4) | (data << 4), scale, size)
        codes = torch.stack((data >> 4, data & 15), dim=-1).flatten(1)
        eighths = torch.tensor(_FP4_TIMES_12, device=data.device)
        table = torch.cat((eighths, -eighths)).to(torch.float8_e4m3fn)
        # An index is eight bytes an element, so a part of the rows at a time.
        looked_up = [table.view(torch.uint8)[part.long()] for part in codes.split(_ROWS_AT_ONCE)]
        data = torch.cat(looked_up).view(torch.float8_e4m3fn)
        return QuantizedMatrix("fp8", data, scale / _FP4_LARGEST, size)

    def column_step(self, columns: int) -> int:
        """See `Scheme`; a larger block is found when its tensors are read."""
        return min(_BLOCKS)

    def slice_steps(self, columns: int) -> tuple[int, int]:
        return 0, 0

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def _read_state(self, stored: Tensor) -> dict[str, Any]:
        """The JSON object of the bytes."""
        try:
            state = json.loads(bytes(stored.cpu().numpy()))
        except ValueError as error:
            raise ValueError(f"{self._state}: no JSON: {error}") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self._state}: no JSON object")
        return state


def _unnested(stored: Mapping[str, Tensor], state: dict[str, Any]) -> Tensor:
    """[blocks] float32 from an absmax that is quantized itself."""
    suffixes = ("weight.nested_absmax", "weight.nested_quant_map")
    if missing := [suffix for suffix in suffixes if suffix not in stored]:
        raise ValueError(f"weight.absmax is quantized, and {' and '.join(missing)} missing")
    outer, values = (stored[suffix].float() for suffix in suffixes)
    codes = stored["weight.absmax"]
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or outer.numel() != -(-codes.numel() // max(size, 1)):
        raise ValueError(
            f"weight.nested_absmax: {outer.numel()} values, for {codes.numel()} blocks by {size}"
        )
    if not isinstance(offset, int | float):
        raise ValueError(f"nested_offset={offset!r}, a number is needed")
    return values[codes.long()] * outer.repeat_interleave(size)[: codes.numel()] + offset


@dataclass(frozen=True, slots=True)
class Int8Rows(Scheme):
    """LLM.int8(); see the head of this file."""

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        return (
            StoredPart("weight", ("I8",), ((rows, columns),)),
            StoredPart("SCB", ("F32", "F16", "BF16"), ((rows,),)),
            StoredPart("weight_format", ("U8", "I64", "I32"), ((), (1,)), optional=True),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        """See `Scheme`. Older releases had orders of `weight` for single GPUs, refused here."""
        form = stored.get("weight_format")
        if form is not None and int(form) != 0:
            raise ValueError(f"weight_format: {int(form)}, only 0 (rows) can be read")
        scale = finite_scale("SCB", stored["SCB"]).float().reshape(rows, 1) / _INT8_LARGEST
        return QuantizedMatrix("int8", stored["weight"], scale, columns)

    def column_step(self, columns: int) -> int:
        return 1


def read(config: Config) -> UniformFormat:
    """The format of a config whose `quant_method` is "bitsandbytes".

    Raises:
        ValueError: an option is not supported.
    """
    key = "llm_int8_skip_modules"
    eight, four = (
        flag(config, one, False) or flag(config, f"_{one}", False)
        for one in ("load_in_8bit", "load_in_4bit")
    )
    if eight == four:
        both = "both" if eight else "neither"
        raise ValueError(f"load_in_4bit and load_in_8bit: {both}, one is needed")
    # A list that does not name the head means a quantized head, as in transformers.
    plain, head = PlainModules(key, names(config, key)), bool(config.get(key))
    if eight:
        choice(config, "llm_int8_has_fp16_weight", (False,), False)
        return UniformFormat("bitsandbytes", Int8Rows(), plain, head)
    choice(config, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    kind = choice(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return UniformFormat("bitsandbytes", FourBits(kind), plain, head)
