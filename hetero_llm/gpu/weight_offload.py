"""`cpu_offload_gb`: weights that stay in pinned host memory and visit the GPU for each product.

The model is built twice: first without memory (torch's meta device) to see which matrices there
are, then for real, with the chosen ones allocated in host memory from the start, so that a model
larger than the GPU can be loaded. All chosen matrices share one staging buffer on the device: the
weight is copied into it right before its product, on the same stream. Order on the stream makes
one buffer enough and makes the pair safe inside a CUDA graph (a memcpy node and the product). A
second buffer and stream could hide the product behind the next copy, but at decoding the copy takes
about 75 times as long as the product (55 GB/s against 4.1 TB/s), so there is nothing to win.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import CausalLM, Linear, Product
from hetero_llm.models.linear_weights import on_linear_weight
from hetero_llm.models.loader import default_dtype
from hetero_llm.models.registry import model_class

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The matrices that stay on the host.

    Attributes:
        budget_gb: as the user gave it.
        chosen: positions of the `Linear` layers in the order in which the model creates them.
        moved_bytes: size of their weights.
        staging_bytes: size of the largest one, which the device must hold for the copies.
        movable_bytes: weights that could have been chosen.
        weight_bytes: all parameters of the model.
    """

    budget_gb: float
    chosen: frozenset[int]
    moved_bytes: int
    staging_bytes: int
    movable_bytes: int
    weight_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Device memory that the plan saves."""
        return self.moved_bytes - self.staging_bytes


def plan_offload(config: ModelConfig, dtype: torch.dtype, offload_gb: float) -> OffloadPlan:
    """Chooses matrices for a budget of `offload_gb` GiB, without allocating any.

    The last layer first, in a layer the largest first, each if it fits into the rest of the budget.
    Only matrices inside layers are chosen: the head is about as large as the staging buffer that
    it would need, and the embedding is read by rows.

    Raises:
        ConfigError: the budget is above 0 and weights are quantized, or it saves nothing, or asks
            for experts as well, which are no `Linear` and stay on the device.
    """
    if offload_gb > 0 and (config.quantization or config.online_quantization):
        raise ConfigError("cpu_offload_gb", offload_gb, "cannot be combined with quantized weights")
    created: list[Linear] = []
    record = on_linear_weight(lambda linear, _: created.append(linear))
    with record, default_dtype(dtype), torch.device("meta"):
        model = model_class(config.architecture)(config)
    place = {id(linear): index for index, linear in enumerate(created)}
    budget = left = int(offload_gb * GIB)
    chosen: list[Linear] = []
    movable = 0
    for linear in _matrices_of_layers(model):
        size = linear.weight.nbytes
        movable += size
        if size <= left:
            left -= size
            chosen.append(linear)
    plan = OffloadPlan(
        offload_gb,
        frozenset(place[id(linear)] for linear in chosen),
        budget - left,
        max((linear.weight.nbytes for linear in chosen), default=0),
        movable,
        sum(p.nbytes for p in model.parameters()),
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
        try:
            host = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=pin)
        except RuntimeError as error:
            raise ConfigError(
                "cpu_offload_gb",
                plan.budget_gb,
                f"the host gave no {'pinned ' if pin else ''}memory for "
                f"{plan.moved_bytes / GIB:.3f} GiB of weights; lower it ({_first_line(error)})",
            ) from error
        return nn.Parameter(host, requires_grad=False)

    with on_linear_weight(place):
        yield moved


def stage_products(layers: list[Linear], device: torch.device) -> None:
    """Lets layers with weights on the host compute on `device`; call once, after loading.

    Code that replaces `Linear.product` afterwards must leave these layers alone or wrap the
    replacement with `staged` again: the weight that a product receives is not on the device.
    """
    if not layers:
        return
    size = max(layer.weight.numel() for layer in layers)
    buffer = torch.empty(size, dtype=layers[0].weight.dtype, device=device)
    for layer in layers:
        layer.product = staged(layer.product, buffer)


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


def _matrices_of_layers(model: CausalLM) -> Iterator[Linear]:
    """The matrices of all layers, of the last layer first, in a layer the largest first."""
    for container in model.modules():
        if isinstance(container, nn.ModuleList):
            for layer in reversed(list(container)):
                linears = [m for m in layer.modules() if isinstance(m, Linear)]
                yield from sorted(linears, key=lambda m: -m.weight.nbytes)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
