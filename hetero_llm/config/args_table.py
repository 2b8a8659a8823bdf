"""Every argument of the engine: those of TACO-LLM's manual and a few of our own.

This file has the arguments that concern every run; `args_features.py` has those of the larger
features.
"""

from __future__ import annotations

from hetero_llm.config.args_features import (
    ADAPTERS,
    CONSTRAINTS,
    HOST_EXPERTS,
    LOOKAHEAD_CACHE,
    OFFLOAD,
    PARALLEL,
    POOLING,
    SPECULATIVE,
)
from hetero_llm.config.args_spec import ArgSpec, Kind, argument, grouped, not_yet, obsolete

_BOOL, _INT, _FLOAT, _STR, _JSON = Kind.BOOL, Kind.INT, Kind.FLOAT, Kind.STR, Kind.JSON

_GRAPH_LENGTH = "no limit on the context length applies to graph capture."
_OWN_THREADS = "tokenization needs no pool of workers."

_MODEL = grouped(
    "Model",
    argument(
        "model",
        Kind.PATH,
        "Folder or Hugging Face name of the model; 'demo' is the embedded one.",
        required=True,
    ),
    argument("revision", _STR, "Branch, tag or commit of the model to fetch."),
    not_yet(
        "code_revision",
        _STR,
        "Branch, tag or commit of the model's remote code.",
        feature="pinning the revision of remote code",
    ),
    argument(
        "trust_remote_code",
        False,
        "Let code run that comes with the model or its tokenizer.",
    ),
    argument(
        "model_impl",
        "auto",
        "What computes the model: 'native' is our implementation, 'transformers' the class of that "
        "library with our attention; 'auto' is the first where there is one, and 'vllm' another "
        "name of 'native'. Not in TACO-LLM.",
        choices=("auto", "native", "vllm", "transformers"),
    ),
    argument("download_dir", Kind.PATH, "Where to download; default: Hugging Face cache."),
    argument(
        "load_format",
        "auto",
        "How weights are stored: 'auto' is safetensors, or a GGUF file if the model is one, 'pt' "
        "is pickled files (needs allow_pickle_weights), 'gguf' is the GGUF file in a folder; "
        "'dummy' makes random ones, for profiling. 'bitsandbytes' is 'auto' with "
        "quantization=bitsandbytes; other readers of vLLM stand for what they read: 'npcache' is "
        "'pt', 'hf' is 'auto', the others 'safetensors'.",
        choices=(
            *("auto", "safetensors", "pt", "gguf", "dummy", "bitsandbytes", "npcache", "hf"),
            *("fastsafetensors", "runai_streamer", "instanttensor"),
        ),
        later_choices=("tensorizer", "sharded_state", "runai_streamer_sharded", "mistral"),
    ),
    argument(
        "allow_pickle_weights",
        False,
        "Read pickled weights (*.bin, *.pt) where there are no safetensors files. Nothing but "
        "tensors is unpickled, but the format invites attacks. Not in TACO-LLM.",
    ),
    argument(
        "model_sha256",
        Kind.PATH,
        "Manifest of the model's files, as sha256sum writes it, or the SHA-256 of the file "
        "SHA256SUMS in the model's folder: nothing else is served. `hetero-llm manifest` writes "
        "one. Not in TACO-LLM.",
    ),
    argument(
        "config_format",
        "auto",
        "Format of the model's configuration file.",
        choices=("auto", "hf"),
        later_choices=("mistral",),
    ),
    not_yet(
        "model_loader_extra_config",
        _JSON,
        "Options for the loader of the chosen load format.",
        feature="a loader with options of its own",
        harmless=({},),
    ),
    obsolete(
        "ignore_patterns",
        ("original/**/*",),
        "Patterns of files not to download with the model; repeatable.",
        reason="only the files that serving needs are downloaded.",
        many_words=True,
    ),
    argument(
        "dtype",
        "auto",
        "Type of weights and activations. 'auto' is the checkpoint's, but bfloat16 for float32 "
        "and, on the CPU, for float16. 'half' is float16, 'float' is float32.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        kind=Kind.DTYPE,
    ),
    argument(
        "quantization",
        _STR,
        "How the weights are quantized; default: what the checkpoint says. Plain weights are "
        "quantized while they are loaded by 'fp8' (a scale for each row), 'fp8_block' (for each "
        "128 x 128), 'ifq' (int8), 'ifq_nf4' (bitsandbytes) or 'int4'.",
        short=("-q",),
    ),
    argument(
        "quantization_param_path",
        Kind.PATH,
        "JSON file with the scaling factors of an FP8 KV cache (kv_cache_dtype=fp8), instead of "
        "those that the checkpoint may have.",
    ),
    argument(
        "max_model_len",
        Kind.AUTO_INT,
        "Longest context (prompt and output); default: what the model was made for. 'auto' or -1: "
        "that, or as much of it as the KV cache holds.",
        minimum=1,
        suffixes=True,
    ),
    argument(
        "rope_scaling",
        _JSON,
        'RoPE scaling instead of the model\'s, such as {"rope_type": "linear", "factor": 2}.',
    ),
    argument("rope_theta", _FLOAT, "RoPE base; default: the model's.", above=0),
    argument(
        "hf_overrides",
        _JSON,
        "Keys of the model's config.json to add or to replace, such as "
        '{"max_position_embeddings": 4096}; mappings inside are merged.',
    ),
    argument(
        "generation_config",
        "auto",
        "Where requests get the sampling fields that they leave out: 'auto' is the model's "
        "generation_config.json or the metadata of its GGUF file, 'vllm' the defaults of "
        "SamplingParams, else a folder with such a file.",
        harmless=(None,),
        kind=Kind.PATH,
    ),
    argument(
        "override_generation_config",
        _JSON,
        'Sampling fields that replace those of generation_config, such as {"temperature": 0.5}; '
        "stop_token_ids may be among them.",
    ),
    argument(
        "disable_sliding_window",
        False,
        "Attend to everything, and cap the context length at the model's window.",
    ),
    argument(
        "limit_mm_per_prompt",
        Kind.COUNTS,
        "Images allowed in each prompt, as image=16; default: one.",
    ),
    argument(
        "allowed_media_domains",
        (),
        "Hosts, as host or host:port, whose https URLs conversations may name as images; by "
        "default only data URIs are read.",
        many_words=True,
        harmless=(None,),
    ),
)

