"""`cpu_offload_gb`: weights that stay in pinned host memory and visit the GPU for each product.

The model is built twice: first without memory (torch's meta device) to see which matrices there
are, then for real, with the chosen ones allocated in host memory from the start, so that a model
larger than the GPU can be loaded. All chosen matrices share one staging buffer on the device: the
weight is copied into it right before its product, on the same stream. Order on the stream makes
one buffer enough and makes the pair safe inside a CUDA graph (a memcpy node and the product). A
second buffer and stream could hide the product behind the next copy, but at decoding the copy takes
about 75 times as long as the product (55 GB/s against 4.1 TB/s), so there is nothing to win.

A quantized matrix is made on the device, as all are, and leaves it at once; after loading, each one
in turn gets the form that the kernels read, whose tensors then lie behind each other in host memory
and visit the device in one copy. Kernels that ask for weights before the kernel ahead of them has
ended (programmatic launches) are safe behind a copy: only kernels overlap in this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare, prepares
from hetero_llm.gpu.kernels.quantized_product import QuantizedProduct
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import CausalLM, Linear, Product
from hetero_llm.models.linear_weights import on_linear_weight
from hetero_llm.models.loader import default_dtype
from hetero_llm.models.registry import model_class
from hetero_llm.quantization.matrix import QuantizedMatrix, QuantizedWeight, quantized_product

GIB = 1 << 30
_ALIGNED = 256  # bytes; loads of kernels need 16


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The matrices that stay on the host.

    Attributes:
        budget_gb: as the user gave it.
        chosen: positions of the `Linear` layers in the order in which the model creates them.
        moved_bytes: size of their weights.
        staging_bytes: size of the largest one, which the device must hold for the copies.
        movable_bytes: weights that could have been chosen.
        weight_bytes: all weights of the model.
        quantized: bytes of quantized weights by their positions, as `loader.quantized_sizes`.
    """

    budget_gb: float
    chosen: frozenset[int]
    moved_bytes: int
    staging_bytes: int
    movable_bytes: int
    weight_bytes: int
    quantized: Mapping[int, int] = field(default_factory=dict)

    @property
    def freed_bytes(self) -> int:
        """Device memory that the plan saves."""
        return self.moved_bytes - self.staging_bytes


def plan_offload(
    config: ModelConfig,
    dtype: torch.dtype,
    offload_gb: float,
    quantized: Mapping[int, int] | None = None,
) -> OffloadPlan:
    """Chooses matrices for a budget of `offload_gb` GiB, without allocating any.

    The last layer first, in a layer the largest first, each if it fits into the rest of the budget.
    Only matrices inside layers are chosen: the head is about as large as the staging buffer that
    it would need, and the embedding is read by rows.

    Args:
        quantized: see `OffloadPlan`; None: all weights are plain.

    Raises:
        ConfigError: the budget saves nothing, or asks for experts as well, which are no `Linear`
            and stay on the device.
    """
    quantized = quantized or {}
    created: list[Linear] = []
    record = on_linear_weight(lambda linear, _: created.append(linear))
    with record, default_dtype(dtype), torch.device("meta"):
        model = model_class(config.architecture)(config)
    place = {id(linear): index for index, linear in enumerate(created)}
    budget = left = int(offload_gb * GIB)
    sizes = {
        id(linear): quantized.get(index, linear.weight.nbytes)
        for index, linear in enumerate(created)
    }
    chosen: list[Linear] = []
    movable = 0
    for linear in _matrices_of_layers(model, sizes):
        size = sizes[id(linear)]
        movable += size
        if size <= left:
            left -= size
            chosen.append(linear)
    plan = OffloadPlan(
        offload_gb,
        frozenset(place[id(linear)] for linear in chosen),
        budget - left,
        max((sizes[id(linear)] for linear in chosen), default=0),
        movable,
        sum(p.nbytes for p in model.parameters())
        - sum(created[index].weight.nbytes - size for index, size in quantized.items()),
        quantized,
    )
    if budget > movable and any(isinstance(module, Experts) for module in model.modules()):
        reason = (
            f"experts stay on the GPU: at most {movable / GIB:.3f} GiB, the weights of other "
            "layers, can stay in host memory"
        )
        raise ConfigError("cpu_offload_gb", offload_gb, reason)
    if offload_gb > 0 and plan.freed_bytes <= 0:
        raise ConfigError(
            "cpu_offload_gb",
            offload_gb,
            f"saves no GPU memory: {plan.moved_bytes / GIB:.3f} GiB of weights would move and "
            f"their staging buffer takes {plan.staging_bytes / GIB:.3f} GiB; use 0, or more, up "
            f"to {movable / GIB:.3f}",
        )
    return plan


