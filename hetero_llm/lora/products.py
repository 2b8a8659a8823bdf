"""Adds adapters to the products of a model, on any device: the reference of later kernels.

The tokens of a step are grouped by slot. For each group and each `Linear` that its adapter has,
the product gets scale * (x A^T) B^T in addition; other rows are not touched. A step without an
adapter runs the model's own products: the replacements are in place only while they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.lora import NO_ADAPTER
from hetero_llm.lora.adapter import Adapter, LinearAdapter
from hetero_llm.models.layers import CausalLM, Linear, Product


@dataclass(frozen=True, slots=True)
class _Group:
    """The tokens of a step with one adapter: a range, or indices [n] int64."""

    adapter: Adapter
    rows: slice | Tensor


class AdaptedProducts:
    """Owns what the slots of a device hold, and the products of the layers that adapters name.

    Args:
        model: ready to serve, its products in place.
        linears: names of the layers that may have an adapter.
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
        self._product = product
        self._slots: list[Adapter | None] = [None] * num_slots
        self._groups: list[_Group] = []
        self._num_tokens = 0
        self._in_place = False

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot, for the steps that follow."""
        self._slots[slot] = adapter

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
            adapter = self._slots[slot]
            assert adapter is not None, "a step uses a slot before it was filled"
            self._groups.append(_Group(adapter, _rows_of(np.flatnonzero(slots == slot), device)))
        if bool(self._groups) != self._in_place:
            self._switch()

    def _switch(self) -> None:
        self._in_place = not self._in_place
        for name, (linear, product) in self._linears.items():
            linear.product = partial(self._multiply, name, product) if self._in_place else product

    def _multiply(
        self, name: str, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`Product` with the step's adapters."""
        y = product(x, weight, bias)
        assert len(x) == self._num_tokens, "a layer runs on other rows than the step's tokens"
        for group in self._groups:
            linear = group.adapter.linears.get(name)
            if linear is not None:
                self._add(linear, group.rows, x, y)
        return y

    def _add(self, linear: LinearAdapter, rows: slice | Tensor, x: Tensor, y: Tensor) -> None:
        a, product = linear.a, self._product
        u = product(x[rows].to(a.dtype), a, None)
        u = (u.float() * linear.scales).to(a.dtype)
        for part in linear.parts:
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
