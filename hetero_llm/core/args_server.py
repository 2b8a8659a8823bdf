"""Every argument that only the HTTP server takes. All of them wait for the server."""

from __future__ import annotations

from typing import Any

from hetero_llm.core.args_spec import ArgSpec, Kind, Scope, grouped, not_yet


def _serve(name: str, kind: Kind, default: Any, help: str, **rest: Any) -> ArgSpec:
    return not_yet(name, kind, default, help, feature="the server", scope=Scope.SERVE, **rest)


_BOOL, _INT, _STR, _JSON = Kind.BOOL, Kind.INT, Kind.STR, Kind.JSON

SERVER_ARGS: tuple[ArgSpec, ...] = grouped(
    "Server",
    _serve("config", Kind.PATH, None, "YAML file with options; the command line overrides it."),
    _serve("host", _STR, "127.0.0.1", "Address to listen on."),
    _serve("port", _INT, 8000, "Port to listen on."),
    _serve(
        "uvicorn_log_level",
        _STR,
        "info",
        "Log level of uvicorn.",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
    ),
    _serve("allow_credentials", _BOOL, False, "CORS: allow credentials."),
    _serve("allowed_origins", _JSON, ("*",), "CORS: origins allowed."),
    _serve("allowed_methods", _JSON, ("*",), "CORS: methods allowed."),
    _serve("allowed_headers", _JSON, ("*",), "CORS: headers allowed."),
    _serve(
        "api_key",
        _STR,
        None,
        "Key that every request must carry in its header.",
        aliases=("api_keys",),
    ),
    _serve(
        "served_model_name",
        Kind.LIST,
        None,
        "Names that requests may use for the model; the first one is in the responses.",
    ),
    _serve("chat_template", _STR, None, "Chat template: a file, or the template in one line."),
    _serve(
        "response_role",
        _STR,
        "assistant",
        "Role of a response when request.add_generation_prompt is true.",
    ),
    _serve(
        "return_tokens_as_token_ids",
        _BOOL,
        False,
        "Show single tokens as 'token_id:{id}' in log probabilities.",
    ),
    _serve(
        "enable_auto_tool_choice",
        _BOOL,
        False,
        "Let the model choose among tools; needs tool_call_parser.",
    ),
    _serve(
        "tool_call_parser",
        _STR,
        None,
        "How the model writes its tool calls.",
        choices=("mistral", "hermes"),
    ),
    _serve("lora_modules", Kind.LIST, None, "LoRA adapters to load, as name=path."),
    _serve("prompt_adapters", Kind.LIST, None, "Prompt adapters to load, as name=path."),
    _serve("ssl_keyfile", Kind.PATH, None, "TLS key file."),
    _serve("ssl_certfile", Kind.PATH, None, "TLS certificate file."),
    _serve("ssl_ca_certs", Kind.PATH, None, "TLS file of CA certificates."),
    _serve("ssl_cert_reqs", _INT, 0, "Whether clients need a certificate (see module ssl)."),
    _serve("root_path", _STR, None, "Path prefix when behind a proxy."),
    _serve("middleware", Kind.LIST, (), "Import path of ASGI middleware; repeatable."),
    _serve(
        "disable_frontend_multiprocessing",
        _BOOL,
        False,
        "Run the API in the engine's process.",
    ),
    _serve("disable_log_requests", _BOOL, False, "Log no requests."),
    _serve("max_log_len", _INT, None, "Most characters or token ids of a prompt in the log."),
)
