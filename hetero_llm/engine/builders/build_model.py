"""Chooses what runs a model, and loads its weights for that, in the engine and in its ranks."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare
from hetero_llm.engine.builders.build_adapters import LoadedAdapters, prepare_adapters
from hetero_llm.engine.resolve import find_model
from hetero_llm.models.quantization_config import with_plain_weights

if TYPE_CHECKING:
    import torch

    from hetero_llm.cpu.backend import NativeBackend
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.experts import HostMemory
    from hetero_llm.models.layers import CausalLM

logger = logging.getLogger(__name__)


def find_served_model(config: EngineConfig, device: torch.device) -> tuple[Path, ModelConfig]:
    """The checkpoint's folder, and its configuration as it is served on the device.

    Raises:
        ConfigError, ModelLoadError: see `find_model`.
    """
    folder, model_config = find_model(config.load)
    if device.type == "cpu" and config.cpu.weight_dtype == "auto":
        plain = with_plain_weights(model_config)
        if plain is not model_config:
            logger.info("%s: blocks become plain weights when they are loaded", folder)
        model_config = plain
    return folder, model_config


def native_backend(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> NativeBackend | None:
    """Settings of the native executor; None if it does not run the model."""
    cpu = config.cpu
    if device.type == "cpu":
        from hetero_llm.cpu.backend import choose_backend

        return choose_backend(
            cpu,
            model_config,
            dtype,
            batch_invariant=config.batch_invariant,
            prompt_adapters=config.prompt_adapters.enabled,
        )
    given = {
        "cpu_backend": cpu.backend != "native",
        "cpu_weight_dtype": cpu.weight_dtype != "auto",
        "cpu_threads": cpu.threads is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        logger.warning("%s has no effect on a GPU", name)
    return None


def backend_name(config: EngineConfig, device: torch.device, *, native: bool) -> str:
    """See `BuiltEngine`. On a CPU without the native executor: "ipex" if configured, else
    "torch"."""
    if native:
        return "native"
    if device.type == "cuda":
        return "cuda"
    return "ipex" if config.cpu.backend == "ipex" else "torch"


def load_weights(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool,
    backend: str,
    share: RankShare = ALONE_SHARE,
    expert_memory: HostMemory | None = None,
) -> tuple[CausalLM, LoadedAdapters | None]:
    """Loads the model and replaces its layers by the fastest ones for device and configuration.
    Returns it, and the adapters of its requests (`prepare_adapters`).

    Args:
        backend: see `BuiltEngine`; "native": the layers stay, since the executor reads the weights
            itself.
        share: of this rank, whose part of the weights is loaded.
        expert_memory: see `load_model`.
    """
    from hetero_llm.models.loader import load_model, quantized_sizes

    load = partial(
        load_model,
        folder,
        model_config,
        dtype=dtype,
        device=device,
        show_progress=show_progress,
        load_format=config.load.load_format,
        allow_pickle=config.load.allow_pickle_weights,
        seed=config.load.seed,
        collectives=share.collectives,
        expert_memory=expert_memory,
    )
    if device.type == "cuda":
        from hetero_llm.gpu.memory import load_weights as load_onto_gpu
        from hetero_llm.gpu.weight_offload import plan_offload
        from hetero_llm.models.rank_config import sharded_config

        rank = share.collectives.rank
        offload_gb, sizes = config.load.cpu_offload_gb, {}
        if offload_gb:
            sizes = quantized_sizes(
                folder,
                model_config,
                dtype=dtype,
                load_format=config.load.load_format,
                allow_pickle=config.load.allow_pickle_weights,
                rank=rank,
            )
        plan = plan_offload(sharded_config(model_config, rank), dtype, offload_gb, sizes)
        model = load_onto_gpu(load, device, plan)
    else:
        model = load()
    adapters = prepare_adapters(
        config.lora,
        model,
        model_config,
        dtype,
        backend=backend,
        download_dir=config.load.download_dir,
    )
    _replace_layers(model, config, backend, share)
    model.finish_loading(batch_invariant=config.batch_invariant)
    return model, adapters


def _replace_layers(model: CausalLM, config: EngineConfig, backend: str, share: RankShare) -> None:
    """Replaces layers by the fastest ones for device and configuration."""
    if config.batch_invariant:
        from hetero_llm.models.invariant import make_batch_invariant

        make_batch_invariant(model)
    elif backend == "cuda":
        from hetero_llm.gpu import fused

        fused.speed_up(model, agree=share.agreement.of_first)
        _fuse_sums(model, share)
    elif backend == "ipex":
        from hetero_llm.cpu.ipex import speed_up

        speed_up(model)
    elif backend == "torch":
        from hetero_llm.cpu.fused import speed_up

        speed_up(model)


def _fuse_sums(model: CausalLM, share: RankShare) -> None:
    """Lets norms make the sums before them, where collectives go through the peers' memory."""
    from hetero_llm.gpu.collectives import PeerCollectives
    from hetero_llm.gpu.fused import fuse_sums

    if isinstance(share.collectives, PeerCollectives):
        fused = fuse_sums(model, share.collectives)
        logger.info("%d norms add up the parts of the ranks", fused)
