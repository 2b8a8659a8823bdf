"""Quantized matrices on their way from the files into a model.

A checkpoint stores a quantized matrix as several tensors ("qweight", "scales", ...), and stores
apart what the model fuses (queries, keys, values) or holds together (experts). `plan_matrices`
finds them; `MatrixFiller` converts a matrix when all of its tensors have been read, and replaces
the weight of a layer when all of its matrices have been converted. So no more than one weight is in
memory twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.experts import Experts, HostMemory, Router, SettlingMemory
from hetero_llm.models.layers import BankView, CausalLM, Float32Linear, Linear, RearrangedView
from hetero_llm.models.linear_weights import on_weight
from hetero_llm.models.sharding import Cut, Run, runs_inside
from hetero_llm.models.weight_files import StoredTensor, WeightFile
from hetero_llm.quantization.formats import mxfp4
from hetero_llm.quantization.formats.fp8 import is_scale_of_experts
from hetero_llm.quantization.formats.mxfp4 import Mxfp4Format
from hetero_llm.quantization.formats.scheme import CheckpointFormat, Scheme, StoredPart
from hetero_llm.quantization.matrix import (
    QuantizedMatrix,
    arrange_rows,
    columns_of,
    concatenate,
    dequantize,
    rows_of,
    stack,
    with_scale_of_each_row,
)
from hetero_llm.quantization.online import OnlineFormat, OnlineScheme

logger = logging.getLogger(__name__)

Stored = Mapping[str, tuple[WeightFile, StoredTensor]]
"""The tensors of all files by the names that the model knows (`CausalLM.checkpoint_name`)."""


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """The weight of a `Linear`, or one of the two of `Experts`."""

    layer: Linear | Experts
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        """What the layer has now."""
        found = getattr(self.layer, self.name)
        assert isinstance(found, nn.Parameter)
        return found

    def set_quantized(self, parts: Sequence[QuantizedMatrix]) -> None:
        """Puts matrices, which follow each other in the weight, into its place.

        Raises:
            ValueError: they differ in what one matrix, or all experts, have once.
        """
        if isinstance(self.layer, Linear):
            self.layer.set_quantized(concatenate(parts))
            return
        if len(parts) == 1:  # a bank of all experts, which has scales of single rows
            self.layer.set_quantized(self.name, with_scale_of_each_row(parts[0]))
            return
        each = len(parts) // self.parameter.shape[0]
        experts = [concatenate(parts[i : i + each]) for i in range(0, len(parts), each)]
        self.layer.set_quantized(self.name, stack(experts))


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A quantized matrix of the checkpoint.

    Attributes:
        module: its name in the checkpoint: "model.layers.0.self_attn.q_proj".
        weight: place of the weight that gets it, in the order in which the model creates them.
        first_row, rows, columns: where it lies in the weight, experts one below the other.
        arrange: see `RearrangedView`; None: rows stay in order.
        transposed: the file has [columns, rows], plain.
        unpack: makes [rows, columns], in the weight's order, of the one plain tensor that the file
            has for all experts (`BankView`); None: the file has a matrix.
        parts: the tensors that the files have of it.
    """

    module: str
    weight: int
    first_row: int
    rows: int
    columns: int
    arrange: Callable[[Tensor], Tensor] | None
    transposed: bool
    scheme: Scheme
    parts: tuple[StoredPart, ...]
    unpack: Callable[[Tensor], Tensor] | None = None

    @property
    def names(self) -> dict[str, str]:
        """The suffix of each part by the name of its tensor."""
        return {part.name_in(self.module): part.suffix for part in self.parts}


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """What a rank reads of the tensors of a matrix.

    Attributes:
        rows, columns: of the part of the matrix that they make.
        cuts: the dim and the indices to be read of each tensor, by its suffix; others are whole.
        left_out: suffixes of tensors that the part does not need.
        order: [rows] int64, the row as read for each of the part; None: as read.
    """

    rows: int
    columns: int
    cuts: Mapping[str, tuple[int, tuple[Run, ...]]]
    left_out: frozenset[str]
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory for a stored tensor of a quantized matrix.

    Attributes:
        tensor: to be filled with the indices in `runs` of dim `dim`.
        then: to be called when it holds them; raises ModelLoadError: the values cannot be those of
            a matrix.
    """

    tensor: Tensor
    dim: int
    runs: tuple[Run, ...]
    then: Callable[[], None]


@contextmanager
def weights_of(
    plans: Sequence[MatrixPlan] = (), *, experts_apart: bool = False
) -> Iterator[list[LayerWeight]]:
    """Lists the weights of the model that is built while it is open, in the order in which it
    creates them. Those that the plans fill get no memory, and neither do those of `Experts` with
    `experts_apart`: `place_experts` then gives it to them."""
    created: list[LayerWeight] = []
    places = {plan.weight for plan in plans}

    def act(layer: Linear | Experts, name: str, weight: nn.Parameter) -> nn.Parameter | None:
        created.append(LayerWeight(layer, name))
        apart = experts_apart and isinstance(layer, Experts)
        if len(created) - 1 not in places and not apart:
            return None
        return nn.Parameter(weight.detach().to("meta"), requires_grad=False)

    with on_weight(act):
        yield created


def place_experts(
    weights: Sequence[LayerWeight], plans: Sequence[MatrixPlan], memory: HostMemory
) -> None:
    """Gives host memory to the weights of `Experts` that `weights_of` has left without; those of
    the plans get theirs when they are set."""
    planned = {plan.weight for plan in plans}
    layers: dict[int, int] = {}
    for place, weight in enumerate(weights):
        if not isinstance(weight.layer, Experts):
            continue
        weight.layer.host_memory = memory
        index = layers.setdefault(id(weight.layer), len(layers))
        if isinstance(memory, SettlingMemory):
            weight.layer.settle = partial(memory.settle, index)
        if place not in planned:
            old = weight.parameter
            new = nn.Parameter(memory(tuple(old.shape), old.dtype), requires_grad=False)
            setattr(weight.layer, weight.name, new)


def plan_matrices(
    model: CausalLM,
    weights: Sequence[LayerWeight],
    checkpoint_format: CheckpointFormat | None,
    stored: Stored,
) -> tuple[MatrixPlan, ...]:
    """The quantized matrices of a checkpoint.

    What the files hold decides where the format leaves it open: a weight of a float type is plain
    unless the format quantizes plain weights.

    Args:
        model: on torch's meta device.
        weights: of `weights_of`, for this model.
        checkpoint_format: None: all weights are plain.

    Raises:
        ModelLoadError: tensors of a matrix are missing or have another type or shape than the
            format's; a fused layer or the experts of a layer are quantized in part; transposed
            weights are quantized. The message names the tensors.
    """
    if checkpoint_format is None:
        return ()
    _check_scales_of_experts(checkpoint_format, stored)
    owners = {id(weight.parameter): place for place, weight in enumerate(weights)}
    plain: set[int] = set()
    if isinstance(checkpoint_format, OnlineFormat):
        plain = _never_quantized(model, weights)
    plans: list[MatrixPlan] = []
    left: dict[int, str] = {}
    targets = model.checkpoint_tensors()
    for name, target in targets.items():
        view = target.view if isinstance(target, RearrangedView) else target
        module, _, kind = name.rpartition(".")
        root = view if view._base is None else view._base
        if kind != "weight" or view.dim() != 2 or id(root) not in owners:
            continue
        place = owners[id(root)]
        scheme = None if place in plain else checkpoint_format.scheme(module)
        transposed = view.stride() != (view.shape[1], 1)
        height, width = reversed(view.shape) if transposed else view.shape
        bank = target if isinstance(target, BankView) else None
        if isinstance(target, RearrangedView) and bank is None and target.shape != view.shape:
            scheme = None  # no matrix as it is stored, and none that any format quantizes
        parts: tuple[StoredPart, ...] = ()
        if scheme is not None:
            parts = _parts_in_files(module, scheme, (height, width), transposed, stored, bank)
            # A bias of the model's own is no part of the matrix.
            parts = tuple(
                p for p in parts if p.suffix != "bias" or p.name_in(module) not in targets
            )
        if scheme is None or not parts:
            left[place] = name
            continue
        if transposed and not isinstance(checkpoint_format, OnlineFormat):
            raise ModelLoadError(f"{module}: quantized and stored transposed, which is not served")
        arrange, unpack = None, None
        if bank is not None and isinstance(scheme, OnlineScheme):
            unpack = bank.arrange
        elif bank is not None:
            arrange = bank.order
        elif isinstance(target, RearrangedView):
            arrange = target.arrange
        first_row = view.storage_offset() // width
        plans.append(
            MatrixPlan(
                *(module, place, first_row, height, width, arrange, transposed, scheme, parts),
                unpack,
            )
        )
    for plan in plans:
        if plan.weight in left:
            raise ModelLoadError(
                f"{plan.module} is quantized and {left[plan.weight]} is not, though the model "
                "multiplies with both at once"
            )
    return tuple(plans)


def _check_scales_of_experts(checkpoint_format: CheckpointFormat, stored: Stored) -> None:
    banked = [name for name in stored if is_scale_of_experts(name)]
    if banked and checkpoint_format.name == "fp8":
        raise ModelLoadError(
            f"{banked[0]} has the scales of all experts, whose weights are stored one by one; only "
            "a scale beside each weight can be read. quantization=fp8_block makes the same of the "
            "plain checkpoint"
        )


def _never_quantized(model: CausalLM, weights: Sequence[LayerWeight]) -> set[int]:
    """Places of the head, of routers and of gates with one output, which lose most and cost
    least."""
    kept = {id(module.gate) for module in model.modules() if isinstance(module, Router)}
    kept.add(id(getattr(model, "lm_head", None)))
    return {
        place
        for place, weight in enumerate(weights)
        if id(weight.layer) in kept or weight.parameter.shape[:-1] == (1,)
    }


def _parts_in_files(
    module: str,
    scheme: Scheme,
    shape: tuple[int, int],
    transposed: bool,
    stored: Stored,
    bank: BankView | None,
) -> tuple[StoredPart, ...]:
    """The parts that the files have of a matrix; none if it is a plain weight."""
    weight = stored.get(f"{module}.weight")
    if weight is not None and weight[1].is_plain and not isinstance(scheme, OnlineScheme):
        return ()
    try:
        parts = scheme.parts(*shape)
    except ValueError as error:
        raise ModelLoadError(f"{module}: {error}") from error
    if transposed:
        parts = tuple(
            replace(part, shapes=tuple(shape[::-1] for shape in part.shapes)) for part in parts
        )
    if bank is not None and isinstance(scheme, OnlineScheme):
        parts = tuple(replace(part, shapes=(bank.shape,)) for part in parts)
    found, problems = [], []
    for part in parts:
        name = part.name_in(module)
        if name not in stored:
            if not part.optional:
                problems.append(f"{name} is missing")
            continue
        tensor = stored[name][1]
        if tensor.dtype is None or tensor.type_name not in part.types:
            problems.append(f"{name} has type {tensor.type_name}, not {' or '.join(part.types)}")
        elif not part.admits(tensor.shape):
            wanted = list(part.shapes[0])
            problems.append(f"{name} is {list(tensor.shape)}, its matrix needs {wanted}")
        found.append(part)
    if problems:
        raise ModelLoadError("; ".join(problems))
    return tuple(found)


def stored_bytes(plan: MatrixPlan, stored: Stored) -> int:
    """Of all tensors of a matrix."""
    return sum(stored[name][1].nbytes for name in plan.names)


class MatrixFiller:
    """Converts matrices as their tensors arrive, and sets the weights of layers.

    Args:
        weights: of `weights_of`, for the model that is filled.
        dtype: of plain weights.
        device: of the stored tensors.
        cuts: what the model, which is a rank's, has of weights, by their places.
        slices: of the matrices of which parts are read, by their names; of others with a cut the
            part is cut out of the whole matrix.
    """

    def __init__(
        self,
        plans: Sequence[MatrixPlan],
        weights: Sequence[LayerWeight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        cuts: Mapping[int, Cut] = MappingProxyType({}),
        slices: Mapping[str, MatrixSlice] = MappingProxyType({}),
    ) -> None:
        self._weights = weights
        self._cuts, self._slices = cuts, slices
        self._dtype, self._device = dtype, device
        self._plan_of = {name: plan for plan in plans for name in plan.names}
        self._arrived: dict[str, dict[str, Tensor]] = {}  # by module, then by suffix
        self._matrices: dict[int, list[tuple[int, QuantizedMatrix]]] = {}  # by place
        self._missing: dict[int, int] = {}
        for plan in plans:
            self._missing[plan.weight] = self._missing.get(plan.weight, 0) + 1

    def claims(self, name: str) -> bool:
        """Whether a stored tensor is part of a quantized matrix."""
        return name in self._plan_of

    def without_matrices(
        self, targets: Mapping[str, Tensor | RearrangedView]
    ) -> dict[str, Tensor | RearrangedView]:
        """The targets that plain tensors fill."""
        filled = {f"{plan.module}.weight" for plan in self._plan_of.values()}
        return {name: target for name, target in targets.items() if name not in filled}

    def take(self, name: str, stored: StoredTensor) -> Taken | None:
        """Memory for a stored tensor; None if it is not needed."""
        dim, runs = self._part_of(name, stored)
        if not runs:
            return None
        assert stored.dtype is not None
        shape = _sliced(stored.shape, dim, runs)
        tensor = torch.empty(shape, dtype=stored.dtype, device=self._device)
        then = partial(self._arrive, name, tensor)
        return Taken(tensor, dim, runs, then)

    def nbytes(self, name: str, stored: StoredTensor) -> int:
        """What is read of a stored tensor."""
        dim, runs = self._part_of(name, stored)
        assert stored.dtype is not None
        return math.prod(_sliced(stored.shape, dim, runs)) * stored.dtype.itemsize if runs else 0

    def _part_of(self, name: str, stored: StoredTensor) -> tuple[int, tuple[Run, ...]]:
        plan = self._plan_of[name]
        suffix, own = plan.names[name], self._slices.get(plan.module)
        if own is not None and suffix in own.left_out:
            return 0, ()
        if own is not None and suffix in own.cuts:
            return own.cuts[suffix]
        return 0, ((0, stored.shape[0] if stored.shape else 1),)

    def _arrive(self, name: str, tensor: Tensor) -> None:
        plan = self._plan_of[name]
        arrived = self._arrived.setdefault(plan.module, {})
        arrived[plan.names[name]] = tensor
        own = self._slices.get(plan.module)
        if len(arrived) + (0 if own is None else len(own.left_out)) < len(plan.parts):
            return
        del self._arrived[plan.module]
        if plan.transposed:
            arrived = {suffix: part.t().contiguous() for suffix, part in arrived.items()}
        converted = self._matrices.setdefault(plan.weight, [])
        try:
            if own is not None:
                matrix = plan.scheme.convert(arrived, own.rows, own.columns)
                if (order := own.order) is not None:
                    order = order.to(matrix.device)
                    matrix = arrange_rows(matrix, lambda rows: rows[order])
                converted.append((plan.first_row, matrix))
            elif plan.unpack is None:
                matrix = plan.scheme.convert(arrived, plan.rows, plan.columns)
                if plan.arrange is not None:
                    matrix = arrange_rows(matrix, plan.arrange)
                converted.append((plan.first_row, self._cut(plan.weight, plan.first_row, matrix)))
            else:  # one matrix after the other: quantizing takes several times their memory
                rows = plan.rows // len(arrived["weight"])
                for place, weight in enumerate(plan.unpack(arrived["weight"]).split(rows)):
                    matrix = plan.scheme.convert({"weight": weight}, rows, plan.columns)
                    first = plan.first_row + place * rows
                    converted.append((first, self._cut(plan.weight, first, matrix)))
        except ValueError as error:
            raise ModelLoadError(f"{plan.module}: {error}") from error
        self._missing[plan.weight] -= 1
        if self._missing[plan.weight] == 0:
            self._set(plan)

    def _cut(self, place: int, first_row: int, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """What the rank has of a matrix that begins in a row of a weight.

        Raises:
            ValueError: see `columns_of`.
        """
        cut = self._cuts.get(place)
        if cut is None:
            return matrix
        if cut.dim == self._weights[place].parameter.dim() - 1:
            return columns_of(matrix, *cut.runs[0])
        return rows_of(matrix, runs_inside(cut, first_row, matrix.shape[0]))

    def _set(self, plan: MatrixPlan) -> None:
        """Sets a weight whose matrices are all there; `plan`: of one of them."""
        parts = [
            matrix
            for _, matrix in sorted(self._matrices.pop(plan.weight), key=lambda part: part[0])
        ]
        weight = self._weights[plan.weight]
        if isinstance(weight.layer, Linear) and weight.layer.keeps_plain:
            self._set_plain(weight, parts)
            return
        try:
            weight.set_quantized(parts)
        except ValueError as error:
            logger.warning(
                "the layer of %s multiplies with plain weights: %s are fused in it",
                *(plan.module, error),
            )
            self._set_plain(weight, parts)

    def _set_plain(self, weight: LayerWeight, parts: Sequence[QuantizedMatrix]) -> None:
        is_router = isinstance(weight.layer, Float32Linear)
        dtype = torch.float32 if is_router else self._dtype
        dense = torch.cat([dequantize(part, dtype) for part in parts])
        dense = dense.view(weight.parameter.shape)
        setattr(weight.layer, weight.name, nn.Parameter(dense, requires_grad=False))


def _sliced(shape: tuple[int, ...], dim: int, runs: tuple[Run, ...]) -> tuple[int, ...]:
    """A shape with the indices of these runs alone."""
    if not shape:
        return ()
    return (*shape[:dim], sum(count for _, count in runs), *shape[dim + 1 :])


class RandomWeightQuantizer:
    """Quantizes the plain weights of a model that has random ones.

    Args:
        weights: all of the model.

    Raises:
        ConfigError: the format is that of stored matrices, but for MXFP4.
    """

    def __init__(
        self, model: CausalLM, weights: Sequence[LayerWeight], checkpoint_format: CheckpointFormat
    ) -> None:
        self._weights = weights
        self._scheme: Scheme | None = None  # of MXFP4
        if isinstance(checkpoint_format, Mxfp4Format):
            banks = (n for n, weight in enumerate(weights) if isinstance(weight.layer, Experts))
            self._left = set(banks)
        elif isinstance(checkpoint_format, OnlineFormat):
            self._left = set(range(len(weights))) - _never_quantized(model, weights)
            self._scheme = checkpoint_format.scheme("")
        else:
            reason = f"there are no random weights of a {checkpoint_format.name} checkpoint"
            raise ConfigError("load_format", "dummy", reason)

    def quantize(self, place: int) -> bool:
        """Quantizes the weight of this place. Returns False if the format leaves it plain.

        Raises:
            ConfigError: the format cannot hold it.
        """
        if place not in self._left:
            return False
        self._left.remove(place)
        weight = self._weights[place]
        *_, height, width = weight.parameter.shape
        plain = weight.parameter.detach().view(-1, height, width)
        try:
            if self._scheme is None:
                weight.set_quantized([mxfp4.quantize(plain.flatten(0, 1))])
            else:
                convert = self._scheme.convert
                weight.set_quantized([convert({"weight": w}, height, width) for w in plain])
        except ValueError as error:
            name = "experts" if isinstance(weight.layer, Experts) else weight.name
            raise ConfigError("load_format", "dummy", f"{name}: {error}") from error
        return True

    def quantize_others(self) -> None:
        """Quantizes all weights that are left."""
        for place in sorted(self._left):
            self.quantize(place)
