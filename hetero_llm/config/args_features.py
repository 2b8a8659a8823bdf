"""Arguments of the larger features: offload, parallelism, speculation, adapters."""

from __future__ import annotations

from hetero_llm.config.args_spec import Kind, effective, grouped, not_yet, obsolete
from hetero_llm.config.parallel_config import MAX_RANKS
from hetero_llm.core.reasoning_formats import OFF, REASONING_PARSER_NAMES
from hetero_llm.core.structured_outputs import BACKENDS

_BOOL, _INT, _FLOAT, _STR, _JSON = Kind.BOOL, Kind.INT, Kind.FLOAT, Kind.STR, Kind.JSON
_LARGEST = 2**31 - 1

_MOST_LORAS, _MOST_RANK = 1024, 512
_ONE_DEVICE = "the engine runs on one host, without remote workers."

CONSTRAINTS = grouped(
    "Structured output and reasoning",
    effective(
        "structured_outputs_config",
        _JSON,
        None,
        'What the next arguments say, as {"disable_any_whitespace": true}; the keys are "backend", '
        '"disable_fallback", "disable_any_whitespace", "disable_additional_properties", '
        '"reasoning_parser" and "enable_in_reasoning": constraints hold for reasoning, too.',
    ),
    effective(
        "guided_decoding_backend",
        _STR,
        None,
        "Library that constrains the output to a schema or an expression. llguidance does so "
        "whichever of vLLM's names is given.",
        choices=BACKENDS,
    ),
    obsolete(
        "guided_decoding_disable_fallback",
        _BOOL,
        False,
        "No other library stands in for one that does not know a schema.",
        reason="llguidance alone does the work: what it does not know is an error.",
    ),
    effective(
        "guided_decoding_disable_any_whitespace",
        _BOOL,
        False,
        "JSON has no whitespace between its parts, unless a request has a pattern for it.",
    ),
    effective(
        "guided_decoding_disable_additional_properties",
        _BOOL,
        False,
        "Objects of schemas that name properties and say nothing about additional ones have none.",
    ),
    effective(
        "reasoning_parser",
        _STR,
        None,
        "How the model marks its reasoning: constraints of outputs begin behind it (none: they "
        "begin at once). A server reads it out of messages, too; there the default is what the "
        "chat template shows, and none: it is not parsed.",
        choices=(OFF, *REASONING_PARSER_NAMES),
        harmless=("",),
    ),
)

POOLING = grouped(
    "Embeddings and scores",
    effective(
        "runner",
        _STR,
        "auto",
        "What the model is for: 'generate' text, or 'pooling' for embeddings, scores and classes. "
        "'auto': as its files say.",
        choices=("auto", "generate", "pooling"),
        later_choices=("draft",),
    ),
    effective(
        "task",
        _STR,
        "auto",
        "Older name of runner and convert in one: 'embed', 'classify' and 'score' pool.",
        choices=("auto", "generate", "embed", "embedding", "classify", "score"),
        later_choices=("reward", "transcription"),
    ),
    effective(
        "convert",
        _STR,
        "auto",
        "What a pooling model returns: 'embed' or 'classify'. 'auto': as its class says.",
        choices=("auto", "none", "embed", "classify"),
        later_choices=("reward",),
    ),
    effective(
        "pooler_config",
        _JSON,
        None,
        'How hidden states become one vector, as {"pooling_type": "MEAN", "normalize": true}; '
        "'CLS', 'MEAN' or 'LAST'. Default: what the model's files say.",
        aliases=("override_pooler_config",),
    ),
)

