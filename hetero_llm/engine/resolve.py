"""Resolves what a configuration leaves open from model folder and machine, before any weight is
loaded: device, dtype, context length, limits of a step, tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.config.args import spec_of
from hetero_llm.config.args_spec import checked
from hetero_llm.config.engine_config import EngineConfig, LoadConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.demo_models import ALIASES, alias_path
from hetero_llm.engine.inputs.default_sampling import default_sampling
from hetero_llm.engine.inputs.images import ImageInputs, open_images
from hetero_llm.engine.text.tokenizer import Tokenizer, load_tokenizer
from hetero_llm.models.configs.transformers_vision import ImageModelConfig
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.pooling.pooling_model import PoolingModel, read_pooling_model

if TYPE_CHECKING:
    import torch

    from hetero_llm.models.config import ModelConfig

logger = logging.getLogger(__name__)

_DTYPES = {"half": "float16", "float": "float32"}
_DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}  # measured: docs/history/log.md
_TOKENS_OF_STAGES = 1024  # all stages work on a prompt only if it is cut into several steps
_TOKENS_WHEN_SERVING = 2048  # on a GPU: other requests' streams pause for a whole prompt chunk


def model_folder(load: LoadConfig, *, weights: bool = True) -> Path:
    """The checkpoint's folder.

    Args:
        weights: whether the weight files are needed, too.

    Raises:
        ModelLoadError: it is missing, or differs from its manifest.
    """
    from hetero_llm.models.folders import resolve_model_folder
    from hetero_llm.models.manifest import check_model

    folder = resolve_model_folder(
        resolve_alias(load.model),
        revision=load.revision,
        download_dir=load.download_dir,
        load_format=load.load_format if weights or load.load_format == "gguf" else "dummy",
        allow_pickle=load.allow_pickle_weights,
        remote_code=load.trust_remote_code,
    )
    if load.model_sha256 is not None:
        check_model(folder, load.model_sha256, weights=weights and load.load_format != "dummy")
    return folder


def find_model(load: LoadConfig, *, weights: bool = True) -> tuple[Path, ModelConfig]:
    """The checkpoint's folder and its configuration.

    Args:
        weights: whether the weight files are needed, too.

    Raises:
        ConfigError: an argument does not apply to this model.
        ModelLoadError: the model folder is missing, damaged, not supported, or differs from its
            manifest.
    """
    from hetero_llm.models.read_config import load_model_config

    folder = model_folder(load, weights=weights)
    if _through_transformers(folder, load):
        return folder, _transformers_config(folder, load)
    config = load_model_config(
        folder,
        rope_scaling=load.rope_scaling,
        rope_theta=load.rope_theta,
        disable_sliding_window=load.disable_sliding_window,
        hf_overrides=load.hf_overrides,
        quantization=load.quantization,
    )
    if isinstance(config, ImageModelConfig):
        if load.model_impl == "native":
            reason = f"{config.class_name} has no native implementation; use auto or transformers"
            raise ConfigError("model_impl", load.model_impl, reason)
        reason = f"needs a native implementation, and {config.class_name} runs on transformers"
        load.refuse_native_options(config.class_name, "cpu_offload_gb")
        if config.quantization is not None or config.online_quantization is not None:
            raise ConfigError("quantization", load.quantization, reason)
    return folder, config


def _through_transformers(folder: Path, load: LoadConfig) -> bool:
    """Whether a class of transformers computes the model; logged if the user did not ask for it."""
    from hetero_llm.models.config_reader import read_config
    from hetero_llm.models.registry import FAMILIES, REFUSED

    model_impl = load.model_impl
    names = read_config(folder, load.hf_overrides).class_names()
    if model_impl == "native" or not names:
        return False
    families = [FAMILIES[name] for name in names if name in FAMILIES]
    if model_impl == "transformers":  # families of ours may run on transformers themselves
        return not any(family.module.startswith("transformers") for family in families)
    if families or any(name in REFUSED for name in names):
        return False
    logger.info("%s has no native implementation: its class of transformers runs it", names[0])
    return True


def _transformers_config(folder: Path, load: LoadConfig) -> ModelConfig:
    from hetero_llm.models.configs.transformers import load_transformers_config

    if is_gguf(folder):
        reason = f"{folder} is a GGUF file, which native implementations read; use auto or native"
        raise ConfigError("model_impl", load.model_impl, reason)
    config = load_transformers_config(
        folder,
        trust_remote_code=load.trust_remote_code,
        disable_sliding_window=load.disable_sliding_window,
        hf_overrides=load.hf_overrides,
    )
    options = ("rope_scaling", "rope_theta", "cpu_offload_gb", "quantization")
    load.refuse_native_options(config.class_name, *options)
    return config


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model without its weights.

    Attributes:
        config: of a pooling model its `PoolingModel`.
        max_model_len: the context length to serve.
        images: prepares its images; None if it takes none.
        default_sampling: fields of `SamplingParams` for requests that leave them out.
    """

    config: ModelConfig | PoolingModel
    max_model_len: int
    tokenizer: Tokenizer | None
    images: ImageInputs | None
    default_sampling: Mapping[str, Any]


