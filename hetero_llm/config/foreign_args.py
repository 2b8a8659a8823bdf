"""Arguments of vLLM, 0.6 to 0.33, that this engine does not have.

A `_tuning` row changes speed or the log, never an answer: any value is accepted with a notice line.
A `_feature` row names what is missing; its harmless values are accepted with a notice line.
"""

from __future__ import annotations

from typing import Any

from hetero_llm.config.args_spec import Scope
from hetero_llm.config.foreign_spec import ForeignArg, Takes

_SWITCH, _ONE, _MANY = Takes.NOTHING, Takes.ONE, Takes.MANY

_LORA = "LoRA"
_REASONING = "separating a model's reasoning from its answer"
_EXTERNAL = "a port for each replica of one server"
_ROUTE = "a server of its own for each, and `hetero-llm route` before them"
_INHERITED = "replicas are processes of this machine, over sockets that they inherit."
_CONTEXT_PARALLEL = "context parallelism"
_EXPERT_PARALLEL = "expert parallelism"
_NODES = "an engine of several machines"
_MAMBA = "models with state spaces (Mamba)"
_LATE = "late interaction (an embedding for each token)"
_SLEEP = "sleep mode"
_KV_TRANSFER = "KV transfer between engines"
_MULTIMODAL = "another treatment of images than the model's own"
_VIDEO = "video"
_VISION_FP8 = "a vision encoder in FP8"
_TRACING = "tracing inside a step"
_WEIGHT_GROUPS = "weight offload by groups or names"
_RPC = "gRPC"

_KERNELS = "kernels are chosen for the model and the device."
_GRAPHS = "CUDA graphs are captured for the batch sizes that can occur."
_NO_COMPILER = "torch compiles nothing here: there is nothing to tune."
_STEPS = "the scheduler shares each step's tokens out without this limit."
_ONE_DEVICE = "the engine runs on one host, without remote workers."
_LOADER = "weights are mapped into memory and copied as fast as the disk gives them."
_IMAGE_CACHE = "prepared images are found again through the prefix cache."
_COUNTERS = "/metrics has the counters there are."
_LOG = "the log has its own levels; see --verbose and --uvicorn-log-level."


def _tuning(name: str, takes: Takes, reason: str, **rest: Any) -> ForeignArg:
    return ForeignArg(name, takes, reason=reason, **rest)


def _feature(name: str, takes: Takes, feature: str, *harmless: Any, **rest: Any) -> ForeignArg:
    if takes is _SWITCH and not harmless:
        harmless = (False,)
    return ForeignArg(name, takes, feature, harmless, **rest)


def _serve(name: str, takes: Takes, feature: str, *harmless: Any, **rest: Any) -> ForeignArg:
    return _feature(name, takes, feature, *harmless, scope=Scope.SERVE, **rest)


_MODEL = (
    _feature("hf_config_path", _ONE, "a config.json outside of the model's folder"),
    _feature(
        "hf_token", _ONE, "a token as an argument", True, instead="the variable HF_TOKEN",
        reason="the token of the variable HF_TOKEN, or of `hf auth login`, is used.",
    ),
    _feature("model_class_overrides", _ONE, "replacing a model's class"),
    _feature("model_weights", _ONE, "weights outside of the model's folder"),
    _feature("quantization_config", _ONE, "quantization"),
    _feature("allow_deprecated_quantization", _SWITCH, "quantization"),
    _feature("enable_return_routed_experts", _SWITCH, "returning the experts of each token"),
    _feature("return_sampling_mask", _SWITCH, "returning the mask of a sampled token"),
    _feature("logprobs_mode", _ONE, "another kind of log-probabilities", "raw_logprobs"),
    _feature("use_fp64_gumbel", _SWITCH, "sampling noise in float64"),
    _feature("enable_trace_replay", _SWITCH, "replaying traces"),
    _feature("enable_prompt_embeds", _SWITCH, "a prompt of embeddings"),
    _feature("engine_use_ray", _SWITCH, "an engine in Ray"),
    _feature("enable_sleep_mode", _SWITCH, _SLEEP),
    _feature("sleep_mode_backend", _ONE, _SLEEP, "cumem"),
    _feature("sleep_mode_offload_cudagraph", _SWITCH, _SLEEP),
    _feature("sleep_preserve_parameter_names", _MANY, _SLEEP),
    _tuning("enable_cumem_allocator", _SWITCH, "torch's own allocator serves."),
    _tuning("enable_nccl_comm_suspend", _SWITCH, _ONE_DEVICE),
    _feature("logits_processors", _MANY, "a logits processor for all requests",
             instead="SamplingParams(logits_processors=...)"),
    _feature("logits_processor_pattern", _ONE, "a logits processor over HTTP"),
    _feature("io_processor_plugin", _ONE, "plug-ins for prompts and answers"),
    _tuning("renderer_num_workers", _ONE, "chat templates have processes of their own."),
    _feature("override_attention_dtype", _ONE, "another type for attention"),
    _feature("watermark_config", _ONE, "watermarks in answers"),
    _feature("diffusion_config", _ONE, "diffusion models"),
    _feature("engram_config", _ONE, "models with Engram tables"),
    _feature("aux_output_config", _ONE, "further outputs of a model"),
)  # fmt: skip

