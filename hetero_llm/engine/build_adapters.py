"""Joins LoRA adapters with the model and its runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.lora_config import LoraConfig

if TYPE_CHECKING:
    import torch

    from hetero_llm.lora.store import AdapterStore
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.layers import CausalLM


def prepare_adapters(
    config: LoraConfig, model: CausalLM, model_config: ModelConfig
) -> AdapterStore | None:
    """Merges the adapter that is to be merged, and opens the host memory of the others.

    Args:
        model: just loaded, its layers not replaced yet.

    Returns:
        None if requests have no adapters.

    Raises:
        ConfigError: the adapter does not fit, or the model is of a kind that takes none.
    """
    if config.merge is not None:
        from hetero_llm.lora.merge import merge_adapter

        merge_adapter(model, model_config, config.merge)
    if not config.enabled:
        return None
    import torch

    from hetero_llm.lora.store import AdapterStore
    from hetero_llm.lora.targets import adapter_targets

    return AdapterStore(
        adapter_targets(model, model_config),
        capacity=config.max_cpu_loras,
        max_rank=config.max_rank,
        # On a CPU torch multiplies a few rows with a small float32 matrix faster than bfloat16.
        dtype=torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype),
    )


def apply_adapters(
    runner: Any, store: AdapterStore, config: EngineConfig, device: torch.device
) -> None:
    """Lets a runner on torch apply the adapters of its steps.

    Args:
        runner: whose model is ready to serve.
    """
    import torch.nn.functional as F

    from hetero_llm.lora.products import AdaptedProducts
    from hetero_llm.models.invariant import product_of_rows
    from hetero_llm.runner.adapters import StepAdapters
    from hetero_llm.runner.model_runner import TorchModelRunner

    assert isinstance(runner, TorchModelRunner), "other runners are refused or not chosen"
    product = product_of_rows if config.batch_invariant else F.linear
    products = AdaptedProducts(runner.model, store.linears(), config.lora.max_loras, product)
    runner.adapters = StepAdapters(products, store, max_num_seqs=config.max_num_seqs, device=device)