@contextmanager
def weights_on_host(plan: OffloadPlan, *, pin: bool = True) -> Iterator[list[Linear]]:
    """While it is open, the next model that is built with memory gets the plan's weights in host
    memory.

    Args:
        plan: of `plan_offload` for the same configuration and dtype.
        pin: page-locked memory, as copies inside a CUDA graph need; torch rounds each block of it
            up to a power of two.

    Yields:
        The chosen layers, filled as the model is built; for `stage_products`.

    Raises:
        ConfigError: the host has no memory for them.
    """
    moved: list[Linear] = []
    index = -1

    def place(linear: Linear, weight: nn.Parameter) -> nn.Parameter | None:
        nonlocal index
        if weight.is_meta:  # of a model that the loader builds for its sizes alone
            return None
        index += 1
        if index not in plan.chosen:
            return None
        moved.append(linear)
        if index in plan.quantized:
            linear.on_host = True
            return None
        host = _host_memory(weight.shape, weight.dtype, plan, pin=pin)
        return nn.Parameter(host, requires_grad=False)

    with on_linear_weight(place):
        yield moved


def _host_memory(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, plan: OffloadPlan, *, pin: bool
) -> Tensor:
    """
    Raises:
        ConfigError: the host has none.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin)
    except RuntimeError as error:
        raise ConfigError(
            "cpu_offload_gb",
            plan.budget_gb,
            f"the host gave no {'pinned ' if pin else ''}memory for "
            f"{plan.moved_bytes / GIB:.3f} GiB of weights; lower it ({_first_line(error)})",
        ) from error


def stage_products(layers: list[Linear], device: torch.device, plan: OffloadPlan) -> None:
    """Lets layers with weights on the host compute on `device`; call once, after loading.

    Code that replaces `Linear.product` afterwards must leave these layers alone or wrap the
    replacement with `staged` again: the weight that a product receives is not on the device.

    Raises:
        ConfigError: the host has no memory for quantized weights in the form of the kernels.
    """
    if not layers:
        return
    packed: dict[int, _Packed] = {}
    plain: list[Linear] = []
    for index, layer in enumerate(layers):
        matrix = layer.quantized
        if matrix is not None:
            packed[index] = _pack(matrix.to(device), plan, pin=device.type == "cuda")
            cast(QuantizedWeight, layer.weight).release()
        elif not layer.on_host:  # else parts of several kinds are fused: plain, and on the device
            plain.append(layer)
    sizes = [one.host.nbytes for one in packed.values()] + [x.weight.nbytes for x in plain]
    buffer = torch.empty(
        -(-max(sizes, default=0) // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device
    )
    for layer in plain:
        layer.product = staged(layer.product, buffer.view(layer.weight.dtype))
    for index, one in packed.items():
        layers[index].product = _staged_quantized(one, buffer)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A quantized matrix whose tensors lie behind each other in host memory.

    Attributes:
        form: its tensors are on the meta device.
        host: [bytes] uint8.
        starts: by field, the first byte of a tensor.
    """

    form: PreparedMatrix | QuantizedMatrix
    host: Tensor
    starts: Mapping[str, int]

    def inside(self, buffer: Tensor) -> PreparedMatrix | QuantizedMatrix:
        """The matrix as it is while `buffer` [bytes or more] holds what `host` does."""
        moved: dict[str, Any] = {}
        for name, start in self.starts.items():
            like: Tensor = getattr(self.form, name)
            moved[name] = buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
        return replace(self.form, **moved)


def _pack(matrix: QuantizedMatrix, plan: OffloadPlan, *, pin: bool) -> _Packed:
    """Brings a matrix into the form of its product, and that into host memory."""
    form = prepare(matrix) if prepares(matrix) else matrix
    found = {one.name: getattr(form, one.name) for one in fields(form)}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    starts, size = {}, 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    host = _host_memory((size,), torch.uint8, plan, pin=pin)
    for name, tensor in tensors.items():
        start = starts[name]
        host[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    empty: dict[str, Any] = {name: tensor.to("meta") for name, tensor in tensors.items()}
    return _Packed(replace(form, **empty), host, starts)


def _staged_quantized(packed: _Packed, buffer: Tensor) -> Product:
    """As `staged`, of a matrix that `buffer` [bytes] has room for."""
    matrix = packed.inside(buffer)
    held = buffer[: packed.host.numel()]
    multiply: Product
    if isinstance(matrix, QuantizedMatrix):
        multiply = partial(_multiply, matrix)
    else:
        multiply = QuantizedProduct(matrix)

    def copy_then_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        held.copy_(packed.host, non_blocking=True)
        return multiply(x, weight, bias)

    return copy_then_multiply


def _multiply(matrix: QuantizedMatrix, x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
    return quantized_product(x, matrix, bias)


def staged(product: Product, buffer: Tensor) -> Product:
    """`product` on a copy of the weight in `buffer`.

    Args:
        product: must read its weight only after the copy on the current stream (no prefetch of
            weights across kernels).
        buffer: flat, on the device of x, at least as long as the weight.
    """

    def copy_then_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        held = buffer[: weight.numel()].view(weight.shape)
        held.copy_(weight, non_blocking=True)
        return product(x, held, bias)

    return copy_then_multiply


def _matrices_of_layers(model: CausalLM, sizes: Mapping[int, int]) -> Iterator[Linear]:
    """The matrices of all layers, of the last layer first, in a layer the largest first."""
    for container in model.modules():
        if isinstance(container, nn.ModuleList):
            for layer in reversed(list(container)):
                linears = [m for m in layer.modules() if isinstance(m, Linear)]
                yield from sorted(linears, key=lambda m: -sizes[id(m)])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
