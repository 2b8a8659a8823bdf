"""Adapters of an engine in a process of its own, alone and behind the server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, AdapterError, LLMEngine, LoRARequest, SamplingParams
from hetero_llm.engine.async_engine import AsyncLLMEngine
from tests.helpers.adapters import TinyAdapter, change_config, write_adapter

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