_TOKENIZER = grouped(
    "Tokenizer",
    argument("tokenizer", Kind.PATH, "Folder or name of the tokenizer; default: the model."),
    argument(
        "tokenizer_mode",
        "auto",
        "'auto' takes the fast tokenizer if there is one, 'slow' never does.",
        choices=("auto", "slow"),
        later_choices=("mistral",),
        harmless=("hf",),
    ),
    argument("tokenizer_revision", _STR, "Branch, tag or commit of the tokenizer."),
    argument(
        "skip_tokenizer_init",
        False,
        "Load no tokenizer: prompts are token ids, and outputs have no text.",
    ),
    obsolete(
        "tokenizer_pool_size",
        0,
        "Size of the pool for asynchronous tokenization.",
        reason=_OWN_THREADS,
    ),
    obsolete(
        "tokenizer_pool_type",
        "ray",
        "Type of the tokenizer pool.",
        reason=_OWN_THREADS,
    ),
    obsolete(
        "tokenizer_pool_extra_config",
        _JSON,
        "Options of the tokenizer pool.",
        reason=_OWN_THREADS,
    ),
)

_MEMORY = grouped(
    "Device and memory",
    argument(
        "device",
        "auto",
        "Where the model runs; 'auto' is the GPU if there is one.",
        choices=("auto", "cpu", "cuda"),
    ),
    argument(
        "gpu_memory_utilization",
        0.9,
        "Share of the GPU's memory for weights, activations and KV cache, in (0, 1]. "
        "On the CPU: share of the free host memory that the KV cache may take.",
        above=0,
        maximum=1,
        aliases=("device_memory_utilization",),
    ),
    argument(
        "block_size",
        16,
        "Tokens in one KV cache block.",
        choices=(8, 16, 32, 64, 128),
        harmless=(None,),
    ),
    argument(
        "num_gpu_blocks_override",
        _INT,
        "Number of KV cache blocks on the device, instead of what fits in memory.",
        minimum=1,
    ),
    argument(
        "enable_prefix_caching",
        True,
        "Reuse the KV cache of prompts that start alike.",
        harmless=(None,),
    ),
    argument(
        "kv_cache_dtype",
        "auto",
        "Type of the KV cache: 'auto' is the model's, or fp8 on a GPU if the checkpoint has a KV "
        "cache scheme; 'fp8' (e4m3, with the scales of the checkpoint or of "
        "quantization_param_path, else 1) and 'fp8_e5m2' halve it and need a GPU; 'float16' and "
        "'bfloat16' must be the model's.",
        choices=("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        later_choices=(
            "fp8_inc",
            "fp8_ds_mla",
            "int8_per_token_head",
            "fp8_per_token_head",
            "nvfp4",
        ),
    ),
    obsolete(
        "swap_space",
        4,
        "Host memory (GiB) for swapped-out requests.",
        reason="a preempted request is computed again, with the help of the prefix cache.",
        kind=_FLOAT,
    ),
    argument(
        "conservative_dry_run",
        False,
        "Size the KV cache by what the driver reports at the fullest moment of the profile run, "
        "memory that kernels take for themselves included. For runs that end out of memory.",
    ),
    argument(
        "cpu_offload_gb",
        0,
        "GiB of weights to keep in pinned host memory, for each GPU of the model; each step copies "
        "them to the GPU. Needs one.",
        minimum=0,
        kind=_FLOAT,
    ),
    argument(
        "cpu_backend",
        "native",
        "What runs the model on a CPU: our compiled executor, torch, or torch with the matrix "
        "products of Intel's extension (IPEX; needs an installation that fits torch). Models that "
        "the executor cannot run, machines without a C++ compiler and batch_invariant are served "
        "by torch.",
        choices=("native", "torch", "ipex"),
    ),
    argument(
        "cpu_weight_dtype",
        "auto",
        "How the native CPU backend holds weights: 'auto' is the model's type, 'int8' rounds "
        "them to 8 bits with one scale for each output, 'int4' to 4 bits with a scale and a zero "
        "point for 32 of them and the head to 8 bits. Int4 and int8 weights of a quantized "
        "checkpoint stay as they are, and with 'int8' and 'int4' the blocks of a GGUF file.",
        choices=("auto", "int8", "int4"),
    ),
    argument(
        "cpu_threads",
        _INT,
        "Threads of a model on the CPU; default: one for each usable core.",
        minimum=1,
    ),
    obsolete(
        "use_v2_block_manager",
        False,
        "Use the second block manager.",
        reason="there is one block manager, and it does what this one did.",
    ),
)

