"""Frozen configuration objects, one per component. Values are checked here or in `config/args.py`.
Values that are resolved at start-up (number of blocks, device) are passed as plain arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hetero_llm.config.constraints_config import ConstraintsConfig, constraints_from_args
from hetero_llm.config.expert_config import ExpertConfig, experts_from_args
from hetero_llm.config.kv_events_config import KvEventsConfig, kv_events_from_args
from hetero_llm.config.lora_config import LoraConfig, lora_from_args
from hetero_llm.config.offload_config import OffloadConfig, offload_from_args
from hetero_llm.config.parallel_config import ParallelConfig, parallel_from_args
from hetero_llm.config.pooling_config import PoolingConfig, pooling_from_args
from hetero_llm.config.prompt_adapter_config import PromptAdapterConfig, prompt_adapters_from_args
from hetero_llm.config.speculation_config import SpeculationConfig, speculation_from_args
from hetero_llm.core.errors import ConfigError

_MAX_NUM_SEQS = 256
_LOAD_FORMATS = {
    "npcache": "pt", "hf": "auto", "bitsandbytes": "auto",
    "fastsafetensors": "safetensors", "runai_streamer": "safetensors",
    "instanttensor": "safetensors",
}  # fmt: skip
"""Ways of vLLM to read weights -> the format that they read."""


# large: one field for each argument that concerns loading
@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Where the model and tokenizer come from. `dtype` and `device` may be "auto"; `model_impl` is
    "auto", "native" or "transformers".
    `quantization` None: weights are served as they are stored.
    `cpu_offload_gb` is GiB of weights that stay in host memory; `hf_overrides` changes
    config.json."""

    model: str
    tokenizer: str
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    revision: str | None
    tokenizer_revision: str | None
    download_dir: str | None
    load_format: str
    allow_pickle_weights: bool
    model_sha256: str | None
    dtype: str
    device: str
    rope_scaling: Mapping[str, Any] | None
    rope_theta: float | None
    disable_sliding_window: bool
    cpu_offload_gb: float
    seed: int
    quantization: str | None = None
    model_impl: str = "auto"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)

    def refuse_native_options(self, class_name: str, *names: str) -> None:
        """Raises ConfigError: one of these fields is given, and transformers' class of this name
        runs the model."""
        for name in names:
            if getattr(self, name) not in (None, 0):
                reason = f"needs a native implementation, and {class_name} runs on transformers"
                raise ConfigError(name, getattr(self, name), reason)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache: `block_size` in tokens; `num_blocks` None: sized from free memory. `conservative`:
    also count memory that was not allocated by torch. `dtype` is "auto", "float16", "bfloat16",
    "fp8", "fp8_e4m3" or "fp8_e5m2"; `scales_path`: file of an e4m3 cache's scales, None: the
    checkpoint's."""

    block_size: int
    dtype: str
    num_blocks: int | None
    memory_utilization: float
    conservative: bool
    enable_prefix_caching: bool
    scales_path: str | None = None


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """How a model runs on a CPU. `backend` is "native", "torch" or "ipex"; `weight_dtype` is "auto"
    "int8" or "int4"; `threads` None: one for each usable core."""

    backend: str
    weight_dtype: str
    threads: int | None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Where sampling defaults come from. `source` is "auto" (the model's generation_config.json, or
    its GGUF file), "vllm" (no file) or a folder; keys of `override` replace those of the file."""

    source: str = "auto"
    override: Mapping[str, Any] = field(default_factory=dict)


MAX_IN_FLIGHT = 4
"""Steps that a runner has places for."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, in tokens; `max_num_seqs` in sequences. `num_stages`: parts of the layers
    that work on different steps at the same time."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    block_size: int
    num_stages: int = 1

    @property
    def num_in_flight(self) -> int:
        """The most steps that are launched and not finished: one for each stage, and one that is
        ready behind them: else the first stage waits while the host finishes a step and makes the
        next one. Runners have buffers for `MAX_IN_FLIGHT`."""
        return min(self.num_stages + 1, MAX_IN_FLIGHT)

    def __post_init__(self) -> None:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                "max_num_seqs",
                self.max_num_seqs,
                "one decode step needs a token per sequence, so it cannot exceed "
                f"max_num_batched_tokens ({self.max_num_batched_tokens})",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                "without chunked prefill a whole prompt runs in one step, so it must be at "
                f"least max_model_len ({self.max_model_len})",
            )


