"""Which client does what with the server, and the table of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.clients.environments import NODE

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
    "tools": "tool calls, required and named: whole, streamed, and an answer to the result",
    "json_schema": "an answer that follows a JSON schema",
    "parse": "answers and arguments in the client's own types (pydantic, zod)",
    "agent": "the client's own loop of calls and results",
    "reasoning": "reasoning apart from the answer, whole and streamed",
    "responses": "the Responses API: the same text, whole, streamed and continued",
    "responses_tools": "the Responses API: tool calls and constrained answers",
    "count": "counts the tokens of a conversation",
}

_OPENAI = frozenset(FEATURES) - {"agent", "count"}
_LANGCHAIN = _OPENAI - {"models", "token_ids", "reasoning"}
_LITELLM = _OPENAI - {"models", "token_ids", "responses_tools"}
_NO_COMPLETIONS = frozenset(
    ("chat", "stream", "usage", "stop", "parallel", "errors", "wrong_key", "retry", "abort",
     "tools", "json_schema", "parse", "agent", "reasoning")
)  # fmt: skip
_TYPED = frozenset(("tools", "json_schema", "parse", "responses_tools"))
_AGENTS = frozenset(("chat", "parse", "agent", "responses"))


@dataclass(frozen=True, slots=True)
class Client:
    """A column of the table: `script` runs in `environment`, with `options` for it."""

    environment: str
    script: str
    features: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)


CLIENTS = {
    "openai 2": Client("openai2", "drive_openai.py", _OPENAI, {"major": "2"}),
    "openai 3": Client("openai3", "drive_openai.py", _OPENAI, {"major": "3"}),
    "openai-agents": Client("openai_agents", "drive_openai_agents.py", _AGENTS),
    "anthropic": Client("anthropic", "drive_anthropic.py", _NO_COMPLETIONS | {"count"}),
    "langchain-openai": Client("langchain", "drive_langchain.py", _LANGCHAIN),
    "instructor": Client("instructor", "drive_instructor.py", _TYPED),
    "litellm openai/": Client("litellm", "drive_litellm.py", _LITELLM, {"prefix": "openai"}),
    "litellm hosted_vllm/": Client(
        "litellm", "drive_litellm.py", _LITELLM, {"prefix": "hosted_vllm"}
    ),
    "AI SDK openai-compatible": Client(
        NODE, "drive_ai_sdk.mjs", _NO_COMPLETIONS, {"provider": "openai-compatible"}
    ),
    "AI SDK openai": Client(
        NODE, "drive_ai_sdk.mjs", frozenset(("responses", "responses_tools")),
        {"provider": "openai"},
    ),
    "AI SDK anthropic": Client(
        NODE, "drive_ai_sdk.mjs", _NO_COMPLETIONS - {"parallel", "retry", "abort", "reasoning"},
        {"provider": "anthropic"},
    ),
}  # fmt: skip
CELLS = [(name, one) for name, client in CLIENTS.items() for one in FEATURES
         if one in client.features]  # fmt: skip


_SUMS = 3  # lm_eval with two servers, schemathesis


class Table:
    """What was found, filled by the tests as they run.

    Attributes:
        versions: of each client.
        cells: by client and feature; whether it works.
        sums: what the tests that are no cells found, as lines.
        left_out: clients that this machine cannot run, and why.
    """

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.cells: dict[str, dict[str, bool]] = {}
        self.sums: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}

    @property
    def complete(self) -> bool:
        """Whether everything was run that can be run here, with whatever result."""
        every = all(
            feature in self.cells.get(client, {})
            for client, feature in CELLS
            if client not in self.left_out
        )
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
        parts += [f"Not run: {name} ({reason})." for name, reason in self.left_out.items()]
        for name, values in self.sums.items():
            parts.append(f"{name}: " + ", ".join(f"{v} {k}" for k, v in values.items()))
        return "\n\n".join(parts) + "\n"

    def json(self) -> dict[str, Any]:
        return {
            "versions": self.versions,
            "cells": self.cells,
            "sums": self.sums,
            "left_out": self.left_out,
        }


def _mark(works: bool | None) -> str:
    return {None: "", True: "ok", False: "FAILS"}[works]
