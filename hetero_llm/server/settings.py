"""Settings and limits of the HTTP server; `serving.settings_of` makes them from the flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.inputs.image_uri import MOST_BYTES, MOST_PIXELS
from hetero_llm.server.adapters import LoraModule

TEMPLATE_KWARGS = ("enable_thinking", "thinking", "thinking_budget", "date_string")


# large: one field for each limit.
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one request may ask for. A request above a limit gets an error that names it.

    Limits are counts unless the name says bytes, chars or seconds. `sequences` limits the prompts
    times the sequences of each; `pooling_inputs` the texts or documents of a request to a model
    that pools; `tool_bytes` applies to each declared tool, `image_bytes` and `image_pixels` to each
    image. A client may read no byte of a stream for `write_seconds`; rendering a conversation may
    take `template_seconds`.
    """

    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    header_bytes: int = 64 << 10
    headers: int = 128
    json_depth: int = 64
    json_parts: int = 1 << 16
    concurrent_requests: int = 2048
    write_seconds: float = 60.0
    template_seconds: float = 5.0
    n: int = 64
    best_of: int = 64
    prompts: int = 256
    pooling_inputs: int = 2048
    sequences: int = 1024
    messages: int = 4096
    tool_calls: int = 128
    tools: int = 128
    tool_bytes: int = 64 << 10
    stop: int = 32
    stop_chars: int = 256
    stop_token_ids: int = 1024
    bad_words: int = 256
    bad_word_chars: int = 256
    logit_bias: int = 1024
    constraint_chars: int = 1 << 17
    image_bytes: int = MOST_BYTES
    image_pixels: int = MOST_PIXELS
    salt_chars: int = 128
    request_id_chars: int = 128
    temperature: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Which web pages of other origins may call the server; with no origins, none.

    Raises:
        ConfigError: there are no origins, but something is set for them.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def __post_init__(self) -> None:
        for name, value, usual in (
            ("allow_credentials", self.credentials, False),
            ("allowed_methods", self.methods, ("*",)),
            ("allowed_headers", self.headers, ("*",)),
        ):
            if not self.origins and value != usual:
                reason = "needs allowed_origins: without any no page of another origin may call"
                raise ConfigError(name, value, reason)


# large: one field for each setting.
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side.

    Raises:
        ConfigError: a limit of each key is set, but there are no keys.

    Args:
        api_keys: requests must carry one of these keys; without any, all requests are served.
        served_names: names of the model; the first is in the responses. Empty: the engine's.
        chat_template: Jinja text instead of the tokenizer's own template.
        chat_template_kwargs: names that a request's chat_template_kwargs may set.
        response_role: role of a chat answer.
        tool_call_parser, reasoning_parser: formats of the model's tool calls and reasoning; None:
            those that the chat template shows; "none": neither is looked for.
        constrained_reasoning: constraints of answers hold for reasoning, too.
        enable_auto_tool_choice: the server needs a format of tool calls.
        return_tokens_as_token_ids: show tokens as "token_id:5" in log-probabilities.
        root_path: path prefix when behind a proxy.
        public_paths: more paths that need no key, such as those of a status page.
        public_metrics: /metrics needs no key.
        server_dev_mode: clients may reset caches (`endpoints.caches`).
        strict_fields: unknown fields of a request are errors instead of a line in the log.
        force_include_usage: streams have usage in each chunk, and a last one of its own, without
            being asked.
        default_max_tokens: of a completion without max_tokens; a chat gets the whole context.
        request_timeout: seconds after which a request ends with what it has; None is for ever.
        keep_alive_seconds: a silent stream gets a comment this often; 0 is never.
        stream_interval: least tokens of a choice in a chunk of a stream; its first and its last
            chunk may have fewer.
        max_requests_per_key, max_requests_per_minute: POST requests of one API key that may run
            at once, and that it may send in a minute; None is any number.
        prefix_cache_isolation: "key": requests of one API key cannot find the cached prefixes of
            another's. "none": shared. None: "key" if there are several keys.
        log_requests: log one line for each request.
        log_prompts: log its prompts, too, cut to `max_log_len` characters or token ids.
        max_log_len: None is the whole prompt, 0 none of it.
        legacy_metric_names: export metrics also under names that vLLM has replaced or dropped.
        lora_modules: adapters that are served from the start.
        lora_root: folder inside which clients may load adapters; None: they may load none.
        prompt_adapters: names and paths of prompt adapters that are served.
        stored_responses, stored_response_bytes: responses of /v1/responses that are kept in memory
            at most, and bytes of them; 0 responses: none are kept.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_names: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_kwargs: tuple[str, ...] = TEMPLATE_KWARGS
    response_role: str = "assistant"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    constrained_reasoning: bool = False
    enable_auto_tool_choice: bool = False
    return_tokens_as_token_ids: bool = False
    root_path: str = ""
    public_paths: tuple[str, ...] = ()
    public_metrics: bool = True
    server_dev_mode: bool = False
    strict_fields: bool = False
    force_include_usage: bool = False
    default_max_tokens: int = 16
    request_timeout: float | None = None
    keep_alive_seconds: float = 15.0
    stream_interval: int = 1
    max_requests_per_key: int | None = None
    max_requests_per_minute: int | None = None
    prefix_cache_isolation: str | None = None
    log_requests: bool = True
    log_prompts: bool = True
    max_log_len: int | None = None
    legacy_metric_names: bool = True
    lora_modules: tuple[LoraModule, ...] = ()
    lora_root: str | None = None
    prompt_adapters: tuple[tuple[str, str], ...] = ()
    stored_responses: int = 0
    stored_response_bytes: int = 256 << 20
    cors: Cors = field(default_factory=Cors)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("max_requests_per_key", "max_requests_per_minute"):
            if getattr(self, name) is not None and not self.api_keys:
                raise ConfigError(name, getattr(self, name), "needs api_key: it limits each key")
