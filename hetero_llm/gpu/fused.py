"""Fused kernels for a model on a CUDA device: norms, activations, products of few rows, experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from hetero_llm.gpu.kernels.activation import activation, gated_activation
from hetero_llm.gpu.kernels.experts import experts, serves
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.norm import (
    MAX_NORM_SIZE,
    add_gemma_rms_norm,
    add_layer_norm,
    add_rms_norm,
)
from hetero_llm.gpu.kernels.quantized_experts import quantized_experts
from hetero_llm.gpu.kernels.quantized_gemm import prepare, prepares
from hetero_llm.gpu.kernels.quantized_product import product_of
from hetero_llm.gpu.kernels.routing import route_sparse_mixer, route_top_k
from hetero_llm.gpu.kernels.skinny_gemm import linear
from hetero_llm.models.experts import Experts, ExpertsFunction, SparseMixerRouter, TopKRouter
from hetero_llm.models.layers import (
    Activation,
    AddLayerNorm,
    CausalLM,
    GatedActivation,
    GemmaRMSNorm,
    Linear,
    RMSNorm,
)
from hetero_llm.quantization.matrix import QuantizedMatrix, QuantizedWeight


def speed_up(model: CausalLM) -> None:
    """Replaces functions of the model's layers by kernels, in place. Weights in host memory keep
    their product, which stages them, and rows too long for one program keep their norms."""
    fused_norms = model.config.hidden_size <= MAX_NORM_SIZE
    for module in model.modules():
        if isinstance(module, RMSNorm) and fused_norms:
            module.function = add_rms_norm
        elif isinstance(module, GemmaRMSNorm) and fused_norms:
            module.function = add_gemma_rms_norm
        elif isinstance(module, AddLayerNorm) and fused_norms:
            module.function = add_layer_norm
        elif isinstance(module, GatedActivation):
            module.function = partial(gated_activation, name=module.name)
        elif isinstance(module, Activation) and module.name is not None:
            module.function = partial(_activation, name=module.name, plain=module.function)
        elif isinstance(module, Linear) and module.quantized is not None:
            if not module.on_host:
                _multiply_by_kernels(module, module.quantized)
        elif isinstance(module, Linear) and module.weight.device.type == "cuda":
            module.product = linear
    speed_up_experts(model)


def speed_up_experts(model: CausalLM) -> None:
    """Replaces routers and experts by kernels, in place."""
    for module in model.modules():
        if isinstance(module, Experts) and serves(module.activation.name):
            module.function = _function_of(module)
        elif isinstance(module, TopKRouter):
            module.function = partial(
                route_top_k,
                k=module.k,
                renormalize=module.renormalize,
                rounded=module.rounded,
            )
        elif isinstance(module, SparseMixerRouter):
            module.function = partial(route_sparse_mixer, jitter=module.jitter)


def _function_of(module: Experts) -> ExpertsFunction:
    """The kernels for the weights that it has. Quantized ones are kept in the order of the kernels
    alone; those that have no such order stay with torch."""
    quantized, activation = module.quantized, module.activation.name
    if not quantized:
        return partial(experts, activation=activation)
    if not all(prepares(stack.matrix) for stack in quantized.values()):
        return module.function
    prepared = {}
    for name, stack in quantized.items():
        prepared[name] = prepare(stack.matrix)
        stack.release()
    gate_up = prepared.get("gate_up", module.gate_up)
    down = prepared.get("down", module.down)

    def function(x: Tensor, ids: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return quantized_experts(x, ids, weights, gate_up, down, activation=activation)

    return function


def _multiply_by_kernels(linear: Linear, matrix: QuantizedMatrix) -> None:
    """The kernels have the matrix in an order of their own, so the layer's is not kept as well."""
    linear.product = product_of(matrix)
    if prepares(matrix):
        cast(QuantizedWeight, linear.weight).release()


def _activation(x: Tensor, name: str, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """The kernel for tensors that it serves, `plain` for others."""
    if x.dim() == 2 and x.is_contiguous() and (x.is_cuda or INTERPRETED):
        return activation(x, name)
    return plain(x)
