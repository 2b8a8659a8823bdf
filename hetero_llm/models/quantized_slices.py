"""What a rank reads of the tensors of a quantized matrix, where a part of them makes a part of it.

Which dims of a tensor belong to rows or columns follows from the sizes that its scheme gives it for
a larger matrix: packed words, groups and blocks need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from hetero_llm.models.quantized_weights import (
    LayerWeight,
    MatrixPlan,
    MatrixSlice,
    Stored,
)
from hetero_llm.models.rank_slices import runs_of
from hetero_llm.models.sharding import Cut, Run, runs_inside
from hetero_llm.quantization.formats.scheme import Scheme, StoredPart, admits

_LARGER = 1 << 20
"""Times as many rows or columns: a number that is rounded up to whole blocks shows."""
_SHAPES = ("weight_shape",)
"""Tensors that hold the sizes of the whole matrix; no part needs them."""


class _ReadsWhole(Exception):
    """No part of a tensor is the part of the matrix."""


def matrix_slices(
    plans: Sequence[MatrixPlan],
    weights: Sequence[LayerWeight],
    cuts: Mapping[int, Cut],
    stored: Stored,
) -> dict[str, MatrixSlice]:
    """The slices by the matrix's name in the checkpoint; of a matrix that is not here the tensors
    are read whole, and the rank's part is cut out of the matrix.

    Args:
        weights: Of the rank's model.
        cuts: Of its weights, by their places.
    """
    found = {}
    for plan in plans:
        cut = cuts.get(plan.weight)
        if cut is None or plan.unpack is not None:
            continue
        shapes = {suffix: stored[name][1].shape for name, suffix in plan.names.items()}
        by_columns = cut.dim == weights[plan.weight].parameter.dim() - 1
        make = _of_columns if by_columns else _of_rows
        with suppress(_ReadsWhole):
            found[plan.module] = make(plan, cut, shapes)
    return found


def _of_columns(plan: MatrixPlan, cut: Cut, shapes: Mapping[str, tuple[int, ...]]) -> MatrixSlice:
    step = plan.scheme.slice_steps(plan.columns)[1]
    _check_step(step, cut.runs)
    cuts = {}
    for suffix, shape in _needed(shapes).items():
        dim = _dim_of(plan, suffix, shape, lambda n: (plan.rows, plan.columns * n))
        if dim is not None:
            cuts[suffix] = (dim, _scaled(cut.runs, shape[dim], plan.columns))
    return MatrixSlice(plan.rows, cut.size, cuts, _left_out(shapes))


def _of_rows(plan: MatrixPlan, cut: Cut, shapes: Mapping[str, tuple[int, ...]]) -> MatrixSlice:
    step = plan.scheme.slice_steps(plan.columns)[0]
    numbers = torch.arange(plan.rows, device=torch.device("cpu"))
    rows = numbers if plan.arrange is None else plan.arrange(numbers.unsqueeze(1)).squeeze(1)
    runs = runs_inside(cut, plan.first_row, plan.rows)
    kept = torch.cat([rows[first : first + count] for first, count in runs])
    stored_rows, order = kept.sort().values, torch.argsort(torch.argsort(kept))
    read = runs_of(stored_rows)
    _check_step(step, read)
    cuts = {}
    for suffix, shape in _needed(shapes).items():
        if len(shape) > 2 and shape[0] * shape[1] == plan.rows:  # a bank of experts
            each = read[: len(read) // shape[0]]
            if not _repeats(read, each, shape[0], shape[1]):
                raise _ReadsWhole
            cuts[suffix] = (1, each)
            continue
        dim = _dim_of(plan, suffix, shape, lambda n: (plan.rows * n, plan.columns))
        if dim is not None:
            cuts[suffix] = (dim, _scaled(read, shape[dim], plan.rows))
    in_order = torch.equal(order, torch.arange(len(order), device=order.device))
    return MatrixSlice(
        len(kept), plan.columns, cuts, _left_out(shapes), None if in_order else order
    )


def _check_step(step: int, runs: Sequence[Run]) -> None:
    """Raises _ReadsWhole."""
    if step == 0 or any(first % step or count % step for first, count in runs):
        raise _ReadsWhole


def _needed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {suffix: shape for suffix, shape in shapes.items() if suffix not in _SHAPES}


def _left_out(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    return frozenset(_SHAPES) & shapes.keys()


def _repeats(read: tuple[Run, ...], each: tuple[Run, ...], experts: int, rows: int) -> bool:
    """Whether the runs are those of the first expert, `experts` times."""
    wanted = [(first + i * rows, count) for i in range(experts) for first, count in each]
    return list(read) == wanted


def _dim_of(
    plan: MatrixPlan, suffix: str, shape: tuple[int, ...], larger: Callable[[int], tuple[int, int]]
) -> int | None:
    """The dim of a stored tensor that grows with the matrix's rows or columns; None: none does."""
    found = shape[::-1] if plan.transposed else shape
    now = _part(plan.scheme, suffix, *larger(1))
    then = _part(plan.scheme, suffix, *larger(_LARGER))
    place = next(i for i, one in enumerate(now.shapes) if admits(one, found))
    sizes = list(zip(now.shapes[place], then.shapes[place], strict=True))
    grown = [dim for dim, (size, other) in enumerate(sizes) if size != other]
    if any(sizes[dim][1] != sizes[dim][0] * _LARGER for dim in grown):
        raise _ReadsWhole
    assert len(grown) <= 1, (suffix, shape)
    if not grown:
        return None
    return len(shape) - 1 - grown[0] if plan.transposed else grown[0]


def _part(scheme: Scheme, suffix: str, rows: int, columns: int) -> StoredPart:
    return next(part for part in scheme.parts(rows, columns) if part.suffix == suffix)


def _scaled(runs: Sequence[Run], length: int, whole: int) -> tuple[Run, ...]:
    """Runs of rows or columns as runs of a dim of `length` that has them.

    Raises:
        _ReadsWhole: They begin or end inside of an index.
    """
    if any(number * length % whole for run in runs for number in run):
        raise _ReadsWhole
    return tuple((first * length // whole, count * length // whole) for first, count in runs)
