"""The texts that the server prints at its start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.pooling_params import EMBED
from hetero_llm.engine.core_plan import plan_cores
from hetero_llm.engine.engine_client import EngineInfo

_CHAT = (
    "/v1/chat/completions",
    '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}',
)
_EMBEDDING = "/v1/embeddings", '{"input": "Hello!"}'
_SCORE = "/v1/score", '{"text_1": "Hello!", "text_2": ["Hi!", "Bye!"]}'
_COMPLETION = "/v1/completions", '{"prompt": "def add(a, b):", "max_tokens": 16}'


def plan_table(info: EngineInfo, config: EngineConfig, *, parsers: str) -> str:
    """The model, device and memory that serve, as lines of a name and a value.

    Args:
        parsers: the formats of tool calls and reasoning that the server reads, in words.
    """
    tokens = info.num_blocks * info.block_size
    rows = [
        ("model", f"{info.model} ({info.dtype})"),
        ("device", f"{info.device}, {info.backend}"),
        *_replicas(info),
        ("cores", _cores(info, config)),
        ("context", f"{info.max_model_len} tokens"),
    ]
    if info.pooling is not None:
        rows += [("pools", f"{info.pooling.pooling}, for {' and '.join(info.pooling.tasks)}")]
        return _lines(rows)
    rows += [
        ("KV cache", f"{tokens} tokens in {info.num_blocks} blocks of {info.block_size}"),
        ("full contexts", f"{tokens / info.max_model_len:.1f} at once"),
        ("sequences", f"{config.max_num_seqs * info.num_replicas} at once"),
        ("drafts", _drafts(config)),
        ("offload", _offload(info, config)),
        ("parsers", parsers),
    ]
    return _lines(rows)


def _replicas(info: EngineInfo) -> list[tuple[str, str]]:
    if info.num_replicas == 1:
        return []
    return [("replicas", f"{info.num_replicas}, each on a device and cores of its own")]


def _lines(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _cores(info: EngineInfo, config: EngineConfig) -> str:
    usable = len(os.sched_getaffinity(0))
    if info.num_replicas > 1:
        return f"{usable}, divided among the replicas"
    plan = plan_cores(config, target_on_cpu=info.device.startswith("cpu"))
    if plan is not None:
        return plan.words()
    if not info.device.startswith("cpu"):
        return f"{usable} for the server, the scheduler and drafts"
    threads = config.cpu.threads
    return f"{usable}, {'all' if threads is None else threads} for the model"


def _drafts(config: EngineConfig) -> str:
    """The drafters, in words."""
    speculation = config.speculation
    if speculation is None:
        return "none"
    if speculation.method == "ngram":
        return f"prompt lookup, {speculation.num_speculative_tokens} tokens"
    parts = []
    if speculation.draft is not None:
        place = "on the CPU" if speculation.draft.on_cpu else "on the model's device"
        parts.append(f"{speculation.draft.model} {place}, {speculation.draft.num_tokens} tokens")
    if speculation.lookahead is not None:
        modes = ("n-grams", "suffix trie", "suffix trie and n-grams", "both merged")
        parts.append(f"lookahead cache on the CPU: {modes[speculation.lookahead.cache_mode]}")
    return "; ".join(parts)


def _offload(info: EngineInfo, config: EngineConfig) -> str:
    """What is in host memory instead of the device's, in words."""
    parts = []
    if config.load.cpu_offload_gb:
        parts.append(f"up to {config.load.cpu_offload_gb:g} GiB of weights in host memory")
    if info.offload:
        parts.append(info.offload)
    elif config.offload is not None:
        on_cpu = info.device.startswith("cpu")
        why = "it is in host memory already" if on_cpu else "see the log"
        parts.append(f"not of the prefix cache: {why}")
    return "; ".join(parts) or "off"


def ready_text(
    address: tuple[str, int],
    seconds: Mapping[str, float],
    args: Mapping[str, Any],
    *,
    chat: bool,
    tasks: tuple[str, ...] = (),
) -> str:
    """The server's address, the duration of its start, a command to try it with, and its pages.

    Args:
        address: that the server listens on.
        chat: the model has a chat template.
        tasks: of a model that pools; empty: it generates.
        seconds: of the start and its parts, see `EngineInfo`.
        args: the server's arguments.
    """
    host, port = address
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if args['ssl_certfile'] else 'http'}://{shown}:{port}"
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total")
    key = ' -H "Authorization: Bearer $API_KEY"' if args["api_key"] else ""
    path, body = _CHAT if chat else _COMPLETION
    if tasks:
        path, body = _EMBEDDING if EMBED in tasks else _SCORE
    return (
        f"Ready on {url} ({seconds['total']:.1f} s: {parts})\n"
        f"  curl {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'\n"
        f"  {url}/ talks to the model and shows how it runs; {url}/docs lists the API"
    )
