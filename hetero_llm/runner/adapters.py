"""Adapters in a runner's steps: fills slots, and says which adapter each token has."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from hetero_llm.core.lora import NO_ADAPTER, AdapterRef
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.lora.adapter import Adapter
from hetero_llm.lora.products import AdaptedProducts


class HeldAdapters(Protocol):
    """Host memory with the adapters that slots are filled from."""

    def held(self, adapter: AdapterRef) -> Adapter: ...


class NoStepAdapters:
    """In the place of `StepAdapters` where adapters are not served."""

    def begin(self, step: SchedulerOutput) -> None:
        pass


class StepAdapters:
    """Keeps the adapter slot of every request slot.

    Args:
        products: of the model.
        memory: holds the adapter of every load of a step until its launch.
        max_num_seqs: request slots.
        device: of the model.
    """

    def __init__(
        self,
        products: AdaptedProducts,
        memory: HeldAdapters,
        *,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self._products = products
        self._memory = memory
        self._device = device
        self._slots = np.full(max_num_seqs, NO_ADAPTER, np.int32)

    def begin(self, step: SchedulerOutput) -> None:
        """Prepares the model for the forward pass of a step, before anything of it is launched."""
        for load in {load.slot: load for load in step.adapter_loads}.values():
            self._products.fill(load.slot, self._memory.held(load.adapter))
        for state in step.admitted:
            self._slots[state.request_slot] = state.adapter_slot
        slots = self._slots[step.request_slots]
        self._products.begin_step(np.repeat(slots, step.num_scheduled_tokens), self._device)