_LOADING = (
    _tuning("safetensors_load_strategy", _ONE, _LOADER),
    _tuning("safetensors_prefetch_num_threads", _ONE, _LOADER),
    _tuning("safetensors_prefetch_block_size", _ONE, _LOADER),
    _tuning("use_tqdm_on_load", _SWITCH, "progress is shown on terminals."),
    _tuning("pt_load_map_location", _ONE, "pickled weights are always read on the CPU."),
    _feature("weight_transfer_config", _ONE, "new weights in a running engine"),
)

_EXECUTION = (
    _tuning("compilation_config", _ONE, _NO_COMPILER, short=("-cc",)),
    _tuning("optimization_level", _ONE, _NO_COMPILER, short=("-O",)),
    _tuning("performance_mode", _ONE, _NO_COMPILER),
    _tuning("cudagraph_capture_sizes", _MANY, _GRAPHS, aliases=("cuda_graph_sizes",)),
    _tuning("max_cudagraph_capture_size", _ONE, _GRAPHS),
    _tuning("attention_backend", _ONE, _KERNELS),
    _tuning("attention_config", _ONE, _KERNELS, short=("-ac",)),
    _tuning("kernel_config", _ONE, _KERNELS),
    _tuning("ir_op_priority", _ONE, _KERNELS),
    _tuning("enable_flashinfer_autotune", _SWITCH, _KERNELS),
    _tuning("monokernel", _SWITCH, _KERNELS),
    _tuning("moe_backend", _ONE, _KERNELS),
    _tuning("linear_backend", _ONE, _KERNELS),
    _tuning("sparse_indexer_topk_backend", _ONE, _KERNELS),
    _tuning("gdn_prefill_backend", _ONE, _KERNELS),
    _tuning("kda_prefill_backend", _ONE, _KERNELS),
    _tuning("kda_decode_backend", _ONE, _KERNELS),
    _tuning("disable_cascade_attn", _SWITCH, _KERNELS),
    _feature("mamba_backend", _ONE, _MAMBA, "triton"),
    _feature("mamba_ssu_algorithm", _ONE, _MAMBA),
    _feature("mamba_config", _ONE, _MAMBA),
    _feature("enable_mamba_cache_stochastic_rounding", _SWITCH, _MAMBA),
    _feature("mamba_cache_philox_rounds", _ONE, _MAMBA, 0),
    _feature("additional_config", _ONE, "options of another platform"),
    _feature("worker_cls", _ONE, "workers of one's own", "auto"),
    _feature("worker_extension_cls", _ONE, "workers of one's own"),
)

