"""Builds the engine of a pooling model."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.pooling.pooling_engine import PoolingEngine
from hetero_llm.engine.resolve import open_tokenizer, resolve_device, resolve_dtype
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.pooling.pooling_model import PoolingModel

if TYPE_CHECKING:
    import torch

    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.headless import HeadlessLM
    from hetero_llm.pooling.decoder_runner import DecoderRunner
    from hetero_llm.pooling.encoder_runner import EncoderRunner

logger = logging.getLogger(__name__)

_STEP_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True, slots=True)
class BuiltPooling:
    """The engine of a pooling model and what its callers need to know; fields as of
    `BuiltEngine`. `num_blocks` is 0 for an encoder, which keeps no KV."""

    engine: PoolingEngine
    model: PoolingModel
    tokenizer: Tokenizer | None
    num_blocks: int
    device: str
    dtype: str
    backend: str
    offload: str = ""

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of the engine, by name."""
        return self.engine.metrics()


def build_pooling(
    config: EngineConfig, folder: Path, model: PoolingModel, *, show_progress: bool = True
) -> BuiltPooling:
    """Loads model and tokenizer and builds the engine.

    Raises:
        ConfigError: this model or machine cannot serve with these arguments.
        ModelLoadError: the model folder is missing, damaged or not supported.
    """
    import torch

    device = resolve_device(config.load.device)
    _check_arguments(config, model, device)
    tokenizer = open_tokenizer(config, folder)
    name = _dtype(config.load.dtype, model, device)
    recipe = _Recipe(config, folder, model, getattr(torch, name), device, show_progress)
    runner: DecoderRunner | EncoderRunner
    if model.decoder is None:
        runner, num_blocks = _encoder(recipe), 0
    else:
        runner, num_blocks = _decoder(recipe, tokenizer)
    if not config.disable_log_stats:
        logger.info(
            "%s on %s in %s: pools (%s) for %s, %d tokens at most",
            config.load.model, device, name, model.pooling, " and ".join(model.tasks),
            model.max_model_len,
        )  # fmt: skip
    backend = "cuda" if device.type == "cuda" else "torch"
    return BuiltPooling(
        PoolingEngine(runner), model, tokenizer, num_blocks, str(device), name, backend
    )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a runner is made of."""

    config: EngineConfig
    folder: Path
    model: PoolingModel
    dtype: torch.dtype
    device: torch.device
    show_progress: bool


def _check_arguments(config: EngineConfig, model: PoolingModel, device: torch.device) -> None:
    """Refuses arguments that a pooling model cannot follow."""
    speculation = config.speculation
    drafts = None if speculation is None else speculation.method
    for field, value, usual in (
        ("speculation", drafts, None),
        ("kv_cache_dtype", config.cache.dtype, "auto"),
        ("quantization_param_path", config.cache.scales_path, None),
        ("cpu_offload_gb", config.load.cpu_offload_gb, 0),
        ("cpu_weight_dtype", config.cpu.weight_dtype, "auto"),
        ("quantization", config.load.quantization, None),
    ):
        if value != usual:
            raise ConfigError(field, value, f"{model.class_name} pools, which runs without it")
    if config.cpu.backend == "ipex":
        raise ConfigError("cpu_backend", "ipex", "a pooling model runs on torch; leave it out")
    for field, given in (
        ("enable_prefix_cache_offload", config.offload is not None),
        ("num_gpu_blocks_override", config.cache.num_blocks is not None),
    ):
        if given:
            logger.warning("%s has no effect on a pooling model", field)
    if device.type == "cpu":
        from hetero_llm.cpu.backend import use_torch_threads

        use_torch_threads(config.cpu.threads)


def _dtype(wanted: str, model: PoolingModel, device: torch.device) -> str:
    """The dtype of a name. "auto" is `resolve_dtype`'s for a decoder. An encoder is small, and its
    vectors are compared by their last digits: on a CPU it stays in float32 unless it is stored in
    bfloat16; on a GPU float32 becomes float16, as in vLLM."""
    if wanted != "auto" or model.decoder is not None:
        return resolve_dtype(wanted, model.torch_dtype, device)
    if model.torch_dtype == "bfloat16":
        return resolve_dtype("auto", "bfloat16", device)
    return "float32" if device.type == "cpu" else "float16"


def _encoder(recipe: _Recipe) -> EncoderRunner:
    from hetero_llm.pooling.encoder_runner import EncoderRunner, load_encoder

    config, device = recipe.config, recipe.device
    network = load_encoder(
        recipe.folder,
        recipe.model,
        config.load,
        dtype=recipe.dtype,
        device=device,
        show_progress=recipe.show_progress,
    )
    return EncoderRunner(
        network,
        recipe.model,
        device=device,
        max_num_seqs=1 if config.batch_invariant else config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or _STEP_TOKENS[device.type],
    )


def _decoder(recipe: _Recipe, tokenizer: Tokenizer | None) -> tuple[DecoderRunner, int]:
    """The runner and the number of its KV blocks."""
    from hetero_llm.pooling.decoder_runner import DecoderRunner, blocks_needed
    from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

    config, model, device = recipe.config, recipe.model, recipe.device
    assert model.decoder is not None
    own = dataclasses.replace(model.decoder, max_model_len=model.max_model_len)
    tokens = config.max_num_batched_tokens or _STEP_TOKENS[device.type]
    if not config.enable_chunked_prefill:
        tokens = max(tokens, model.max_model_len)
    most = min(config.max_num_seqs, tokens)
    size = config.cache.block_size
    shape = KVCacheShape(own.num_layers, own.num_kv_heads, own.head_dim, size, recipe.dtype)
    num_blocks = blocks_needed(model.max_model_len, tokens, most, size)
    _check_memory(config, shape.block_bytes * num_blocks, model.max_model_len, device)
    ids = _label_ids(model, tokenizer) if model.label_tokens else []
    network = _load_decoder(recipe, own, ids)
    cache = PagedKVCache(shape, num_blocks, device)
    row_kernel = None
    if device.type == "cpu" and not config.batch_invariant:
        from hetero_llm.cpu.paged_attention import native_row_kernel
        from hetero_llm.runner.scored_attention import Scoring

        row_kernel = native_row_kernel(cache, own.num_heads, Scoring.of(own))
    runner = DecoderRunner(
        network,
        model,
        cache,
        max_num_seqs=most,
        max_num_batched_tokens=tokens,
        row_by_row=config.batch_invariant,
        row_kernel=row_kernel,
    )
    return runner, num_blocks


def _load_decoder(recipe: _Recipe, own: ModelConfig, label_ids: list[int]) -> HeadlessLM:
    """Loads the weights and replaces layers by the fastest ones for the device.

    Args:
        label_ids: of `PoolingModel.label_tokens`; empty: the checkpoint has a classifier, or none.
    """
    from hetero_llm.models.headless import HeadlessLM
    from hetero_llm.models.loader import load_model

    config, model, device = recipe.config, recipe.model, recipe.device
    classes = 0 if model.label_tokens else len(model.labels)
    network = load_model(
        recipe.folder,
        own,
        dtype=recipe.dtype,
        device=device,
        show_progress=recipe.show_progress,
        load_format=config.load.load_format,
        allow_pickle=config.load.allow_pickle_weights,
        seed=config.load.seed,
        build=partial(HeadlessLM, num_classes=classes, keeps_head=bool(model.label_tokens)),
    )
    assert isinstance(network, HeadlessLM)
    if label_ids:  # before the head's rows are laid out anew
        network.classify_by_tokens(label_ids, two_way=model.two_way)
    if config.batch_invariant:
        from hetero_llm.models.invariant import make_batch_invariant

        make_batch_invariant(network)
    elif device.type == "cuda":
        from hetero_llm.gpu import fused

        fused.speed_up(network)
    else:
        from hetero_llm.cpu.fused import speed_up

        speed_up(network)
    network.finish_loading(batch_invariant=config.batch_invariant)
    return network


def _label_ids(model: PoolingModel, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        reason = "classifier_from_token needs the tokenizer"
        raise ConfigError("skip_tokenizer_init", True, reason)
    ids = tokenizer.hf.convert_tokens_to_ids(list(model.label_tokens))
    unknown = tokenizer.hf.unk_token_id
    for token, index in zip(model.label_tokens, ids, strict=True):
        if index is None or index == unknown or index >= model.vocab_size:
            raise ConfigError("classifier_from_token", token, "is no token of the vocabulary")
    return ids


def _check_memory(
    config: EngineConfig, needed: int, max_model_len: int, device: torch.device
) -> None:
    """Raises ConfigError: the KV cache does not fit."""
    if device.type == "cuda":
        import torch

        total = int(torch.cuda.mem_get_info(device)[0] * config.cache.memory_utilization)
    else:
        from hetero_llm.utils.topology import usable_memory_bytes

        total = int(usable_memory_bytes() * config.cache.memory_utilization)
    if needed > total:
        raise ConfigError(
            "max_model_len", max_model_len,
            f"the KV cache of one such input and one step takes {needed / 2**30:.1f} GiB, "
            f"{total / 2**30:.1f} GiB may be used; lower max_model_len or max_num_batched_tokens",
        )  # fmt: skip