OFFLOAD = grouped(
    "Prefix cache offload",
    effective(
        "enable_prefix_cache_offload",
        _BOOL,
        False,
        "Keep evicted blocks of the prefix cache in pinned host memory and load them back, layer "
        "by layer, when a prompt wants them. Needs a GPU to have an effect.",
    ),
    effective(
        "cpu_prefill_memory_utilization",
        _FLOAT,
        0.3,
        "Share of the host's total memory for offloaded blocks, of all ranks together, in (0, 1]; "
        "what is not available is not taken, and the log says so.",
        above=0,
        maximum=1,
    ),
    effective(
        "apc_offload_not_lazy",
        _BOOL,
        False,
        "Submit all layers of a load at once instead of a few at a time; for debugging.",
    ),
    effective(
        "apc_offload_min_access_threshold",
        _INT,
        1,
        "Requests that must have used a block before it is worth offloading; 1 offloads all.",
        minimum=1,
    ),
    effective(
        "apc_offload_enable_hit_cnt",
        _BOOL,
        False,
        "Log how many blocks were found on the GPU, on the CPU or nowhere, every 100 blocks.",
    ),
    effective(
        "apc_offload_gpu_evictor_limit",
        _INT,
        -1,
        "Most unused blocks that stay cached on the GPU; -1 for no limit. For debugging.",
        minimum=-1,
        maximum=_LARGEST,
    ),
    effective(
        "apc_offload_lookahead",
        _INT,
        2,
        "Groups of layers of one load that are submitted ahead of the copies. Not in TACO-LLM.",
        minimum=1,
        maximum=_LARGEST,
    ),
    effective(
        "apc_offload_max_inflight_mb",
        _INT,
        32,
        "Most MiB of loads that are submitted and not yet copied: so long may another copy to the "
        "GPU have to wait. Not in TACO-LLM.",
        minimum=1,
        maximum=1 << 20,
    ),
    effective(
        "apc_offload_write_policy",
        _STR,
        "victim",
        "When a block is copied to host memory: 'victim' when it is about to leave the GPU, "
        "'write_through' as soon as it is full. Not in TACO-LLM.",
        choices=("victim", "write_through"),
    ),
    effective(
        "apc_offload_host_policy",
        _STR,
        "slru",
        "Which block leaves host memory when it is full: 'lru' the one unused for longest, 'slru' "
        "the same, but those used once before those used again, 'cost' the one that is cheapest "
        "to compute for how often it is used. Never one before those that follow it. Not in "
        "TACO-LLM.",
        choices=("lru", "slru", "cost"),
    ),
    effective(
        "apc_offload_load_min_tokens",
        _INT,
        None,
        "Shorter hits in host memory are computed again; by default a hit is loaded where that is "
        "faster. Not in TACO-LLM.",
        minimum=0,
        maximum=_LARGEST,
    ),
    effective(
        "apc_offload_background_pin",
        _BOOL,
        True,
        "Serve while the host memory is still being pinned: the pool grows in the background. Not "
        "in TACO-LLM.",
    ),
)

HOST_EXPERTS = grouped(
    "Experts in host memory",
    effective(
        "moe_expert_memory",
        Kind.AUTO_FLOAT,
        "auto",
        "GiB of the GPU's memory for the experts of a mixture; the others stay in host memory and "
        "run on the CPU. 'auto': all of them if they fit beside the KV cache, else as many as do. "
        "Not in TACO-LLM.",
        above=0,
    ),
    effective(
        "moe_cpu_experts",
        _STR,
        "auto",
        "Which experts of a mixture the CPU computes beside a GPU: 'auto' those that do not fit, "
        "'off' none, so a mixture that does not fit is refused, 'all' every one. Not in TACO-LLM.",
        choices=("auto", "off", "all"),
    ),
    effective(
        "moe_expert_profile",
        Kind.PATH,
        None,
        "File of how often each expert was used: read at start, so that the GPU begins with the "
        "experts in demand, and written at the end. Not in TACO-LLM.",
    ),
)

PARALLEL = grouped(
    "Parallelism",
    effective(
        "tensor_parallel_size",
        _INT,
        1,
        "GPUs of this host that share each layer, one process each; on a CPU processes. "
        "docs/design/parallel.md.",
        minimum=1,
        maximum=MAX_RANKS,
        short=("-tp",),
    ),
    effective(
        "pipeline_parallel_size",
        _INT,
        1,
        "Stages that the layers are cut into, one GPU of this host each, or tensor_parallel_size "
        "GPUs; on a CPU processes. docs/design/parallel.md.",
        minimum=1,
        maximum=MAX_RANKS,
        short=("-pp",),
    ),
    effective(
        "sequence_parallel_size",
        _INT,
        1,
        "GPUs of this host with the whole model that share the tokens of long prompts, one process "
        "each; with tensor_parallel_size as many groups of GPUs. docs/parallel.md.",
        minimum=1,
        maximum=MAX_RANKS,
    ),
    effective(
        "data_parallel_size",
        _INT,
        1,
        "Engines of this model behind one port, each on devices and cores of its own: a request "
        "goes to the one that knows most of its prompt and has least to do. Only in servers: LLM "
        "takes 1.",
        short=("-dp",),
        minimum=1,
        maximum=1024,
    ),
    effective(
        "data_parallel_size_local",
        _INT,
        None,
        "How many of data_parallel_size are on this machine: all of them. Servers on several "
        "machines go behind `hetero-llm route`.",
        short=("-dpl",),
        minimum=1,
    ),
    effective(
        "kv_events_config",
        _JSON,
        None,
        "Publish which KV blocks come and go, in vLLM's form over ZeroMQ, for routers that follow "
        'the caches: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", '
        '"replay_endpoint": ..., "topic": ...}. See docs/routing.md.',
    ),
    effective(
        "distributed_executor_backend",
        _STR,
        None,
        "What starts the processes of tensor parallelism: 'mp', the engine itself, which is the "
        "default; 'uni': there is one process. 'ray' is refused: one host needs no Ray.",
        choices=("mp", "uni", "ray"),
    ),
    obsolete("worker_use_ray", _BOOL, False, "Older form of 'ray'.", reason=_ONE_DEVICE),
    obsolete(
        "ray_workers_use_nsight",
        _BOOL,
        False,
        "Profile Ray workers with Nsight.",
        reason=_ONE_DEVICE,
        aliases=("ray_workers_use_nslight",),
    ),
    obsolete(
        "max_parallel_loading_workers",
        _INT,
        None,
        "Workers that may load weights at the same time.",
        reason=_ONE_DEVICE,
    ),
    effective(
        "disable_custom_all_reduce",
        _BOOL,
        False,
        "GPUs that share layers exchange through NCCL, and not through memory that they map of "
        "each other. Steps then run without CUDA graphs.",
    ),
)

