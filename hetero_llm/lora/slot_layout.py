"""Where the adapters of all layers lie in one slot of the device's memory.

A slot is one piece of bytes, so that one copy fills it. Each `Linear` has its A, B and scales
there, for each of the matrices that the model has fused into it (a part); what an adapter lacks is
zero. Parts are as wide as the largest rank that is served, so the place of everything is the same
in all slots and kernels find it by the slot's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hetero_llm.lora.adapter import Adapter
from hetero_llm.lora.targets import AdapterTargets

_ALIGNMENT = 128  # bytes


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """Of the adapters of one `Linear`.

    Attributes:
        bounds: outputs at which parts begin, and N.
        columns: K.
        a, b, scales: first bytes of [parts * R, K], [N, R] and [parts * R] float32.
    """

    bounds: tuple[int, ...]
    columns: int
    a: int
    b: int
    scales: int

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Attributes:
    rank: R, of every part.
    dtype: of A and B.
    places: by the name of the `Linear`.
    num_bytes: of a slot.
    """

    rank: int
    dtype: torch.dtype
    places: Mapping[str, LinearPlace]
    num_bytes: int

    @staticmethod
    def of(targets: AdapterTargets, rank: int, dtype: torch.dtype) -> SlotLayout:
        """The layout of a model's adapters, layers in the order of the checkpoint."""
        places: dict[str, LinearPlace] = {}
        end = 0
        for name, bounds in _bounds(targets).items():
            columns, parts = targets.sizes[name][1], len(bounds) - 1
            begins = []
            for count in (
                parts * rank * columns * dtype.itemsize,
                bounds[-1] * rank * dtype.itemsize,
                parts * rank * torch.float32.itemsize,
            ):
                begins.append(end)
                end += -(-count // _ALIGNMENT) * _ALIGNMENT
            places[name] = LinearPlace(bounds, columns, *begins)
        return SlotLayout(rank, dtype, places, end)

    def views(self, slots: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """A [slots, parts * R, K], B [slots, N, R] and scales [slots, parts * R] of one `Linear`.

        Args:
            slots: [slots, num_bytes] uint8.
        """
        place, rank = self.places[name], self.rank

        def view(begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
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
            for part in linear.parts:
                begin = self.places[name].bounds.index(part.first_row) * self.rank
                stored = slice(part.first_rank, part.first_rank + part.rank)
                own = slice(begin, begin + part.rank)
                a[own] = linear.a[stored]
                scales[own] = linear.scales[stored]
                b[part.first_row : part.first_row + len(part.b), : part.rank] = part.b
        return packed[0]


def _bounds(targets: AdapterTargets) -> dict[str, tuple[int, ...]]:
    """Where the parts of each `Linear` begin, and N; rows without a target are parts, too."""
    found: dict[str, set[int]] = {}
    for target in targets.targets.values():
        bounds = found.setdefault(target.linear, {0, targets.sizes[target.linear][0]})
        bounds |= {target.first_row, target.first_row + target.rows}
    return {name: tuple(sorted(bounds)) for name, bounds in found.items()}


def widths(bounds: Iterable[int]) -> list[int]:
    """Outputs of each part."""
    return [stop - first for first, stop in pairwise(bounds)]
