"""Device memory that all ranks of a host map: `gpu.kernels.collectives` exchanges through it.

Two makers, tried in this order until one has worked on all ranks:

- torch's symmetric memory, whose interface torch calls unstable;
- CUDA's own handles between processes (CUDA driver API, "Interprocess Communication"), sent over
  the group.

Multicast is not used. All calls are collective: each rank makes them in the same order, and what
fails on one rank fails on all of them. Before memory is given out, every rank has written to every
other one's, and each has seen what was written to its own.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_llm.core.errors import HeteroLLMError

logger = logging.getLogger(__name__)

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_GRANULARITY = 2 << 20


class PeersUnreachable(HeteroLLMError):
    """The devices of the ranks cannot write to each other's memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"GPUs cannot reach each other's memory: {reason}")
        self.reason = reason


class PeerMemory(Protocol):
    """One allocation of each rank.

    Attributes:
        tensors: [elements] int16 of each rank, in rank order, as this process and its device see
            them; the own one at this process' rank.
    """

    tensors: tuple[Tensor, ...]

    def unmap(self) -> None:
        """Drops the peers' memory; nothing on this device may use it any more."""
        ...

    def free(self) -> None:
        """Frees the own memory, after `unmap` on all ranks."""
        ...


class RankExchange(Protocol):
    """What the ranks tell each other at start and end."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order; waits for all."""
        ...


Maker = Callable[[int, torch.device, RankExchange], PeerMemory]
"""(bytes, device, exchange) -> memory; any exception: it could not be made."""


class GroupExchange:
    """`RankExchange` over a group of torch.distributed that serves host memory (gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def make_peer_memory(
    num_bytes: int,
    device: torch.device,
    exchange: RankExchange,
    *,
    fill: int = 0,
    makers: Sequence[tuple[str, Maker]] | None = None,
) -> PeerMemory:
    """Memory of `num_bytes` on each rank's device that all ranks map.

    Args:
        device: Of this rank, a CUDA device, current.
        fill: Of all its int16 elements.
        makers: Names and functions, tried in order; None: those of this file.

    Raises:
        PeersUnreachable: devices have no access to each other, or no maker worked; on all ranks.
    """
    _check_access(device, exchange)
    size = -(-num_bytes // _GRANULARITY) * _GRANULARITY
    reasons = []
    for name, maker in makers or MAKERS:
        memory, reason = _try(maker, size, device, exchange, fill)
        if memory is not None:
            logger.info("memory of %d ranks mapped by %s", exchange.size, name)
            return memory
        reasons.append(f"{name}: {reason}")
        if exchange.rank == 0:
            logger.warning("memory of the ranks is not mapped by %s: %s", name, reason)
    raise PeersUnreachable("; ".join(reasons))


def close_peer_memory(memory: PeerMemory, exchange: RankExchange) -> None:
    """Waits for all ranks and gives the memory back. Ranks that have died are not waited for."""
    try:
        _finish(memory.tensors[exchange.rank])
    except RuntimeError as error:
        logger.debug("the device does not end its work: %s", error)
    _meet(exchange)
    memory.unmap()
    _meet(exchange)
    memory.free()


def _try(
    maker: Maker, size: int, device: torch.device, exchange: RankExchange, fill: int
) -> tuple[PeerMemory | None, str]:
    """The memory, or why a rank has none; the same on all ranks."""
    memory, reason = None, ""
    try:
        memory = maker(size, device, exchange)
    except Exception as error:  # drivers and torch raise what they like; all ranks must hear of it
        reason = _line(error)
    reason = _first(exchange.gather(reason))
    if memory is not None and not reason:
        reason = _first(exchange.gather(_cross_check(memory, exchange, fill)))
    if memory is not None and not reason:
        return memory, ""
    if memory is not None:
        memory.unmap()
    exchange.gather(None)
    if memory is not None:
        memory.free()
    return None, reason


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _first(reasons: Sequence[str]) -> str:
    found = ((rank, reason) for rank, reason in enumerate(reasons) if reason)
    return next((f"rank {rank}: {reason}" for rank, reason in found), "")


def _cross_check(memory: PeerMemory, exchange: RankExchange, fill: int) -> str:
    """Every rank writes into all memories, at both ends, who writes to whom; why not all of it
    arrived here, or an empty string. Leaves `fill` everywhere."""
    rank, size = exchange.rank, exchange.size
    own = memory.tensors[rank]
    try:
        own.fill_(fill)
        _finish(own)
        exchange.gather(None)
        for peer, tensor in enumerate(memory.tensors):
            tensor[rank] = tensor[rank - size] = rank * size + peer
        _finish(own)
        exchange.gather(None)
        found = torch.cat((own[:size], own[-size:])).tolist()
        own.fill_(fill)
        _finish(own)
        exchange.gather(None)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    expected = 2 * [peer * size + rank for peer in range(size)]
    return "" if found == expected else f"peers wrote {expected}, here is {found}"


def _finish(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def _check_access(device: torch.device, exchange: RankExchange) -> None:
    """Raises PeersUnreachable on all ranks if a pair is known to have no access. Devices that this
    process does not see are not asked."""
    if device.type != "cuda":
        return
    own = str(torch.cuda.get_device_properties(device).uuid)
    seen = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    reason = ""
    for rank, peer in enumerate(exchange.gather(own)):
        known = peer != own and peer in seen
        if known and not torch.cuda.can_device_access_peer(device, seen[peer]):
            reason = reason or f"no access from {device} to that of rank {rank}"
    reason = _first(exchange.gather(reason))
    if reason:
        raise PeersUnreachable(reason)


class _TorchMemory:
    """`PeerMemory` of torch.distributed._symmetric_memory."""

    def __init__(self, num_bytes: int, device: torch.device, exchange: RankExchange) -> None:
        count, own, failed = num_bytes // 2, torch.empty(0), ""
        try:
            own = _allocate_symmetric(count, device)
        except Exception as error:  # a rank that raised here would leave the others waiting below
            failed = _line(error)
        failed = _first(exchange.gather(failed))
        if failed:
            raise RuntimeError(failed)
        if not isinstance(exchange, GroupExchange):
            raise RuntimeError("needs a group of torch.distributed")
        self._handle: Any = _rendezvous(own, exchange.group)
        self.tensors = tuple(
            own if rank == exchange.rank else self._handle.get_buffer(rank, (count,), torch.int16)
            for rank in range(exchange.size)
        )

    def unmap(self) -> None:
        """The peers' memory and the own one go together, in `free`."""

    def free(self) -> None:
        self.tensors, self._handle = (), None


