"""The one form in which the engine holds a quantized weight matrix.

Readers of checkpoint formats (`formats`) and quantizers (`online`) make it, kernels multiply with
it, and the functions here are what those are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["fp8", "int8", "int4", "fp4", "nf4"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*_FP4_POSITIVE, *(-value for value in _FP4_POSITIVE))
"""e2m1 by code (OCP Microscaling Formats 1.0, table 5)."""

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat by code (QLoRA, Dettmers et al. 2023, appendix E), as bitsandbytes has them."""

INT4_ZERO = 8
"""What code of int4 stands for zero where no zero points are stored."""

BLOCK_ROWS = 128
_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix of N rows (outputs) and K columns (inputs). Its element (n, k) is

        row_scale[n] * (scale[n // rows, g] * (element - zero[n, g]) + offset[n, g])

    where g = k // group and the element is the number that the code in `data` stands for. All
    tensors are contiguous, on one device.

    Attributes:
        kind: of the elements. fp8 is e4m3fn, fp4 e2m1.
        data: fp8: [N, K] float8_e4m3fn. int8: [N, K] int8. Of 4 bits: [N, K / 2] uint8, column 2j
            in the low half of byte j and column 2j + 1 in its high half.
        scale: [ceil(N / rows), ceil(K / group)] float32, float16, bfloat16 or float8_e4m3fn.
        group: columns that share a scale; K or more where there is one for each row.
        rows: rows that share a scale: 1, or `BLOCK_ROWS`.
        zero: [N, K / group] uint8, int4 with rows 1 only; None: `INT4_ZERO` for int4, 0 for others.
        offset: [N, K / group] of the scale's dtype, int4 only, and then `zero` is None and counts
            as 0; None: no offset.
        row_scale: [N] float32; None: 1.
        order: [K] int32: column k of `data` is column order[k] of the matrix; None: in order.
            Groups are of columns as `data` has them. [E, K]: a `stack` of E matrices, each of which
            has an order of its own.
    """

    kind: Kind
    data: Tensor
    scale: Tensor
    group: int
    rows: int = 1
    zero: Tensor | None = None
    offset: Tensor | None = None
    row_scale: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        height, width = self.shape
        groups = -(-width // self.group)
        assert self.kind in KINDS and self.rows in (1, BLOCK_ROWS) and self.group > 0
        assert self.data.dtype == _DATA_DTYPES[self.kind] and self.data.is_contiguous()
        assert self.scale.shape == (-(-height // self.rows), groups), (self.scale.shape, self.shape)
        assert self.scale.dtype in _SCALE_DTYPES and self.scale.is_contiguous()
        assert (self.kind in ("fp8", "int8")) or self.group % 2 == 0
        if self.zero is not None:
            assert self.kind == "int4" and self.rows == 1 and self.offset is None
            assert self.zero.shape == (height, groups) and self.zero.dtype == torch.uint8
        if self.offset is not None:
            assert self.kind == "int4" and self.rows == 1
            assert self.offset.shape == (height, groups) and self.offset.dtype == self.scale.dtype
        if self.row_scale is not None:
            assert self.row_scale.shape == (height,) and self.row_scale.dtype == torch.float32
        if self.order is not None:
            assert self.order.shape[-1] == width and self.order.dtype == torch.int32
            assert height * width % self.order.numel() == 0 and self.order.dim() <= 2

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        height, width = self.data.shape
        return height, width * _PER_BYTE[self.kind]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> QuantizedMatrix:
        """The same on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)


_DATA_DTYPES: dict[Kind, torch.dtype] = {
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
    "int4": torch.uint8, "fp4": torch.uint8, "nf4": torch.uint8,
}  # fmt: skip
_PER_BYTE: dict[Kind, int] = {"fp8": 1, "int8": 1, "int4": 2, "fp4": 2, "nf4": 2}


class QuantizedWeight(nn.Module):
    """A `QuantizedMatrix` in the place of a `Linear`'s weight; its tensors are buffers."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        for name, tensor in matrix.tensors().items():
            self.register_buffer(name, tensor)

    def release(self) -> None:
        """Lets go of the memory; shape and kind stay. For a product with a form of its own."""
        self.matrix = self.matrix.to("meta")
        for name, tensor in self.matrix.tensors().items():
            self.register_buffer(name, tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """N, K."""
        return self.matrix.shape

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def extra_repr(self) -> str:
        matrix = self.matrix
        return f"{list(self.shape)}, {matrix.kind}, group={matrix.group}, rows={matrix.rows}"


class QuantizedStack(QuantizedWeight):
    """The same in the place of weights [count, N, K]: `matrix` is the `stack` of them."""

    def __init__(self, matrix: QuantizedMatrix, count: int) -> None:
        super().__init__(matrix)
        self.count = count

    @property
    def shape(self) -> tuple[int, ...]:
        """count, N, K."""
        height, width = self.matrix.shape
        return self.count, height // self.count, width

    def __getitem__(self, place: int) -> QuantizedMatrix:
        parts: dict[str, Any] = {
            name: tensor.view(self.count, -1, *tensor.shape[1:])[place]
            for name, tensor in self.matrix.tensors().items()
        }
        return replace(self.matrix, **parts)


def pack_codes(codes: Tensor) -> Tensor:
    """[N, K] integers from 0 to 15 -> [N, K / 2] uint8, as in `QuantizedMatrix.data`."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_codes(data: Tensor) -> Tensor:
    """The reverse of `pack_codes`."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, computed in float32; columns in the matrix's order."""
    width = matrix.shape[1]

    def spread(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(matrix.group, 1)[:, :width]

    values = _elements(matrix)
    if matrix.zero is not None:
        values = values - spread(matrix.zero)
    elif matrix.kind == "int4" and matrix.offset is None:
        values = values - INT4_ZERO
    values = values * spread(_scale_of_rows(matrix))
    if matrix.offset is not None:
        values += spread(matrix.offset)
    if matrix.row_scale is not None:
        values *= matrix.row_scale.unsqueeze(1)
    if matrix.order is not None:
        order = matrix.order.long().view(-1, 1, width)
        values = values.view(len(order), -1, width)
        values = torch.empty_like(values).scatter_(2, order.expand_as(values), values).flatten(0, 1)
    return values.to(dtype)


def quantized_product(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """x [T, K] times the transposed matrix, plus `bias` [N]: the product of whatever device has no
    kernel for it. It dequantizes the matrix in each call."""
    return F.linear(x, dequantize(matrix, x.dtype), bias)


def concatenate(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """The rows of several matrices, of equal kind, group, columns and order, as one matrix.

    Block scales stay where all parts but the last one end with a block.

    Raises:
        ValueError: the parts differ in what one matrix has once.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        same_order = (first.order is None) == (part.order is None) and (
            first.order is None or part.order is None or torch.equal(first.order, part.order)
        )
        if (part.kind, part.group, part.shape[1]) != (first.kind, first.group, first.shape[1]):
            raise ValueError("parts of several kinds, groups or widths")
        if not same_order:
            raise ValueError("parts whose columns are in different orders")
    aligned = all(part.shape[0] % part.rows == 0 for part in parts[:-1])
    if len({part.rows for part in parts}) > 1 or not aligned:
        parts = [with_scale_of_each_row(part) for part in parts]
    if len({part.scale.dtype for part in parts}) > 1:
        parts = [_with_float32_scales(part) for part in parts]
    return QuantizedMatrix(
        first.kind,
        torch.cat([part.data for part in parts]),
        torch.cat([part.scale for part in parts]),
        first.group,
        parts[0].rows,
        *_joined_zeros(parts),
        _joined([part.row_scale for part in parts], lambda i: _ones(parts[i])),
        first.order,
    )


def stack(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of equal size and kind, one below the other; each keeps its order of columns.

    Raises:
        ValueError: they differ in what all rows have in common.
    """
    whole = concatenate([replace(matrix, order=None) for matrix in matrices])
    orders = [matrix.order for matrix in matrices]
    if all(order is None for order in orders):
        return whole
    in_order = torch.arange(whole.shape[1], dtype=torch.int32, device=whole.device)
    return replace(whole, order=torch.stack([in_order if o is None else o for o in orders]))


def arrange_rows(matrix: QuantizedMatrix, arrange: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
    """The matrix with its rows in another order.

    Args:
        arrange: [N, anything] -> its rows in the order that is wanted.
    """
    each = with_scale_of_each_row(matrix)
    rows: dict[str, Any] = {
        name: arrange(tensor.view(torch.uint8) if name == "data" else tensor).contiguous()
        for name, tensor in each.tensors().items()
        if name not in ("order", "row_scale")
    }
    rows["data"] = rows["data"].view(each.data.dtype)
    if each.row_scale is not None:
        rows["row_scale"] = arrange(each.row_scale.unsqueeze(1)).squeeze(1).contiguous()
    return replace(each, **rows)


def rows_of(matrix: QuantizedMatrix, runs: Sequence[tuple[int, int]]) -> QuantizedMatrix:
    """Some rows of a matrix: (first, count) of each run of them, in this order. Block scales stay
    where runs begin and end with a block; else each row gets a scale of its own."""
    return concatenate([_run_of_rows(matrix, first, count) for first, count in runs])


def _run_of_rows(matrix: QuantizedMatrix, first: int, count: int) -> QuantizedMatrix:
    last = first + count
    if first % matrix.rows:
        matrix = with_scale_of_each_row(matrix)
    kept: dict[str, Any] = {
        name: tensor[first:last].contiguous()
        for name, tensor in matrix.tensors().items()
        if name != "order"
    }
    if matrix.rows > 1:
        blocks = slice(first // matrix.rows, -(-last // matrix.rows))
        kept["scale"] = matrix.scale[blocks].contiguous()
    return replace(matrix, **kept)


def columns_of(matrix: QuantizedMatrix, first: int, count: int) -> QuantizedMatrix:
    """Columns of a matrix that follow one another.

    Raises:
        ValueError: they begin or end inside of a group, or columns are in an order of their own.
    """
    width = matrix.shape[1]
    if matrix.order is not None:
        raise ValueError("its columns are quantized in an order of their own (desc_act, actorder)")
    if matrix.group >= width:
        group, groups = count, slice(0, 1)
    elif first % matrix.group or (count % matrix.group and first + count < width):
        raise ValueError(
            f"columns {first} to {first + count} of {width} begin or end inside of a group of "
            f"{matrix.group}"
        )
    else:
        group = matrix.group
        groups = slice(first // group, -(-(first + count) // group))
    each = _PER_BYTE[matrix.kind]
    if first % each or count % each:
        raise ValueError(f"columns {first} to {first + count}: two share a byte")
    kept: dict[str, Any] = {
        name: tensor[:, groups].contiguous()
        for name, tensor in matrix.tensors().items()
        if name in ("scale", "zero", "offset")
    }
    data = matrix.data[:, first // each : (first + count) // each].contiguous()
    return replace(matrix, data=data, group=group, **kept)


def with_scale_of_each_row(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The same matrix with `rows` 1."""
    if matrix.rows == 1:
        return matrix
    return replace(matrix, scale=_scale_of_rows(matrix), rows=1)


def _scale_of_rows(matrix: QuantizedMatrix) -> Tensor:
    """[N, groups]."""
    if matrix.rows == 1:
        return matrix.scale
    scale = matrix.scale
    wide = scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale
    wide = wide.repeat_interleave(matrix.rows, 0)[: matrix.shape[0]].contiguous()
    return wide.view(scale.dtype)


def _elements(matrix: QuantizedMatrix) -> Tensor:
    """[N, K] float32: what the codes stand for, zero points not taken off."""
    if matrix.kind in ("fp8", "int8"):
        return matrix.data.float()
    codes = unpack_codes(matrix.data)
    if matrix.kind == "int4":
        return codes.float()
    values = FP4_VALUES if matrix.kind == "fp4" else NF4_VALUES
    return torch.tensor(values, device=codes.device)[codes.long()]


def _with_float32_scales(matrix: QuantizedMatrix) -> QuantizedMatrix:
    offset = None if matrix.offset is None else matrix.offset.float()
    return replace(matrix, scale=matrix.scale.float(), offset=offset)


def _joined_zeros(parts: Sequence[QuantizedMatrix]) -> tuple[Tensor | None, Tensor | None]:
    """Zero points and offsets; as offsets if parts have one of each."""
    if all(part.offset is None for part in parts):
        return _joined([part.zero for part in parts], lambda i: _zeros_of(parts[i])), None
    return None, torch.cat([_offset_of(part) for part in parts])


def _offset_of(part: QuantizedMatrix) -> Tensor:
    if part.offset is not None:
        return part.offset
    zero = _zeros_of(part) if part.zero is None else part.zero
    return (-part.scale.float() * zero.float()).to(part.scale.dtype)


def _zeros_of(part: QuantizedMatrix) -> Tensor:
    return torch.full_like(part.scale, INT4_ZERO, dtype=torch.uint8)


def _ones(part: QuantizedMatrix) -> Tensor:
    return torch.ones(part.shape[0], device=part.device)


def _joined(tensors: Sequence[Tensor | None], default: Callable[[int], Tensor]) -> Tensor | None:
    """All of them as one; None if none is there. `default(i)` is what stands for a missing i."""
    if all(tensor is None for tensor in tensors):
        return None
    return torch.cat([default(i) if t is None else t for i, t in enumerate(tensors)])
