"""Adds one adapter to the weights of a model, for a server that serves no other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import AdapterError, ConfigError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.lora.adapter import LinearAdapter, read_adapter
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import CausalLM, Linear

_MOST_RANK = 1 << 16


@torch.no_grad()
def merge_adapter(
    model: CausalLM, config: ModelConfig, folder: str, *, download_dir: str | None = None
) -> None:
    """Adds scale * B A to the weights, in float32, each sum rounded once to the weight's type.

    Args:
        model: just loaded, its layers not replaced yet.
        folder: a hub id may stand for it.
        download_dir: see `adapter_folder`.

    Raises:
        ConfigError: the adapter cannot be read or does not fit, or a weight is quantized.
    """
    targets = adapter_targets(model, config, field="lora_merge", value=folder)
    request = LoRARequest("merged", 1, folder)
    try:
        adapter = read_adapter(
            request, targets, max_rank=_MOST_RANK, dtype=torch.float32, download_dir=download_dir
        )
    except AdapterError as error:
        raise ConfigError("lora_merge", folder, str(error)) from error
    modules = dict(model.named_modules())
    for name in (*adapter.linears, *adapter.experts):
        if _weight(modules, name) is None:
            reason = f"{name} is quantized; serve the adapter with enable_lora"
            raise ConfigError("lora_merge", folder, reason)
    for name, own in adapter.linears.items():
        weight = _weight(modules, name)
        assert weight is not None
        _add(weight, own)
    for name, experts in adapter.experts.items():
        weights = _weight(modules, name)
        assert weights is not None
        for expert, own in experts.items():
            _add(weights[expert], own)


def _weight(modules: Mapping[str, nn.Module], name: str) -> Tensor | None:
    """Of a `Linear`, or a parameter of `Experts`; None: it is quantized."""
    module = modules.get(name)
    if module is not None:
        assert isinstance(module, Linear)
        return None if module.quantized is not None else module.weight
    layer, _, weight = name.rpartition(".")
    experts = modules[layer]
    assert isinstance(experts, Experts)
    return None if weight in experts.quantized else getattr(experts, weight)


def _add(weight: Tensor, own: LinearAdapter) -> None:
    delta = own.delta(weight.shape[0]).to(weight.device)
    weight.copy_(weight.float() + delta)