def _allocate_symmetric(count: int, device: torch.device) -> Tensor:
    """Not `symmetric_memory.empty`, which may give a part of a larger allocation."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.int16, device)


def _rendezvous(own: Tensor, group: dist.ProcessGroup) -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(own, group)


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class _Driver:
    """The calls of the CUDA driver that this file needs; they raise RuntimeError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        address, pointer = ctypes.c_uint64, ctypes.POINTER
        self._types = {
            "cuMemAlloc_v2": (pointer(address), ctypes.c_size_t),
            "cuMemFree_v2": (address,),
            "cuIpcGetMemHandle": (pointer(_Handle), address),
            "cuIpcOpenMemHandle_v2": (pointer(address), _Handle, ctypes.c_uint),
            "cuIpcCloseMemHandle": (address,),
        }
        for name, types in self._types.items():
            getattr(self._library, name).argtypes = types

    def call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown').decode()} ({error})")

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def handle_of(self, address: int) -> bytes:
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        own = _Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), own, _LAZY_PEER_ACCESS)
        return address.value


class _IpcMemory:
    """`PeerMemory` of handles that the driver makes."""

    def __init__(self, num_bytes: int, device: torch.device, exchange: RankExchange) -> None:
        self._own, self._opened = 0, list[int]()
        self.tensors: tuple[Tensor, ...] = ()
        handle, failed = b"", ""
        try:
            torch.cuda.synchronize(device)  # makes the device's context the current one
            self._driver = _Driver()
            self._own = self._driver.allocate(num_bytes)
            handle = self._driver.handle_of(self._own)
        except Exception as error:  # a rank that raised here would leave the others waiting below
            failed = _line(error)
        handles = exchange.gather((handle, failed))
        failed = _first([reason for _, reason in handles])
        try:
            if failed:
                raise RuntimeError(failed)
            addresses = [
                self._own if rank == exchange.rank else self._open(one)
                for rank, (one, _) in enumerate(handles)
            ]
        except RuntimeError:
            self.unmap()
            self.free()
            raise
        self.tensors = tuple(_view(address, num_bytes, device) for address in addresses)

    def _open(self, handle: bytes) -> int:
        address = self._driver.open(handle)
        self._opened.append(address)
        return address

    def unmap(self) -> None:
        self.tensors = ()
        while self._opened:
            self._driver.call("cuIpcCloseMemHandle", self._opened.pop())

    def free(self) -> None:
        if self._own:
            self._driver.call("cuMemFree_v2", self._own)
        self._own = 0


def _view(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """int16 elements at an address that `device` can use; they belong to no allocator of torch."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.int16, device=device).set_(storage)


def _meet(exchange: RankExchange) -> None:
    """Waits for all ranks; a dead one uses nothing any more."""
    try:
        exchange.gather(None)
    except RuntimeError as error:
        logger.debug("a rank is gone: %s", error)


MAKERS: tuple[tuple[str, Maker], ...] = (
    ("torch's symmetric memory", _TorchMemory),
    ("CUDA's handles between processes", _IpcMemory),
)
