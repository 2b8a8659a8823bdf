"""Arguments of the larger features: offload, parallelism, speculation, adapters."""

from __future__ import annotations

from hetero_llm.config.args_spec import Kind, argument, grouped, not_yet, obsolete
from hetero_llm.config.parallel_config import MAX_RANKS
from hetero_llm.core.reasoning_formats import OFF, REASONING_PARSER_NAMES
from hetero_llm.core.structured_outputs import BACKENDS

_BOOL, _INT, _FLOAT, _STR, _JSON = Kind.BOOL, Kind.INT, Kind.FLOAT, Kind.STR, Kind.JSON
_LARGEST = 2**31 - 1

_MOST_LORAS, _MOST_RANK = 1024, 512
_ONE_DEVICE = "the engine runs on one host, without remote workers."

CONSTRAINTS = grouped(
    "Structured output and reasoning",
    argument(
        "structured_outputs_config",
        _JSON,
        'What the next arguments say, as {"disable_any_whitespace": true}; the keys are "backend", '
        '"disable_fallback", "disable_any_whitespace", "disable_additional_properties", '
        '"reasoning_parser" and "enable_in_reasoning": constraints hold for reasoning, too.',
    ),
    argument(
        "guided_decoding_backend",
        _STR,
        "Library that constrains the output to a schema or an expression. llguidance does so "
        "whichever of vLLM's names is given.",
        choices=BACKENDS,
    ),
    obsolete(
        "guided_decoding_disable_fallback",
        False,
        "No other library stands in for one that does not know a schema.",
        reason="llguidance alone does the work: what it does not know is an error.",
    ),
    argument(
        "guided_decoding_disable_any_whitespace",
        False,
        "JSON has no whitespace between its parts, unless a request has a pattern for it.",
    ),
    argument(
        "guided_decoding_disable_additional_properties",
        False,
        "Objects of schemas that name properties and say nothing about additional ones have none.",
    ),
    argument(
        "reasoning_parser",
        _STR,
        "How the model marks its reasoning: constraints of outputs begin behind it (none: they "
        "begin at once). A server reads it out of messages, too; there the default is what the "
        "chat template shows, and none: it is not parsed.",
        choices=(OFF, *REASONING_PARSER_NAMES),
        harmless=("",),
    ),
)

POOLING = grouped(
    "Embeddings and scores",
    argument(
        "runner",
        "auto",
        "What the model is for: 'generate' text, or 'pooling' for embeddings, scores and classes. "
        "'auto': as its files say.",
        choices=("auto", "generate", "pooling"),
        later_choices=("draft",),
    ),
    argument(
        "task",
        "auto",
        "Older name of runner and convert in one: 'embed', 'classify' and 'score' pool.",
        choices=("auto", "generate", "embed", "embedding", "classify", "score"),
        later_choices=("reward", "transcription"),
    ),
    argument(
        "convert",
        "auto",
        "What a pooling model returns: 'embed' or 'classify'. 'auto': as its class says.",
        choices=("auto", "none", "embed", "classify"),
        later_choices=("reward",),
    ),
    argument(
        "pooler_config",
        _JSON,
        'How hidden states become one vector, as {"pooling_type": "MEAN", "normalize": true}; '
        "'CLS', 'MEAN' or 'LAST'. Default: what the model's files say.",
        aliases=("override_pooler_config",),
    ),
)

