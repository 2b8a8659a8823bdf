"""Fused kernels for a model on a CUDA device: norms, gated activations, products of few rows."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hetero_llm.gpu.kernels.activation import gated_activation
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.kernels.small_linear import linear
from hetero_llm.models.layers import CausalLM, GatedActivation, Linear, RMSNorm
from hetero_llm.models.llama import LlamaForCausalLM, LlamaLayer


def speed_up(model: CausalLM) -> None:
    """Replaces what can be replaced, in place. Weights that wait in host memory keep their
    product, which stages them."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.function = add_rms_norm
        elif isinstance(module, GatedActivation):
            module.function = partial(gated_activation, name=module.name)
        elif isinstance(module, Linear) and module.weight.device.type == "cuda":
            module.product = linear
    if isinstance(model, LlamaForCausalLM):
        _fetch_ahead(model)


def _fetch_ahead(model: LlamaForCausalLM) -> None:
    """Names to each small kernel the weights that are read next."""
    for layer in model.layers:
        assert isinstance(layer, LlamaLayer)
        layer.input_norm.function = partial(add_rms_norm, ahead=_on_device(layer.qkv_proj))
        layer.heads.ahead = _on_device(layer.o_proj)
        layer.post_attention_norm.function = partial(
            add_rms_norm, ahead=_on_device(layer.gate_up_proj)
        )
        layer.activation.function = partial(
            gated_activation, name=layer.activation.name, ahead=_on_device(layer.down_proj)
        )
    model.norm.function = partial(add_rms_norm, ahead=_on_device(model.lm_head))


def _on_device(linear: Linear) -> Tensor | None:
    return linear.weight if linear.weight.device.type == "cuda" else None
