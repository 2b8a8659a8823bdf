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
from hetero_llm import LLM, SamplingParams
from tests.clients.environments import HERE, run_script
from tests.clients.matrix import CLIENTS, Table
from tests.clients.servers import KEY, MODEL, server

MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "héllo 😀, sort a list"},
]
PROMPT = "def add(a, b):\n    return"
MAX_TOKENS = 24
_INTRODUCTION = """\
# Clients

What `make test-clients` found, which wrote this page: each client in an environment of its own
against `hetero-llm serve demo --dtype float32` on a CPU. An empty field is something that the
client does not offer. lm_eval's log-probabilities are compared with those of the offline `LLM`;
schemathesis makes its requests of the server's own `/openapi.json`.
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
    config.stash[_TABLE] = Table()


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
    with server(logs / "server", "--max-stored-responses", "100") as found:
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
    with server(logs / "drafting", "--use-lookahead", "--max-model-len", "128") as found:
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
            }
            home = tmp_path_factory.mktemp("client")
            result = run_script(client.environment, client.script, setup, home)
            found[name] = result["cells"]
            table.versions[name] = result["version"]
            table.cells[name] = {cell: error is None for cell, error in found[name].items()}
        return found[name]

    return of_client
