"""What a rank reads of stored tensors, and where in its parameters that goes.

The names, shapes and rearrangements of a checkpoint are those of the whole model, which is built
without memory; of each view into one of its parameters follows which of the stored elements belong
to the rank's cut of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.layers import BankView, RearrangedView
from hetero_llm.models.sharding import Cut, RankParts, Run
from hetero_llm.models.weight_files import StoredTensor, WeightFile
from hetero_llm.models.weight_reader import Piece, pieces_of_slice


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Some of the indices of one dim of a stored tensor.

    Attributes:
        shape: Of the whole stored tensor, as `fill` wants its dims.
        dim, runs: See `pieces_of_slice`.
        target: Of the same dims, with the indices of `runs` alone; None: `fill` takes the numbers.
        view: The part of the rank's parameter, as the whole model's view of it.
        fill: Slice of the stored tensor -> copies it into `view`.
    """

    shape: tuple[int, ...]
    dim: int
    runs: tuple[Run, ...]
    view: Tensor
    fill: Callable[[Tensor], None] | None = None

    @property
    def sliced_shape(self) -> tuple[int, ...]:
        """Of what is read."""
        size = sum(count for _, count in self.runs)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Of what is read."""
        return math.prod(self.sliced_shape) if self.runs else 0

    def pieces(
        self, file: WeightFile, stored: StoredTensor, *, piece_bytes: int
    ) -> Iterator[Piece]:
        """The pieces that read it."""
        if not self.runs:
            return
        target, dtype = self.view, self.view.dtype
        if self.fill is not None:
            target = torch.empty(self.sliced_shape, dtype=stored.dtype, device=target.device)
        *pieces, last = pieces_of_slice(
            *(file, stored, target),
            dim=self.dim, runs=self.runs, dtype=dtype, piece_bytes=piece_bytes,
        )  # fmt: skip
        yield from pieces
        yield last if self.fill is None else replace(last, then=partial(self.fill, target))


class RankSlices:
    """The slices of a rank.

    Args:
        whole: The whole model, on torch's meta device.
        own: The rank's model.
        parts: Of it.
    """

    def __init__(self, whole: DecoderLM, own: DecoderLM, parts: RankParts) -> None:
        self._names = {id(parameter): name for name, parameter in whole.named_parameters()}
        self._own = dict(own.named_parameters())
        self._parts = parts
        self._adds = own.config.rank.index == 0

    def of(self, target: Tensor | RearrangedView) -> RankSlice:
        """What fills the rank's part of a target (`CausalLM.checkpoint_tensors`) of the whole
        model."""
        view = target.view if isinstance(target, RearrangedView) else target
        root = view if view._base is None else view._base
        name = self._names[id(root)]
        own, cut = self._own[name], self._parts.cuts.get(name)
        shape = tuple(target.shape)
        if name in self._parts.added and not self._adds:
            return RankSlice(shape, 0, (), own)
        if cut is None:
            return _whole(target, own.as_strided(view.shape, view.stride(), view.storage_offset()))
        dim, kept, part = _part_of(view, root, own, cut)
        if part is None:
            return RankSlice(shape, 0, (), own)
        if isinstance(target, BankView):
            return _of_bank(target, part, dim, kept)
        if isinstance(target, Tensor):
            return RankSlice(shape, dim, runs_of(kept), part)
        return _of_rearranged(target, part, dim, kept)


def _whole(target: Tensor | RearrangedView, view: Tensor) -> RankSlice:
    """A stored tensor that every rank has."""
    shape = tuple(target.shape)
    if not shape:
        shape, view = (1,), view.view(1)
    runs = ((0, shape[0]),)
    if isinstance(target, Tensor):
        return RankSlice(shape, 0, runs, view)
    return RankSlice(shape, 0, runs, view, replace(target, view=view).fill)


def _part_of(
    view: Tensor, root: Tensor, own: Tensor, cut: Cut
) -> tuple[int, Tensor, Tensor | None]:
    """A view of a whole parameter as one of the rank's.

    Args:
        view: Of `root`, the whole parameter.
        own: The rank's parameter.

    Returns:
        The dim of the view that runs over the cut one; its indices that the rank has, [n] int64;
        the view of `own` with these alone, None if there are none.
    """
    step, length, size = root.stride(cut.dim), cut.length, cut.size
    block = step * length
    moving = [
        dim for dim in range(view.dim()) if view.stride(dim) >= step and view.stride(dim) % block
    ]
    dim = max(moving, key=view.stride)
    cpu = torch.device("cpu")
    steps = torch.arange(view.shape[dim], device=cpu)
    offsets = steps * view.stride(dim) + int(view.storage_offset())
    place = torch.full((length,), -1, device=cpu)
    place[cut.index()] = torch.arange(size, device=cpu)
    places = place[offsets % block // step]
    kept = (places >= 0).nonzero().squeeze(1)
    if len(kept) == 0:
        return dim, kept, None
    offsets, places = offsets[kept], places[kept]
    own_offsets: Tensor = offsets // block * (step * size) + places * step + offsets % step

    def own_stride(stride: int) -> int:
        return stride // block * (step * size) + stride % block

    sizes, strides = list(view.shape), [own_stride(stride) for stride in view.stride()]
    sizes[dim] = len(kept)
    first = int(own_offsets[0])
    expected = first + strides[dim] * torch.arange(len(kept), device=cpu)
    assert torch.equal(own_offsets, expected), "a rank's part of a view is no view of its own"
    return dim, kept, own.as_strided(sizes, strides, first)


def _of_bank(target: BankView, part: Tensor, dim: int, kept: Tensor) -> RankSlice:
    """Matrices of all experts, stored as [experts, columns, rows]."""
    experts, _, rows = target.shape
    arrange = target.arrange
    assert arrange is not None
    if dim == 1:  # columns

        def fill_columns(stored: Tensor) -> None:
            part.copy_(arrange(stored.to(part.dtype)))

        return RankSlice(target.shape, 1, runs_of(kept), part, fill_columns)
    numbers = torch.arange(experts * rows, device=kept.device).view(experts, 1, rows)
    stored_rows = arrange(numbers).view(-1)[kept[: len(kept) // experts]]
    order = torch.argsort(torch.argsort(stored_rows))

    def fill_rows(stored: Tensor) -> None:
        matrices = stored.to(part.dtype).transpose(1, 2)[:, order.to(stored.device)]
        part.copy_(matrices.reshape(part.shape))

    return RankSlice(target.shape, 2, runs_of(stored_rows.sort().values), part, fill_rows)


def _of_rearranged(target: RearrangedView, part: Tensor, dim: int, kept: Tensor) -> RankSlice:
    shape, arrange = target.shape, target.arrange
    assert arrange is not None
    view_shape = target.view.shape
    if shape == tuple(view_shape) and dim == 0 and len(shape) == 2:
        stored_rows, order = kept, None
        if not target.by_row:
            numbers = torch.arange(shape[0], device=kept.device).unsqueeze(1)
            stored_rows = arrange(numbers).squeeze(1)[kept]
            order = torch.argsort(torch.argsort(stored_rows))

        def fill_rows(stored: Tensor) -> None:
            stored = stored.to(part.dtype)
            part.copy_(arrange(stored) if order is None else stored[order.to(stored.device)])

        return RankSlice(shape, 0, runs_of(stored_rows.sort().values), part, fill_rows)

    def fill(stored: Tensor) -> None:  # a vector, or a few: all of it
        arranged = arrange(stored.to(part.dtype)).reshape(view_shape)
        part.copy_(arranged.index_select(dim, kept.to(stored.device)))

    return RankSlice(shape, 0, ((0, shape[0]),), part, fill)


def runs_of(index: Tensor) -> tuple[Run, ...]:
    """Rising indices as runs of such that follow one another."""
    if len(index) == 0:
        return ()
    breaks = (index.diff() != 1).nonzero().squeeze(1) + 1
    return tuple((int(run[0]), len(run)) for run in index.tensor_split(breaks))
