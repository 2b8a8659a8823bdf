from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hetero_llm.bench_client.datasets import DatasetOptions
from hetero_llm.bench_client.offline import run_latency, run_throughput
from hetero_llm.bench_client.wire_format import Sample
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.core.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class FakeLLM:
    """Takes the given seconds for each call and generates `max_tokens` for each prompt."""

    def __init__(self, seconds: Sequence[float], finish: str = "length") -> None:
        self.now = 0.0
        self.calls: list[tuple[list[Any], list[SamplingParams]]] = []
        self._seconds = iter(seconds)
        self._finish = finish

    def clock(self) -> float:
        return self.now

    def generate(
        self, prompts: Any, sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        self.calls.append((list(prompts), list(sampling_params)))
        self.now += next(self._seconds)
        outputs = []
        for prompt, params in zip(prompts, sampling_params):
            ids = prompt.get("prompt_token_ids") or list(range(len(prompt["prompt"])))
            one = CompletionOutput(
                0, "", [1] * (params.max_tokens or 2), finish_reason=self._finish
            )
            outputs.append(RequestOutput("0", None, ids, None, [one], True))
        return outputs


def test_throughput() -> None:
    llm = FakeLLM([4.0])
    samples = [Sample((1, 2, 3), 10), Sample("four", 6), Sample((1,), None)]
    figures = run_throughput(llm, samples, params=PARAMS, clock=llm.clock)
    prompts, params = llm.calls[0]
    assert prompts == [{"prompt_token_ids": [1, 2, 3]}, {"prompt": "four"},
                       {"prompt_token_ids": [1]}]  # fmt: skip
    assert [one.max_tokens for one in params] == [10, 6, None]
    assert all(one.ignore_eos and one.temperature == 0.0 for one in params)
    assert figures.as_json() == {
        "elapsed_time": 4.0,
        "num_requests": 3,
        "total_num_tokens": 26,
        "prompt_tokens": 8,
        "output_tokens": 18,
        "requests_per_second": 0.75,
        "tokens_per_second": 6.5,
        "output_tokens_per_second": 4.5,
    }
    assert figures.as_text() == (
        "Throughput: 0.75 requests/s, 6.50 total tokens/s, 4.50 output tokens/s\n"
        "Total num prompt tokens: 8\n"
        "Total num output tokens: 18\n"
    )


def test_latency() -> None:
    llm = FakeLLM([100.0, 1.0, 3.0])
    dataset = DatasetOptions(input_len=4, output_len=5, vocab_size=50_000)
    figures = run_latency(
        llm, dataset, batch_size=2, params=PARAMS, num_warmups=1, num_iters=2, clock=llm.clock
    )
    found = figures.as_json()
    assert found["latencies"] == [1.0, 3.0]
    assert found["avg_latency"] == 2.0
    assert found["percentiles"]["50"] == 2.0
    assert figures.as_text().splitlines()[0] == "Avg latency: 2.0000 seconds"
    assert figures.as_text().splitlines()[-1] == "99% percentile latency: 2.9800 seconds"
    prompts = [tuple(p["prompt_token_ids"]) for batch, _ in llm.calls for p in batch]
    assert len(prompts) == len(set(prompts)) == 6  # no batch is one that a cache knows


def test_half_a_run_is_no_figure() -> None:
    llm = FakeLLM([1.0], finish="abort")
    with pytest.raises(KeyboardInterrupt):
        run_throughput(llm, [Sample((1,), 2)], params=PARAMS, clock=llm.clock)


def test_conversations_are_for_servers() -> None:
    with pytest.raises(ConfigError, match="conversations can be benched by serve only"):
        run_throughput(FakeLLM([1.0]), [Sample(None, 2, ({},))], params=PARAMS)
