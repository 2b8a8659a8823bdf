"""Benches of an `LLM` in this process: many prompts at once, or batches one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetero_llm.bench_client.datasets import DatasetOptions, load_samples
from hetero_llm.bench_client.metrics import percentile
from hetero_llm.bench_client.wire_format import Sample
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


class Generator(Protocol):
    """The methods of `hetero_llm.LLM` that the benches call."""

    def generate(
        self, prompts: Any, sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]: ...


@dataclass(frozen=True, slots=True)
class Throughput:
    """Counts and duration of one `generate` of all prompts."""

    seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def as_json(self) -> dict[str, float]:
        """The figures by vLLM's keys."""
        total = self.prompt_tokens + self.output_tokens
        return {
            "elapsed_time": self.seconds,
            "num_requests": self.num_requests,
            "total_num_tokens": total,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_second": self.num_requests / self.seconds,
            "tokens_per_second": total / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
        }

    def as_text(self) -> str:
        rates = self.as_json()
        return (
            f"Throughput: {rates['requests_per_second']:.2f} requests/s, "
            f"{rates['tokens_per_second']:.2f} total tokens/s, "
            f"{rates['output_tokens_per_second']:.2f} output tokens/s\n"
            f"Total num prompt tokens: {self.prompt_tokens}\n"
            f"Total num output tokens: {self.output_tokens}\n"
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations in seconds of each `generate` of a whole batch."""

    seconds: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """The figures by vLLM's keys."""
        ordered = sorted(self.seconds)
        return {
            "avg_latency": sum(ordered) / len(ordered),
            "latencies": list(self.seconds),
            "percentiles": {str(wanted): percentile(ordered, wanted) for wanted in PERCENTILES},
        }

    def as_text(self) -> str:
        figures = self.as_json()
        lines = [f"Avg latency: {figures['avg_latency']:.4f} seconds"]
        for wanted, value in figures["percentiles"].items():
            lines.append(f"{wanted}% percentile latency: {value:.4f} seconds")
        return "\n".join(lines) + "\n"


def run_throughput(
    llm: Generator,
    samples: Sequence[Sample],
    *,
    params: SamplingParams,
    use_tqdm: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Generates for all samples at once.

    Raises:
        RequestError: a prompt does not fit the model.
        KeyboardInterrupt: the user interrupted it, so there is no figure.
    """
    prompts = [_prompt(sample) for sample in samples]
    each = [_with_length(params, sample.output_len) for sample in samples]
    begin = clock()
    outputs = llm.generate(prompts, each, use_tqdm=use_tqdm)
    seconds = clock() - begin
    _refuse_interrupted(outputs)
    return Throughput(
        seconds=max(seconds, 1e-9),
        num_requests=len(outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(one.token_ids) for output in outputs for one in output.outputs),
    )


def run_latency(
    llm: Generator,
    dataset: DatasetOptions,
    *,
    batch_size: int,
    params: SamplingParams,
    num_warmups: int,
    num_iters: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Generates `num_warmups` + `num_iters` batches one after another and times the last
    `num_iters`. Every batch has new prompts, so prefix caches have no hits. Raises as
    `run_throughput` does."""
    samples = load_samples(dataset, batch_size * (num_warmups + num_iters))
    seconds = []
    for begin in range(0, len(samples), batch_size):
        batch = samples[begin : begin + batch_size]
        seconds.append(run_throughput(llm, batch, params=params, clock=clock).seconds)
    return Latency(tuple(seconds[num_warmups:]))


def _prompt(sample: Sample) -> dict[str, Any]:
    if sample.prompt is None:
        raise ConfigError("dataset_name", "jsonl", "conversations can be benched by serve only")
    if isinstance(sample.prompt, str):
        return {"prompt": sample.prompt}
    return {"prompt_token_ids": list(sample.prompt)}


def _with_length(params: SamplingParams, output_len: int | None) -> SamplingParams:
    from dataclasses import replace

    return params if output_len is None else replace(params, max_tokens=output_len)


def _refuse_interrupted(outputs: Sequence[RequestOutput]) -> None:
    if any(one.finish_reason == "abort" for output in outputs for one in output.outputs):
        raise KeyboardInterrupt