_CACHE = (
    _feature("kv_cache_memory_bytes", _ONE, "a KV cache of a given size",
             instead="num_gpu_blocks_override or gpu_memory_utilization"),
    _tuning("prefix_caching_hash_algo", _ONE, "blocks are named by SHA-256."),
    _feature("prefix_cache_retention_interval", _ONE, "an interval of prefix retention", 0),
    _feature("prefix_match_unit", _ONE, "another unit of prefix matches than the block"),
    _feature("kv_cache_dtype_skip_layers", _MANY, "another KV type for some layers"),
    _feature("calculate_kv_scales", _SWITCH, "measuring the scales of an FP8 KV cache",
             instead="a checkpoint with scales, or quantization_param_path"),
    _feature("kv_sharing_fast_prefill", _SWITCH, "layers that share KV"),
    _tuning("swa_bounded_replay", _SWITCH, "sliding windows keep the blocks they need."),
    _feature("mamba_cache_dtype", _ONE, _MAMBA, "auto"),
    _feature("mamba_ssm_cache_dtype", _ONE, _MAMBA, "auto"),
    _feature("mamba_block_size", _ONE, _MAMBA),
    _feature("mamba_cache_mode", _ONE, _MAMBA, "none"),
    _feature("enable_mamba_shared_prefix_checkpoint", _SWITCH, _MAMBA),
    _feature("replayssm_buffer_len", _ONE, _MAMBA, 16),
    _feature("use_replayssm", _SWITCH, _MAMBA),
    _feature("kv_offloading_size", _ONE, "a KV offload of a given size",
             instead="enable_prefix_cache_offload and cpu_prefill_memory_utilization"),
    _feature("kv_offloading_backend", _ONE, "another KV offload than our own", "native"),
    _feature("kv_transfer_config", _ONE, _KV_TRANSFER),
    _feature("ec_transfer_config", _ONE, "transfer of encoder outputs between engines"),
    _feature("ec_manager_config", _ONE, "a cache of encoder outputs"),
    _feature("offload_backend", _ONE, _WEIGHT_GROUPS, "auto", "uva"),
    _feature("cpu_offload_params", _MANY, _WEIGHT_GROUPS),
    _feature("offload_group_size", _ONE, _WEIGHT_GROUPS, 0),
    _feature("offload_num_in_group", _ONE, _WEIGHT_GROUPS, 1),
    _feature("offload_prefetch_step", _ONE, _WEIGHT_GROUPS, 0, 1),
    _feature("offload_params", _MANY, _WEIGHT_GROUPS),
    _tuning("disable_hybrid_kv_cache_manager", _SWITCH, "there is one block manager."),
)  # fmt: skip

_SCHEDULING = (
    _feature("scheduling_policy", _ONE, "priority scheduling", "fcfs"),
    _feature("scheduler_cls", _ONE, "a scheduler of one's own"),
    _tuning("async_scheduling", _SWITCH, "steps are launched ahead wherever they can be."),
    _tuning("multi_step_stream_outputs", _SWITCH, "every step is scheduled on its own."),
    _tuning("max_num_partial_prefills", _ONE, _STEPS),
    _tuning("max_long_partial_prefills", _ONE, _STEPS),
    _tuning("long_prefill_token_threshold", _ONE, _STEPS),
    _tuning("long_prefill_token_threshold_adaptive", _SWITCH, _STEPS),
    _tuning("max_num_scheduled_tokens", _ONE, _STEPS),
    _tuning("scheduler_reserve_full_isl", _SWITCH, _STEPS),
    _tuning("watermark", _ONE, _STEPS),
    _tuning("prefill_schedule_interval", _ONE, _STEPS),
    _feature("max_num_active_seqs", _ONE, "a limit on admitted sequences besides max_num_seqs"),
    _feature("max_num_queued_tokens", _ONE, "a limit on the tokens of waiting requests",
             instead="max_queued_requests"),
    _tuning("disable_chunked_mm_input", _SWITCH, "an image's tokens are read in one step."),
)  # fmt: skip

