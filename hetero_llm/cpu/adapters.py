"""LoRA adapters in the steps of the native executor: fills its slots, and says which slot each
sequence has. The products are phases of the executor (`csrc/step/adapters.h`)."""

from __future__ import annotations

import numpy as np
import torch

from hetero_llm.core.lora import NO_ADAPTER
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.cpu.executor import Executor
from hetero_llm.runner.adapters import HeldAdapters


class NoNativeAdapters:
    """In the place of `NativeAdapters` where adapters are not served."""

    def begin(self, step: SchedulerOutput) -> np.ndarray | None:
        return None


class NativeAdapters:
    """Keeps the adapter slot of every request slot.

    Args:
        executor: has no adapter slots yet.
        memory: holds the adapter of every load of a step until its launch.
        num_slots: adapters at the same time.
        max_num_seqs: request slots.
        dtype: of A and B in the executor, bfloat16 or float32.
    """

    def __init__(
        self,
        executor: Executor,
        memory: HeldAdapters,
        *,
        num_slots: int,
        max_num_seqs: int,
        dtype: torch.dtype,
    ) -> None:
        executor.make_adapter_slots(num_slots, dtype)
        self._executor = executor
        self._memory = memory
        self._slots = np.full(max_num_seqs, NO_ADAPTER, np.int32)

    def begin(self, step: SchedulerOutput) -> np.ndarray | None:
        """Fills the slots that a step needs, before it runs.

        Returns:
            [S] int32 slot of each scheduled sequence's adapter; None: no sequence has one.

        Raises:
            MemoryError: there is no memory for an adapter.
        """
        for load in {load.slot: load for load in step.adapter_loads}.values():
            self._executor.fill_adapter_slot(load.slot, self._memory.held(load.adapter))
        for state in step.admitted:
            self._slots[state.request_slot] = state.adapter_slot
        slots = self._slots[step.request_slots]
        return slots if (slots != NO_ADAPTER).any() else None
