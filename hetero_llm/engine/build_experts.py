"""Joins the experts of a mixture: host memory, the GPU's bank, CPU threads, and the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hetero_llm.bridge.host_experts import HostExperts, HostKind, HostLayer, HostMatrices
from hetero_llm.core.errors import ConfigError
from hetero_llm.models.config import ClampedSwish

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetero_llm.models.experts import Experts
    from hetero_llm.quantization.matrix import QuantizedStack

FIELD = "moe_cpu_experts"


def expert_modules(model: nn.Module) -> list[Experts]:
    """The mixtures of a model in the order of its layers."""
    from hetero_llm.models.experts import Experts

    return [module for module in model.modules() if isinstance(module, Experts)]


def host_experts(modules: Sequence[Experts]) -> HostExperts:
    """The experts of layers whose weights are in host memory; shares the memory.

    Raises:
        ConfigError: layers differ, or a checkpoint's columns are in an order of their own.
    """
    layers = []
    for module in modules:
        first, second = module.biases or (None, None)
        parts = [
            _matrices(getattr(module, name), bias)
            for name, bias in (("gate_up", first), ("down", second))
        ]
        layers.append(HostLayer(*parts))
    for layer in layers[1:]:
        if _form(layer) != _form(layers[0]):
            reason = "experts on the CPU need layers that are quantized alike"
            raise ConfigError(FIELD, "auto", reason)
    gate = modules[0].activation.name
    if isinstance(gate, ClampedSwish):
        return HostExperts(tuple(layers), "clamped", gate.alpha, gate.limit)
    return HostExperts(tuple(layers), gate)


def _matrices(weight: torch.Tensor | QuantizedStack, bias: torch.Tensor | None) -> HostMatrices:
    import torch

    if bias is not None:
        bias = bias.detach().cpu()
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


def _form(layer: HostLayer) -> tuple[object, ...]:
    """What all layers have to have in common."""
    return tuple(
        (part.kind, part.group, part.scale_rows, name, tensor.dtype, tuple(tensor.shape))
        for part in (layer.gate_up, layer.down)
        for name, tensor in part.tensors()
    )
