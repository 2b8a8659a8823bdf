"""Joins LoRA adapters with the model and its runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.lora_config import LoraConfig
from hetero_llm.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from hetero_llm.gpu.adapters import GpuAdapters
    from hetero_llm.lora.slot_layout import SlotLayout
    from hetero_llm.lora.store import AdapterStore
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.layers import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """Attributes:
    store: the adapters in host memory.
    layout: how the device has them; None: torch multiplies with what is in host memory.
    """

    store: AdapterStore
    layout: SlotLayout | None


def prepare_adapters(
    config: LoraConfig,
    model: CausalLM,
    model_config: ModelConfig,
    dtype: torch.dtype,
    *,
    backend: str,
    download_dir: str | None = None,
) -> LoadedAdapters | None:
    """Merges the adapter that is to be merged, and opens the host memory of the others.

    Args:
        model: just loaded, its layers not replaced yet.
        dtype: of the model.
        backend: see `BuiltEngine`; on "cuda" kernels of our own apply the adapters.
        download_dir: cache folder of adapters from the hub.

    Returns:
        None if requests have no adapters.

    Raises:
        ConfigError: the adapter does not fit, or the model is of a kind that takes none.
    """
    if config.merge is not None:
        from hetero_llm.lora.merge import merge_adapter

        merge_adapter(model, model_config, config.merge, download_dir=download_dir)
    if not config.enabled:
        return None
    import torch

    from hetero_llm.lora.slot_layout import SlotLayout
    from hetero_llm.lora.store import AdapterStore
    from hetero_llm.lora.targets import adapter_targets

    # On a CPU torch multiplies a few rows with a small float32 matrix faster than with bfloat16.
    on_gpu = backend == "cuda"
    auto = dtype if on_gpu or backend == "native" else torch.float32
    wanted = auto if config.dtype == "auto" else getattr(torch, config.dtype)
    targets = adapter_targets(model, model_config, experts=config.experts)
    if config.experts and not targets.banks:
        reasons = {text for text in targets.refused.values() if "experts" in text}
        raise ConfigError("lora_experts", True, min(reasons, default="the model has no experts"))
    layout, place = None, None
    if on_gpu:
        from hetero_llm.gpu.kernels.lora import MAX_RANK, padded_rank

        if config.max_rank > MAX_RANK:
            reason = f"kernels on a GPU have adapters of ranks up to {MAX_RANK}"
            raise ConfigError("max_lora_rank", config.max_rank, reason)
        if wanted != dtype:
            reason = f"on a GPU adapters have the model's type, {dtype}; leave it out"
            raise ConfigError("lora_dtype", config.dtype, reason)
        layout = SlotLayout.of(targets, padded_rank(config.max_rank), dtype)
        place = partial(layout.pack, pin=torch.cuda.is_available())
    store = AdapterStore(
        targets,
        capacity=config.max_cpu_loras,
        max_rank=config.max_rank,
        dtype=wanted,
        place=place,
        download_dir=download_dir,
    )
    return LoadedAdapters(store, layout)


def device_adapters(
    adapters: LoadedAdapters | None, model: CausalLM, config: EngineConfig, device: torch.device
) -> GpuAdapters | None:
    """The slots on a GPU; None where torch applies adapters.

    Args:
        model: ready to serve.
    """
    if adapters is None or adapters.layout is None:
        return None
    from hetero_llm.gpu.adapters import GpuAdapters

    size = config.lora.max_loras * adapters.layout.num_bytes / 2**20
    logger.info("%d adapter slots take %.0f MiB of the GPU", config.lora.max_loras, size)
    return GpuAdapters(
        model,
        adapters.layout,
        adapters.store,
        num_slots=config.lora.max_loras,
        max_num_seqs=config.max_num_seqs,
        device=device,
    )


def apply_adapters(
    runner: Any, store: AdapterStore, config: EngineConfig, device: torch.device
) -> None:
    """Lets a runner on a CPU apply the adapters of its steps.

    Args:
        runner: whose model is ready to serve.
    """
    from hetero_llm.cpu.model_runner import NativeModelRunner

    if isinstance(runner, NativeModelRunner):
        runner.serve_adapters(store, config.lora.max_loras, _native_dtype(store.dtype))
        return
    import torch.nn.functional as F

    from hetero_llm.lora.products import AdaptedProducts
    from hetero_llm.models.invariant import product_of_rows
    from hetero_llm.runner.adapters import StepAdapters
    from hetero_llm.runner.model_runner import TorchModelRunner

    assert isinstance(runner, TorchModelRunner), "other runners are refused or not chosen"
    product = product_of_rows if config.batch_invariant else F.linear
    products = AdaptedProducts(runner.model, store.linears(), config.lora.max_loras, product)
    runner.adapters = StepAdapters(products, store, max_num_seqs=config.max_num_seqs, device=device)


def _native_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which the native executor has A and B: that of the adapters in host memory, or
    float32, which holds all that it has no products for."""
    import torch

    return dtype if dtype == torch.bfloat16 else torch.float32
