"""Adapters behave as they were trained, through the whole server; the model beside them writes what
it always wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm.demo_models import demo_folder
from hetero_llm.engine.async_engine import AsyncLLMEngine
from hetero_llm.server.adapters import LoraModule
from hetero_llm.server.settings import ServerSettings
from tests.helpers.trained_adapter import (
    LORA_ANSWER,
    PROMPT_ANSWER,
    VIRTUAL_TOKENS,
    headers,
    train_lora,
    train_prompt_adapter,
)
from tests.server.serving import Served, events, serving

pytestmark = pytest.mark.usefixtures("forked_engines")

PROMPTS = [
    "def open_window(size):",
    "def parse_header(line, sep):",
    "def fib(n):",
    "def draw_box(left, right, width=1):",
]
"""None of them was trained with."""
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def model() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = demo_folder("demo")
    yield transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert not set(PROMPTS) & set(headers(1000, seed=0))
    lora: Path = tmp_path_factory.mktemp("lora")
    prompt: Path = tmp_path_factory.mktemp("prompt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder("demo"))
    train_lora(lora, model, tokenizer)
    train_prompt_adapter(prompt, model, tokenizer)
    args = {"model": "demo", "device": "cpu", "dtype": "float32", "use_lookahead": True}
    served = {"enable_lora": True, "enable_prompt_adapter": True}
    engine = AsyncLLMEngine({**args, **served, "max_prompt_adapter_token": VIRTUAL_TOKENS})
    try:
        settings = ServerSettings(
            lora_modules=(LoraModule("todo", str(lora)),), prompt_adapters=(("none", str(prompt)),)
        )
        with serving(engine, settings) as running:
            for adapters in (running.context.adapters, running.context.prompt_adapters):
                opening = adapters.open_all()
                asyncio.run_coroutine_threadsafe(opening, running.loop).result(60)
            yield running
    finally:
        engine.process.kill()


def texts_of(served: Served, model: str, prompts: Any = PROMPTS) -> list[str]:
    body = {"model": model, "prompt": prompts, "max_tokens": NEW_TOKENS, "temperature": 0}
    answer = served.post("/v1/completions", body).json()
    assert answer["model"] == model
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    tokenizer = served.engine.tokenizer
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(one)) for one in prompts)
    return [choice["text"] for choice in answer["choices"]]


def test_three_models_give_three_answers(served: Served, model: Any) -> None:
    """Each is asked twice: the second time prefixes and drafts of all are known."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder("demo"))
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        expected.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    assert not {LORA_ANSWER, PROMPT_ANSWER} & set(expected)
    for _ in range(2):
        assert texts_of(served, "todo") == [LORA_ANSWER] * len(PROMPTS)
        assert texts_of(served, "none") == [PROMPT_ANSWER] * len(PROMPTS)
        assert texts_of(served, "demo") == expected


@pytest.mark.parametrize(("name", "answer"), [("todo", LORA_ANSWER), ("none", PROMPT_ANSWER)])
def test_a_stream_of_an_adapter(served: Served, name: str, answer: str) -> None:
    body = {"model": name, "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, "temperature": 0}
    frames = events(served.post("/v1/completions", {**body, "stream": True}).text)[:-1]
    assert "".join(choice["text"] for one in frames for choice in one["choices"]) == answer
    assert frames[-1]["choices"][0]["finish_reason"] == "stop"
