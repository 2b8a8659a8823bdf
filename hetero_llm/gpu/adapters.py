"""LoRA adapters on the device: their slots, and the products that they are added to.

A forward pass is made for steps without adapters, whose products are the model's own, or for steps
with adapters, whose products read each token's slot from device memory (`begin`). So both kinds can
be captured, and a step in which no request has an adapter costs what it costs without adapters.
Which kernels a product with adapters takes: `kernels.lora_product`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.lora import NO_ADAPTER, AdapterRef
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.kernels.activation import gated_activation
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots
from hetero_llm.gpu.kernels.lora_product import (
    GateAdapters,
    StepRows,
    product_before_gate,
    product_with_adapters,
    sums_of_product,
)
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.lora.slot_layout import SlotLayout, widths
from hetero_llm.models.blocks import GatedMLP
from hetero_llm.models.layers import CausalLM, GatedActivation, Linear, Product

assert NO_SLOT == NO_ADAPTER


class PackedAdapters(Protocol):
    """Host memory with the adapters that slots are filled from."""

    def held(self, adapter: AdapterRef) -> Tensor:
        """Of `SlotLayout.pack`; valid until the step that needs it has run."""
        ...


class NoGpuAdapters:
    """In the place of `GpuAdapters` where adapters are not served."""

    def prepare(self, step: SchedulerOutput) -> bool:
        return False

    def begin(self, token_slots: Tensor | None) -> None:
        pass


class GpuAdapters:
    """Owns the slots on the device, and takes part in the products of the layers that have places
    there.

    Args:
        model: ready to serve, its products in place.
        memory: holds the adapter of every load of a step until the slot is used for another.
        num_slots: adapters on the device.
        max_num_seqs: request slots.
    """

    def __init__(
        self,
        model: CausalLM,
        layout: SlotLayout,
        memory: PackedAdapters,
        *,
        num_slots: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self._memory = memory
        self._slots = torch.zeros(num_slots, layout.num_bytes, dtype=torch.uint8, device=device)
        self._adapter_of = np.full(max_num_seqs, NO_ADAPTER, np.int32)  # by request slot
        self._device_adapter_of = torch.full(
            (max_num_seqs,), NO_ADAPTER, dtype=torch.int32, device=device
        )
        self._uploads = Uploads(max_num_seqs, device)
        self._rows: StepRows | None = None  # of the forward pass that is made
        self._missing: GateAdapters | None = None  # of gate and up, until their activation runs
        self._layers: list[tuple[Product, LoraSlots]] = []
        self._words: dict[int, int] = {}  # by number of rows: see `StepRows`
        modules = dict(model.named_modules())
        gates = {
            module.gate_up_proj: module.activation
            for module in modules.values()
            if isinstance(module, GatedMLP) and _is_kernel(module.activation)
        }
        for name, place in layout.places.items():
            linear = modules[name]
            assert isinstance(linear, Linear)
            bounds = torch.tensor(place.bounds, dtype=torch.int32, device=device)
            weights = LoraSlots(
                *layout.views(self._slots, name),
                bounds,
                widest=max(widths(place.bounds)),
                alignment=math.gcd(*place.bounds),
            )
            self._layers.append((linear.product, weights))
            linear.product = partial(self._multiply, linear.product, weights)
            if linear in gates and weights.parts == 2:
                product = self._layers[-1][0]
                linear.product = partial(self._multiply_before_gate, product, weights)
                activation = gates[linear]
                activation.function = partial(self._gate, activation.name, activation.function)

    def prepare(self, step: SchedulerOutput) -> bool:
        """Fills the slots that a step needs and tells the device the slots of admitted sequences.

        Returns:
            Whether a sequence of the step has an adapter.
        """
        for load in {load.slot: load for load in step.adapter_loads}.values():
            packed = self._memory.held(load.adapter)
            self._slots[load.slot].copy_(packed, non_blocking=True)
        changed = False
        for state in step.admitted:
            changed |= self._adapter_of[state.request_slot] != state.adapter_slot
            self._adapter_of[state.request_slot] = state.adapter_slot
        if changed:
            self._device_adapter_of.copy_(self._uploads.send(self._adapter_of))
        return bool((self._adapter_of[step.request_slots] != NO_ADAPTER).any())

    def begin(self, token_slots: Tensor | None) -> None:
        """Begins a forward pass.

        Args:
            token_slots: [T] int32, the request slot of each token; None: no token has an adapter.
        """
        self._rows = None
        if token_slots is not None:
            self._rows = StepRows(
                token_slots,
                self._device_adapter_of,
                num_slots=len(self._slots),
                words=self._num_words(len(token_slots)),
            )

    def _num_words(self, num_rows: int) -> int:
        words = self._words.get(num_rows)
        if words is None:
            words = sum(sums_of_product(product, num_rows, own) for product, own in self._layers)
            self._words[num_rows] = words
        return words

    def _multiply(
        self, product: Product, slots: LoraSlots, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`Product` with the adapters of the rows."""
        if self._rows is None:
            return product(x, weight, bias)
        return product_with_adapters(product, x, weight, bias, rows=self._rows, weights=slots)

    def _multiply_before_gate(
        self, product: Product, slots: LoraSlots, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`_multiply` of gate and up; `_gate`, which comes next, may add the adapters."""
        if self._rows is None:
            return product(x, weight, bias)
        y, self._missing = product_before_gate(
            product, x, weight, bias, rows=self._rows, weights=slots
        )
        return y

    def _gate(self, name: str, plain: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        missing, self._missing = self._missing, None
        return plain(gate_up) if missing is None else missing.gate(gate_up, name)


def _is_kernel(activation: GatedActivation) -> bool:
    """Whether `lora_gate` computes what this activation does."""
    function = activation.function
    return isinstance(function, partial) and function.func is gated_activation