OFFLOAD = grouped(
    "Prefix cache offload",
    argument(
        "enable_prefix_cache_offload",
        False,
        "Keep evicted blocks of the prefix cache in pinned host memory and load them back, layer "
        "by layer, when a prompt wants them. Needs a GPU to have an effect.",
    ),
    argument(
        "cpu_prefill_memory_utilization",
        0.3,
        "Share of the host's total memory for offloaded blocks, of all ranks together, in (0, 1]; "
        "what is not available is not taken, and the log says so.",
        above=0,
        maximum=1,
    ),
    argument(
        "apc_offload_not_lazy",
        False,
        "Submit all layers of a load at once instead of a few at a time; for debugging.",
    ),
    argument(
        "apc_offload_min_access_threshold",
        1,
        "Requests that must have used a block before it is worth offloading; 1 offloads all.",
        minimum=1,
    ),
    argument(
        "apc_offload_enable_hit_cnt",
        False,
        "Log how many blocks were found on the GPU, on the CPU or nowhere, every 100 blocks.",
    ),
    argument(
        "apc_offload_gpu_evictor_limit",
        -1,
        "Most unused blocks that stay cached on the GPU; -1 for no limit. For debugging.",
        minimum=-1,
        maximum=_LARGEST,
    ),
    argument(
        "apc_offload_lookahead",
        2,
        "Groups of layers of one load that are submitted ahead of the copies. Not in TACO-LLM.",
        minimum=1,
        maximum=_LARGEST,
    ),
    argument(
        "apc_offload_max_inflight_mb",
        32,
        "Most MiB of loads that are submitted and not yet copied: so long may another copy to the "
        "GPU have to wait. Not in TACO-LLM.",
        minimum=1,
        maximum=1 << 20,
    ),
    argument(
        "apc_offload_write_policy",
        "victim",
        "When a block is copied to host memory: 'victim' when it is about to leave the GPU, "
        "'write_through' as soon as it is full. Not in TACO-LLM.",
        choices=("victim", "write_through"),
    ),
    argument(
        "apc_offload_host_policy",
        "slru",
        "Which block leaves host memory when it is full: 'lru' the one unused for longest, 'slru' "
        "the same, but those used once before those used again, 'cost' the one that is cheapest "
        "to compute for how often it is used. Never one before those that follow it. Not in "
        "TACO-LLM.",
        choices=("lru", "slru", "cost"),
    ),
    argument(
        "apc_offload_load_min_tokens",
        _INT,
        "Shorter hits in host memory are computed again; by default a hit is loaded where that is "
        "faster. Not in TACO-LLM.",
        minimum=0,
        maximum=_LARGEST,
    ),
    argument(
        "apc_offload_background_pin",
        True,
        "Serve while the host memory is still being pinned: the pool grows in the background. Not "
        "in TACO-LLM.",
    ),
)

HOST_EXPERTS = grouped(
    "Experts in host memory",
    argument(
        "moe_expert_memory",
        "auto",
        "GiB of the GPU's memory (of each GPU's, with tensor_parallel_size) for the experts of a "
        "mixture; the others stay in host memory and run on the CPU. 'auto': all of them if they "
        "fit beside the KV cache, else as many as do. Not in TACO-LLM.",
        above=0,
        kind=Kind.AUTO_FLOAT,
    ),
    argument(
        "moe_cpu_experts",
        "auto",
        "Which experts of a mixture the CPU computes beside a GPU: 'auto' those that do not fit, "
        "'off' none, so a mixture that does not fit is refused, 'all' every one. Not in TACO-LLM.",
        choices=("auto", "off", "all"),
    ),
    argument(
        "moe_expert_profile",
        Kind.PATH,
        "File of how often each expert was used: read at start, so that the GPU begins with the "
        "experts in demand, and written at the end. Not in TACO-LLM.",
    ),
    argument(
        "moe_link_lane",
        False,
        "Let the GPU compute a part of the experts that steps of up to 16 tokens miss, reading it "
        "from host memory beside the CPU's threads, where measurements at start find that faster. "
        "Off by default: steps that miss fewer experts than those measured may get slower by 3%. "
        "Not in TACO-LLM.",
    ),
)

PARALLEL = grouped(
    "Parallelism",
    argument(
        "tensor_parallel_size",
        1,
        "GPUs of this host that share each layer, one process each; on a CPU processes. "
        "docs/design/parallel.md.",
        minimum=1,
        maximum=MAX_RANKS,
        short=("-tp",),
    ),
    argument(
        "pipeline_parallel_size",
        1,
        "Stages that the layers are cut into, one GPU of this host each, or tensor_parallel_size "
        "GPUs; on a CPU processes. docs/design/parallel.md.",
        minimum=1,
        maximum=MAX_RANKS,
        short=("-pp",),
    ),
    argument(
        "sequence_parallel_size",
        1,
        "GPUs of this host with the whole model that share the tokens of long prompts, one process "
        "each; with tensor_parallel_size as many groups of GPUs. docs/parallel.md.",
        minimum=1,
        maximum=MAX_RANKS,
    ),
    argument(
        "data_parallel_size",
        1,
        "Engines of this model behind one port, each on devices and cores of its own: a request "
        "goes to the one that knows most of its prompt and has least to do. Only in servers: LLM "
        "takes 1.",
        short=("-dp",),
        minimum=1,
        maximum=1024,
    ),
    argument(
        "data_parallel_size_local",
        _INT,
        "How many of data_parallel_size are on this machine: all of them. Servers on several "
        "machines go behind `hetero-llm route`.",
        short=("-dpl",),
        minimum=1,
    ),
    argument(
        "kv_events_config",
        _JSON,
        "Publish which KV blocks come and go, in vLLM's form over ZeroMQ, for routers that follow "
        'the caches: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", '
        '"replay_endpoint": ..., "topic": ...}. See docs/routing.md.',
    ),
    argument(
        "distributed_executor_backend",
        _STR,
        "What starts the processes of tensor parallelism: 'mp', the engine itself, which is the "
        "default; 'uni': there is one process. 'ray' is refused: one host needs no Ray.",
        choices=("mp", "uni", "ray"),
    ),
    obsolete("worker_use_ray", False, "Older form of 'ray'.", reason=_ONE_DEVICE),
    obsolete(
        "ray_workers_use_nsight",
        False,
        "Profile Ray workers with Nsight.",
        reason=_ONE_DEVICE,
        aliases=("ray_workers_use_nslight",),
    ),
    obsolete(
        "max_parallel_loading_workers",
        _INT,
        "Workers that may load weights at the same time.",
        reason=_ONE_DEVICE,
    ),
    argument(
        "disable_custom_all_reduce",
        False,
        "GPUs that share layers exchange through NCCL, and not through memory that they map of "
        "each other. Steps then run without CUDA graphs.",
    ),
)

