"""Bench of a server: warm-up, loads, runs, and their figures."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hetero_llm.bench_client.client import (
    RequestResult,
    Server,
    count_tokens,
    first_model,
    measure,
    open_session,
)
from hetero_llm.bench_client.datasets import DatasetOptions, load_samples
from hetero_llm.bench_client.errors import ServerError
from hetero_llm.bench_client.load import Load, LoadResult, arrival_times, run_load
from hetero_llm.bench_client.metrics import Metrics, count_request, summarise
from hetero_llm.bench_client.report import Point, Run
from hetero_llm.bench_client.wire_format import Sample, api_of, request_body
from hetero_llm.core.errors import HeteroLLMError

if TYPE_CHECKING:
    import aiohttp

    from hetero_llm.engine.text.tokenizer import Tokenizer

_SHORTEST_SECONDS = 1e-9


# large: one attribute for each choice of a user's.
@dataclass(frozen=True, slots=True)
class ServeBench:
    """Settings of a bench: server, requests and loads.

    Attributes:
        path: the endpoint; `api_of` tells whose API it is.
        backend: name of the server in the report.
        model: None: the first one that the server offers.
        extra: more fields of every request, besides those that the bench needs.
        tokenizer: folder or name; None: count through the server's `/tokenize`, if it has one.
        num_prompts: requests of each run of each load.
        loads: measured one after another.
        reuse_prompts: every run of every load sends the same prompts, which a server's prefix
            cache will know; else each prompt is sent once.
        percentiles: percentiles to compute; must include the 99th.
        goodput: see `summarise`.
    """

    server: Server
    path: str
    backend: str
    model: str | None
    dataset: DatasetOptions
    num_prompts: int
    loads: tuple[Load, ...]
    num_warmups: int = 1
    num_runs: int = 1
    reuse_prompts: bool = False
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    show_progress: bool = False


async def run_bench(bench: ServeBench, report: Callable[[str, Point], None]) -> str:
    """Measures all loads; `report` gets the model's name and each load when it is done.

    Returns:
        The model's name.

    Raises:
        ServerError: the server cannot be reached, or a warm-up request failed.
        ConfigError: the prompts cannot be loaded, or cannot be sent to this endpoint.
    """
    tokenizer = None if bench.tokenizer is None else local_tokenizer(bench.tokenizer)
    samples = _samples(bench, tokenizer or _tokenizer_of_answers(bench))
    async with open_session(bench.server) as session:
        model = bench.model or await first_model(session, bench.server)
        sender = _Sender(bench, session, model, tokenizer)
        bodies = [sender.body(sample) for sample in samples]  # raises before any request is sent
        await sender.warm_up(bodies[: bench.num_warmups])
        begin = bench.num_warmups  # of the run's samples
        for number, load in enumerate(bench.loads):
            runs = []
            for run in range(bench.num_runs):
                chosen = slice(begin, begin + bench.num_prompts)
                seed = f"{bench.dataset.seed}/{number}/{run}"
                runs.append(await sender.run(load, samples[chosen], bodies[chosen], seed))
                begin += 0 if bench.reuse_prompts else bench.num_prompts
            report(model, _point(bench, load, runs))
    return model


def _samples(bench: ServeBench, tokenizer: Tokenizer | None) -> list[Sample]:
    loads = 1 if bench.reuse_prompts else len(bench.loads) * bench.num_runs
    options = bench.dataset
    count = None if tokenizer is None else (lambda text: len(_encoded(tokenizer, text)))
    return load_samples(options, loads * bench.num_prompts, count, warmups=bench.num_warmups)


def _tokenizer_of_answers(bench: ServeBench) -> Tokenizer | None:
    """The tokenizer of the model's name, as vLLM's bench takes it, if the data set has answers
    whose lengths count; None if it needs none or there is none here."""
    options = bench.dataset
    if options.name != "sharegpt" or options.output_len is not None or bench.model is None:
        return None
    try:
        return local_tokenizer(bench.model)
    except HeteroLLMError:
        return None


def local_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a folder or GGUF file, a model in the local cache, or a demo model.

    Raises:
        ModelLoadError: there is no such tokenizer.
    """
    from pathlib import Path

    from hetero_llm.demo_models import ALIASES, alias_path
    from hetero_llm.engine.text.tokenizer import load_tokenizer

    folder = alias_path(name) if name in ALIASES else Path(name)
    return load_tokenizer(folder, mode="auto", trust_remote_code=False)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


