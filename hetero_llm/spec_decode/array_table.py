"""Arrays that compiled functions find by name.

A compiled function takes a third of a microsecond for every array that it is handed, and several
times as long with the cold caches behind a step of the device; a proposal needs seventy. So arrays
that stay are entered into a table of addresses, and the table is all that is handed over.

What a table holds is declared once, as a class whose annotations are arrays, NamedTuples of arrays
or NamedTuples of numbers. `ArrayTable` enters values under these names, and the reader that
`reader_of` makes reads them in compiled code:

    class Arrays:
        tokens: Int32Vector
        found: Proposals

    read = reader_of(Arrays)

    @njit(cache=True)
    def count(table):
        return read(table, "found").counts.sum() + len(read(table, "tokens"))

    arrays = ArrayTable(Arrays)
    arrays.put("tokens", tokens)
    arrays.put("found", proposals)
    count(arrays.table)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

BORROWING: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
"""Options of `njit` for functions that allocate nothing: arrays belong to the caller, and their
references are not counted. Counting took four fifths of a lookup's time, and threads contend for
the counters."""


INLINED: dict[str, Any] = {**BORROWING, "forceinline": True}
"""Options of small or hot functions that get many arrays: seven words of each are passed in a call,
which took half of a lookup's time."""


@dataclass(frozen=True)
class ArrayType:
    """Type of a C-contiguous array in a declaration."""

    dtype: type[np.generic]
    ndim: int


Int32Vector = Annotated[np.ndarray, ArrayType(np.int32, 1)]
Int32Matrix = Annotated[np.ndarray, ArrayType(np.int32, 2)]
Int32Cube = Annotated[np.ndarray, ArrayType(np.int32, 3)]
Int64Vector = Annotated[np.ndarray, ArrayType(np.int64, 1)]
Int64Matrix = Annotated[np.ndarray, ArrayType(np.int64, 2)]
Int64Cube = Annotated[np.ndarray, ArrayType(np.int64, 3)]
UInt64Vector = Annotated[np.ndarray, ArrayType(np.uint64, 1)]
Float32Vector = Annotated[np.ndarray, ArrayType(np.float32, 1)]
Float32Matrix = Annotated[np.ndarray, ArrayType(np.float32, 2)]
Float64Vector = Annotated[np.ndarray, ArrayType(np.float64, 1)]
Float64Matrix = Annotated[np.ndarray, ArrayType(np.float64, 2)]
BoolVector = Annotated[np.ndarray, ArrayType(np.bool_, 1)]

_COLUMNS = 4  # address and up to three sizes; or a number's bits


class _Field(NamedTuple):
    """A name of a declaration.

    Attributes:
        kind: an `ArrayType`; int, float or bool; or a NamedTuple class.
        place: its first row in the table.
        parts: the fields of a NamedTuple, in order.
        num_rows: of the table.
    """

    kind: Any
    place: int
    parts: tuple[_Field, ...]
    num_rows: int


def _field(annotation: Any, place: int) -> _Field:
    if get_origin(annotation) is Annotated:
        return _Field(get_args(annotation)[1], place, (), 1)
    if annotation in (int, float, bool):
        return _Field(annotation, place, (), 1)
    parts = tuple(_fields(annotation, place).values())
    return _Field(annotation, place, parts, sum(part.num_rows for part in parts))


@cache
def _fields(declaration: type, place: int = 0) -> dict[str, _Field]:
    """The fields of a declaration whose first one stands at this place."""
    found: dict[str, _Field] = {}
    for name, annotation in get_type_hints(declaration, include_extras=True).items():
        found[name] = _field(annotation, place)
        place += found[name].num_rows
    return found


def _paths(fields: dict[str, _Field], prefix: str = "") -> Iterator[tuple[str, _Field]]:
    """All fields by their names, those inside NamedTuples by `outer.inner`."""
    for name, field in fields.items():
        yield prefix + name, field
        if field.parts:
            inner = dict(zip(field.kind._fields, field.parts, strict=True))
            yield from _paths(inner, f"{prefix}{name}.")