_SCHEDULING = grouped(
    "Scheduling and execution",
    argument(
        "max_num_batched_tokens",
        _INT,
        "Most tokens in one step; default: chosen for the device.",
        minimum=1,
        maximum=1 << 24,
        suffixes=True,
    ),
    argument(
        "max_num_seqs",
        _INT,
        "Most sequences in one step; default: 256, or max_num_batched_tokens if that is smaller.",
        minimum=1,
        maximum=1 << 16,
    ),
    argument(
        "enable_chunked_prefill",
        _BOOL,
        "Spread long prompts over several steps; on unless switched off.",
        optional_value=True,
    ),
    argument(
        "max_logprobs",
        20,
        "Most log probabilities per token that a request may ask for; -1 is no limit.",
        minimum=-1,
    ),
    argument(
        "seed",
        0,
        "Seed of everything random; requests without a seed of their own derive it from this.",
        minimum=0,
        maximum=2**64 - 1,
        harmless=(None,),
    ),
    argument(
        "enforce_eager",
        _BOOL,
        "Never use CUDA graphs: ready sooner, slower steps. Default: use them on a GPU.",
    ),
    argument(
        "batch_invariant",
        False,
        "Compute each row in the same way whatever shares its batch: slower, but the output "
        "does not depend on other requests. Not in TACO-LLM.",
    ),
    argument("disable_log_stats", False, "Log no throughput statistics."),
    obsolete(
        "num_scheduler_steps",
        1,
        "Steps taken for one call of the scheduler.",
        reason="every step is scheduled on its own.",
    ),
    obsolete(
        "scheduler_delay_factor",
        0.0,
        "Delay before the next prompt is scheduled, in units of the last prompt's latency.",
        reason="prompts join running requests in one step, so that waiting saves nothing.",
    ),
    obsolete(
        "num_lookahead_slots",
        0,
        "KV slots reserved for each sequence beyond its tokens.",
        reason="the scheduler reserves the slots that each step needs.",
    ),
    obsolete(
        "preemption_mode",
        _STR,
        "What becomes of a preempted request: 'recompute' or 'swap'.",
        reason="a preempted request is always computed again ('recompute').",
    ),
    obsolete(
        "disable_async_output_proc",
        False,
        "Process outputs in step with the model.",
        reason="the order of output processing changes no result.",
    ),
    obsolete(
        "max_seq_len_to_capture",
        8192,
        "Longest context covered by CUDA graphs.",
        reason=_GRAPH_LENGTH,
    ),
    obsolete(
        "max_context_len_to_capture",
        _INT,
        "Older name of max_seq_len_to_capture.",
        reason=_GRAPH_LENGTH,
    ),
    obsolete(
        "override_neuron_config",
        _JSON,
        "Configuration of Neuron devices.",
        reason="Neuron devices are not supported.",
    ),
)

ENGINE_ARGS: tuple[ArgSpec, ...] = (
    *_MODEL,
    *_TOKENIZER,
    *_MEMORY,
    *_SCHEDULING,
    *CONSTRAINTS,
    *POOLING,
    *OFFLOAD,
    *HOST_EXPERTS,
    *PARALLEL,
    *SPECULATIVE,
    *LOOKAHEAD_CACHE,
    *ADAPTERS,
)