_PARALLEL = (
    _feature("data_parallel_rank", _ONE, "one replica of several by its rank", 0, short=("-dpn",),
             instead=_ROUTE),
    _feature("data_parallel_rank_local", _ONE, "one replica of several by its rank", 0),
    _feature("data_parallel_start_rank", _ONE, "replicas on several machines", 0, short=("-dpr",)),
    _tuning("data_parallel_address", _ONE, _INHERITED, short=("-dpa",)),
    _tuning("data_parallel_rpc_port", _ONE, _INHERITED, short=("-dpp",)),
    _feature("data_parallel_backend", _ONE, "replicas in Ray actors", "mp", short=("-dpb",),
             instead="deploy/ray"),
    _feature("data_parallel_hybrid_lb", _SWITCH, _EXTERNAL, short=("-dph",), instead=_ROUTE),
    _feature("data_parallel_external_lb", _SWITCH, _EXTERNAL, short=("-dpe",), instead=_ROUTE),
    _feature("data_parallel_multi_port_external_lb", _SWITCH, _EXTERNAL, short=("-dpm",),
             instead=_ROUTE),
    _feature("decode_context_parallel_size", _ONE, _CONTEXT_PARALLEL, 1, short=("-dcp",)),
    _feature("prefill_context_parallel_size", _ONE, _CONTEXT_PARALLEL, 1, short=("-pcp",)),
    _tuning("dcp_comm_backend", _ONE, _ONE_DEVICE),
    _tuning("dcp_q_replicate", _SWITCH, _ONE_DEVICE),
    _tuning("dcp_kv_cache_interleave_size", _ONE, _ONE_DEVICE),
    _tuning("cp_kv_cache_interleave_size", _ONE, _ONE_DEVICE),
    _feature("enable_expert_parallel", _SWITCH, _EXPERT_PARALLEL, short=("-ep",)),
    _tuning("enable_ep_weight_filter", _SWITCH, _ONE_DEVICE),
    _tuning("all2all_backend", _ONE, _ONE_DEVICE),
    _feature("enable_eplb", _SWITCH, _EXPERT_PARALLEL),
    _tuning("eplb_config", _ONE, _ONE_DEVICE),
    _feature("num_redundant_experts", _ONE, _EXPERT_PARALLEL, 0),
    _tuning("eplb_window_size", _ONE, _ONE_DEVICE),
    _tuning("eplb_step_interval", _ONE, _ONE_DEVICE),
    _tuning("eplb_log_balancedness", _SWITCH, _ONE_DEVICE),
    _tuning("expert_placement_strategy", _ONE, _ONE_DEVICE),
    _feature("enable_elastic_ep", _SWITCH, _EXPERT_PARALLEL),
    _tuning("elastic_ep_max_dp_size", _ONE, _ONE_DEVICE),
    _tuning("enable_dbo", _SWITCH, _ONE_DEVICE, aliases=("enable_microbatching",)),
    _tuning("ubatch_size", _ONE, _ONE_DEVICE),
    _tuning("dbo_decode_token_threshold", _ONE, _ONE_DEVICE),
    _tuning("dbo_prefill_token_threshold", _ONE, _ONE_DEVICE),
    _tuning("dp_sync_interval", _ONE, _ONE_DEVICE),
    _tuning("disable_nccl_for_dp_synchronization", _SWITCH, _ONE_DEVICE),
    _tuning("enable_hc_sp", _SWITCH, _ONE_DEVICE),
    _tuning("enable_batch_sharded_sampling", _SWITCH, _ONE_DEVICE),
    _tuning("enable_shm_tensor_arena", _SWITCH, _ONE_DEVICE),
    _feature("enable_fault_tolerance", _SWITCH, "serving on without a replica that died",
             instead="`hetero-llm route` before servers of one replica each"),
    _tuning("fault_tolerance_config", _ONE, _ONE_DEVICE),
    _tuning("master_addr", _ONE, _ONE_DEVICE),
    _tuning("master_port", _ONE, _ONE_DEVICE),
    _feature("nnodes", _ONE, _NODES, 1, short=("-n",)),
    _feature("node_rank", _ONE, _NODES, 0, short=("-r",)),
    _tuning("distributed_timeout_seconds", _ONE, _ONE_DEVICE),
    _tuning("cpu_distributed_timeout_seconds", _ONE, _ONE_DEVICE),
    _tuning("numa_bind", _SWITCH, "pinned memory lies on the NUMA node of the GPU."),
    _tuning("numa_bind_nodes", _MANY, "pinned memory lies on the NUMA node of the GPU."),
    _feature("numa_bind_cpus", _MANY, "a list of cores as an argument", instead="taskset"),
    _feature("device_ids", _ONE, "a choice of GPUs as an argument",
             instead="the variable CUDA_VISIBLE_DEVICES"),
)  # fmt: skip

_SPECULATION = (
    _tuning("speculative_disable_mqa_scorer", _SWITCH, "all drafts are verified in one step."),
    _feature("spec_method", _ONE, "a method without its settings", "draft_model",
             instead="speculative_config={'method': ...}"),
)  # fmt: skip

