"""The types of `LLM`'s keyword arguments and of `EngineArgs`, for type checkers; docs/flags.md says
what they mean.

Generated from the argument table by tools/gen_engine_arg_types.py; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict


# large: one key for each engine argument.
class EngineArgTypes(TypedDict, total=False):
    """By name and by alias. `model` and `tokenizer` are parameters of their own."""

    revision: str | None
    code_revision: str | None
    trust_remote_code: bool
    model_impl: str
    download_dir: str | os.PathLike[str] | None
    load_format: str
    allow_pickle_weights: bool
    model_sha256: str | os.PathLike[str] | None
    config_format: str
    model_loader_extra_config: Mapping[str, Any] | None
    ignore_patterns: str | Sequence[str]
    dtype: Any
    quantization: str | None
    quantization_param_path: str | os.PathLike[str] | None
    max_model_len: int | str | None
    rope_scaling: Mapping[str, Any] | None
    rope_theta: float | None
    hf_overrides: Mapping[str, Any] | None
    generation_config: str | os.PathLike[str]
    override_generation_config: Mapping[str, Any] | None
    disable_sliding_window: bool
    limit_mm_per_prompt: Mapping[str, int] | str | None
    allowed_media_domains: str | Sequence[str]
    tokenizer_mode: str
    tokenizer_revision: str | None
    skip_tokenizer_init: bool
    tokenizer_pool_size: int
    tokenizer_pool_type: str
    tokenizer_pool_extra_config: Mapping[str, Any] | None
    device: str
    gpu_memory_utilization: float
    device_memory_utilization: float
    block_size: int
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str
    swap_space: float
    conservative_dry_run: bool
    cpu_offload_gb: float
    cpu_backend: str
    cpu_weight_dtype: str
    cpu_threads: int | None
    use_v2_block_manager: bool
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    enable_chunked_prefill: bool | None
    max_logprobs: int
    seed: int
    enforce_eager: bool | None
    batch_invariant: bool
    disable_log_stats: bool
    num_scheduler_steps: int
    scheduler_delay_factor: float
    num_lookahead_slots: int
    preemption_mode: str | None
    disable_async_output_proc: bool
    max_seq_len_to_capture: int
    max_context_len_to_capture: int | None
    override_neuron_config: Mapping[str, Any] | None
    structured_outputs_config: Mapping[str, Any] | None
    guided_decoding_backend: str | None
    guided_decoding_disable_fallback: bool
    guided_decoding_disable_any_whitespace: bool
    guided_decoding_disable_additional_properties: bool
    reasoning_parser: str | None
    runner: str
    task: str
    convert: str
    pooler_config: Mapping[str, Any] | None
    override_pooler_config: Mapping[str, Any] | None
    enable_prefix_cache_offload: bool
    cpu_prefill_memory_utilization: float
    apc_offload_not_lazy: bool
    apc_offload_min_access_threshold: int
    apc_offload_enable_hit_cnt: bool
    apc_offload_gpu_evictor_limit: int
    apc_offload_lookahead: int
    apc_offload_max_inflight_mb: int
    apc_offload_write_policy: str
    apc_offload_host_policy: str
    apc_offload_load_min_tokens: int | None
    apc_offload_background_pin: bool
    moe_expert_memory: float | str
    moe_cpu_experts: str
    moe_expert_profile: str | os.PathLike[str] | None
    moe_link_lane: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    sequence_parallel_size: int
    data_parallel_size: int
    data_parallel_size_local: int | None
    kv_events_config: Mapping[str, Any] | None
    distributed_executor_backend: str | None
    worker_use_ray: bool
    ray_workers_use_nsight: bool
    ray_workers_use_nslight: bool
    max_parallel_loading_workers: int | None
    disable_custom_all_reduce: bool
    speculative_model: str | os.PathLike[str] | None
    spec_model: str | os.PathLike[str] | None
    num_speculative_tokens: int | None
    spec_tokens: int | None
    cpu_draft_worker: bool
    speculative_overlap: str
    draft_timeout_ms: float | None
    draft_threads: int | None
    draft_weight_dtype: str
    draft_optional: bool
    speculative_config: Mapping[str, Any] | None
    speculative_model_quantization: str | None
    speculative_draft_tensor_parallel_size: int | None
    speculative_max_model_len: int | None
    speculative_disable_by_batch_size: int | None
    ngram_prompt_lookup_max: int | None
    ngram_prompt_lookup_min: int | None
    spec_decoding_acceptance_method: str
    typical_acceptance_sampler_posterior_threshold: float
    typical_acceptance_sampler_posterior_alpha: float
    disable_logprobs_during_spec_decoding: bool | None
    lookahead_cache_config_dir: str | os.PathLike[str] | None
    use_lookahead: bool
    cpu_decoding_memory_utilization: float
    ignore_prompt_for_lookahead_cache: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_experts: bool
    lora_extra_vocab_size: int
    lora_dtype: str
    long_lora_scaling_factors: str | None
    max_cpu_loras: int | None
    lora_merge: str | os.PathLike[str] | None
    fully_sharded_loras: bool
    enable_prompt_adapter: bool
    max_prompt_adapters: int
    max_prompt_adapter_token: int
    qlora_adapter_name_or_path: str | os.PathLike[str] | None
    served_model_name: str | Sequence[str]
    disable_log_requests: bool


# large: one field for each engine argument.
class EngineArgFields:
    """What `EngineArgs` inherits: a field for each argument, by its name."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    model: str
    tokenizer: str | None
    revision: str | None
    code_revision: str | None
    trust_remote_code: bool
    model_impl: str
    download_dir: str | os.PathLike[str] | None
    load_format: str
    allow_pickle_weights: bool
    model_sha256: str | os.PathLike[str] | None
    config_format: str
    model_loader_extra_config: Mapping[str, Any] | None
    ignore_patterns: str | Sequence[str]
    dtype: Any
    quantization: str | None
    quantization_param_path: str | os.PathLike[str] | None
    max_model_len: int | str | None
    rope_scaling: Mapping[str, Any] | None
    rope_theta: float | None
    hf_overrides: Mapping[str, Any] | None
    generation_config: str | os.PathLike[str]
    override_generation_config: Mapping[str, Any] | None
    disable_sliding_window: bool
    limit_mm_per_prompt: Mapping[str, int] | str | None
    allowed_media_domains: str | Sequence[str]
    tokenizer_mode: str
    tokenizer_revision: str | None
    skip_tokenizer_init: bool
    tokenizer_pool_size: int
    tokenizer_pool_type: str
    tokenizer_pool_extra_config: Mapping[str, Any] | None
    device: str
    gpu_memory_utilization: float
    block_size: int
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str
    swap_space: float
    conservative_dry_run: bool
    cpu_offload_gb: float
    cpu_backend: str
    cpu_weight_dtype: str
    cpu_threads: int | None
    use_v2_block_manager: bool
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    enable_chunked_prefill: bool | None
    max_logprobs: int
    seed: int
    enforce_eager: bool | None
    batch_invariant: bool
    disable_log_stats: bool
    num_scheduler_steps: int
    scheduler_delay_factor: float
    num_lookahead_slots: int
    preemption_mode: str | None
    disable_async_output_proc: bool
    max_seq_len_to_capture: int
    max_context_len_to_capture: int | None
    override_neuron_config: Mapping[str, Any] | None
    structured_outputs_config: Mapping[str, Any] | None
    guided_decoding_backend: str | None
    guided_decoding_disable_fallback: bool
    guided_decoding_disable_any_whitespace: bool
    guided_decoding_disable_additional_properties: bool
    reasoning_parser: str | None
    runner: str
    task: str
    convert: str
    pooler_config: Mapping[str, Any] | None
    enable_prefix_cache_offload: bool
    cpu_prefill_memory_utilization: float
    apc_offload_not_lazy: bool
    apc_offload_min_access_threshold: int
    apc_offload_enable_hit_cnt: bool
    apc_offload_gpu_evictor_limit: int
    apc_offload_lookahead: int
    apc_offload_max_inflight_mb: int
    apc_offload_write_policy: str
    apc_offload_host_policy: str
    apc_offload_load_min_tokens: int | None
    apc_offload_background_pin: bool
    moe_expert_memory: float | str
    moe_cpu_experts: str
    moe_expert_profile: str | os.PathLike[str] | None
    moe_link_lane: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    sequence_parallel_size: int
    data_parallel_size: int
    data_parallel_size_local: int | None
    kv_events_config: Mapping[str, Any] | None
    distributed_executor_backend: str | None
    worker_use_ray: bool
    ray_workers_use_nsight: bool
    max_parallel_loading_workers: int | None
    disable_custom_all_reduce: bool
    speculative_model: str | os.PathLike[str] | None
    num_speculative_tokens: int | None
    cpu_draft_worker: bool
    speculative_overlap: str
    draft_timeout_ms: float | None
    draft_threads: int | None
    draft_weight_dtype: str
    draft_optional: bool
    speculative_config: Mapping[str, Any] | None
    speculative_model_quantization: str | None
    speculative_draft_tensor_parallel_size: int | None
    speculative_max_model_len: int | None
    speculative_disable_by_batch_size: int | None
    ngram_prompt_lookup_max: int | None
    ngram_prompt_lookup_min: int | None
    spec_decoding_acceptance_method: str
    typical_acceptance_sampler_posterior_threshold: float
    typical_acceptance_sampler_posterior_alpha: float
    disable_logprobs_during_spec_decoding: bool | None
    lookahead_cache_config_dir: str | os.PathLike[str] | None
    use_lookahead: bool
    cpu_decoding_memory_utilization: float
    ignore_prompt_for_lookahead_cache: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_experts: bool
    lora_extra_vocab_size: int
    lora_dtype: str
    long_lora_scaling_factors: str | None
    max_cpu_loras: int | None
    lora_merge: str | os.PathLike[str] | None
    fully_sharded_loras: bool
    enable_prompt_adapter: bool
    max_prompt_adapters: int
    max_prompt_adapter_token: int
    qlora_adapter_name_or_path: str | os.PathLike[str] | None
    served_model_name: str | Sequence[str]
    disable_log_requests: bool
