"""The experts of a mixture in host memory: what CPU threads multiply with, and what the GPU's bank
of experts is filled from.

Matrices lie as in the checkpoint, row after row, and the experts of a layer one behind the other,
so the same memory serves the CPU's kernels, copies to the GPU's bank and the streams of long
prompts. On a machine with a GPU it is page-locked.

Where host memory does not hold all experts, those of all layers share one row of places
(`host_places`) for the numbers of their matrices; scales and biases of all experts are always here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from hetero_llm.bridge.host_places import NOT_HELD, HostPlaces

if TYPE_CHECKING:
    import torch

HostKind = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4", "fp4", "nf4"]
HOST_KINDS: tuple[HostKind, ...] = get_args(HostKind)
"""Three types of plain numbers, and the kinds of `quantization.matrix.QuantizedMatrix`."""

TENSORS = ("data", "scale", "zero", "offset", "row_scale", "bias")
"""The tensors of `HostMatrices` in the order of `HostMatrices.pointers`."""


@dataclass(frozen=True, slots=True)
class HostMatrices:
    """One matrix of N rows (outputs) and K columns (inputs) of each of E experts.

    All tensors are contiguous, in host memory, with the experts as their first dimension: an
    expert's part is contiguous, too. With `places`, the first dimension of `data` are places, and
    layers share it. Element (n, k) of a quantized expert is

        row_scale[n] * (scale[n // scale_rows, g] * (element - zero[n, g]) + offset[n, g])

    where g = k // group; `element` is the number that a code stands for, as in
    `quantization.matrix.QuantizedMatrix`, whose fields these are.

    Attributes:
        kind: of `data`.
        data: plain: [E, N, K] of that type. fp8: [E, N, K] float8_e4m3fn. int8: [E, N, K] int8. Of
            4 bits: [E, N, K / 2] uint8, column 2j in the low half of byte j.
        scale: [E, ceil(N / scale_rows), ceil(K / group)] float32, float16, bfloat16 or
            float8_e4m3fn; None for plain numbers.
        group: columns that share a scale, K or more where a row has one; 0 for plain numbers.
        scale_rows: rows that share a scale: 1 or 128.
        zero: [E, N, groups] uint8, int4 only; None: codes of int4 count from 8, others from 0.
        offset: [E, N, groups] of the scale's type, int4 only, and then zero points are 0; or None.
        row_scale: [E, N] float32; None: 1.
        bias: [E, N] of the model's type, added to the product; or None.
        places: [E] int32, the place in `data` of each expert or `NOT_HELD`, a view of
            `HostPlaces.table`; None: of expert e, e.
    """

    kind: HostKind
    data: torch.Tensor
    scale: torch.Tensor | None = None
    group: int = 0
    scale_rows: int = 1
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    places: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.kind in HOST_KINDS, self.kind
        assert self.data.dim() == 3
        for name, tensor in self.tensors():
            assert tensor.is_contiguous()
            assert name == "data" or tensor.shape[0] == self.num_experts
            assert tensor.device.type == "cpu", tensor.device
        assert (self.scale is None) == (self.group == 0)

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.data.shape[0]) if self.places is None else len(self.places)

    @property
    def rows(self) -> int:
        """N."""
        return int(self.data.shape[1])

    @property
    def columns(self) -> int:
        """K."""
        per_byte = 2 if self.kind in ("int4", "fp4", "nf4") else 1
        return int(self.data.shape[2]) * per_byte

    @property
    def expert_bytes(self) -> int:
        """Of one expert's part of all tensors."""
        return self.data_bytes + self.kept_bytes

    @property
    def data_bytes(self) -> int:
        """Of one expert's part of `data`."""
        return self.data[0].numel() * self.data.element_size()

    @property
    def kept_bytes(self) -> int:
        """Of one expert's part of the other tensors."""
        others = sum(tensor.nbytes for name, tensor in self.tensors() if name != "data")
        return others // self.num_experts

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of `TENSORS` that there are, with their names."""
        for name in TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def pointers(self) -> np.ndarray:
        """[E, len(TENSORS)] int64 addresses of each expert's part, for native code; 0: the tensor
        or, in the column of `data`, the expert is not there."""
        found = np.zeros((self.num_experts, len(TENSORS)), np.int64)
        for name, tensor in self.tensors():
            rows = np.arange(self.num_experts, dtype=np.int64)
            if name == "data" and self.places is not None:
                rows = self.places.astype(np.int64)
            each = tensor[0].numel() * tensor.element_size()
            found[:, TENSORS.index(name)] = np.where(
                rows == NOT_HELD, 0, tensor.data_ptr() + rows * each
            )
        return found

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The experts from `first` on, cut into runs whose parts of `data` follow each other: first
        expert, its place, and how many. All of them are held."""
        if self.places is None:
            yield first, first, count
            return
        end = first + count
        while first < end:
            place, some = int(self.places[first]), 1
            assert place != NOT_HELD, first
            while first + some < end and int(self.places[first + some]) == place + some:
                some += 1
            yield first, place, some
            first += some


@dataclass(frozen=True, slots=True)
class HostLayer:
    """The experts of one layer.

    Attributes:
        gate_up: of N = 2 * inner rows, gates first, and K = hidden columns.
        down: of N = hidden rows and K = inner columns.
    """

    gate_up: HostMatrices
    down: HostMatrices

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return self.gate_up.expert_bytes + self.down.expert_bytes


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The experts of all layers that have any, in the order of the layers.

    Experts of all layers have one size, kind and activation: they take each other's places in the
    bank.

    Attributes:
        activation: the name of an activation (`models.layers.Activation`): an expert is
            down @ (activation(gate) * up); "clamped": (up + 1) * gate * sigmoid(alpha * gate), with
            gates of at most `limit` and ups within it on both sides (`models.config.ClampedSwish`).
        alpha, limit: of "clamped"; 0 otherwise.
        places: who is where, if host memory does not hold all experts; None: it does.
    """

    layers: tuple[HostLayer, ...]
    activation: str
    alpha: float = 0.0
    limit: float = 0.0
    places: HostPlaces | None = None

    def __post_init__(self) -> None:
        assert self.layers
        for layer in self.layers:
            for one, first in zip(
                (layer.gate_up, layer.down),
                (self.layers[0].gate_up, self.layers[0].down),
                strict=True,
            ):
                assert one.kind == first.kind and one.data.shape == first.data.shape

    def is_page_locked(self) -> bool:
        """Whether a device reads all of it where it lies. Needs a device."""
        return all(
            tensor.is_pinned()
            for layer in self.layers
            for part in (layer.gate_up, layer.down)
            for _, tensor in part.tensors()
        )

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return self.layers[0].gate_up.num_experts

    @property
    def hidden(self) -> int:
        """Inputs and outputs of an expert."""
        return self.layers[0].gate_up.columns

    @property
    def inner(self) -> int:
        """Outputs of a gate."""
        return self.layers[0].down.columns

    @property
    def expert_bytes(self) -> int:
        """Of one expert of one layer."""
        return self.layers[0].expert_bytes

    def pointers(self) -> np.ndarray:
        """[layers, E, 2, len(TENSORS)] int64: `HostMatrices.pointers` of gate_up and down. The
        memory lives as long as this object's tensors; with `places`, addresses follow them."""
        found = np.stack(
            [np.stack((x.gate_up.pointers(), x.down.pointers()), axis=1) for x in self.layers]
        )
        if self.places is not None:
            parts = (self.layers[0].gate_up, self.layers[0].down)
            self.places.lead(
                found[..., TENSORS.index("data")],
                [part.data.data_ptr() for part in parts],
                [part.data_bytes for part in parts],
            )
        return found
