"""Host memory for the experts of a mixture, while weights are loaded and afterwards.

`ExpertMemory` holds all experts: tensors are read into page-locked memory and stay there.
`ExpertStore` is for hosts that do not hold all of them: a weight of a layer is read into pageable
memory, and as soon as it is complete, each expert is copied to its slot of the GPU's bank or to its
place in page-locked memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hetero_llm.bridge.host_experts import HostExperts, HostKind, HostLayer, HostMatrices
from hetero_llm.bridge.host_places import HostPlaces
from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool, PoolError
from hetero_llm.core.errors import ConfigError
from hetero_llm.models.config import ClampedSwish

if TYPE_CHECKING:
    import torch

    from hetero_llm.gpu.expert_bank import BankMatrices, ExpertBank
    from hetero_llm.models.experts import Experts
    from hetero_llm.quantization.matrix import QuantizedStack

FIELD = "moe_cpu_experts"
_GIB = 1 << 30
_PINNING_THREADS = 8
_PAGE = 4096


class ExpertMemory:
    """Page-locked memory for tensors of experts, each of its own pool; `models.experts.HostMemory`.

    Args:
        node: preferred NUMA node; None: any.
        libcuda: see `PinnedPool`.

    Attributes:
        num_bytes: given so far.
    """

    def __init__(self, *, node: int | None = None, libcuda: str | None = "libcuda.so.1") -> None:
        self.num_bytes = 0
        self._node = node
        self._libcuda = libcuda

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An empty tensor, whose memory lives as long as any view of it.

        Raises:
            ConfigError: the host has no memory for it, or does not lock it.
        """
        import torch

        size = math.prod(shape) * dtype.itemsize
        rows = -(-size // _PAGE)
        try:
            pool = PinnedPool(
                _PAGE, rows, chunk_bytes=rows * _PAGE, node=self._node, threads=_PINNING_THREADS,
                libcuda=self._libcuda,
            )  # fmt: skip
        except PoolError as error:
            raise self._refused(size, str(error)) from error
        if pool.failure:
            pool.close()
            raise self._refused(size, pool.failure)
        self.num_bytes += size
        memory = (ctypes.c_char * max(size, 1)).from_address(pool.address)
        weakref.finalize(memory, pool.close)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size)
        return flat.view(dtype).view(shape)

    def _refused(self, size: int, why: str) -> ConfigError:
        held, more = self.num_bytes / _GIB, size / _GIB
        reason = (
            f"no host memory for experts: {held:.2f} GiB are locked, and {more:.2f} GiB more are "
            f"not: {why}"
        )
        return ConfigError(FIELD, "auto", reason)


