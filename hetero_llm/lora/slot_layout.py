"""Where the adapters of all layers lie in one slot of the device's memory.

Each `Linear` has its A, B and scales in a slot, for each of the matrices that the model has fused
into it (a part), and so has each expert of a mixture that may have adapters; what an adapter lacks
is zero. Every part has room for the largest rank that is served, so the place of everything is the
same in all slots and kernels find it by the slot's number.

Layers lie in a slot in the order in which they run, in *pieces*, each of which one copy fills. A
step that runs behind the copies waits before the first product of each piece. A piece has half as
many layers as lie before it: while those n layers run, at most 1.5 n are copied, so it is there in
time if a layer takes 1.5 times as long as its copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from hetero_llm.lora.adapter import Adapter, LinearAdapter
from hetero_llm.lora.targets import AdapterTargets, of_gates

_ALIGNMENT = 128  # bytes


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """Of the adapters of one `Linear`, or of one weight of all experts of a layer.

    Attributes:
        bounds: outputs at which parts begin, and N.
        columns: K.
        piece: of the slot, in which all of it lies.
        a, b, scales: first bytes of [parts * R, K], [N, R] and [parts * R] float32, of each expert
            behind the other.
        experts: 0: it is a `Linear`.
    """

    bounds: tuple[int, ...]
    columns: int
    piece: int
    a: int
    b: int
    scales: int
    experts: int = 0

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Attributes:
    rank: R, of every part.
    dtype: of A and B.
    places: by the name of the `Linear` or of the experts' parameter, in the order in which they lie
        in a slot.
    pieces: bytes of each piece of a slot, in order.
    """

    rank: int
    dtype: torch.dtype
    places: Mapping[str, LinearPlace]
    pieces: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(self.pieces)

    @staticmethod
    def of(targets: AdapterTargets, rank: int, dtype: torch.dtype) -> SlotLayout:
        """The layout of a model's adapters. What is outside of the numbered layers comes first,
        and within a layer the order is that of the checkpoint."""
        all_bounds = _bounds(targets)
        places: dict[str, LinearPlace] = {}
        sizes: list[int] = []
        for piece, names in enumerate(_pieces(all_bounds)):
            begin = end = sum(sizes)
            for name in names:
                bounds = all_bounds[name]
                columns, parts = targets.sizes[name][1], len(bounds) - 1
                experts = targets.experts.get(name, 0)
                begins = []
                for count in (
                    parts * rank * columns * dtype.itemsize,
                    bounds[-1] * rank * dtype.itemsize,
                    parts * rank * torch.float32.itemsize,
                ):
                    begins.append(end)
                    end += -(-count * max(experts, 1) // _ALIGNMENT) * _ALIGNMENT
                a, b, scales = begins
                places[name] = LinearPlace(bounds, columns, piece, a, b, scales, experts)
            sizes.append(end - begin)
        return SlotLayout(rank, dtype, places, tuple(sizes))

    def views(self, slots: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """A [slots, parts * R, K], B [slots, N, R] and scales [slots, parts * R] of one `Linear`;
        of experts [slots, experts, parts * R, K] and so on.

        Args:
            slots: [slots, num_bytes] uint8.
        """
        place, rank = self.places[name], self.rank
        experts = (place.experts,) if place.experts else ()

        def view(begin: int, dtype: torch.dtype, *sizes: int) -> Tensor:
            shape = (*experts, *sizes)
            count = torch.Size(shape).numel() * dtype.itemsize
            return slots[:, begin : begin + count].view(dtype).unflatten(1, shape)

        return (
            view(place.a, self.dtype, place.parts * rank, place.columns),
            view(place.b, self.dtype, place.bounds[-1], rank),
            view(place.scales, torch.float32, place.parts * rank),
        )

    def pack(self, adapter: Adapter, *, pin: bool) -> Tensor:
        """[num_bytes] uint8 in host memory: the content of the adapter's slot.

        Args:
            pin: in page-locked memory.
        """
        packed = torch.zeros(1, self.num_bytes, dtype=torch.uint8, pin_memory=pin)
        for name, linear in adapter.linears.items():
            (a,), (b,), (scales,) = self.views(packed, name)
            self._pack(linear, (a, b, scales), self.places[name].bounds)
        for name, experts in adapter.experts.items():
            (a,), (b,), (scales,) = self.views(packed, name)
            for expert, linear in experts.items():
                matrices = (a[expert], b[expert], scales[expert])
                self._pack(linear, matrices, self.places[name].bounds)
        return packed[0]

    def _pack(
        self, linear: LinearAdapter, to: tuple[Tensor, Tensor, Tensor], bounds: tuple[int, ...]
    ) -> None:
        a, b, scales = to
        for part in linear.parts:
            begin = bounds.index(part.first_row) * self.rank
            stored = slice(part.first_rank, part.first_rank + part.rank)
            own = slice(begin, begin + part.rank)
            a[own] = linear.a[stored]
            scales[own] = linear.scales[stored]
            b[part.first_row : part.first_row + len(part.b), : part.rank] = part.b


def _pieces(names: Iterable[str]) -> list[list[str]]:
    """The `Linear`s of each piece, of 1, 1, 1, 2, 3, 4, 6, 9, ... layers."""
    layers = [list(x) for _, x in groupby(sorted(names, key=_layer_number), _layer_number)]
    pieces: list[list[str]] = []
    begin = 0
    while begin < len(layers):
        end = begin + max(1, (begin + 1) // 2)
        pieces.append([name for layer in layers[begin:end] for name in layer])
        begin = end
    return pieces


def _layer_number(name: str) -> int:
    """The first number in the name of a `Linear`; -1 if there is none."""
    return next((int(word) for word in name.split(".") if word.isdecimal()), -1)


def _bounds(targets: AdapterTargets) -> dict[str, tuple[int, ...]]:
    """Where the parts of each `Linear` begin, and N; rows without a target are parts, too."""
    found: dict[str, set[int]] = {}
    for target in targets.targets.values():
        if not target.here:
            continue
        bounds = found.setdefault(target.linear, {0, targets.sizes[target.linear][0]})
        bounds |= {target.first_row, target.first_row + target.rows}
    for target in targets.banks.values():
        if target.here:
            bounds = found.setdefault(target.linear, {0, target.rows})
            if of_gates(target):
                bounds.add(target.rows // 2)
    return {name: tuple(sorted(bounds)) for name, bounds in found.items()}


def widths(bounds: Iterable[int]) -> list[int]:
    """Outputs of each part."""
    return [stop - first for first, stop in pairwise(bounds)]