SPECULATIVE = grouped(
    "Speculative decoding",
    argument(
        "speculative_model",
        Kind.PATH,
        "Draft model, a folder or a hub id, which needs num_speculative_tokens; or '[ngram]': "
        "drafts are looked up in the sequence's own tokens (prompt lookup), which needs "
        "num_speculative_tokens and ngram_prompt_lookup_max.",
        aliases=("spec_model",),
    ),
    argument(
        "num_speculative_tokens",
        _INT,
        "Longest draft in tokens; with the lookahead cache and no draft model another name of its "
        "copy_length.",
        minimum=1,
        maximum=63,
        aliases=("spec_tokens",),
    ),
    argument(
        "cpu_draft_worker",
        False,
        "Run the draft model on the CPU, in a process of its own, while the target verifies; "
        "without it the draft model runs on the target's device, in turn with the target.",
    ),
    argument(
        "speculative_overlap",
        "auto",
        "What the draft worker does while its last drafts are verified: 'enumerate' drafts for the "
        "likeliest outcomes, and what is not there in time is not waited for; 'off' drafts for "
        "what is committed only, and the engine waits; 'auto' does both as far as it pays. Not in "
        "TACO-LLM.",
        choices=("auto", "off", "enumerate"),
    ),
    argument(
        "draft_timeout_ms",
        _FLOAT,
        "Longest that a step waits for the draft worker; by default twice what it took lately, at "
        "most 2 ms. Not in TACO-LLM.",
        above=0,
        maximum=10_000,
    ),
    argument(
        "draft_threads",
        _INT,
        "Threads of the draft worker, a core each; by default all that nothing else needs. Not in "
        "TACO-LLM.",
        minimum=1,
    ),
    argument(
        "draft_weight_dtype",
        "auto",
        "How the draft worker holds weights: 'int8', 'int4' (both as cpu_weight_dtype says), "
        "'bfloat16' or 'float32'; 'auto' is int8 where the native executor runs the model, else "
        "bfloat16. Not in TACO-LLM.",
        choices=("auto", "int8", "int4", "bfloat16", "float32"),
    ),
    argument(
        "draft_optional",
        False,
        "Serve without drafts if the draft model cannot be loaded. Not in TACO-LLM.",
    ),
    argument(
        "speculative_config",
        _JSON,
        "vLLM's mapping instead of single flags: method 'ngram' with num_speculative_tokens, "
        "prompt_lookup_max and prompt_lookup_min (5 and 5; one alone stands for both), method "
        "'lookahead' with config_dir and the keys of lookahead_cache_config.json, or method "
        "'draft_model' with model and num_speculative_tokens. Not in TACO-LLM.",
        short=("-sc",),
    ),
    not_yet(
        "speculative_model_quantization",
        _STR,
        "How the draft model's weights are quantized.",
        feature="quantization of draft models",
    ),
    not_yet(
        "speculative_draft_tensor_parallel_size",
        _INT,
        "GPUs that share the draft model.",
        feature="tensor parallelism of draft models",
        harmless=(1,),
        short=("-spec-draft-tp",),
    ),
    argument(
        "speculative_max_model_len",
        _INT,
        "Longest context of the draft model; longer sequences are not drafted for.",
        minimum=1,
    ),
    argument(
        "speculative_disable_by_batch_size",
        _INT,
        "No drafts in steps of more than this many sequences.",
        minimum=1,
    ),
    argument(
        "ngram_prompt_lookup_max",
        _INT,
        "Longest match for drafts looked up in the sequence's own tokens.",
        minimum=1,
        maximum=_LARGEST,
    ),
    argument(
        "ngram_prompt_lookup_min",
        _INT,
        "Shortest match for drafts looked up in the sequence's own tokens; 1 unless given.",
        minimum=1,
        maximum=_LARGEST,
    ),
    argument(
        "spec_decoding_acceptance_method",
        "rejection_sampler",
        "How drafts are accepted. The default is lossless: drafts change how fast tokens come, "
        "not which (but for near ties in bfloat16). 'typical_acceptance_sampler' is lossy: where "
        "temperature is above 0 it also accepts draft tokens that are likely enough without being "
        "drawn, so outputs depend on who drafts; greedy requests stay exact.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
    ),
    argument(
        "typical_acceptance_sampler_posterior_threshold",
        0.09,
        "With the typical_acceptance_sampler: a draft token of higher probability is accepted.",
        above=0,
        maximum=1,
    ),
    argument(
        "typical_acceptance_sampler_posterior_alpha",
        0.3,
        "With the typical_acceptance_sampler: so is one of more than this times exp(-entropy of "
        "the distribution).",
        above=0,
    ),
    not_yet(
        "disable_logprobs_during_spec_decoding",
        _BOOL,
        "Return no log probabilities while speculating.",
        feature="speculation without log probabilities",
        harmless=(False,),
        optional_value=True,
    ),
)

