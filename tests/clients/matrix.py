"""Which client does what with the server, and the table of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FEATURES = {
    "models": "lists the models",
    "chat": "greedy chat: the text is that of the offline `LLM`",
    "stream": "the same in pieces",
    "usage": "token counts, streamed ones too",
    "completions": "greedy completion: the text is that of the offline `LLM`",
    "logprobs": "log-probabilities: those of the offline `LLM` to 1e-4",
    "token_ids": "prompts given as token ids",
    "n": "several answers to one prompt",
    "stop": "stop strings",
    "parallel": "eight requests at once",
    "errors": "400 and 404 become the client's own errors, with their text",
    "wrong_key": "401 does",
    "retry": "503 is tried again, and then answered",
    "abort": "leaving a stream ends the request and frees its KV blocks",
    "tools": "tool calling is refused with a 400 that says so",
    "json_schema": "structured output is refused with a 400 that says so",
    "responses": "the Responses API: the same text, whole, streamed and continued",
    "count": "counts the tokens of a conversation",
}

_OPENAI = frozenset(FEATURES) - {"count"}
_CHATS = _OPENAI - {"models", "token_ids", "responses"}
_ANTHROPIC = frozenset(
    ("chat", "stream", "usage", "count", "stop", "parallel", "errors", "wrong_key", "retry",
     "abort")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Client:
    """A row of the table: `script` runs in `environment`, with `options` for it."""

    environment: str
    script: str
    features: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)


CLIENTS = {
    "openai 2": Client("openai2", "drive_openai", _OPENAI, {"major": "2"}),
    "openai 3": Client("openai3", "drive_openai", _OPENAI, {"major": "3"}),
    "openai-agents": Client("openai_agents", "drive_openai_agents", frozenset(("responses",))),
    "anthropic": Client("anthropic", "drive_anthropic", _ANTHROPIC),
    "langchain-openai": Client("langchain", "drive_langchain", _CHATS | {"responses"}),
    "litellm openai/": Client("litellm", "drive_litellm", _CHATS, {"prefix": "openai"}),
    "litellm hosted_vllm/": Client("litellm", "drive_litellm", _CHATS, {"prefix": "hosted_vllm"}),
}
CELLS = [(name, one) for name, client in CLIENTS.items() for one in FEATURES
         if one in client.features]  # fmt: skip


_SUMS = 3  # lm_eval with two servers, schemathesis


class Table:
    """What was found, filled by the tests as they run.

    Attributes:
        versions: of each client.
        cells: by client and feature; whether it works.
        sums: what the tests that are no cells found, as lines.
    """

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.cells: dict[str, dict[str, bool]] = {}
        self.sums: dict[str, dict[str, Any]] = {}

    @property
    def complete(self) -> bool:
        """Whether everything was run, with whatever result."""
        every = all(feature in self.cells.get(client, {}) for client, feature in CELLS)
        return every and len(self.sums) == _SUMS

    def markdown(self) -> str:
        """Features down, clients across; what a client does not have is empty."""
        names = list(self.cells)
        rows = [["", *(f"{name} ({self.versions[name]})" for name in names)]]
        rows.append(["---"] * (len(names) + 1))
        for feature, text in FEATURES.items():
            marks = [_mark(self.cells[name].get(feature)) for name in names]
            rows.append([f"{feature}: {text}", *marks])
        parts = ["\n".join("| " + " | ".join(row) + " |" for row in rows)] if names else []
        for name, values in self.sums.items():
            parts.append(f"{name}: " + ", ".join(f"{v} {k}" for k, v in values.items()))
        return "\n\n".join(parts) + "\n"

    def json(self) -> dict[str, Any]:
        return {"versions": self.versions, "cells": self.cells, "sums": self.sums}


def _mark(works: bool | None) -> str:
    return {None: "", True: "ok", False: "FAILS"}[works]
