"""How benches drive an engine: greedy parameters, timed calls, requests fed to its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hetero_llm import LLM, LoRARequest, SamplingParams
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt

Adapters = LoRARequest | Sequence[LoRARequest | None] | None


def greedy(count: int, **more: Any) -> SamplingParams:
    """Exactly `count` tokens per prompt, without text, greedy unless `more` has a temperature."""
    settings = {"temperature": 0, "ignore_eos": True, "detokenize": False, **more}
    return SamplingParams(max_tokens=count, **settings)


def seconds(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    adapters: Adapters = None,
) -> float:
    """Of one `LLM.generate` call. Every output must have `max_tokens`, no prompt a cached token.

    Args:
        adapters: of all prompts, or one or None for each.
    """
    begin = time.perf_counter()
    outputs = llm.generate(
        prompt_token_ids=prompts, sampling_params=params, use_tqdm=False, lora_request=adapters
    )
    elapsed = time.perf_counter() - begin
    assert all(len(o.outputs[0].token_ids) == params.max_tokens for o in outputs)
    assert all(not o.num_cached_tokens for o in outputs)
    return elapsed


def first_token_ms(
    llm: LLM, prompt: list[int], *, adapter: LoRARequest | None = None
) -> tuple[float, int]:
    """Milliseconds of `LLM.generate` for one token, and the prompt's tokens found in the prefix
    cache."""
    params = greedy(1)
    begin = time.perf_counter()
    (output,) = llm.generate(
        prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False, lora_request=adapter
    )
    return (time.perf_counter() - begin) * 1e3, output.num_cached_tokens


def add_requests(
    engine: Engine,
    name: str,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    adapter: LoRARequest | None = None,
) -> list[str]:
    """Adds one request per prompt; returns their ids, `name`-0, `name`-1, ..."""
    ids = [f"{name}-{index}" for index in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        request = engine.make_request(request_id, Prompt(token_ids=prompt), params, adapter)
        engine.add_request(request)
    return ids


def step_outputs(engine: Engine) -> dict[str, list[int]]:
    """Runs one step; request id -> token ids of the requests that finished in it."""
    return {
        output.request_id: list(output.outputs[0].token_ids)
        for output in engine.step()
        if output.finished
    }
