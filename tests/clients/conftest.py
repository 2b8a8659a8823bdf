"""Real clients against a real server. Only when asked for by name, as `make test-clients` does:
it takes minutes and the clients' environments.

CLIENTS_JSON and CLIENTS_MARKDOWN name files that get the table, if every cell of it was run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.common import environment
from hetero_llm import LLM, SamplingParams, StructuredOutputsParams
from tests.clients.environments import ENVIRONMENTS, HERE, NODE, missing, run_script
from tests.clients.matrix import CLIENTS, Table
from tests.clients.servers import KEY, MODEL, server

MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "héllo 😀, sort a list"},
]
EXAMPLE = 'Like {"name": "a", "kind": "set", "size": 3, "done": true}'
"""Of the constrained answer; without one the model loops over line ends."""
PROMPT = "def add(a, b):\n    return"
MAX_TOKENS = 24
GUIDED_TOKENS = 200  # enough for each of the constrained answers
TEMPLATE = HERE / "chat.jinja"
"""The demo model's own template, and tools and reasoning for those who ask for them."""
CITY = {"type": "string", "enum": ["Köln", "Bonn"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY, "days": DAYS},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW = {
    "name": "now",
    "description": "What time it is.",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"type": "string", "enum": ["list", "set"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "done": {"type": "boolean"},
    },
    "required": ["name", "kind", "size", "done"],
    "additionalProperties": False,
}
_INTRODUCTION = """\
# Clients

What `make test-clients` found, which wrote this page: each client in an environment of its own
against `hetero-llm serve demo --dtype float32` on a CPU, with a chat template that takes tools and
reasoning. An empty field is something that the client does not offer, or that was not tried. What
this small model writes is no sensible answer, so calls are required and constrained answers follow
an example; they are checked against their schemas. lm_eval's log-probabilities are compared with
those of the offline `LLM`; schemathesis makes its requests of the server's own `/openapi.json`.
"""
_TABLE = pytest.StashKey[Table]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = (Path(str(one).partition("::")[0]).absolute() for one in config.invocation_params.args)
    if any(path.is_relative_to(HERE) for path in named):
        return
    skip = pytest.mark.skip(reason="takes minutes and other environments: make test-clients")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLE] = table = Table()
    reason = missing(NODE)
    if reason is not None:
        table.left_out = {n: reason for n, one in CLIENTS.items() if one.environment == NODE}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table = config.stash.get(_TABLE, Table())
    if not table.cells and not table.sums:
        return
    terminalreporter.section("clients")
    terminalreporter.write(table.markdown())
    if not table.complete:
        return
    for variable, write in (("CLIENTS_JSON", _json), ("CLIENTS_MARKDOWN", _page)):
        if path := os.environ.get(variable):
            Path(path).write_text(write(table))
            terminalreporter.write_line(f"written: {path}")


def _page(table: Table) -> str:
    return f"{_INTRODUCTION}\n{table.markdown()}"


def _json(table: Table) -> str:
    return json.dumps({"bench": "clients", **environment(), **table.json()}, indent=1) + "\n"


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    return pytestconfig.stash[_TABLE]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def url(logs: Path) -> Iterator[str]:
    """The server that the clients talk to."""
    flags = ("--max-stored-responses", "100", "--chat-template", str(TEMPLATE))
    with server(logs / "server", *flags) as found:
        yield found


@pytest.fixture(scope="session")
def small_url(logs: Path) -> Iterator[str]:
    """One request at a time, and none waits."""
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "0", "--cpu-threads", "1")
    with server(logs / "small", *flags) as found:
        yield found


@pytest.fixture(scope="session")
def drafting_url(logs: Path) -> Iterator[str]:
    """Speculates, and has a short context, so that fuzzing does not wait for long answers."""
    flags = ("--use-lookahead", "--max-model-len", "128", "--chat-template", str(TEMPLATE))
    with server(logs / "drafting", *flags) as found:
        yield found


@pytest.fixture(scope="session")
def offline() -> Iterator[LLM]:
    with LLM(model=MODEL, device="cpu", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="session")
def reference(offline: LLM) -> dict[str, Any]:
    """What the clients have to get, by the engine without a server."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    (chat,) = offline.chat(MESSAGES, greedy, use_tqdm=False)
    (completion,) = offline.generate(PROMPT, greedy, use_tqdm=False)
    schema = StructuredOutputsParams(json=SCHEMA)
    guided = SamplingParams(temperature=0, max_tokens=GUIDED_TOKENS, structured_outputs=schema)
    asking = [MESSAGES[0], {"role": "user", "content": EXAMPLE}]
    (structure,) = offline.chat(asking, guided, use_tqdm=False)
    (thought,) = offline.chat(
        MESSAGES,
        greedy,
        use_tqdm=False,
        chat_template=TEMPLATE.read_text(),
        chat_template_kwargs={"enable_thinking": True},
    )
    ids = offline.get_tokenizer().encode(PROMPT)
    text = chat.outputs[0].text
    return {
        "messages": MESSAGES,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "chat": text,
        "chat_prompt_tokens": len(chat.prompt_token_ids),
        "chat_logprobs": [
            position[token].logprob
            for token, position in zip(chat.outputs[0].token_ids, chat.outputs[0].logprobs or ())
        ],
        "completion": completion.outputs[0].text,
        "prompt_ids": ids,
        "prompt_logprobs": [logprob for logprob, _ in scores(offline, ids)],
        "stop": text[len(text) // 2 :][:2],
        "guided_tokens": GUIDED_TOKENS,
        "tools": [{"type": "function", "function": one} for one in (WEATHER, NOW)],
        "schema": SCHEMA,
        "asking": asking,
        "structure": structure.outputs[0].text,
        "thought": thought.outputs[0].text.strip(),
    }


def scores(offline: LLM, ids: list[int]) -> list[tuple[float, bool]]:
    """Of each token but the first: its log-probability, and whether it is the likeliest."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (output,) = offline.generate(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)
    positions = (output.prompt_logprobs or [])[1:]
    return [
        (position[token].logprob, position[token].rank == 1)
        for token, position in zip(ids[1:], positions, strict=True)
    ]


@pytest.fixture(scope="session")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Table
) -> Callable[[str], dict[str, str | None]]:
    """How each cell of a client went; its script runs once."""
    found: dict[str, dict[str, str | None]] = {}

    def of_client(name: str) -> dict[str, str | None]:
        if name not in found:
            client = CLIENTS[name]
            setup = {
                "url": request.getfixturevalue("url"),
                "small_url": request.getfixturevalue("small_url"),
                "key": KEY,
                "model": MODEL,
                "wanted": request.getfixturevalue("reference"),
                "options": dict(client.options),
                "environment": str(ENVIRONMENTS / client.environment),
            }
            home = tmp_path_factory.mktemp("client")
            result = run_script(client.environment, client.script, setup, home)
            found[name] = result["cells"]
            table.versions[name] = result["version"]
            table.cells[name] = {cell: error is None for cell, error in found[name].items()}
        return found[name]

    return of_client
