"""Adapters of an engine in a process of its own, alone and behind the server."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import (
    LLM,
    AdapterError,
    LLMEngine,
    LoRARequest,
    PromptAdapterRequest,
    RequestOutput,
    SamplingParams,
)
from hetero_llm.engine.async_engine import AsyncLLMEngine
from tests.helpers.adapters import TinyAdapter, change_config, write_adapter
from tests.helpers.prompt_adapters import write_prompt_adapter

pytestmark = pytest.mark.usefixtures("forked_engines")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "def add(a, b):"
ARGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enable_lora": True, "max_loras": 2}


@pytest.fixture(scope="module")
def requests(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("adapters")
    for number in (1, 2, 3):
        write_adapter(folder / str(number), model, seed=number)
    return [LoRARequest(f"a{n}", n, str(folder / str(n))) for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, requests: list[LoRARequest]) -> list[list[int]]:
    """Tokens of the base and of each adapter."""
    with LLM(str(tiny_folder), **ARGS) as llm:
        outputs = llm.generate([PROMPT] * 4, GREEDY, use_tqdm=False, lora_request=[None, *requests])
        figures = llm.get_metrics()
    assert any(one.name == "vllm:lora_requests_info" for one in figures)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine({"model": str(tiny_folder), **ARGS})
    yield made
    made.process.kill()


def test_requests_adapters_and_errors(
    engine: AsyncLLMEngine,
    requests: list[LoRARequest],
    expected: list[list[int]],
    tmp_path: Path,
    tiny_folder: Path,
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    change_config(write_adapter(tmp_path, model), use_dora=True)
    bad = LoRARequest("bad", 9, str(tmp_path))

    async def tokens(index: int, adapter: LoRARequest | None, turn: int) -> list[int]:
        found: list[int] = []
        async for output in engine.generate(PROMPT, GREEDY, f"{turn}-{index}", adapter):
            found = output.outputs[0].token_ids
            assert output.lora_request == adapter
        return found

    async def run() -> None:
        for turn in range(2):
            made = [tokens(i, one, turn) for i, one in enumerate([None, *requests])]
            assert await asyncio.gather(*made) == expected
        assert await engine.list_loras() == {1, 2, 3}
        with pytest.raises(AdapterError, match="use_dora=True: DoRA is not available yet"):
            await tokens(0, bad, 9)
        with pytest.raises(AdapterError, match="'a1' is known with"):
            await tokens(0, LoRARequest("a1", 1, "/other"), 9)
        assert await engine.remove_lora(1)
        assert not await engine.remove_lora(1)
        assert await engine.add_lora(requests[0])
        assert await tokens(0, requests[0], 10) == expected[1]
        # Two others take the slots and the host memory of a third, whose files go meanwhile.
        gone = LoRARequest("gone", 8, str(tmp_path / "gone"))
        shutil.copytree(requests[0].lora_path, gone.lora_path)
        change_config(TinyAdapter(tmp_path / "gone", {}), lora_alpha=3)
        assert await engine.add_lora(gone)
        assert await tokens(1, requests[0], 11) == expected[1]
        assert await tokens(2, requests[1], 11) == expected[2]
        assert await engine.add_lora(requests[2])
        shutil.rmtree(gone.lora_path)
        with pytest.raises(AdapterError, match="lora_request='gone': .*no such folder"):
            await tokens(0, gone, 12)
        assert await tokens(1, requests[0], 12) == expected[1]
        figures = await engine.metrics()
        assert figures["max_loras"] == 2
        assert figures["lora_loads"] >= 3

    asyncio.run(run())


def test_llm_engine(
    tiny_folder: Path, requests: list[LoRARequest], expected: list[list[int]]
) -> None:
    engine = LLMEngine({"model": str(tiny_folder), **ARGS})
    assert engine.add_lora(requests[0])
    for index, request in enumerate([None, *requests]):
        engine.add_request(str(index), PROMPT, GREEDY, lora_request=request)
    found: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[int(output.request_id)] = output.outputs[0].token_ids
    assert [found[index] for index in range(4)] == expected
    assert engine.list_loras() == {1, 2, 3}
    assert engine.remove_lora(2) and not engine.remove_lora(2)
    engine.shutdown()


def test_an_adapter_of_the_hub_is_fetched_by_this_process(
    engine: AsyncLLMEngine,
    requests: list[LoRARequest],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's process makes no step while it opens an adapter."""
    folder = requests[1].lora_path
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: folder)
    hub = LoRARequest("hub", 70, "org/sql")

    async def run() -> None:
        async for output in engine.generate(PROMPT, GREEDY, "hub", hub):
            assert output.lora_request == hub
        assert output.outputs[0].token_ids == expected[2]

    asyncio.run(run())


def test_prompt_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    """From this process to the engine's; a second one of the same content shares prefixes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    size = model.get_input_embeddings().weight.shape[1]
    for name in ("polite", "copy"):
        write_prompt_adapter(tmp_path / name, 20, size)
    polite = PromptAdapterRequest("polite", 1, str(tmp_path / "polite"), 20)
    copy = PromptAdapterRequest("copy", 2, str(tmp_path / "copy"), 20)
    args = {
        "device": "cpu", "dtype": "float32", "enable_prompt_adapter": True,
        "max_prompt_adapter_token": 20, "block_size": 8,
    }  # fmt: skip
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    with LLM(str(tiny_folder), **args) as llm:
        outputs = llm.generate(
            [PROMPT] * 2, params, use_tqdm=False, prompt_adapter_request=[None, polite]
        )
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
    engine = AsyncLLMEngine({"model": str(tiny_folder), **args})

    async def ask(request_id: str, adapter: Any, wanted: SamplingParams = params) -> RequestOutput:
        stream = engine.generate(PROMPT, wanted, request_id, prompt_adapter_request=adapter)
        *_, last = [output async for output in stream]
        return last

    async def run() -> None:
        for index, adapter in enumerate([None, polite]):
            output = await ask(str(index), adapter)
            assert output.prompt_token_ids == outputs[index].prompt_token_ids
            assert output.outputs[0].token_ids == outputs[index].outputs[0].token_ids
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        again = await ask("copy", copy, GREEDY)
        assert again.outputs[0].token_ids == outputs[1].outputs[0].token_ids
        num_prompt = len(again.prompt_token_ids)
        assert again.num_cached_tokens == max((19 + num_prompt) // 8 * 8 - 20, 0)
        for wrong, reason in (
            (object(), "must be a PromptAdapterRequest"),
            (dataclasses.replace(polite, prompt_adapter_id=5), "is known with 1"),
            (PromptAdapterRequest("x", 9, "/none", 3), "no such folder"),
        ):
            with pytest.raises(AdapterError, match=reason):
                await ask("wrong", wrong)
        assert await engine.num_virtual_tokens(str(tmp_path / "copy")) == 20

    try:
        asyncio.run(run())
    finally:
        engine.process.kill()
