"""LoRA adapters that benches make in memory, in the place of folders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_timing import event_ms
from hetero_llm import LoRARequest
from hetero_llm.core.lora import AdapterRef
from hetero_llm.lora import store
from hetero_llm.lora.adapter import Adapter, AdapterPart, LinearAdapter
from hetero_llm.lora.slot_layout import SlotLayout
from hetero_llm.lora.targets import AdapterTargets


class MadeAdapters:
    """Makes adapters instead of reading files; several names share one content in memory.

    Args:
        contents: different ones in memory.
        rank: of every module.
        device: on which their numbers are drawn.
        b_size: standard deviation of B's numbers. The default leaves random models in the range of
            their type.
    """

    def __init__(self, contents: int, rank: int, device: str, *, b_size: float = 1e-3) -> None:
        self._contents = contents
        self._rank = rank
        self._device = device
        self._b_size = b_size
        self._linears: dict[int, Mapping[str, LinearAdapter]] = {}
        self._packed: dict[int, Tensor] = {}  # by the identity of what was packed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Engines that are started inside have these adapters, whatever folders requests name."""
        pack = SlotLayout.pack

        def packed(layout: SlotLayout, adapter: Adapter, *, pin: bool) -> Tensor:
            key = id(adapter.linears)
            if key not in self._packed:
                self._packed[key] = pack(layout, adapter, pin=pin)
            return self._packed[key]

        with (
            mock.patch.object(store, "read_adapter", self.read),
            mock.patch.object(SlotLayout, "pack", packed),
        ):
            yield

    def read(
        self, request: LoRARequest, targets: AdapterTargets, *, dtype: torch.dtype, **_: Any
    ) -> Adapter:
        """In the place of `read_adapter`; another name is another content to the engine."""
        number = request.lora_int_id % self._contents
        if number not in self._linears:
            self._linears[number] = self._make(number, targets, dtype)
        linears = self._linears[number]
        key = sha256(request.lora_name.encode()).hexdigest()
        rank = max(linear.a.shape[0] for linear in linears.values())
        return Adapter(AdapterRef(request, key, rank), linears)

    def copy_ms(self, device: str) -> float:
        """Of one adapter's copy to the device while nothing else runs; there must be one."""
        packed = next(iter(self._packed.values()))
        slot = torch.empty_like(packed, device=device)
        return event_ms(lambda: slot.copy_(packed, non_blocking=True))

    def _make(
        self, number: int, targets: AdapterTargets, dtype: torch.dtype
    ) -> Mapping[str, LinearAdapter]:
        generator = torch.Generator(self._device).manual_seed(number)

        def drawn(rows: int, columns: int, size: float) -> Tensor:
            values = torch.randn(rows, columns, device=self._device, generator=generator)
            return (values * size).to(dtype).cpu()

        rank = self._rank
        members: dict[str, list[tuple[int, int]]] = {}
        for target in targets.targets.values():
            if target.expert is not None:
                continue
            members.setdefault(target.linear, []).append((target.first_row, target.rows))
        linears = {}
        for name, places in members.items():
            columns = targets.sizes[name][1]
            parts = tuple(
                AdapterPart(first_row, index * rank, rank, drawn(rows, rank, self._b_size))
                for index, (first_row, rows) in enumerate(sorted(places))
            )
            a = drawn(len(parts) * rank, columns, 1 / math.sqrt(columns))
            linears[name] = LinearAdapter(a, torch.ones(len(a)), parts)
        return linears


def adapters_of(count: int) -> list[LoRARequest]:
    return [LoRARequest(f"a{number}", number, "made") for number in range(1, count + 1)]