_IMAGES = (
    _feature("allowed_local_media_path", _ONE, "reading images from the server's files"),
    _feature("mm_processor_kwargs", _ONE, _MULTIMODAL),
    _feature("media_io_kwargs", _ONE, _MULTIMODAL),
    _feature("language_model_only", _SWITCH, "a model of images without its vision encoder"),
    _feature("enable_mm_embeds", _SWITCH, "embeddings as images"),
    _feature("interleave_mm_strings", _SWITCH, _MULTIMODAL),
    _feature("mm_placeholder_str_override", _ONE, _MULTIMODAL),
    _feature("mm_encoder_only", _SWITCH, "a vision encoder without its language model"),
    _feature("mm_encoder_attn_dtype", _ONE, _VISION_FP8),
    _feature("mm_encoder_fp8_scale_path", _ONE, _VISION_FP8),
    _feature("mm_encoder_fp8_scale_save_path", _ONE, _VISION_FP8),
    _feature("mm_encoder_fp8_scale_save_margin", _ONE, _VISION_FP8, 1.5),
    _feature("video_pruning_rate", _ONE, _VIDEO),
    _feature("video_pruning_method", _ONE, _VIDEO, "evs"),
    _tuning("disable_mm_preprocessor_cache", _SWITCH, _IMAGE_CACHE),
    _tuning("mm_processor_cache_gb", _ONE, _IMAGE_CACHE),
    _tuning("mm_processor_cache_type", _ONE, _IMAGE_CACHE),
    _tuning("mm_shm_cache_max_object_size_mb", _ONE, _IMAGE_CACHE),
    _tuning("mm_hasher_algorithm", _ONE, "images are named by SHA-256."),
    _tuning("mm_encoder_tp_mode", _ONE, _ONE_DEVICE),
    _tuning("enable_multimodal_encoder_data_parallel", _SWITCH, _ONE_DEVICE),
    _tuning("mm_encoder_attn_backend", _ONE, _KERNELS),
    _tuning("skip_mm_profiling", _SWITCH, "the profile run is one of text alone."),
    _tuning("mm_tensor_ipc", _ONE, "images travel over the engine's socket."),
    _tuning("mm_ipc_gpu_memory_gb", _ONE, "images travel over the engine's socket."),
    _feature("mm_processor_device", _ONE, "preparing images on the GPU", "auto", "cpu"),
    _feature("mm_device_do_normalize", _SWITCH, "preparing images on the GPU"),
)

_ADAPTERS = (
    _feature("enable_lora_bias", _SWITCH, _LORA),
    _feature("enable_tower_connector_lora", _SWITCH, _LORA),
    _feature("lora_target_modules", _MANY, _LORA),
    _feature("default_mm_loras", _ONE, _LORA),
    _feature("specialize_active_lora", _SWITCH, _LORA),
    _feature("enable_mixed_moe_lora_format", _SWITCH, _LORA),
    _feature("enable_moe_shared_loras", _SWITCH, _LORA),
    _feature("max_lora_cls_labels", _ONE, _LORA),
)

_OUTPUT_FORMS = (
    _tuning("enable_reasoning", _SWITCH, "reasoning_parser alone decides."),
    _feature("reasoning_parser_plugin", _ONE, _REASONING),
    _feature("reasoning_config", _ONE, _REASONING),
)

_OBSERVATION = (
    _feature("show_hidden_metrics_for_version", _ONE, "metrics of an older vLLM",
             instead="legacy_metric_names"),
    _tuning("per_request_spec_decode_metrics", _ONE, _COUNTERS),
    _tuning("kv_cache_metrics", _SWITCH, _COUNTERS),
    _tuning("kv_cache_metrics_sample", _ONE, _COUNTERS),
    _feature("custom_histogram_buckets", _ONE, "other bounds of histograms"),
    _tuning("cudagraph_metrics", _SWITCH, _COUNTERS),
    _tuning("enable_mfu_metrics", _SWITCH, _COUNTERS),
    _tuning("enable_mm_processor_stats", _SWITCH, _COUNTERS),
    _feature("enable_layerwise_nvtx_tracing", _SWITCH, _TRACING),
    _feature("profiler_config", _ONE, _TRACING),
    _tuning("enable_logging_iteration_details", _SWITCH, _LOG),
    _tuning("jit_monitor_mode", _ONE, _LOG),
    _tuning("jit_monitor_verbose", _SWITCH, _LOG),
    _tuning("logging_config", _ONE, _LOG),
    _tuning("log_level", _ONE, _LOG),
    _feature("log_config_file", _ONE, "a logging configuration file", instead="log_format"),
    _tuning("aggregate_engine_logging", _SWITCH, _ONE_DEVICE),
    _tuning("fail_on_environ_validation", _SWITCH, "unknown HETERO_LLM_ variables are errors."),
    _feature("watchdog_config", _ONE, "another watchdog", instead="step_timeout"),
)  # fmt: skip

