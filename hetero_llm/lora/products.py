"""Adds adapters to the products of a model, on any device: the reference of later kernels.

The tokens of a step are grouped by slot. For each group and each `Linear` that its adapter has,
the product gets scale * (x A^T) B^T in addition; other rows are not touched. So it is with each
expert's products, of the tokens that chose it. A step without an adapter runs the model's own
products: the replacements are in place only while they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.lora import NO_ADAPTER
from hetero_llm.lora.adapter import Adapter, AdapterPart, LinearAdapter
from hetero_llm.models.experts import Experts, adapt_nothing
from hetero_llm.models.layers import CausalLM, Linear, Product


@dataclass(frozen=True, slots=True)
class _Added:
    """A `LinearAdapter` in a slot. `scales` None: they are multiplied into `a`, which is float32;
    in a shorter type that would round it once more."""

    a: Tensor
    scales: Tensor | None
    parts: tuple[AdapterPart, ...]

    @staticmethod
    def of(linear: LinearAdapter) -> _Added:
        if linear.a.dtype == torch.float32:
            return _Added(linear.a * linear.scales[:, None], None, linear.parts)
        return _Added(linear.a, linear.scales, linear.parts)


@dataclass(frozen=True, slots=True)
class _Slot:
    """See `Adapter`."""

    linears: Mapping[str, _Added]
    experts: Mapping[str, Mapping[int, _Added]]


@dataclass(frozen=True, slots=True)
class _Group:
    """The tokens of a step with one adapter: a range, or indices [n] int64."""

    slot: int
    own: _Slot
    rows: slice | Tensor


class AdaptedProducts:
    """Owns what the slots of a device hold, and the products of the layers that adapters name.

    Args:
        model: ready to serve, its products in place.
        linears: names of the layers that may have an adapter; experts all may.
        num_slots: adapters at the same time.
        product: multiplies with A and B; where the model's products are row-independent, so has
            this one to be.
    """

    def __init__(
        self, model: CausalLM, linears: Iterable[str], num_slots: int, product: Product
    ) -> None:
        modules = dict(model.named_modules())
        self._linears: dict[str, tuple[Linear, Product]] = {}
        for name in sorted(linears):
            linear = modules[name]
            assert isinstance(linear, Linear)
            self._linears[name] = linear, linear.product
        self._experts = {n: m for n, m in modules.items() if isinstance(m, Experts)}
        self._product = product
        self._slots: list[_Slot | None] = [None] * num_slots
        self._groups: list[_Group] = []
        self._token_slots = torch.empty(0, dtype=torch.int64)  # on the device
        self._num_tokens = 0
        self._in_place = False

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot, for the steps that follow."""
        self._slots[slot] = _Slot(
            {name: _Added.of(own) for name, own in adapter.linears.items()},
            {
                name: {expert: _Added.of(own) for expert, own in experts.items()}
                for name, experts in adapter.experts.items()
            },
        )

    def begin_step(self, slots: np.ndarray, device: torch.device) -> None:
        """Sets the adapters of the next forward pass.

        Args:
            slots: [T] slot of each token; `NO_ADAPTER`: the base model.
        """
        self._groups.clear()
        self._num_tokens = len(slots)
        for slot in np.unique(slots).tolist():
            if slot == NO_ADAPTER:
                continue
            own = self._slots[slot]
            assert own is not None, "a step uses a slot before it was filled"
            rows = _rows_of(np.flatnonzero(slots == slot), device)
            self._groups.append(_Group(slot, own, rows))
        if any(group.own.experts for group in self._groups):
            self._token_slots = torch.from_numpy(slots.astype(np.int64)).to(device)
        if bool(self._groups) != self._in_place:
            self._switch()

    def _switch(self) -> None:
        self._in_place = not self._in_place
        for name, (linear, product) in self._linears.items():
            linear.product = partial(self._multiply, name, product) if self._in_place else product
        for name, experts in self._experts.items():
            experts.adapt = partial(self._adapt, name) if self._in_place else adapt_nothing

    def _multiply(
        self, name: str, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`Product` with the step's adapters."""
        y = product(x, weight, bias)
        assert len(x) == self._num_tokens, "a layer runs on other rows than the step's tokens"
        converted = x
        for group in self._groups:
            own = group.own.linears.get(name)
            if own is not None:
                converted = converted.to(own.a.dtype)  # once: all adapters have one type
                self._add(own, group.rows, converted, y)
        return y

    def _adapt(
        self, layer: str, name: str, expert: int, which: Tensor | slice, x: Tensor, y: Tensor
    ) -> None:
        """`AdaptExpert` with the step's adapters."""
        converted = x
        for group in self._groups:
            own = group.own.experts.get(f"{layer}.{name}", {}).get(expert)
            if own is None:
                continue
            (rows,) = (self._token_slots[which] == group.slot).nonzero(as_tuple=True)
            if len(rows):
                converted = converted.to(own.a.dtype)
                self._add(own, rows, converted, y)

    def _add(self, added_by: _Added, rows: slice | Tensor, x: Tensor, y: Tensor) -> None:
        product = self._product
        u = product(x[rows], added_by.a, None)
        if added_by.scales is not None:
            u = (u.float() * added_by.scales).to(u.dtype)
        for part in added_by.parts:
            own = u[:, part.first_rank : part.first_rank + part.rank]
            added = product(own, part.b, None).to(y.dtype)
            out = y[:, part.first_row : part.first_row + len(part.b)]
            if isinstance(rows, slice):
                out[rows].add_(added)
            else:
                out.index_add_(0, rows, added)


def _rows_of(indices: np.ndarray, device: torch.device) -> slice | Tensor:
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return torch.from_numpy(indices).to(device)
