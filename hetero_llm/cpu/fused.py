"""Faster parts for a bfloat16 model that runs through torch on a CPU.

Linear layers: the weight is laid out once for oneDNN; plain `F.linear` reorders it in every call.
Norms and gated activations: one pass over memory in our library (`csrc/elementwise.cpp`) instead
of five to eight torch operations. References: `models.layers.add_rms_norm` and
`GatedActivation.plain`. Bench: `bench/kernels/cpu_kernels.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from hetero_llm.cpu import native
from hetero_llm.models.layers import (
    AddNorm,
    CausalLM,
    GatedActivation,
    Linear,
    Product,
    RMSNorm,
    add_rms_norm,
)

_LANES = 16


def speed_up(model: CausalLM) -> None:
    """Replaces these parts in place if the model is in bfloat16 on a CPU."""
    if _is_bfloat16_on_cpu(model) and _onednn_packs():
        replace_products(model, _packed_product)
    fuse_elementwise(model)


def replace_products(model: CausalLM, pack: Callable[[Linear], Product]) -> None:
    """Replaces the product of every linear layer by `pack(layer)`.

    A weight that nothing else uses is emptied after packing, so memory does not double; a head
    tied to the embedding is kept in both forms.
    """
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is None:
            module.product = pack(module)
            if owners[id(module.weight)] == 1:
                module.weight.data = module.weight.data.new_empty(0)


def fuse_elementwise(model: CausalLM) -> None:
    """Replaces norms and gated activations, in place; see `speed_up`."""
    library = native.load() if _is_bfloat16_on_cpu(model) else None
    if library is None:
        return
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.weight.numel() % _LANES == 0:
            module.function = native_add_rms_norm(library)
        elif isinstance(module, GatedActivation) and module.name == "silu":
            module.function = native_silu_mul(library, module.plain)


def native_add_rms_norm(library: ctypes.CDLL) -> AddNorm:
    """The library's form of `add_rms_norm`; sizes must be multiples of 16."""
    function = library.hetero_rms_norm_bf16

    def add_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        if x.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
            return add_rms_norm(x, residual, weight, eps)
        out = torch.empty(rows, size, dtype=torch.bfloat16)
        function(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            x.stride(0),
            eps,
            torch.get_num_threads(),
        )
        return out, x if residual is None else residual

    return add_norm


def native_silu_mul(
    library: ctypes.CDLL, plain: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The library's form of a gated SiLU; `plain` computes shapes that it does not support."""
    function = library.hetero_silu_mul_bf16

    def silu_mul(gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        inner = width // 2
        if inner % _LANES or not gate_up.is_contiguous():
            return plain(gate_up)
        out = torch.empty(rows, inner, dtype=torch.bfloat16)
        function(gate_up.data_ptr(), out.data_ptr(), rows, inner, torch.get_num_threads())
        return out

    return silu_mul


def _is_bfloat16_on_cpu(model: CausalLM) -> bool:
    parameter = next(model.parameters())
    return parameter.dtype == torch.bfloat16 and parameter.device.type == "cpu"


def _packed_product(module: Linear) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
    linear = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, packed, bias, "none", [], "")

    return product


def _onednn_packs() -> bool:
    """Whether this torch has oneDNN with bfloat16 and these operators, which are not public."""
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in names)
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