# large: one field for each part's configuration and each limit.
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The checked configuration of an engine. None means "resolved at start-up", except
    `speculation` None: no drafts, and `offload` None: no prefix cache in host memory.
    `max_images`: maximum images of one prompt; `media_domains`: hosts that they may come from.
    `num_replicas`: engines that share this machine and serve as one; each has this configuration
    but for its number, `replica`. `kv_events` None: events of the KV cache are not published.
    `fit_max_model_len`: a KV cache that does not hold `max_model_len` tokens shortens the context.
    """

    load: LoadConfig
    cache: CacheConfig
    cpu: CpuConfig
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    max_logprobs: int
    batch_invariant: bool
    enforce_eager: bool
    disable_log_stats: bool
    seed: int
    speculation: SpeculationConfig | None
    offload: OffloadConfig | None
    max_images: int | None = None
    media_domains: tuple[str, ...] = ()
    generation: GenerationDefaults = GenerationDefaults()
    pooling: PoolingConfig = PoolingConfig()
    constraints: ConstraintsConfig = ConstraintsConfig()
    lora: LoraConfig = LoraConfig()
    prompt_adapters: PromptAdapterConfig = PromptAdapterConfig()
    num_replicas: int = 1
    parallel: ParallelConfig = ParallelConfig()
    experts: ExpertConfig = ExpertConfig()
    replica: int = 0
    kv_events: KvEventsConfig | None = None
    fit_max_model_len: bool = False

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> EngineConfig:
        """Builds the configuration from the complete dict of `config.args.resolve_engine_args`."""
        model = args["model"]
        if not model:
            raise ConfigError("model", model, "a folder or a hub id is needed")
        load = _same_names(LoadConfig, args) | {
            "tokenizer": args["tokenizer"] or model,
            # The model's revision means nothing in another repository.
            "tokenizer_revision": args["tokenizer_revision"]
            or (args["revision"] if args["tokenizer"] in (None, model) else None),
            "model_impl": "native" if args["model_impl"] == "vllm" else args["model_impl"],
            "load_format": _LOAD_FORMATS.get(args["load_format"], args["load_format"]),
            "hf_overrides": args["hf_overrides"] or {},
            "quantization": _quantization(args["load_format"], args["quantization"]),
        }
        cache = CacheConfig(
            block_size=args["block_size"],
            dtype=args["kv_cache_dtype"],
            num_blocks=args["num_gpu_blocks_override"],
            memory_utilization=args["gpu_memory_utilization"],
            conservative=args["conservative_dry_run"],
            enable_prefix_caching=args["enable_prefix_caching"],
            scales_path=args["quantization_param_path"],
        )
        fits = args["max_model_len"] == "auto"
        own = _same_names(EngineConfig, args) | {
            "max_model_len": None if fits else args["max_model_len"],
            "max_num_seqs": _max_num_seqs(args["max_num_seqs"], args["max_num_batched_tokens"]),
            "enable_chunked_prefill": args["enable_chunked_prefill"] is not False,
            "enforce_eager": bool(args["enforce_eager"]),
        }
        return EngineConfig(
            **own,
            load=LoadConfig(**load),
            cache=cache,
            cpu=CpuConfig(args["cpu_backend"], args["cpu_weight_dtype"], args["cpu_threads"]),
            speculation=speculation_from_args(args),
            offload=offload_from_args(args),
            max_images=_max_images(args["limit_mm_per_prompt"]),
            media_domains=args["allowed_media_domains"],
            generation=GenerationDefaults(
                args["generation_config"], args["override_generation_config"] or {}
            ),
            pooling=pooling_from_args(args),
            constraints=constraints_from_args(args),
            lora=lora_from_args(args),
            prompt_adapters=prompt_adapters_from_args(args),
            num_replicas=_num_replicas(
                args["data_parallel_size"], args["data_parallel_size_local"]
            ),
            parallel=parallel_from_args(args),
            experts=experts_from_args(args),
            kv_events=kv_events_from_args(args),
            fit_max_model_len=fits,
        )

    def of_one_replica(self, replica: int, *, on_cpu: bool) -> EngineConfig:
        """This configuration with one replica's share of what all replicas have together: host
        memory, to which a CPU's KV cache belongs."""
        if self.num_replicas == 1:
            return self
        share = 1.0 / self.num_replicas
        cache, speculation, offload = self.cache, self.speculation, self.offload
        if on_cpu:
            cache = replace(cache, memory_utilization=cache.memory_utilization * share)
        if speculation is not None:
            memory = speculation.memory_utilization * share
            speculation = replace(speculation, memory_utilization=memory)
        if offload is not None:
            offload = replace(offload, memory_utilization=offload.memory_utilization * share)
        return replace(self, cache=cache, speculation=speculation, offload=offload, replica=replica)

    def check_one_replica(self) -> None:
        """Raises ConfigError: several replicas are wanted of a program that has one engine."""
        if self.num_replicas > 1:
            reason = (
                "an engine in this process has no replicas, as in vLLM; use AsyncLLMEngine or "
                "`hetero-llm serve`, or one process for each device"
            )
            raise ConfigError("data_parallel_size", self.num_replicas, reason)


def _same_names(config: type, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that have the name of a field of the configuration."""
    return {field.name: args[field.name] for field in fields(config) if field.name in args}


def _num_replicas(size: int, local: int | None) -> int:
    if local is not None and local != size:
        reason = (
            f"data_parallel_size={size} and all replicas are on this machine; start a server on "
            "each machine, and `hetero-llm route` before them"
        )
        raise ConfigError("data_parallel_size_local", local, reason)
    return size


def _quantization(load_format: str, wanted: str | None) -> str | None:
    """The load format "bitsandbytes" quantizes plain weights, or reads those of bitsandbytes."""
    if load_format != "bitsandbytes":
        return wanted
    if wanted not in (None, "bitsandbytes"):
        reason = f"needs quantization=bitsandbytes, not {wanted!r}; leave one of them out"
        raise ConfigError("load_format", load_format, reason)
    return "bitsandbytes"


def _max_num_seqs(wanted: int | None, max_num_batched_tokens: int | None) -> int:
    """Sequences of a step; by default at most one for each of its tokens."""
    if wanted is not None:
        return wanted
    return min(_MAX_NUM_SEQS, max_num_batched_tokens or _MAX_NUM_SEQS)


def _max_images(limits: Mapping[str, int] | None) -> int | None:
    """Maximum images of a prompt; None if not given."""
    for name in limits or ():
        if name != "image":
            reason = "input other than text and images is not available yet"
            raise ConfigError("limit_mm_per_prompt", name, reason)
    return None if limits is None else limits.get("image")
