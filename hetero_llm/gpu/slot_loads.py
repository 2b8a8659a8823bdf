"""Adapters on their way from host memory into slots, behind the forward pass that needs them.

A load is issued as a whole before the step that needs it: on a stream of its own, behind all
steps that were launched before (they may read what the slot held), the pieces of
`lora.slot_layout` are copied in order, those of several slots together, and a flag counts them.
The step waits on the device before the first product of each piece (`layer_ready`). So all copies
are in their stream before a kernel waits for one of them, whatever the host does next, and pieces
that have arrived stay: a later step waits for none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.gpu.kernels.layer_ready import MOST_LOOKS
from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags

_PLACE = 0  # of the one flag
_MOST_LOOKS = 16 * MOST_LOOKS
"""About half a minute for a piece: a step without its adapter ends the engine."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""Targets on the device, and what they receive, in page-locked host memory."""


class LoadStream(Protocol):
    """Copies to the device beside the current stream."""

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        """Copies the pieces in order, behind all work that the current stream has by now. Behind
        the copies of the i-th piece, from 0 on, the flag becomes `count + i + 1` as int32. Pieces
        are drawn while the load stream is the current one."""
        ...


class CudaLoadStream:
    """See `LoadStream`. No call waits for the device.

    Args:
        flag: [1] int32 on the device.

    Attributes:
        stream: on which the copies run.
    """

    def __init__(self, flag: Tensor) -> None:
        self.stream = torch.cuda.Stream(flag.device)
        self._launched = torch.cuda.Event()
        self._address = flag.data_ptr()
        # A copy of 4 bytes would be no flag: nothing orders what other streams see of two copies.
        self._write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
        self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        self._launched.record()
        with torch.cuda.stream(self.stream):
            self._launched.wait()
            for copies in pieces:
                for target, source in copies:
                    # Torch keeps the source from being used anew while the copy runs.
                    target.copy_(source, non_blocking=True)
                count += 1
                error = self._write(self.stream.cuda_stream, self._address, count % 2**32, 0)
                if error:
                    raise RuntimeError(f"cuStreamWriteValue32 for an adapter: error {error}")


class HostLoadStream:
    """See `LoadStream`; loads at once, in Triton's interpreter."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        for copies in pieces:
            for target, source in copies:
                target.copy_(source)
            count += 1
            self._flag.fill_((count + 2**31) % 2**32 - 2**31)


def open_load_stream(flag: Tensor) -> LoadStream:
    """The load stream of the flag's device."""
    return CudaLoadStream(flag) if flag.device.type == "cuda" else HostLoadStream(flag)


class SlotLoads:
    """Starts the loads of slots and lets steps wait for them. One thread calls it.

    Args:
        slots: [slots, bytes] uint8 on the device.
        pieces: bytes of each piece of a slot, in order.
        open_stream: of a flag, [1] int32 on the device.
        most_looks: see `kernels.layer_ready.wait_for_loads`.

    Attributes:
        num_pieces: of a slot.
        pending: a load was started, and no step launched since then waits for it. `GpuAdapters`
            sets it to False when it prepares a step that waits: work issued to the stream after
            that step finds the slots filled.
        turn: of the load started last, for `timed_out`.
    """

    def __init__(
        self,
        slots: Tensor,
        pieces: Sequence[int],
        *,
        open_stream: Callable[[Tensor], LoadStream] = open_load_stream,
        most_looks: int = _MOST_LOOKS,
    ) -> None:
        self.num_pieces = len(pieces)
        self.pending = False
        self.turn = 0
        self._slots = slots
        self._pieces = list(pieces)
        self._count = 0  # pieces of all loads started
        self._ready = DeviceLayerReadyFlags(slots.device, self._flag, most_looks=most_looks)
        self._stream = open_stream(self._ready.flags[_PLACE : _PLACE + 1])

    def start(self, contents: Mapping[int, Tensor]) -> None:
        """Starts to fill slots, in the order of the pieces.

        Args:
            contents: by slot, [bytes] uint8 in page-locked host memory.
        """
        copies = [
            zip(self._slots[slot].split(self._pieces), packed.split(self._pieces), strict=True)
            for slot, packed in contents.items()
        ]
        self._stream.load(zip(*copies, strict=True), self._count)
        self._ready.arm((self._count,))  # behind the copies: they need not wait for this kernel
        self._count += self.num_pieces
        self.turn = self._ready.turn
        self.pending = True

    def wait(self, piece: int) -> None:
        """Work issued after it finds this piece, and those before it, of all started loads."""
        self._ready.wait(piece)

    def timed_out(self, turn: int) -> bool:
        """Whether a step gave up waiting for the load of this turn. To be called once the step has
        ended."""
        return self._ready.take_error(turn)

    def _flag(self, count: int) -> LayerReadyFlag:
        """The flag of a load, and its value when the load begins: `count` pieces were copied by
        earlier loads."""
        return LayerReadyFlag(_PLACE, count)