class _Sender:
    """Sends the requests to one model of a server and counts the tokens of the answers."""

    def __init__(
        self,
        bench: ServeBench,
        session: aiohttp.ClientSession,
        model: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._bench = bench
        self._session = session
        self._model = model
        self._tokenizer = tokenizer
        self._server_counts = tokenizer is None

    def body(self, sample: Sample) -> dict[str, Any]:
        bench = self._bench
        return request_body(
            sample,
            api=api_of(bench.path),
            model=self._model,
            stream=bench.stream,
            extra=bench.extra,
        )

    async def send(self, body: Mapping[str, Any], arrival: float) -> RequestResult:
        bench = self._bench
        return await measure(
            self._session,
            bench.server,
            bench.path,
            body,
            clock=time.perf_counter,
            arrival=arrival,
        )

    async def warm_up(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Sends all warm-up requests at once; raises `ServerError` if one fails."""
        now = time.perf_counter()
        for result in await asyncio.gather(*(self.send(body, now) for body in bodies)):
            if result.error is not None:
                raise ServerError(f"warm-up request failed: {result.error}")

    async def run(
        self,
        load: Load,
        samples: Sequence[Sample],
        bodies: Sequence[Mapping[str, Any]],
        seed: str,
    ) -> Run:
        with _progress(len(bodies), self._bench.show_progress) as progress:
            outcome = await run_load(
                bodies,
                self.send,
                arrivals=arrival_times(len(bodies), load, random.Random(seed)),
                max_concurrency=load.max_concurrency,
                finished=lambda result: progress.update(),
            )
        return await self._counted(outcome, samples)

    async def _counted(self, outcome: LoadResult, samples: Sequence[Sample]) -> Run:
        """Computes the figures. Texts are tokenized here, after the timed part."""
        results = outcome.results
        retokenized = await self._retokenize([r.text if r.ok else "" for r in results])
        counts = [
            count_request(
                result,
                prompt_tokens=self._prompt_tokens(sample, result),
                retokenized=None if retokenized is None else retokenized[index],
            )
            for index, (sample, result) in enumerate(zip(samples, results, strict=True))
        ]
        metrics = summarise(
            results,
            counts,
            duration=max(outcome.duration, _SHORTEST_SECONDS),
            retokenized=None if retokenized is None else sum(retokenized),
            percentiles=self._bench.percentiles,
            goodput=self._bench.goodput,
        )
        return Run(metrics, results, counts, outcome.health)

    async def _retokenize(self, texts: list[str]) -> list[int] | None:
        if self._tokenizer is not None:
            return [len(_encoded(self._tokenizer, text)) for text in texts]
        if not self._server_counts:
            return None
        bench = self._bench
        counts = await count_tokens(self._session, bench.server, self._model, texts)
        self._server_counts = counts is not None
        return counts

    def _prompt_tokens(self, sample: Sample, result: RequestResult) -> int | None:
        if result.usage is not None or sample.prompt is None:
            return None
        if not isinstance(sample.prompt, str):
            return len(sample.prompt)
        return None if self._tokenizer is None else len(self._tokenizer.encode(sample.prompt))


def _point(bench: ServeBench, load: Load, runs: Sequence[Run]) -> Point:
    return Point(
        backend=bench.backend,
        rate=load.rate,
        max_concurrency=load.max_concurrency,
        pooled=pooled(runs, bench.percentiles, bench.goodput),
        runs=tuple(runs),
    )


def pooled(
    runs: Sequence[Run],
    percentiles: Sequence[float],
    goodput: Mapping[str, float] = MappingProxyType({}),
) -> Metrics:
    """Figures of the requests of all runs, as of one run with the sum of their durations."""
    if len(runs) == 1:
        return runs[0].metrics
    known = [run.metrics.retokenized for run in runs]
    return replace(
        summarise(
            [result for run in runs for result in run.results],
            [count for run in runs for count in run.counts],
            duration=sum(run.metrics.duration for run in runs),
            retokenized=None,
            percentiles=percentiles,
            goodput=goodput,
        ),
        retokenized=None if None in known else sum(count or 0 for count in known),
    )


def _progress(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not shown, file=sys.stderr, unit="req", leave=False)