class ArrayTable:
    """Holds values under the names of a declaration, for compiled functions. One thread writes, and
    no other one reads meanwhile.

    Attributes:
        table: [rows, 4] int64 for compiled functions: address and sizes of each array. Good as long
            as this object lives.
    """

    def __init__(self, declaration: type) -> None:
        fields = _fields(declaration)
        self._fields = dict(_paths(fields))
        self._held: dict[str, Any] = dict.fromkeys(self._fields)
        num_rows = sum(field.num_rows for field in fields.values())
        self.table: NDArray[np.int64] = np.zeros((num_rows, _COLUMNS), np.int64)

    def put(self, name: str, value: Any) -> None:
        """Enters an array or a NamedTuple. It costs next to nothing if it is there already.

        Args:
            name: of the declaration; `outer.inner` for a field of a NamedTuple.
        """
        if self._held[name] is not value:
            self._enter(self._fields[name], value)
            self._held[name] = value

    def cut(self, name: str, size: int) -> None:
        """Until it is replaced, the array has only its first `size` rows."""
        self.table[self._fields[name].place, 1] = size

    def _enter(self, field: _Field, value: Any) -> None:
        if field.parts:
            for part, one in zip(field.parts, value, strict=True):
                self._enter(part, one)
        elif isinstance(field.kind, ArrayType):
            assert value.flags.carray and value.ndim == field.kind.ndim, (field, value.shape)
            assert value.dtype == field.kind.dtype, (field, value.dtype)
            self.table[field.place, : value.ndim + 1] = value.ctypes.data, *value.shape
        else:
            columns = self.table[field.place]
            (columns.view(np.float64) if field.kind is float else columns)[0] = value


def reader_of(declaration: type) -> Callable[[NDArray[np.int64], str], Any]:
    """Makes the compiled function (table, name) -> value; `name` is a literal of the declaration's
    own names. Compiled functions that call it can be cached on disk."""

    @intrinsic(prefer_literal=True)  # type: ignore[misc]
    def read(typing_context: Any, table: Any, name: Any) -> Any:
        field = _fields(declaration)[name.literal_value]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows = make_array(table)(context, builder, arguments[0]).data
            return _load(context, builder, rows, field)

        return _type_of(field)(table, name), generate

    return read  # type: ignore[no-any-return]


def _type_of(field: _Field) -> Any:
    """A field's type in compiled code."""
    if field.parts:
        return types.BaseTuple.from_types([_type_of(part) for part in field.parts], field.kind)
    if isinstance(field.kind, ArrayType):
        return types.Array(from_dtype(np.dtype(field.kind.dtype)), field.kind.ndim, "C")
    return {int: types.int64, float: types.float64, bool: types.boolean}[field.kind]


def _load(context: Any, builder: Any, rows: Any, field: _Field) -> Any:
    """Generates code that loads a field from the table's rows."""
    if field.parts:
        values = [_load(context, builder, rows, part) for part in field.parts]
        return context.make_tuple(builder, _type_of(field), values)

    def column(index: int) -> Any:
        place = ir.Constant(ir.IntType(64), field.place * _COLUMNS + index)
        return builder.load(builder.gep(rows, [place]))

    if not isinstance(field.kind, ArrayType):
        number = column(0)
        if field.kind is float:
            return builder.bitcast(number, ir.DoubleType())
        return number if field.kind is int else cgutils.is_not_null(builder, number)
    array = make_array(_type_of(field))(context, builder)
    size = context.get_constant(types.intp, np.dtype(field.kind.dtype).itemsize)
    shape = [column(1 + axis) for axis in range(field.kind.ndim)]
    strides = [size]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(column(0), array.data.type)
    populate_array(array, data, shape, strides, size, meminfo=None)
    return array._getvalue()
