"""Every argument that only the HTTP server takes."""

from __future__ import annotations

from functools import partial

from hetero_llm.config.args_spec import ArgSpec, Kind, Scope, argument, grouped, not_yet, obsolete

_serve = partial(argument, scope=Scope.SERVE)
_later = partial(not_yet, scope=Scope.SERVE)
_vain = partial(obsolete, scope=Scope.SERVE)

TOOL_PARSERS = (
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "internlm",
    "kimi_k2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mimo",
    "minimax",
    "minimax_m1",
    "minimax_m2",
    "mistral",
    "olmo3",
    "openai",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)
"""Names of formats of tool calls; `server/regions/formats.py` describes them."""
_BOOL, _INT, _FLOAT, _STR = Kind.BOOL, Kind.INT, Kind.FLOAT, Kind.STR

_MANUAL: tuple[ArgSpec, ...] = (
    _serve("config", Kind.PATH, "YAML file with options; variables and flags override it."),
    _serve("host", "127.0.0.1", "Address to listen on."),
    _serve("port", 8000, "Port to listen on; 0 for any.", minimum=0, maximum=65535),
    _serve(
        "uvicorn_log_level",
        "info",
        "Log level of uvicorn.",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
    ),
    _serve("allow_credentials", False, "CORS: allow credentials; needs allowed_origins."),
    _serve("allowed_origins", (), "CORS: origins allowed; none unless given."),
    _serve("allowed_methods", ("*",), "CORS: methods allowed; needs allowed_origins."),
    _serve("allowed_headers", ("*",), "CORS: headers allowed; needs allowed_origins."),
    _serve(
        "api_key",
        (),
        "Key that requests must carry in their Authorization header; repeatable.",
        aliases=("api_keys",),
    ),
    _serve(
        "served_model_name",
        (),
        "Names that requests may use for the model; the first one is in the responses.",
        many_words=True,
    ),
    _serve("chat_template", _STR, "Chat template: a file, or the template in one line."),
    _serve(
        "response_role",
        "assistant",
        "Role of a response when request.add_generation_prompt is true.",
    ),
    _serve(
        "return_tokens_as_token_ids",
        False,
        "Show single tokens as 'token_id:{id}' in log probabilities.",
    ),
    _serve(
        "enable_auto_tool_choice",
        False,
        "Refuse to start unless the model's tool calls can be parsed. A model whose chat template "
        "shows a known format may choose among tools without this, too.",
    ),
    _serve(
        "tool_call_parser",
        _STR,
        "How the model writes its tool calls (default: as its chat template shows; none: they "
        "are not parsed).",
        choices=("none", *TOOL_PARSERS),
    ),
    _serve(
        "lora_modules",
        (),
        "LoRA adapters that clients may name as the model: name=path, or JSON with the keys "
        '"name", "path" and "base_model_name"; needs enable_lora.',
        many_words=True,
    ),
    _serve(
        "lora_root",
        Kind.PATH,
        "Folder inside which clients may load further adapters (/v1/load_lora_adapter and "
        "/v1/unload_lora_adapter, which do not exist without it); needs enable_lora.",
    ),
    _serve(
        "prompt_adapters",
        (),
        "Prompt adapters that clients may name as the model, as name=path; needs "
        "enable_prompt_adapter.",
        many_words=True,
    ),
    _serve("ssl_keyfile", Kind.PATH, "TLS key file."),
    _serve("ssl_certfile", Kind.PATH, "TLS certificate file."),
    _serve("ssl_ca_certs", Kind.PATH, "TLS file of CA certificates."),
    _serve(
        "ssl_cert_reqs",
        0,
        "Whether clients need a certificate: 0 no, 1 optional, 2 yes (see module ssl).",
        minimum=0,
        maximum=2,
    ),
    _serve("ssl_ciphers", _STR, "TLS ciphers, as OpenSSL names them."),
    _serve("root_path", _STR, "Path prefix when behind a proxy."),
    _serve("middleware", (), "Import path of ASGI middleware; repeatable."),
    _vain(
        "disable_frontend_multiprocessing",
        False,
        "Run the API in the engine's process.",
        reason="the engine has a process of its own; no answer depends on it.",
    ),
    _serve("disable_log_requests", False, "Log no requests."),
    _serve(
        "max_log_len",
        _INT,
        "Most characters or token ids of a prompt in the log; 0 for none (default: all).",
        minimum=0,
    ),
    _serve(
        "otlp_traces_endpoint",
        _STR,
        "Address that OpenTelemetry spans of requests are sent to, such as http://localhost:4317.",
    ),
    _later(
        "collect_detailed_traces",
        _STR,
        "Parts to trace in detail: model, worker, all.",
        feature="tracing inside a step",
    ),
)
_OURS: tuple[ArgSpec, ...] = (
    _serve(
        "log_format",
        "text",
        "Form of the log: lines of text, or one JSON object on each line.",
        choices=("text", "json"),
    ),
    _serve(
        "log_stats_interval",
        10.0,
        "Seconds between the lines about throughput, which --disable-log-stats turns off.",
        above=0,
    ),
    _serve(
        "disable_uvicorn_access_log",
        False,
        "Log no HTTP requests. Successful ones of monitors are logged with "
        "--uvicorn-log-level debug only.",
    ),
    _serve(
        "legacy_metric_names",
        True,
        "Export metrics also under vLLM's names since 0.4, such as gpu_cache_usage_perc.",
    ),
    _serve(
        "log_prompts",
        _BOOL,
        "Log the prompt of each request that is logged; default: yes, as in TACO-LLM.",
    ),
    _serve(
        "max_queued_requests",
        1024,
        "Requests that may wait for a place; more are answered 503.",
        minimum=0,
        aliases=("max_num_queued_reqs",),
    ),
    _serve(
        "request_timeout",
        _FLOAT,
        "Seconds after which a request ends with what it has.",
        above=0,
    ),
    _serve(
        "header_timeout",
        10.0,
        "Seconds that a client has to send a request's headers.",
        above=0,
    ),
    _serve("body_timeout", 30.0, "Seconds that a client has to send a request's body.", above=0),
    _serve(
        "write_timeout",
        60.0,
        "Seconds that a client may let one write of a stream wait; then its request is aborted.",
        above=0,
    ),
    _serve(
        "max_connections",
        2048,
        "Connections at once; requests over more of them are answered 503.",
        minimum=1,
    ),
    _serve(
        "step_timeout",
        _FLOAT,
        "Seconds without a sign of life after which the engine counts as hung (default: 30 on a "
        "GPU, 120 on a CPU).",
        above=0,
    ),
    _serve(
        "keep_alive_on_hang",
        False,
        "Go on answering 503 when the engine hangs, instead of ending with code 70.",
    ),
    _serve(
        "shutdown_timeout",
        30.0,
        "Seconds that running requests get after the first SIGTERM or SIGHUP.",
        minimum=0,
    ),
    _serve(
        "drain_delay",
        0.0,
        "Seconds between SIGTERM, when /ready turns to 503, and the refusal of new requests.",
        minimum=0,
    ),
    _serve(
        "max_requests_per_key",
        _INT,
        "Requests of one API key that may run at once; more are answered 429.",
        minimum=1,
    ),
    _serve(
        "max_requests_per_minute",
        _INT,
        "Requests that one API key may send in a minute; more are answered 429.",
        minimum=1,
    ),
    _serve(
        "stream_interval",
        1,
        "Tokens that a chunk of a stream waits for; the first and the last one come at once.",
        minimum=1,
    ),
    _serve(
        "stream_keep_alive",
        15.0,
        "Seconds after which a silent stream gets a comment; 0 for never.",
        minimum=0,
        aliases=("sse_keep_alive_interval",),
    ),
    _serve(
        "allowed_chat_template_kwargs",
        (),
        "Names that a request's chat_template_kwargs may set, besides the usual ones.",
    ),
    _serve(
        "server_dev_mode",
        False,
        "Serve POST /reset_prefix_cache, /reset_mm_cache, /reset_encoder_cache, as vLLM does with "
        "VLLM_SERVER_DEV_MODE=1, which is read here, too.",
    ),
    _serve("strict_fields", False, "Unknown fields of a request are errors."),
    _serve(
        "enable_force_include_usage",
        False,
        "Streams have token counts in each chunk and at the end without being asked.",
    ),
    _serve(
        "max_stored_responses",
        0,
        "Responses of /v1/responses that are kept in memory for previous_response_id; 0 for none.",
        minimum=0,
    ),
    _serve(
        "max_stored_response_bytes",
        256 << 20,
        "Bytes of the responses that are kept; those not used for longest are dropped.",
        minimum=1,
        suffixes=True,
    ),
    _serve(
        "prefix_cache_isolation",
        _STR,
        "Whose prompts find whose in the prefix cache (default: by key if there are several).",
        choices=("key", "none"),
    ),
)

SERVER_ARGS: tuple[ArgSpec, ...] = grouped("Server", *_MANUAL) + grouped("Serving", *_OURS)
