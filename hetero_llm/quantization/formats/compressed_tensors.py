"""compressed-tensors: what llm-compressor writes.

`config_groups` has schemes, each with `targets` (class names, names, or "re:" and a regular
expression that the name begins with), the arguments of its `weights`, and perhaps a `format` of its
own; `ignore` has names and "re:" patterns of modules that are plain. Layouts, after the compressors
of the package compressed-tensors 0.20:

float-quantized, naive-quantized: `weight` [N, K] float8_e4m3fn; `weight_scale` [1], [N, 1], or
    [N / b, K / c] of blocks.
int-quantized, naive-quantized: `weight` [N, K] int8, `weight_scale` likewise, or [N, K / g].
pack-quantized: `weight_packed` [N, K x bits / 32] int32, the first column in the lowest bits; code
    c stands for c - 2 ** (bits - 1). `weight_shape` [2] is N, K. Asymmetric: `weight_zero_point`
    [N x bits / 32, K / g] int32, packed so along the rows. `weight_g_idx` [K] of "actorder":
    "group": the group of each column.
nvfp4-pack-quantized: `weight_packed` [N, K / 2] uint8, the first column in the low half;
    `weight_scale` [N, K / 16] float8_e4m3fn, which `weight_global_scale` [1] *divides*.
mxfp4-pack-quantized: `weight_packed` likewise; `weight_scale` [N, K / 32] e8m0.

Scales of activations are read over, see `fp8`. int8 has no zero points here, so asymmetric weights
of 8 bits are refused: their codes less their zero points take nine bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hetero_llm.quantization.formats.fp8 import Fp8Blocks, Fp8Rows, block_of
from hetero_llm.quantization.formats.modules import is_embedding
from hetero_llm.quantization.formats.options import (
    Config,
    choice,
    flag,
    group_of,
    names,
    pattern,
    refused,
    table,
)
from hetero_llm.quantization.formats.scheme import FLOATS, Scheme, StoredPart
from hetero_llm.quantization.formats.values import (
    E8M0_TYPES,
    bytes_of_words,
    check_finite,
    check_unused_zeros,
    finite_scale,
    in_order,
    order_of_groups,
    read_over,
    scale_of_exponents,
    scale_of_rows,
    scale_part,
    unused_zeros,
    width_of_groups,
)
from hetero_llm.quantization.matrix import QuantizedMatrix

_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)


@dataclass(frozen=True, slots=True)
class Int8(Scheme):
    """`weight` [N, K] int8. `group`: columns of a group; None: one scale, or one for each row."""

    group: int | None = None

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        scale = scale_part("weight_scale", rows)
        if self.group is not None:
            groups = columns // width_of_groups(columns, self.group, 8)
            scale = StoredPart("weight_scale", FLOATS, ((rows, groups),))
        return (
            StoredPart("weight", ("I8",), ((rows, columns),)),
            scale,
            unused_zeros(scale),
            *read_over(*_ACTIVATIONS),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        check_unused_zeros(stored)
        scale, group = stored["weight_scale"], columns
        if self.group is None:
            scale = scale_of_rows("weight_scale", scale, rows)
        else:
            scale = finite_scale("weight_scale", scale)
            group = width_of_groups(columns, self.group, 8)
        return QuantizedMatrix("int8", stored["weight"], scale, group)

    def column_step(self, columns: int) -> int:
        return self.group or 1


@dataclass(frozen=True, slots=True)
class Packed(Scheme):
    """Integers in words of 32 bits.

    Attributes:
        bits: 4 or 8.
        group: columns of a group; -1: all.
        symmetric: there are no zero points; 4 bits only.
        ordered: columns of a group need not follow one another.
    """

    bits: Literal[4, 8]
    group: int
    symmetric: bool
    ordered: bool

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        groups = columns // width_of_groups(columns, self.group, self.bits)
        each = 32 // self.bits
        scale = StoredPart("weight_scale", FLOATS, ((rows, groups),))
        if self.group == -1:
            scale = scale_part("weight_scale", rows)
        zeros = unused_zeros(scale)
        if not self.symmetric:
            zeros = StoredPart("weight_zero_point", ("I32",), ((-(-rows // each), groups),))
        parts = (
            StoredPart("weight_packed", ("I32",), ((rows, -(-columns // each)),)),
            scale,
            zeros,
            StoredPart("weight_shape", ("I64", "I32"), ((2,),), optional=True),
            *read_over(*_ACTIVATIONS),
        )
        if not self.ordered:
            return parts
        return *parts, StoredPart("weight_g_idx", ("I32", "I64"), ((columns,),))

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        if (shape := stored.get("weight_shape")) is not None and shape.tolist() != [rows, columns]:
            raise ValueError(f"weight_shape: {shape.tolist()}, its matrix is {[rows, columns]}")
        group = width_of_groups(columns, self.group, self.bits)
        scale = finite_scale("weight_scale", stored["weight_scale"])
        if self.group == -1:
            scale = scale_of_rows("weight_scale", scale, rows)
        order = None
        if self.ordered:
            order = order_of_groups("weight_g_idx", stored["weight_g_idx"], columns // group)
        data = bytes_of_words(stored["weight_packed"])
        if self.symmetric:
            check_unused_zeros(stored)
        if self.bits == 8:
            data = data[:, :columns] ^ 128
            data = (data if order is None else data[:, order.long()]).contiguous()
            return QuantizedMatrix("int8", data.view(torch.int8), scale, group, order=order)
        data = in_order(data[:, : columns // 2].contiguous(), order)
        zero = None if self.symmetric else _zeros(stored["weight_zero_point"], rows)
        return QuantizedMatrix("int4", data, scale, group, zero=zero, order=order)

    def column_step(self, columns: int) -> int:
        if self.ordered and self.group != -1:
            raise ValueError("its columns are quantized in an order of their own (actorder)")
        return 32 // self.bits if self.group == -1 else self.group

    def slice_steps(self, columns: int) -> tuple[int, int]:
        """See `Scheme`; zero points are packed by rows."""
        return 32 // self.bits, 0 if self.ordered else self.column_step(columns)


def _zeros(words: Tensor, rows: int) -> Tensor:
    """[rows, groups] uint8 from [rows / 8, groups] int32. A stored code and a stored zero point are
    both 8 more than what they stand for, so their difference is that of the codes."""
    wide = bytes_of_words(words.t())  # [groups, rows / 2]
    codes = torch.stack((wide & 15, wide >> 4), dim=-1).flatten(1)[:, :rows]
    return codes.t().contiguous()


@dataclass(frozen=True, slots=True)
class Fp4(Scheme):
    """e2m1 in bytes, with scales of groups; NVIDIA's format and the one of the OCP.

    Attributes:
        packed: suffix of the codes.
        kind: "nv": e4m3 scales of 16 columns and one of the matrix; "mx": e8m0 scales of 32.
        whole: suffix of the scale of the matrix.
        divides: that scale divides; False: it multiplies.
    """

    kind: Literal["nv", "mx"]
    packed: str = "weight_packed"
    whole: str = "weight_global_scale"
    divides: bool = True
    activations: tuple[str, ...] = _ACTIVATIONS

    @property
    def group(self) -> int:
        """Columns of a group."""
        return 16 if self.kind == "nv" else 32

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        groups = columns // width_of_groups(columns, self.group, 4)
        packed = StoredPart(self.packed, ("U8",), ((rows, columns // 2),))
        if self.kind == "mx":
            scale = StoredPart("weight_scale", E8M0_TYPES, ((rows, groups),))
            return packed, scale, *read_over(*self.activations)
        return (
            packed,
            StoredPart("weight_scale", ("F8_E4M3",), ((rows, groups),)),
            StoredPart(self.whole, FLOATS, ((1,), (), (1, 1))),
            *read_over(*self.activations),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        data, scale = stored[self.packed], stored["weight_scale"]
        if self.kind == "mx":
            return QuantizedMatrix(
                "fp4", data, scale_of_exponents("weight_scale", scale), self.group
            )
        check_finite("weight_scale", scale)
        whole = stored[self.whole].float().reshape(1)
        if self.divides:
            whole = 1 / whole
        check_finite(self.whole if not self.divides else f"1 / {self.whole}", whole)
        return QuantizedMatrix(
            "fp4", data, scale, self.group, row_scale=whole.expand(rows).contiguous()
        )

    def column_step(self, columns: int) -> int:
        return self.group


class _Names:
    """Names, and patterns after "re:" that they begin with."""

    def __init__(self, key: str, entries: tuple[str, ...]) -> None:
        self.exact = frozenset(one for one in entries if not one.startswith("re:"))
        self._patterns = tuple(
            pattern(key, one.removeprefix("re:")) for one in entries if one.startswith("re:")
        )

    def __contains__(self, module: str) -> bool:
        return module in self.exact or any(one.match(module) for one in self._patterns)


class CompressedTensorsFormat:
    """See `CheckpointFormat` and `read`.

    Args:
        groups: the targets of each scheme.
    """

    name = "compressed-tensors"

    def __init__(self, groups: list[tuple[_Names, Scheme]], ignored: _Names) -> None:
        self._groups, self._ignored = groups, ignored

    def scheme(self, module: str) -> Scheme | None:
        """See `CheckpointFormat`. A target that names the module goes before its class."""
        if module in self._ignored:
            return None
        kind = "Embedding" if is_embedding(module) else "Linear"
        named = [scheme for targets, scheme in self._groups if module in targets]
        of_class = [scheme for targets, scheme in self._groups if kind in targets.exact]
        return next(iter(named + of_class), None)


def read(config: Config) -> CompressedTensorsFormat:
    """The format of a config whose `quant_method` is "compressed-tensors".

    Raises:
        ValueError: an option is not supported.
    """
    sparsity = table(config, "sparsity_config").get("format")
    if sparsity not in (None, "dense"):
        raise refused("sparsity_config.format", sparsity, ("dense",))
    if config.get("transform_config"):
        raise ValueError("transform_config is not supported: rotations of activations")
    groups = []
    for name, group in table(config, "config_groups").items():
        key = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise refused(key, group, "an object with targets and weights")
        if group.get("weights") is None:
            continue  # of activations or of the cache alone
        targets = _Names(f"{key}.targets", names(group, "targets"))
        form = group.get("format") or config.get("format")
        scheme = _scheme(form, table(group, "weights"), f"{key}.weights")
        groups.append((targets, scheme))
    if not groups and not config.get("kv_cache_scheme"):
        raise refused("config_groups", config.get("config_groups"), "a group with weights")
    return CompressedTensorsFormat(groups, _Names("ignore", names(config, "ignore")))


def _scheme(form: object, weights: dict[str, Any], key: str) -> Scheme:
    """The scheme of a group by its format and the arguments of its weights."""
    if form not in _FORMATS:
        raise refused("format", form, _FORMATS)
    prefixed = {f"{key}.{name}": value for name, value in weights.items()}

    def one_of(name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        return choice(prefixed, f"{key}.{name}", supported, default)

    if flag(prefixed, f"{key}.dynamic", False):
        raise refused(f"{key}.dynamic", True, (False,))
    symmetric = flag(prefixed, f"{key}.symmetric", True)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        one_of("num_bits", (4,))
        one_of("type", ("float",))
        kind: Literal["nv", "mx"] = "nv" if form == "nvfp4-pack-quantized" else "mx"
        one_of("group_size", (Fp4(kind).group,), Fp4(kind).group)
        one_of("strategy", ("tensor_group", "group") if kind == "nv" else ("group",), "group")
        one_of("symmetric", (True,), True)
        return Fp4(kind)
    if form == "pack-quantized":
        one_of("type", ("int",), "int")
        bits = one_of("num_bits", (4, 8))
        if bits == 8:
            one_of("symmetric", (True,), True)
        order = weights.get("actorder")
        if order not in (None, False, "weight", "static", "group", "dynamic", True):
            raise refused(f"{key}.actorder", order, ("weight", "group"))
        strategy = one_of("strategy", ("group", "channel"), _strategy(weights))
        group = -1
        if strategy == "group":
            group = group_of(f"{key}.group_size", weights.get("group_size"))
        return Packed(bits, group, symmetric, order in ("group", "dynamic", True))
    one_of("num_bits", (8,), 8)
    one_of("symmetric", (True,), True)
    kind_of = one_of("type", ("int", "float"), "int")
    if form == "int-quantized" and kind_of != "int":
        raise refused(f"{key}.type", kind_of, ("int",))
    if form == "float-quantized" and kind_of != "float":
        raise refused(f"{key}.type", kind_of, ("float",))
    if kind_of == "int":
        strategy = one_of("strategy", ("tensor", "channel", "group"), _strategy(weights))
        if strategy == "group":
            return Int8(group_of(f"{key}.group_size", weights.get("group_size")))
        return Int8()
    strategy = one_of("strategy", ("tensor", "channel", "block"), _strategy(weights))
    if strategy == "block":
        block = block_of(f"{key}.block_structure", weights.get("block_structure"))
        return Fp8Blocks(block, activations=_ACTIVATIONS)
    return Fp8Rows(activations=_ACTIVATIONS)


def _strategy(weights: dict[str, Any]) -> str:
    """What compressed-tensors infers where no strategy is given."""
    size = weights.get("group_size")
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"