LOOKAHEAD_CACHE = grouped(
    "Lookahead cache",
    argument(
        "lookahead_cache_config_dir",
        Kind.PATH,
        "Switch the lookahead cache on, configured by lookahead_cache_config.json in this folder "
        "or, without such a file, by its defaults.",
    ),
    argument(
        "use_lookahead",
        False,
        "Switch the lookahead cache on (Angel-vLLM's flag), with its defaults unless "
        "lookahead_cache_config_dir is given too.",
    ),
    argument(
        "cpu_decoding_memory_utilization",
        0.15,
        "Share of the host's memory for the lookahead cache, in (0, 1].",
        above=0,
        maximum=1,
    ),
    argument(
        "ignore_prompt_for_lookahead_cache",
        False,
        "The lookahead cache learns from outputs only.",
    ),
)

ADAPTERS = grouped(
    "Adapters",
    argument("enable_lora", False, "Accept LoRA adapters (PEFT)."),
    argument("max_loras", 1, "Most adapters in one batch.", minimum=1, maximum=_MOST_LORAS),
    argument("max_lora_rank", 16, "Highest rank of an adapter.", minimum=1, maximum=_MOST_RANK),
    argument(
        "lora_experts",
        False,
        "Accept adapters of a mixture's experts: on a GPU each slot has room for them.",
    ),
    not_yet(
        "lora_extra_vocab_size",
        256,
        "Most tokens that an adapter may add to the vocabulary.",
        feature="an adapter that adds tokens to the vocabulary",
    ),
    argument(
        "lora_dtype",
        "auto",
        "Type of the adapters' weights; 'auto' is the model's (float32 where torch serves on a "
        "CPU).",
        choices=("auto", "float16", "bfloat16", "float32"),
    ),
    not_yet(
        "long_lora_scaling_factors",
        _STR,
        "Scaling factors of Long LoRA adapters.",
        feature="an adapter with a longer context than its base",
    ),
    argument(
        "max_cpu_loras",
        _INT,
        "Most adapters in host memory; others are read again when they are needed (default: "
        "max_loras).",
        minimum=1,
        maximum=_LARGEST,
    ),
    argument(
        "lora_merge",
        Kind.PATH,
        "Folder of one adapter that is added to the weights when they are loaded.",
    ),
    obsolete(
        "fully_sharded_loras",
        False,
        "Shard all of the LoRA computation.",
        reason=_ONE_DEVICE,
    ),
    argument(
        "enable_prompt_adapter",
        False,
        "Accept prompt adapters (PEFT's prompt tuning); torch then serves the model.",
    ),
    argument(
        "max_prompt_adapters",
        1,
        "Most prompt adapters in memory; others are read again when they are needed.",
        minimum=1,
        maximum=_LARGEST,
    ),
    argument(
        "max_prompt_adapter_token",
        0,
        "Most virtual tokens of a prompt adapter; must be given with enable_prompt_adapter.",
        minimum=0,
        maximum=_LARGEST,
    ),
    not_yet(
        "qlora_adapter_name_or_path",
        Kind.PATH,
        "Name or folder of the QLoRA adapter.",
        feature="QLoRA",
    ),
)