class ExpertStore:
    """Experts that are either in the bank or in host memory; `models.experts.SettlingMemory`.

    Args:
        table: [layers, experts] int32, the slot of each expert or a negative number.
        num_places: of host memory.
        num_slots: of the bank, its staging slots included.
        memory: for what stays on the host.
        dtype: of the model.
        device: of the bank.

    Attributes:
        places: where the others are.
    """

    def __init__(
        self,
        table: np.ndarray,
        *,
        num_places: int,
        num_slots: int,
        memory: ExpertMemory,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_layers, num_experts = table.shape
        self.places = HostPlaces(num_layers, num_experts, num_places)
        self.places.fill(table)
        self._table = table.copy()
        self._num_slots = num_slots
        self._memory = memory
        self._dtype, self._device = dtype, device
        self._forms: dict[str, tuple[object, ...]] = {}
        self._data: dict[str, torch.Tensor] = {}  # places of host memory
        self._bank: dict[str, BankMatrices] = {}
        self._blocks: dict[int, mmap.mmap] = {}  # of weights that are being read, by address
        self._settled: dict[tuple[int, str], HostMatrices] = {}

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `models.experts.HostMemory`. The system gives pages when they are written."""
        import torch

        count = math.prod(shape)
        # Private: pages of shared memory would stay when they are given back.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=private)
        tensor = torch.frombuffer(block, dtype=dtype, count=count).view(shape)
        self._blocks[tensor.data_ptr()] = block
        return tensor

    def settle(self, index: int, layer: Experts, name: str) -> None:
        """See `models.experts.SettlingMemory`.

        Raises:
            ConfigError: no kernel serves the experts, layers differ, or the host does not lock the
                memory.
        """
        import torch
        from torch import nn

        weight = getattr(layer, name)
        shape = tuple(weight.shape)
        whole = host_matrices(weight, None)
        self._open(name, whole)
        bank, data = self._bank[name], self._data[name]
        table, places = self._table[index], self.places.table[index]
        for expert, slot in enumerate(table.tolist()):
            if slot >= 0:
                bank.fill(slot, whole, expert, 1)
            else:
                place = data[places[expert]].view(torch.uint8)
                place.copy_(whole.data[expert].view(torch.uint8))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        kept: dict[str, Any] = {
            part: self._memory(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            for part, tensor in whole.tensors()
            if part != "data"
        }
        self._settled[index, name] = dataclasses.replace(whole, data=data, places=places, **kept)
        if not isinstance(weight, torch.Tensor):
            tensors = weight.matrix.tensors().values()
        else:
            tensors = (weight,)
        for tensor in tensors:
            self.give_back(tensor)
        delattr(layer, name)
        empty = torch.empty(shape, dtype=self._dtype, device="meta")
        setattr(layer, name, nn.Parameter(empty, requires_grad=False))

    def give_back(self, tensor: torch.Tensor) -> None:
        """See `models.experts.SettlingMemory`. The loader has views of a plain weight until all are
        filled: the memory goes back, the addresses stay."""
        self._blocks.pop(tensor.data_ptr()).madvise(mmap.MADV_DONTNEED)

    def _open(self, name: str, whole: HostMatrices) -> None:
        """Makes bank and places for one of the two matrices when the first layer's arrives."""
        from hetero_llm.gpu.expert_bank import BankMatrices, why_not_part

        form = _form_of(whole)
        if name in self._forms:
            if form != self._forms[name]:
                raise _unlike()
            return
        reason = why_not_part(whole, self._dtype)
        if reason is not None:
            raise ConfigError(FIELD, "auto", reason)
        self._forms[name] = form
        shape = (self.places.num_places, *whole.data.shape[1:])
        self._data[name] = self._memory(shape, whole.data.dtype)
        self._bank[name] = BankMatrices(whole, self._num_slots, self._device)

    def host_experts(self, modules: Sequence[Experts]) -> HostExperts:
        """The experts of the model's layers, all weights of which have settled."""
        layers = []
        for index, module in enumerate(modules):
            parts = (self._settled[index, "gate_up"], self._settled[index, "down"])
            biases = module.biases or (None, None)
            with_biases = (
                part if bias is None else dataclasses.replace(part, bias=_on_host(bias))
                for part, bias in zip(parts, biases, strict=True)
            )
            layers.append(HostLayer(*with_biases))
        return _joined(layers, modules[0], self.places)

    def open_bank(self, host: HostExperts, num_slots: int, *, staging: int) -> ExpertBank:
        """The bank, whose slots are filled."""
        from hetero_llm.gpu.expert_bank import ExpertBank

        matrices = (self._bank["gate_up"], self._bank["down"])
        bank = ExpertBank(host, num_slots, staging=staging, device=self._device, matrices=matrices)
        for which, part in enumerate(matrices):
            for index, layer in enumerate(host.layers):
                source = (layer.gate_up, layer.down)[which]
                if source.bias is None:
                    continue
                if part.bias is None:
                    part.add_bias(source.bias)
                for expert, slot in enumerate(self._table[index].tolist()):
                    if slot >= 0:
                        part.fill_bias(slot, source, expert, 1)
        bank.show(self._table)
        return bank


def host_experts(modules: Sequence[Experts]) -> HostExperts:
    """The experts of layers whose weights are in host memory; shares the memory.

    Raises:
        ConfigError: layers differ, or a checkpoint's columns are in an order of their own.
    """
    layers = []
    for module in modules:
        first, second = module.biases or (None, None)
        parts = [
            host_matrices(getattr(module, name), bias)
            for name, bias in (("gate_up", first), ("down", second))
        ]
        layers.append(HostLayer(*parts))
    return _joined(layers, modules[0], None)


def _joined(layers: list[HostLayer], module: Experts, places: HostPlaces | None) -> HostExperts:
    for layer in layers[1:]:
        if _form(layer) != _form(layers[0]):
            raise _unlike()
    gate = module.activation.name
    if isinstance(gate, ClampedSwish):
        return HostExperts(tuple(layers), "clamped", gate.alpha, gate.limit, places)
    return HostExperts(tuple(layers), gate, places=places)


def _unlike() -> ConfigError:
    return ConfigError(FIELD, "auto", "experts on the CPU need layers that are quantized alike")


def host_matrices(weight: torch.Tensor | QuantizedStack, bias: torch.Tensor | None) -> HostMatrices:
    """One of the two weights of a layer's experts, which is in host memory.

    Raises:
        ConfigError: its columns are in an order of their own.
    """
    import torch

    if bias is not None:
        bias = _on_host(bias)
    if isinstance(weight, torch.Tensor):
        kind = cast(HostKind, str(weight.dtype).removeprefix("torch."))
        return HostMatrices(kind, weight.detach(), bias=bias)
    matrix, count = weight.matrix, weight.count
    if matrix.order is not None:
        reason = "experts whose columns have an order of their own (desc_act) stay on the GPU"
        raise ConfigError(FIELD, "auto", reason)

    def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.view(count, -1, *tensor.shape[1:])

    data = each(matrix.data)
    assert data is not None
    return HostMatrices(
        matrix.kind,
        data,
        each(matrix.scale),
        matrix.group,
        matrix.rows,
        each(matrix.zero),
        each(matrix.offset),
        None if matrix.row_scale is None else matrix.row_scale.view(count, -1),
        bias,
    )


def _on_host(bias: torch.Tensor) -> torch.Tensor:
    """A copy of a bias, page-locked if it comes from a device, which is to read it there."""
    found = bias.detach().cpu()
    return found.pin_memory() if bias.device.type == "cuda" else found


def _form(layer: HostLayer) -> tuple[object, ...]:
    """What all layers have to have in common."""
    return _form_of(layer.gate_up), _form_of(layer.down)


def _form_of(part: HostMatrices) -> tuple[object, ...]:
    tensors = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part.tensors()]
    return (part.kind, part.group, part.scale_rows, *tensors)
