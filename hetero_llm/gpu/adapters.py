"""LoRA adapters on the device: their slots, and the products that they are added to.

A forward pass is made for steps without adapters, whose products are the model's own, or for steps
with adapters, whose products read each token's slot from device memory (`begin`). So both kinds can
be captured, and a step in which no request has an adapter costs what it costs without adapters.
Which kernels a product with adapters takes: `kernels.lora_product`.

A slot may still be on its way from host memory when a step that needs it is launched: such a step
waits on the device, piece by piece of the slot (`slot_loads`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.core.lora import NO_ADAPTER, AdapterRef
from hetero_llm.core.null_objects import do_nothing
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.kernels.activation import gated_activation
from hetero_llm.gpu.kernels.expert_adapters import ExpertAdapters, ExpertKernels
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots
from hetero_llm.gpu.kernels.lora_product import (
    GateAdapters,
    StepRows,
    product_before_gate,
    product_with_adapters,
    sums_of_product,
)
from hetero_llm.gpu.slot_loads import SlotLoads
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.lora.slot_layout import SlotLayout, widths
from hetero_llm.lora.targets import EXPERT_WEIGHTS
from hetero_llm.models.blocks import GatedMLP
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import CausalLM, GatedActivation, Linear, Product

assert NO_SLOT == NO_ADAPTER


class AdapterUse(enum.IntEnum):
    """What a step needs of adapters; as a bool, whether a sequence of it has one."""

    NONE = 0
    RESIDENT = 1
    LOADING = 2
    """As `RESIDENT`, but slots may still be on their way: the step waits for them."""


class PackedAdapters(Protocol):
    """Host memory with the adapters that slots are filled from."""

    def held(self, adapter: AdapterRef) -> Tensor:
        """Of `SlotLayout.pack`."""
        ...


class NoGpuAdapters:
    """In the place of `GpuAdapters` where adapters are not served."""

    turn = 0
    overlaps_loads = False
    begin = end = check = staticmethod(do_nothing)

    def prepare(self, step: SchedulerOutput) -> AdapterUse:
        return AdapterUse.NONE


class GpuAdapters:
    """Owns the slots on the device, and takes part in the products of the layers that have places
    there.

    Args:
        model: ready to serve, its products in place.
        memory: holds the adapter of every load of a step until its launch.
        num_slots: adapters on the device.
        max_num_seqs: request slots.
        open_loads: of the slots and the bytes of their pieces.
        overlap_loads: a step waits for its adapters piece by piece on the device; else the copies
            are part of the step's stream.
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
        open_loads: Callable[[Tensor, Sequence[int]], SlotLoads] = SlotLoads,
        overlap_loads: bool = True,
    ) -> None:
        self.overlaps_loads = overlap_loads
        self._memory = memory
        self._slots = torch.zeros(num_slots, layout.num_bytes, dtype=torch.uint8, device=device)
        self._loads = open_loads(self._slots, layout.pieces)
        self._next_piece = len(layout.pieces)  # that the forward pass has not waited for
        self._adapter_of = np.full(max_num_seqs, NO_ADAPTER, np.int32)  # by request slot
        self._device_adapter_of = torch.full(
            (max_num_seqs,), NO_ADAPTER, dtype=torch.int32, device=device
        )
        self._uploads = Uploads(max_num_seqs, device)
        self._rows: StepRows | None = None  # of the forward pass that is made
        self._selected_rows: StepRows | None = None  # of them, in the last layer
        self._missing: GateAdapters | None = None  # of gate and up, until their activation runs
        self._layers: list[tuple[Product, LoraSlots]] = []
        self._words: dict[int, int] = {}  # by number of rows: see `StepRows`
        modules = dict(model.named_modules())
        of_experts: dict[str, dict[str, LoraSlots]] = {}  # by the layer and its weight
        gates = {
            module.gate_up_proj: module.activation
            for module in modules.values()
            if isinstance(module, GatedMLP) and _is_kernel(module.activation)
        }
        for name, place in layout.places.items():
            bounds = torch.tensor(place.bounds, dtype=torch.int32, device=device)
            weights = LoraSlots(
                *layout.views(self._slots, name),
                bounds,
                widest=max(widths(place.bounds)),
                alignment=math.gcd(*place.bounds),
                experts=place.experts or 1,
            )
            if place.experts:
                path, _, weight = name.rpartition(".")
                own = of_experts.setdefault(path, {})
                own[weight] = weights
                if len(own) == len(EXPERT_WEIGHTS):
                    self._join_experts(modules[path], own, place.piece)
                continue
            linear = modules[name]
            assert isinstance(linear, Linear)
            self._layers.append((linear.product, weights))
            deferred = linear in gates and weights.parts == 2
            if deferred:
                activation = gates[linear]
                activation.function = partial(self._gate, activation.name, activation.function)
            linear.product = partial(self._multiply, linear.product, weights, place.piece, deferred)

    def _join_experts(self, layer: nn.Module, slots: dict[str, LoraSlots], piece: int) -> None:
        assert isinstance(layer, Experts)
        kernels = layer.function
        if not isinstance(kernels, ExpertKernels):
            reason = "no kernel computes this model's experts, so they take no adapter here"
            raise ConfigError("lora_experts", True, reason)
        layer.function = partial(self._multiply_experts, kernels, slots, piece)

    @property
    def turn(self) -> int:
        """Of the loads that the step prepared last waits for, for `check`."""
        return self._loads.turn

    def prepare(self, step: SchedulerOutput) -> AdapterUse:
        """Starts to fill the slots of a step, and copies the slots of admitted sequences to the
        device. A step is launched as the kind that is returned, before the next one is prepared."""
        loads = {load.slot: load.adapter for load in step.adapter_loads}
        if self.overlaps_loads and loads:
            self._loads.start({slot: self._memory.held(one) for slot, one in loads.items()})
        elif loads:
            for slot, one in loads.items():
                self._slots[slot].copy_(self._memory.held(one), non_blocking=True)
        changed = False
        for state in step.admitted:
            changed |= self._adapter_of[state.request_slot] != state.adapter_slot
            self._adapter_of[state.request_slot] = state.adapter_slot
        if changed:
            self._device_adapter_of.copy_(self._uploads.send(self._adapter_of))
        if not (self._adapter_of[step.request_slots] != NO_ADAPTER).any():
            return AdapterUse.NONE
        if not self._loads.pending:
            return AdapterUse.RESIDENT
        self._loads.pending = False
        return AdapterUse.LOADING

    def begin(
        self, token_slots: Tensor | None, *, waits: bool = False, selected: Tensor | None = None
    ) -> None:
        """Begins a forward pass.

        Args:
            token_slots: [T] int32, the request slot of each token; None: no token has an adapter.
            waits: slots may still be on their way (`AdapterUse.LOADING`).
            selected: [N] int64 tokens that alone come to the end of the last layer, N other than T;
                None: all do. A product knows by the number of its rows which ones they are.
        """
        self._rows = self._selected_rows = None
        self._next_piece = 0 if waits else self._loads.num_pieces
        if token_slots is not None:
            self._rows = self._step_rows(token_slots)
            if selected is not None:
                assert len(selected) != len(token_slots)
                self._selected_rows = self._step_rows(token_slots.index_select(0, selected))

    def _step_rows(self, token_slots: Tensor) -> StepRows:
        return StepRows(
            token_slots,
            self._device_adapter_of,
            num_slots=len(self._slots),
            words=self._num_words(len(token_slots)),
        )

    def _rows_of(self, x: Tensor, rows: StepRows) -> StepRows:
        """Those of a product's inputs, `rows` or the selected ones."""
        if len(x) == len(rows.slots):
            return rows
        assert self._selected_rows is not None and len(x) == len(self._selected_rows.slots)
        return self._selected_rows

    def end(self) -> None:
        """Ends a forward pass: behind one that waits, all slots are filled."""
        self._wait(self._loads.num_pieces - 1)

    def check(self, turn: int) -> None:
        """
        Args:
            turn: of a step of `LOADING` that has ended.

        Raises:
            RuntimeError: it has run without its adapters.
        """
        if self._loads.timed_out(turn):
            raise RuntimeError("adapters have not reached the GPU: a step gave up waiting for them")

    def _wait(self, piece: int) -> None:
        """Later kernels of the forward pass find this piece of all slots."""
        if piece >= self._next_piece:
            self._loads.wait(piece)
            self._next_piece = piece + 1

    def _num_words(self, num_rows: int) -> int:
        words = self._words.get(num_rows)
        if words is None:
            words = sum(sums_of_product(product, num_rows, own) for product, own in self._layers)
            self._words[num_rows] = words
        return words

    def _multiply(
        self, product: Product, slots: LoraSlots, piece: int, deferred: bool,
        x: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`Product` with the adapters of the rows; `deferred`: `_gate`, which comes next, may add
        them."""
        if self._rows is None:
            return product(x, weight, bias)
        self._wait(piece)
        rows = self._rows_of(x, self._rows)
        if deferred:
            y, self._missing = product_before_gate(
                product, x, weight, bias, rows=rows, weights=slots
            )
            return y
        return product_with_adapters(product, x, weight, bias, rows=rows, weights=slots)

    def _multiply_experts(
        self, kernels: ExpertKernels, slots: dict[str, LoraSlots], piece: int,
        x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    ) -> Tensor:  # fmt: skip
        """`ExpertsFunction` with the adapters of the rows."""
        if self._rows is None:
            return kernels(x, ids, weights, gate_up, down)
        self._wait(piece)
        rows = self._rows_of(x, self._rows)
        adapters = ExpertAdapters(rows.slots, slots["gate_up"], slots["down"])
        return kernels.adapted(x, ids, weights, gate_up, down, adapters=adapters)

    def _gate(self, name: str, plain: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        missing, self._missing = self._missing, None
        return plain(gate_up) if missing is None else missing.gate(gate_up, name)


def _is_kernel(activation: GatedActivation) -> bool:
    """Whether `lora_gate` computes what this activation does."""
    function = activation.function
    return isinstance(function, partial) and function.func is gated_activation