SPECULATIVE = grouped(
    "Speculative decoding",
    effective(
        "speculative_model",
        Kind.PATH,
        None,
        "Draft model, a folder or a hub id, which needs num_speculative_tokens; or '[ngram]': "
        "drafts are looked up in the sequence's own tokens (prompt lookup), which needs "
        "num_speculative_tokens and ngram_prompt_lookup_max.",
        aliases=("spec_model",),
    ),
    effective(
        "num_speculative_tokens",
        _INT,
        None,
        "Longest draft in tokens; with the lookahead cache and no draft model another name of its "
        "copy_length.",
        minimum=1,
        maximum=63,
        aliases=("spec_tokens",),
    ),
    effective(
        "cpu_draft_worker",
        _BOOL,
        False,
        "Run the draft model on the CPU, in a process of its own, while the target verifies; "
        "without it the draft model runs on the target's device, in turn with the target.",
    ),
    effective(
        "speculative_overlap",
        _STR,
        "auto",
        "What the draft worker does while its last drafts are verified: 'enumerate' drafts for the "
        "likeliest outcomes, and what is not there in time is not waited for; 'off' drafts for "
        "what is committed only, and the engine waits; 'auto' does both as far as it pays. Not in "
        "TACO-LLM.",
        choices=("auto", "off", "enumerate"),
    ),
    effective(
        "draft_timeout_ms",
        _FLOAT,
        None,
        "Longest that a step waits for the draft worker; by default twice what it took lately, at "
        "most 2 ms. Not in TACO-LLM.",
        above=0,
        maximum=10_000,
    ),
    effective(
        "draft_threads",
        _INT,
        None,
        "Threads of the draft worker, a core each; by default all that nothing else needs. Not in "
        "TACO-LLM.",
        minimum=1,
    ),
    effective(
        "draft_weight_dtype",
        _STR,
        "auto",
        "How the draft worker holds weights: 'int8', 'int4' (both as cpu_weight_dtype says), "
        "'bfloat16' or 'float32'; 'auto' is int8 where the native executor runs the model, else "
        "bfloat16. Not in TACO-LLM.",
        choices=("auto", "int8", "int4", "bfloat16", "float32"),
    ),
    effective(
        "draft_optional",
        _BOOL,
        False,
        "Serve without drafts if the draft model cannot be loaded. Not in TACO-LLM.",
    ),
    effective(
        "speculative_config",
        _JSON,
        None,
        "vLLM's mapping instead of single flags: method 'ngram' with num_speculative_tokens, "
        "prompt_lookup_max and prompt_lookup_min (5 and 5; one alone stands for both), method "
        "'lookahead' with config_dir and the keys of lookahead_cache_config.json, or method "
        "'draft_model' with model and num_speculative_tokens. Not in TACO-LLM.",
        short=("-sc",),
    ),
    not_yet(
        "speculative_model_quantization",
        _STR,
        None,
        "How the draft model's weights are quantized.",
        feature="quantization of draft models",
    ),
    not_yet(
        "speculative_draft_tensor_parallel_size",
        _INT,
        None,
        "GPUs that share the draft model.",
        feature="tensor parallelism of draft models",
        harmless=(1,),
        short=("-spec-draft-tp",),
    ),
    effective(
        "speculative_max_model_len",
        _INT,
        None,
        "Longest context of the draft model; longer sequences are not drafted for.",
        minimum=1,
    ),
    effective(
        "speculative_disable_by_batch_size",
        _INT,
        None,
        "No drafts in steps of more than this many sequences.",
        minimum=1,
    ),
    effective(
        "ngram_prompt_lookup_max",
        _INT,
        None,
        "Longest match for drafts looked up in the sequence's own tokens.",
        minimum=1,
        maximum=_LARGEST,
    ),
    effective(
        "ngram_prompt_lookup_min",
        _INT,
        None,
        "Shortest match for drafts looked up in the sequence's own tokens; 1 unless given.",
        minimum=1,
        maximum=_LARGEST,
    ),
    effective(
        "spec_decoding_acceptance_method",
        _STR,
        "rejection_sampler",
        "How drafts are accepted. The default is lossless: drafts change how fast tokens come, "
        "not which (but for near ties in bfloat16). 'typical_acceptance_sampler' is lossy: where "
        "temperature is above 0 it also accepts draft tokens that are likely enough without being "
        "drawn, so outputs depend on who drafts; greedy requests stay exact.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
    ),
    effective(
        "typical_acceptance_sampler_posterior_threshold",
        _FLOAT,
        0.09,
        "With the typical_acceptance_sampler: a draft token of higher probability is accepted.",
        above=0,
        maximum=1,
    ),
    effective(
        "typical_acceptance_sampler_posterior_alpha",
        _FLOAT,
        0.3,
        "With the typical_acceptance_sampler: so is one of more than this times exp(-entropy of "
        "the distribution).",
        above=0,
    ),
    not_yet(
        "disable_logprobs_during_spec_decoding",
        _BOOL,
        None,
        "Return no log probabilities while speculating.",
        feature="speculation without log probabilities",
        harmless=(False,),
        optional_value=True,
    ),
)