_SERVER = (
    _serve("headless", _SWITCH, "replicas without a port of their own"),
    _serve("api_server_count", _ONE, "several API processes", 1, short=("-asc",)),
    _serve("grpc", _SWITCH, _RPC),
    _serve("grpc_port", _ONE, _RPC),
    _serve("data_parallel_supervisor_port", _ONE, _EXTERNAL, 9256, instead=_ROUTE),
    _serve("dp_supervisor_probe_interval_s", _ONE, _EXTERNAL, 5.0),
    _serve("dp_supervisor_probe_timeout_s", _ONE, _EXTERNAL, 5.0),
    _serve("dp_supervisor_probe_failure_threshold", _ONE, _EXTERNAL, 3),
    _serve("uds", _ONE, "a Unix socket", instead="host and port"),
    _serve("enable_ssl_refresh", _SWITCH, "reading new certificates without a restart"),
    _serve("disable_access_log_for_endpoints", _ONE, "an access log without some endpoints",
           instead="disable_uvicorn_access_log"),
    _serve("enable_request_id_headers", _SWITCH, "answers without X-Request-Id", True, False,
           reason="every answer carries X-Request-Id."),
    _serve("disable_fastapi_docs", _SWITCH, "a server without /openapi.json"),
    _serve("enable_offline_docs", _SWITCH, "documentation pages of the API"),
    _serve("h11_max_incomplete_event_size", _ONE, "another limit on headers", 4194304,
           reason="the headers of a request may have 64 KiB."),
    _serve("h11_max_header_count", _ONE, "another limit on headers", 256,
           reason="a request may have 128 headers."),
    _serve("enable_flash_late_interaction", _SWITCH, _LATE, True, False),
    _serve("chat_template_content_format", _ONE, "a choice of the template's content form",
           "auto"),
    _serve("trust_request_chat_template", _SWITCH, "a request's own chat template"),
    _serve("trust_request_mm_kwargs", _SWITCH, _MULTIMODAL),
    _serve("default_chat_template_kwargs", _ONE, "the server's own chat_template_kwargs"),
    _serve("reasoning_effort_map", _ONE, "other words for reasoning_effort"),
    _serve("exclude_tools_when_tool_choice_none", _SWITCH, "tool calling"),
    _serve("tool_parser_plugin", _ONE, "a parser of tool calls of your own",
           instead="tool_call_parser"),
    _serve("tool_strict_level", _ONE, "tool calling"),
    _serve("tool_server", _ONE, "tool calling"),
    _serve("enable_prompt_tokens_details", _SWITCH, "usage without prompt_tokens_details", True,
           False, reason="usage always has prompt_tokens_details."),
    _serve("enable_per_request_metrics", _SWITCH, "metrics in each answer"),
    _serve("enable_server_load_tracking", _SWITCH, "a server without /load", True, False,
           reason="/load always answers."),
    _serve("enable_tokenizer_info_endpoint", _SWITCH, "/tokenizer_info"),
    _serve("enable_log_outputs", _SWITCH, "answers in the log"),
    _serve("enable_log_deltas", _SWITCH, "answers in the log", True, False,
           reason="answers are never logged."),
    _serve("enable_log_requests", _SWITCH, "the log of requests by another name", True, False,
           reason="it is disable_log_requests turned round."),
    _serve("cohere_is_reasoning_model", _SWITCH, _REASONING, True, False,
           reason="only models of Cohere's API read it."),
    _serve("cohere_format", _ONE, "Cohere's form of prompts", "cmd4"),
    _serve("anthropic_disabled_thinking_effort", _ONE, "an effort for disabled thinking", "auto"),
    _serve("log_error_stack", _SWITCH, "a switch for tracebacks", True, False,
           reason="unexpected errors are logged with their traceback."),
    _serve("tokens_only", _SWITCH, "an API of token ids alone", instead="skip_tokenizer_init"),
    _serve("enable_scale_out", _SWITCH, "more replicas in a running server"),
    _serve("fingerprint_mode", _ONE, "system_fingerprint", "none"),
    _serve("fingerprint_value", _ONE, "system_fingerprint"),
)  # fmt: skip

FOREIGN_ARGS: tuple[ForeignArg, ...] = (
    *_MODEL,
    *_LOADING,
    *_EXECUTION,
    *_CACHE,
    *_SCHEDULING,
    *_PARALLEL,
    *_SPECULATION,
    *_IMAGES,
    *_ADAPTERS,
    *_OUTPUT_FORMS,
    *_OBSERVATION,
    *_SERVER,
)
