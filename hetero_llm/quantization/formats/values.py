"""What several formats do with the values of stored tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hetero_llm.quantization.formats.scheme import FLOATS, StoredPart
from hetero_llm.quantization.matrix import pack_codes, unpack_codes

E8M0_TYPES = ("F8_E8M0", "U8")

_NUMBER_SHAPES = ((), (1,), (1, 1))
_E8M0_NAN = 255


def read_over(*suffixes: str) -> tuple[StoredPart, ...]:
    """Scales and zero points of activations, which a matrix may have beside it. Activations are
    multiplied as they are, or quantized with scales of their own, so these are not used."""
    types = (*FLOATS, "I8", "U8", "I32")
    return tuple(StoredPart(suffix, types, _NUMBER_SHAPES, optional=True) for suffix in suffixes)


def scale_part(suffix: str, rows: int, *, optional: bool = False) -> StoredPart:
    """A scale of the whole matrix, or one for each row."""
    return StoredPart(suffix, FLOATS, ((rows, 1), (rows,), *_NUMBER_SHAPES), optional)


def width_of_groups(columns: int, group: int, bits: int) -> int:
    """Columns of a group; `group` -1: all of them.

    Raises:
        ValueError: groups do not divide the columns, or cannot be packed two columns to a byte.
    """
    width = columns if group == -1 else group
    if columns % width:
        raise ValueError(f"groups of {width} columns do not divide its {columns} columns")
    if bits == 4 and width % 2:
        raise ValueError(f"groups of {width} columns, an odd number, cannot be packed by 4 bits")
    return width


def check_finite(name: str, values: Tensor) -> None:
    """Raises:
    ValueError: some of the values are not finite.
    """
    bad = int((~torch.isfinite(values.float())).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {values.numel()} values are not finite")


def finite_scale(name: str, values: Tensor) -> Tensor:
    """A scale of a type that `QuantizedMatrix` takes, after a look at its values.

    Raises:
        ValueError: some of them are not finite.
    """
    check_finite(name, values)
    return values.float() if values.dtype == torch.float64 else values


def scale_of_rows(name: str, values: Tensor, rows: int) -> Tensor:
    """[rows, 1] from a stored scale of each row, or of the whole matrix.

    Raises:
        ValueError: some values are not finite.
    """
    scale = finite_scale(name, values).reshape(-1, 1)
    return scale.expand(rows, 1).contiguous()


def scale_of_exponents(name: str, exponents: Tensor) -> Tensor:
    """bfloat16 scales of e8m0, which hold them exactly: 2 to the power of the stored byte less 127
    (OCP Microscaling Formats 1.0, section 5.4.1).

    Raises:
        ValueError: a byte is 255, which stands for no number.
    """
    bad = int((exponents == _E8M0_NAN).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {exponents.numel()} values are not finite")
    # The byte is bfloat16's exponent; 2 ** -127, of byte 0, is half of its smallest normal number.
    bits = (exponents.to(torch.int16) << 7).masked_fill_(exponents == 0, 1 << 6)
    return bits.view(torch.bfloat16).contiguous()


def order_of_groups(name: str, group_of: Tensor, groups: int) -> Tensor | None:
    """The order in which the columns of each group follow one another.

    Args:
        group_of: [K] integers, the group of each column.

    Returns:
        [K] int32, the columns of the first group, then those of the second one; None if they
        already follow one another, or if every entry is -1, which stands for that.

    Raises:
        ValueError: it names a group that there is not, or groups of different sizes.
    """
    columns = group_of.numel()
    if bool((group_of == -1).all()):
        return None
    low, high = (int(one) for one in torch.aminmax(group_of))
    if low < 0 or high >= groups:
        raise ValueError(f"{name}: names groups {low} to {high}, there are {groups}")
    sizes = torch.bincount(group_of.long(), minlength=groups)
    if int(sizes.min()) != columns // groups or int(sizes.max()) != columns // groups:
        raise ValueError(
            f"{name}: groups have {int(sizes.min())} to {int(sizes.max())} columns, "
            f"not {columns // groups}"
        )
    order = torch.argsort(group_of, stable=True).to(torch.int32)
    in_order = torch.arange(columns, dtype=torch.int32, device=order.device)
    return None if torch.equal(order, in_order) else order


def in_order(data: Tensor, order: Tensor | None) -> Tensor:
    """Packed codes of 4 bits, [N, K / 2], with columns in `order`."""
    if order is None:
        return data
    return pack_codes(unpack_codes(data)[:, order.long()]).contiguous()


def bytes_of_words(words: Tensor) -> Tensor:
    """[A, B] int32 -> [A, 4 B] uint8, the lowest byte of each word first."""
    return words.contiguous().view(torch.uint8)


_ZERO = "weight_zero_point"


def unused_zeros(scale: StoredPart) -> StoredPart:
    """Zero points of 0, which some writers store beside symmetric weights."""
    types = ("I8", "I32", "U8", "F8_E4M3", *FLOATS)
    return StoredPart(_ZERO, types, scale.shapes, optional=True)


def check_unused_zeros(stored: Mapping[str, Tensor]) -> None:
    """Raises:
    ValueError: a symmetric matrix has zero points that are not 0.
    """
    zeros = stored.get(_ZERO)
    if zeros is not None and bool((zeros.float() != 0).any()):
        raise ValueError(f"{_ZERO}: not 0, though the config says symmetric")
