"""The prompt adapters that a process keeps: names, capacity, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.prompt_adapter_config import PromptAdapterConfig
from hetero_llm.core.errors import AdapterError, ConfigError
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.engine.inputs.prompt_adapters import PromptAdapters
from tests.helpers.prompt_adapters import write_prompt_adapter

SIZE = 8


@pytest.fixture
def requests(tmp_path: Path) -> list[PromptAdapterRequest]:
    for number in range(1, 5):
        write_prompt_adapter(tmp_path / f"p{number}", number, SIZE, seed=number)
    return [PromptAdapterRequest(f"p{n}", n, str(tmp_path / f"p{n}"), n) for n in range(1, 5)]


def store(capacity: int) -> PromptAdapters:
    return PromptAdapters(PromptAdapterConfig(True, capacity, 4), size=SIZE)


def test_the_least_recently_used_one_leaves(requests: list[PromptAdapterRequest]) -> None:
    known = store(2)
    first = known.open(requests[0])
    known.open(requests[1])
    assert known.open(requests[0]) is first
    known.open(requests[2])
    assert [known.is_loaded(one) for one in requests] == [True, False, True, False]
    assert (known.num_loaded, known.num_reads) == (2, 3)
    known.open(requests[1])
    assert known.num_reads == 4 and not known.is_loaded(requests[0])


def test_many_threads(requests: list[PromptAdapterRequest]) -> None:
    known = store(2)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(known.open, requests * 30))
    assert [one.num_tokens for one in found] == [1, 2, 3, 4] * 30
    assert known.num_loaded == 2


def test_an_adapter_that_cannot_be_read_leaves_no_trace(
    requests: list[PromptAdapterRequest], tmp_path: Path
) -> None:
    known = store(2)
    with pytest.raises(AdapterError, match="no such folder"):
        known.open(PromptAdapterRequest("p1", 1, str(tmp_path / "none"), 1))
    assert known.open(requests[0]).num_tokens == 1


def test_arguments() -> None:
    def config(**args: object) -> PromptAdapterConfig:
        given = resolve_engine_args({"model": "demo", **args})
        return EngineConfig.from_args(given).prompt_adapters

    assert config() == PromptAdapterConfig()
    found = config(enable_prompt_adapter=True, max_prompt_adapters=3, max_prompt_adapter_token=9)
    assert found == PromptAdapterConfig(True, 3, 9)
    with pytest.raises(ConfigError, match="max_prompt_adapter_token=0: must be given"):
        config(enable_prompt_adapter=True)


def test_arguments_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.from_args(resolve_engine_args({"model": "demo", "max_prompt_adapters": 3}))
    assert "max_prompt_adapters: no effect without enable_prompt_adapter" in caplog.text
