"""Two engines behind one `AsyncLLMEngine`: the tokens of one, and calls that reach both."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import (
    LLM,
    AsyncLLMEngine,
    ConfigError,
    EngineDeadError,
    LLMEngine,
    LoRARequest,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hetero_llm.demo_models import alias_path
from tests.helpers.adapters import write_adapter
from tests.helpers.async_tools import idle_metrics, read, until
from tests.server.serving import serving

pytestmark = pytest.mark.usefixtures("forked_engines")

ARGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 512, "max_num_seqs": 8,
    "cpu_threads": 1, "enable_lora": True, "use_lookahead": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(
    max_tokens=None, ignore_eos=True, seed=1, output_kind=RequestOutputKind.DELTA
)
PROMPTS = [f"def name{number}(a, b):\n" + "    a = a + b\n" * 30 for number in range(6)]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        alias_path("demo"), dtype=torch.float32
    )
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, model, seed=1)
    return LoRARequest("a1", 1, str(folder))


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine({"model": "demo", "data_parallel_size": 2, **ARGS})
    yield made
    asyncio.run(made.shutdown(0))


@pytest.fixture(scope="module")
def expected(adapter: LoRARequest) -> list[list[int]]:
    with LLM("demo", **ARGS) as llm:
        outputs = llm.generate(
            [*PROMPTS, *PROMPTS], GREEDY, use_tqdm=False,
            lora_request=[None] * len(PROMPTS) + [adapter] * len(PROMPTS),
        )  # fmt: skip
    return [output.outputs[0].token_ids for output in outputs]


def test_tokens_are_those_of_one_engine(
    engine: AsyncLLMEngine, adapter: LoRARequest, expected: list[list[int]]
) -> None:
    async def tokens(name: str, prompt: str, lora: LoRARequest | None) -> list[int]:
        found: list[int] = []
        async for output in engine.generate(prompt, GREEDY, name, lora):
            found = output.outputs[0].token_ids
        return found

    async def run() -> None:
        before = await engine.metrics()
        for turn in range(2):
            made = [tokens(f"{turn} {i}", one, None) for i, one in enumerate(PROMPTS)]
            made += [tokens(f"{turn} lora {i}", one, adapter) for i, one in enumerate(PROMPTS)]
            assert await asyncio.gather(*made) == expected
        metrics = await idle_metrics(engine)
        assert metrics["num_requests_finished"] - before["num_requests_finished"] == 24
        await until(
            lambda: (
                sum(one["num_requests_finished"] for one in engine.stats().replicas)
                == metrics["num_requests_finished"]
            )
        )
        assert all(one["num_requests_finished"] > 0 for one in engine.stats().replicas)

    asyncio.run(run())


def test_a_prefix_returns_to_its_replica(engine: AsyncLLMEngine) -> None:
    """Hits are as many as one engine would have: no prompt is computed twice."""

    async def run() -> None:
        await engine.reset_prefix_cache()
        for prompt in PROMPTS:
            await read(engine, f"first {prompt}", prompt, GREEDY)
        before = await engine.metrics()
        for prompt in PROMPTS:
            (*_, last) = await read(engine, f"again {prompt}", prompt, GREEDY)
            blocks, rest = divmod(len(last.prompt_token_ids) - 1, engine.info.block_size)
            assert last.num_cached_tokens >= blocks * engine.info.block_size
        metrics = await engine.metrics()
        queried = metrics["prefix_cache_queries"] - before["prefix_cache_queries"]
        assert metrics["prefix_cache_hits"] - before["prefix_cache_hits"] > 0.9 * queried

    asyncio.run(run())


def test_a_request_may_choose_its_replica(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        for rank, counts in ((1, [0, 3]), (0, [3, 0])):
            names = [f"chosen {rank} {number}" for number in range(3)]
            streams = [
                await engine.add_request(name, "x", ENDLESS, data_parallel_rank=rank)
                for name in names
            ]
            await until(
                lambda counts=counts: (
                    [one.get("num_requests_running") for one in engine.stats().replicas] == counts
                )
            )
            await engine.abort(names)
            for stream in streams:
                assert [one async for one in stream][-1].finished
            await idle_metrics(engine)
        with pytest.raises(RequestError, match="from 0 to 1"):
            await anext(engine.generate("x", GREEDY, "none", data_parallel_rank=2))

    asyncio.run(run())


def test_aborts_reach_the_replica_that_runs_a_request(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        async def stream(name: str) -> RequestOutput:
            *_, last = [output async for output in engine.generate("x", ENDLESS, name)]
            return last

        tasks = [asyncio.create_task(stream(f"endless {number}")) for number in range(6)]
        await until(
            lambda: [one.get("num_requests_running") for one in engine.stats().replicas] == [3, 3]
        )
        await engine.abort([f"endless {number}" for number in range(6)])
        for last in await asyncio.gather(*tasks):
            assert last.outputs[0].finish_reason == "abort"
        await idle_metrics(engine)

    asyncio.run(run())


def test_adapters_are_known_to_both_and_forgotten_by_both(
    engine: AsyncLLMEngine, adapter: LoRARequest, tmp_path: Path
) -> None:
    async def run() -> None:
        other = dataclasses.replace(adapter, lora_name="a2", lora_int_id=2)
        assert await engine.add_lora(other)
        assert 2 in await engine.list_loras()
        assert await engine.remove_lora(2)
        assert 2 not in await engine.list_loras()

    asyncio.run(run())


def test_each_replica_saves_what_it_has_learned(engine: AsyncLLMEngine, tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "cache"
        await engine.save_lookahead_cache(path)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["cache", "cache.1"]
        await engine.load_lookahead_cache(path)
        os.remove(tmp_path / "cache.1")
        await engine.load_lookahead_cache(path)

    asyncio.run(run())


def test_it_is_one_engine_to_vllms_metrics_and_the_limits(engine: AsyncLLMEngine) -> None:
    assert engine.info.num_replicas == 2 and engine.info.num_blocks == 1024
    figures = {one.name: one for one in asyncio.run(engine.get_metrics())}
    assert figures["vllm:generation_tokens"].labels["engine"] == "0"


def test_a_server_of_two_replicas(engine: AsyncLLMEngine) -> None:
    with serving(engine) as served:
        answer = served.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        )
        assert answer.status_code == 200, answer.text
        text = served.http.get("/metrics").text
    for replica in "01":
        assert 'hetero_llm:replica_num_requests_running{engine="0"' in text
        assert f'replica="{replica}"' in text
    assert text.count("\nvllm:num_requests_running{") == 1


def test_one_dead_replica_ends_all(engine: AsyncLLMEngine) -> None:
    """The last test of this engine."""

    async def run() -> None:
        async def stream(name: str) -> None:
            async for _ in engine.generate("x", ENDLESS, name):
                pass

        tasks = [asyncio.create_task(stream(str(number))) for number in range(4)]
        await until(lambda: engine.stats().metrics.get("num_requests_running") == 4)
        children = [one.pid for one in _engines()]
        assert len(children) == 2
        os.kill(children[-1], signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {str(one) for one in results} == {
            "engine 1 of 2 is dead: its process was ended by signal 9"
        }
        assert all(isinstance(one, EngineDeadError) for one in results)
        with pytest.raises(EngineDeadError):
            engine.check_health()
        await engine.shutdown(0)
        assert not {one.pid for one in _engines()} & set(children), "none is left"

    asyncio.run(run())


def _engines() -> list[Any]:
    """The engine processes of this one, in the order of their start."""
    import psutil

    found = [
        one
        for one in psutil.Process().children(recursive=True)
        if one.status() != psutil.STATUS_ZOMBIE and one.name() == "engine_process"
    ]
    return sorted(found, key=lambda one: one.create_time())


@pytest.mark.parametrize("kind", [LLM, LLMEngine])
def test_an_engine_in_this_process_has_no_replicas(kind: Any) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2: an engine in this process"):
        if kind is LLM:
            LLM("demo", data_parallel_size=2)
        else:
            LLMEngine({"model": "demo", "data_parallel_size": 2})


def test_all_replicas_are_on_this_machine() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size_local=1: data_parallel_size=2"):
        LLM("demo", data_parallel_size=2, data_parallel_size_local=1)