LOOKAHEAD_CACHE = grouped(
    "Lookahead cache",
    effective(
        "lookahead_cache_config_dir",
        Kind.PATH,
        None,
        "Switch the lookahead cache on, configured by lookahead_cache_config.json in this folder "
        "or, without such a file, by its defaults.",
    ),
    effective(
        "use_lookahead",
        _BOOL,
        False,
        "Switch the lookahead cache on (Angel-vLLM's flag), with its defaults unless "
        "lookahead_cache_config_dir is given too.",
    ),
    effective(
        "cpu_decoding_memory_utilization",
        _FLOAT,
        0.15,
        "Share of the host's memory for the lookahead cache, in (0, 1].",
        above=0,
        maximum=1,
    ),
    effective(
        "ignore_prompt_for_lookahead_cache",
        _BOOL,
        False,
        "The lookahead cache learns from outputs only.",
    ),
)

ADAPTERS = grouped(
    "Adapters",
    effective("enable_lora", _BOOL, False, "Accept LoRA adapters (PEFT)."),
    effective("max_loras", _INT, 1, "Most adapters in one batch.", minimum=1, maximum=_MOST_LORAS),
    effective(
        "max_lora_rank", _INT, 16, "Highest rank of an adapter.", minimum=1, maximum=_MOST_RANK
    ),
    not_yet(
        "lora_extra_vocab_size",
        _INT,
        256,
        "Most tokens that an adapter may add to the vocabulary.",
        feature="an adapter that adds tokens to the vocabulary",
    ),
    effective(
        "lora_dtype",
        _STR,
        "auto",
        "Type of the adapters' weights; 'auto' is the model's (float32 where torch serves on a "
        "CPU).",
        choices=("auto", "float16", "bfloat16", "float32"),
    ),
    not_yet(
        "long_lora_scaling_factors",
        _STR,
        None,
        "Scaling factors of Long LoRA adapters.",
        feature="an adapter with a longer context than its base",
    ),
    effective(
        "max_cpu_loras",
        _INT,
        None,
        "Most adapters in host memory; others are read again when they are needed (default: "
        "max_loras).",
        minimum=1,
        maximum=_LARGEST,
    ),
    effective(
        "lora_merge",
        Kind.PATH,
        None,
        "Folder of one adapter that is added to the weights when they are loaded.",
    ),
    obsolete(
        "fully_sharded_loras",
        _BOOL,
        False,
        "Shard all of the LoRA computation.",
        reason=_ONE_DEVICE,
    ),
    effective(
        "enable_prompt_adapter",
        _BOOL,
        False,
        "Accept prompt adapters (PEFT's prompt tuning); torch then serves the model.",
    ),
    effective(
        "max_prompt_adapters",
        _INT,
        1,
        "Most prompt adapters in memory; others are read again when they are needed.",
        minimum=1,
        maximum=_LARGEST,
    ),
    effective(
        "max_prompt_adapter_token",
        _INT,
        0,
        "Most virtual tokens of a prompt adapter; must be given with enable_prompt_adapter.",
        minimum=0,
        maximum=_LARGEST,
    ),
    not_yet(
        "qlora_adapter_name_or_path",
        Kind.PATH,
        None,
        "Name or folder of the QLoRA adapter.",
        feature="QLoRA",
    ),
)