def open_model(config: EngineConfig) -> OpenedModel:
    """Opens a model without its weights.

    Raises:
        ConfigError, ModelLoadError: see `build_engine`.
    """
    folder = model_folder(config.load, weights=False)
    pooling = read_pooling_model(folder, config)
    if pooling is not None:
        tokenizer = open_tokenizer(config, folder)
        return OpenedModel(pooling, pooling.max_model_len, tokenizer, None, {})
    folder, model_config = find_model(config.load, weights=False)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    images = open_images(folder, model_config, config.max_images, config.media_domains)
    tokenizer = open_tokenizer(config, folder)
    sampling = default_sampling(config.generation, folder)
    return OpenedModel(model_config, max_model_len, tokenizer, images, sampling)


def resolve_alias(model: str) -> str:
    """The path of a model that is named by one word ("demo", "demo-draft", "smollm2"), else the
    name itself.

    Raises:
        ModelLoadError: the package with the model is not installed.
    """
    return str(alias_path(model)) if model in ALIASES else model


def resolve_device(name: str) -> torch.device:
    """The device of a name; "auto" is the GPU if there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "no CUDA device is visible to torch; use device='cpu'")
    return torch.device(name)


def resolve_dtype(name: str, stored: str, device: torch.device) -> str:
    """The dtype of a name. "auto" is the checkpoint's, with two exceptions: half precision instead
    of float32, and bfloat16 instead of float16 on a CPU, which has no fast float16 path.

    Raises:
        ConfigError: the GPU has no bfloat16.
    """
    import torch

    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if name != "auto":
        if name == "bfloat16" and not has_bfloat16:
            reason = "needs a GPU of compute capability 8.0 or later; use half"
            raise ConfigError("dtype", name, reason)
        return _DTYPES.get(name, name)
    if not has_bfloat16:
        return "float16"
    return "float16" if stored == "float16" and device.type == "cuda" else "bfloat16"


def resolve_max_model_len(wanted: int | None, model_config: ModelConfig) -> int:
    """The context length: `wanted`, or the model's own if that is None.

    Raises:
        ConfigError: the model's context is shorter.
    """
    if wanted is None:
        return model_config.max_model_len
    if wanted > model_config.max_model_len:
        raise ConfigError(
            "max_model_len",
            wanted,
            f"the model's context length is {model_config.max_model_len}",
        )
    return wanted


def limit_steps(
    config: EngineConfig, max_model_len: int, device_type: str, *, serving: bool
) -> SchedulerConfig:
    """The limits of a step. `serving`: other requests stream meanwhile, so steps are shorter."""
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = _DEFAULT_BATCHED_TOKENS[device_type]
        if serving:
            tokens = min(tokens, _TOKENS_WHEN_SERVING)
        tokens *= config.parallel.sequence_parallel_size  # a step takes as long as on one device
        if config.parallel.pipeline_parallel_size > 1:
            tokens = min(tokens, _TOKENS_OF_STAGES)
        tokens = max(tokens, config.max_num_seqs)
        if not config.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        block_size=config.cache.block_size,
        num_stages=config.parallel.pipeline_parallel_size,
    )


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Any:
    """The transformers tokenizer of a folder, a GGUF file, a hub id or "demo", by vLLM's name.

    Raises:
        ConfigError: the mode is unknown.
        ModelLoadError: there is none.
    """
    spec = spec_of("tokenizer_mode")
    assert spec is not None, "the table has it"
    mode = checked(spec, tokenizer_mode)
    folder = _tokenizer_folder(
        str(tokenizer_name), revision, download_dir, remote_code=trust_remote_code
    )
    return load_tokenizer(folder, mode=mode, trust_remote_code=trust_remote_code).hf


def _tokenizer_folder(
    name: str, revision: str | None, download_dir: str | None, *, remote_code: bool
) -> Path:
    from hetero_llm.models.folders import resolve_model_folder

    return resolve_model_folder(
        resolve_alias(name),
        revision=revision,
        download_dir=download_dir,
        load_format="dummy",  # no weights
        remote_code=remote_code,
    )


def open_tokenizer(config: EngineConfig, model_folder: Path) -> Tokenizer | None:
    """The configured tokenizer; None with `skip_tokenizer_init`."""
    load = config.load
    if load.skip_tokenizer_init:
        return None
    folder = model_folder
    if load.tokenizer != load.model or load.tokenizer_revision != load.revision:
        folder = _tokenizer_folder(
            load.tokenizer,
            load.tokenizer_revision,
            load.download_dir,
            remote_code=load.trust_remote_code,
        )
    return load_tokenizer(
        folder, mode=load.tokenizer_mode, trust_remote_code=load.trust_remote_code
    )
