"""`LLM(reasoning_parser=...)`: constraints of outputs wait until the reasoning has ended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, SamplingParams, StructuredOutputsParams
from hetero_llm.demo_models import demo_folder

OPENS, CLOSES = 4095, 1
GREEDY = SamplingParams(temperature=0, max_tokens=24)
WORDS = {"yes", "no"}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if thinking is defined and not thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, two of whose tokens are <think> and </think>."""
    folder = tmp_path_factory.mktemp("thinking") / "demo"
    shutil.copytree(demo_folder("demo"), folder)
    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    last = next(text for text, index in model["vocab"].items() if index == OPENS)
    model["merges"] = [one for one in model["merges"] if "".join(one).replace(" ", "") != last]
    for index, text in ((CLOSES, "</think>"), (OPENS, "<think>")):
        model["vocab"] = {one: i for one, i in model["vocab"].items() if i != index}
        model["vocab"][text] = index
        added[:] = [one for one in added if one["id"] != index]
        added.append({**added[0], "id": index, "content": text, "special": False})
    added.sort(key=lambda one: one["id"])
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields = {name: one for name, one in fields.items() if name in ("tokenizer_class", "eos_token")}
    config.write_text(json.dumps(fields), encoding="utf-8")
    return folder


def says(at: int, *, first: int | None = None) -> SamplingParams:
    """The model ends its reasoning at this output token, and may begin with another one."""

    def processor(output: Any, logits: torch.Tensor) -> torch.Tensor:
        position = len(output)
        if position == at:
            logits[CLOSES] += 1e4
        if position == 0 and first is not None:
            logits[first] += 1e4
        return logits

    choice = StructuredOutputsParams(choice=sorted(WORDS))
    return replace(GREEDY, structured_outputs=choice, logits_processors=[processor])


@pytest.fixture(scope="module")
def always(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), reasoning_parser="deepseek_r1", max_model_len=512) as llm:
        yield llm


def split(text: str) -> tuple[str, str]:
    before, marker, after = text.partition("</think>")
    assert marker
    return before, after


def test_a_constraint_waits_for_the_end_of_reasoning(always: LLM) -> None:
    free = always.generate("def add(", GREEDY, use_tqdm=False)[0].outputs[0]
    output = always.generate("def add(", says(6), use_tqdm=False)[0].outputs[0]
    assert output.token_ids[:7] == [*free.token_ids[:6], CLOSES]
    assert split(output.text)[1] in WORDS and output.finish_reason == "stop"


def test_reasoning_that_the_prompt_has_ended(always: LLM) -> None:
    """The template closes the reasoning: the answer begins at once. Its text stays as it is."""
    message = [{"role": "user", "content": "Is 7 a prime?"}]
    kwargs: dict[str, Any] = {"chat_template": TEMPLATE, "use_tqdm": False}
    off = always.chat(message, says(99), chat_template_kwargs={"thinking": False}, **kwargs)
    assert off[0].outputs[0].text in WORDS
    on = always.chat(message, says(3), **kwargs)
    before, after = split(on[0].outputs[0].text)
    assert before and after in WORDS


def test_reasoning_that_the_model_may_leave_out(folder: Path) -> None:
    with LLM(str(folder), reasoning_parser="qwen3", max_model_len=512) as llm:
        params = [says(99), says(4, first=OPENS)]
        at_once, later = llm.generate(["def add("] * 2, params, use_tqdm=False)
    assert at_once.outputs[0].text in WORDS
    before, after = split(later.outputs[0].text)
    assert before.startswith("<think>") and after in WORDS


def test_constraints_may_hold_for_reasoning_too(folder: Path) -> None:
    config = {"reasoning_parser": "deepseek_r1", "enable_in_reasoning": True}
    with LLM(str(folder), structured_outputs_config=config, max_model_len=512) as llm:
        output = llm.generate("def add(", says(99), use_tqdm=False)[0].outputs[0]
    assert output.text in WORDS
