"""The experts of a mixture that are on the GPU: slots of one size, which belong to no layer.

All experts of one matrix kind are one tensor, or one `PreparedMatrix`, with a slot after the other,
so the kernels of experts read the bank as they read the experts of a layer, by slots instead of
ids. A table on the device says in which slot an expert is, or that it is on the host. The bank
writes a slot in the order in which its caller's stream runs; when a slot may be written is up to
`expert_moves`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_llm.bridge.host_experts import HostExperts, HostMatrices
from hetero_llm.gpu.kernels.expert_requests import ON_HOST
from hetero_llm.gpu.kernels.experts import serves
from hetero_llm.gpu.kernels.quantized_gemm import (
    PreparedMatrix,
    prepare,
    prepares,
    stored_codes,
)
from hetero_llm.models.config import Gate
from hetero_llm.quantization.matrix import QuantizedMatrix

_PREPARED_AT_ONCE = 8  # experts: what lies between the two forms takes several times their memory
_ALIGNED = 16  # columns of scales, see `PreparedMatrix`


class BankMatrices:
    """One of the two matrices of all slots.

    Args:
        like: all experts of some layer.
        num_slots: of the bank.
        device: of the bank.

    Attributes:
        weights: [slots, N, K], or a matrix of slots x N rows.
        bias: [slots, N]; None without.
    """

    def __init__(self, like: HostMatrices, num_slots: int, device: torch.device) -> None:
        self._rows = like.rows
        self._slots, self._device = num_slots, device
        self.bias: Tensor | None = None
        if like.bias is not None:
            self.add_bias(like.bias)
        self.weights: Tensor | PreparedMatrix
        if like.scale is None:
            shape3 = (num_slots, like.rows, like.columns)
            self.weights = torch.zeros(shape3, dtype=like.data.dtype, device=device)
        else:
            self.weights = _empty_matrix(prepare(_matrix_of(like, 0, 0, 1, device)), num_slots)

    def add_bias(self, like: Tensor) -> None:
        """Room for biases of the type of `like`; zeros."""
        shape = (self._slots, self._rows)
        self.bias = torch.zeros(shape, dtype=like.dtype, device=self._device)

    def fill(self, slot: int, source: HostMatrices, first: int, count: int) -> None:
        """Copies `count` experts from `first` on into the slots from `slot` on, on the current
        stream."""
        if self.bias is not None:
            self.fill_bias(slot, source, first, count)
        for expert, place, some in source.runs(first, count):
            self._fill_run(slot + expert - first, source, (expert, place, some))

    def fill_bias(self, slot: int, source: HostMatrices, first: int, count: int) -> None:
        """The biases alone of `fill`."""
        assert self.bias is not None and source.bias is not None
        biases = source.bias[first : first + count]
        self.bias[slot : slot + count].copy_(biases, non_blocking=True)

    def _fill_run(self, slot: int, source: HostMatrices, run: tuple[int, int, int]) -> None:
        """`run`: see `HostMatrices.runs`."""
        expert, place, count = run
        if isinstance(self.weights, Tensor):
            data = source.data[place : place + count]
            self.weights[slot : slot + count].copy_(data, non_blocking=True)
            return
        for start in range(0, count, _PREPARED_AT_ONCE):
            some = min(_PREPARED_AT_ONCE, count - start)
            places = (expert + start, place + start)
            matrix = _matrix_of(source, *places, some, self.weights.device)
            self._place(prepare(matrix), slot + start, some)

    def save(self, slot: int, target: Tensor) -> None:
        """Copies the numbers of a slot's expert back to the host as they were there, bit for bit,
        on the current stream. Scales and biases never leave the host.

        Args:
            target: of one place of `HostMatrices.data`.
        """
        if isinstance(self.weights, Tensor):
            target.copy_(self.weights[slot], non_blocking=True)
            return
        codes = stored_codes(self.weights, slot * self._rows, self._rows)
        target.view(torch.uint8).copy_(codes, non_blocking=True)

    def _place(self, part: PreparedMatrix, slot: int, count: int) -> None:
        whole = self.weights
        assert isinstance(whole, PreparedMatrix) and part.lanes == whole.lanes
        begin, end = slot * self._rows, (slot + count) * self._rows
        whole.data[begin:end].copy_(part.data)
        if part.row_scale is not None:
            assert whole.row_scale is not None
            whole.row_scale[begin:end].copy_(part.row_scale)
        for name, rows in (("scale", whole.rows), ("zero", 1), ("offset", 1)):
            theirs, ours = getattr(part, name), getattr(whole, name)
            if theirs is not None:
                first, last = begin // rows, end // rows
                ours[:, first:last].copy_(theirs[:, : last - first])

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.weights.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _matrix_of(
    source: HostMatrices, first: int, place: int, count: int, device: torch.device
) -> QuantizedMatrix:
    """`count` experts, one below the other, on the device.

    Args:
        first: of these experts.
        place: of the first one's numbers in `HostMatrices.data`.
    """
    assert source.scale is not None and source.kind not in ("float32", "bfloat16", "float16")

    def part(tensor: Tensor | None, at: int = first) -> Tensor | None:
        if tensor is None:
            return None
        moved = tensor[at : at + count].to(device, non_blocking=True)
        return moved.flatten(0, 1).contiguous()

    data, scale = part(source.data, place), part(source.scale)
    assert data is not None and scale is not None
    return QuantizedMatrix(
        source.kind,
        data,
        scale,
        source.group,
        source.scale_rows,
        part(source.zero),
        part(source.offset),
        part(source.row_scale),
    )


def _empty_matrix(one: PreparedMatrix, count: int) -> PreparedMatrix:
    """A matrix of `count` experts like `one`, which is a single expert; zeros."""
    rows, columns = one.shape
    assert rows % one.rows == 0, "experts end with a block of scales"
    tensors: dict[str, Any] = {}
    tensors["data"] = torch.zeros_like(one.data[:1]).expand(count * rows, -1).contiguous()
    if one.row_scale is not None:
        tensors["row_scale"] = one.row_scale.new_zeros(count * rows)
    for name, shared in (("scale", one.rows), ("zero", 1), ("offset", 1)):
        words = getattr(one, name)
        if words is not None:
            wide = -(-count * rows // shared // _ALIGNED) * _ALIGNED
            tensors[name] = words.new_zeros(words.shape[0], wide)
    return dataclasses.replace(one, shape=(count * rows, columns), **tensors)


def slot_bytes(host: HostExperts, device: torch.device) -> int:
    """Of one slot."""
    parts = host.layers[0]
    return sum(BankMatrices(part, 1, device).nbytes for part in (parts.gate_up, parts.down))


def why_not(host: HostExperts, dtype: torch.dtype, activation: Gate) -> str | None:
    """Why the kernels cannot compute these experts for a model of `dtype`; None if they can."""
    if not serves(activation):
        return f"no kernel of the GPU has the experts' activation, {activation}"
    parts = (host.layers[0].gate_up, host.layers[0].down)
    return next((reason for part in parts if (reason := why_not_part(part, dtype))), None)


def why_not_part(part: HostMatrices, dtype: torch.dtype) -> str | None:
    """The same for one of the two matrices."""
    if part.scale is None:
        if part.data.dtype != dtype:
            return f"{part.kind} experts of a model that runs in {_name(dtype)}"
        return None
    one = _matrix_of(part, 0, 0, 1, torch.device("cpu"))
    if not prepares(one):
        return f"{part.kind} experts with groups of {part.group}: no kernel reads them"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{part.kind} experts need a model in 16 bits, and this one runs in float32"
    if part.columns % 16:
        return f"{part.kind} experts with {part.columns} inputs, which 16 does not divide"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ExpertBank:
    """Slots, the table and the counters.

    Args:
        host: all experts.
        num_slots: of experts that stay for long.
        staging: how many experts of a layer can be streamed; there are slots for two layers of
            them, behind the others. 0: none are streamed.
        device: of the bank.
        matrices: gate_up and down of at least `num_slots + 2 * staging` slots, of which those that
            stay for long may be filled; None: new ones.

    Attributes:
        host, num_slots, staging: see Args.
        gate_up, down: the matrices.
        table: [layers, experts] int32: slots, or `ON_HOST`.
        hits: [layers, experts] int32, counted up by `expert_requests.post`.
        places: [layers, experts] int32, where host memory has the experts that the table says are
            there, if it does not hold all (`HostPlaces`); None: it does.
    """

    def __init__(
        self,
        host: HostExperts,
        num_slots: int,
        *,
        staging: int,
        device: torch.device,
        matrices: tuple[BankMatrices, BankMatrices] | None = None,
    ) -> None:
        assert 0 <= staging <= host.num_experts
        self.host = host
        self.num_slots = num_slots
        self.staging = staging
        if matrices is None:
            first, slots = host.layers[0], max(1, num_slots + 2 * staging)
            parts = (first.gate_up, first.down)
            matrices = (
                BankMatrices(parts[0], slots, device),
                BankMatrices(parts[1], slots, device),
            )
        self.gate_up, self.down = matrices
        shape = (host.num_layers, host.num_experts)
        self.table = torch.full(shape, ON_HOST, dtype=torch.int32, device=device)
        self.hits = torch.zeros(shape, dtype=torch.int32, device=device)
        self.places: Tensor | None = None
        if host.places is not None:
            self.places = torch.from_numpy(host.places.table).to(device, copy=True)

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def nbytes(self) -> int:
        """On the device, the table left out."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """By slots, of gate_up and of down."""
        first, second = self.gate_up.bias, self.down.bias
        return None if first is None or second is None else (first, second)

    @property
    def is_quantized(self) -> bool:
        return not (
            isinstance(self.gate_up.weights, Tensor) and isinstance(self.down.weights, Tensor)
        )

    def fill(self, slot: int, layer: int, first: int, count: int = 1) -> None:
        """Copies experts of a layer from the host into slots that follow each other, on the current
        stream."""
        source = self.host.layers[layer]
        self.gate_up.fill(slot, source.gate_up, first, count)
        self.down.fill(slot, source.down, first, count)

    def save(self, slot: int, place: int) -> None:
        """Copies the expert in a slot to a place of host memory, on the current stream."""
        first = self.host.layers[0]  # layers share their places
        self.gate_up.save(slot, first.gate_up.data[place])
        self.down.save(slot, first.down.data[place])

    def layer_places(self, layer: int) -> Tensor | None:
        """A layer's row of `places`."""
        return None if self.places is None else self.places[layer]

    def staging_slot(self, layer: int) -> int:
        """The first of the slots in which a layer's experts are streamed: layers alternate."""
        return self.num_slots + layer % 2 * self.staging

    def place(self, table: np.ndarray) -> None:
        """Fills slots and writes the table, before the first step.

        Args:
            table: [layers, experts] int32, the slot of each expert or `ON_HOST`.
        """
        for layer, expert in np.argwhere(table >= 0).tolist():
            self.fill(int(table[layer, expert]), layer, expert)
        self.show(table)

    def show(self, table: np.ndarray) -> None:
        """Writes the table; the slots and the places that it names are filled."""
        self.table.copy_(torch.from_numpy(table))
        if self.places is not None and self.host.places is not None:
            self.places.copy_(torch.from_numpy(self.host.places.table))
