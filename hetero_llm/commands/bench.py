"""`hetero-llm bench serve`: measures a server under load. The offline benches are in
`bench_offline`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.commands.console import Finish, add_command, note_neighbours
from hetero_llm.commands.dataset_flags import DATASET_FLAGS, dataset_of
from hetero_llm.commands.options import (
    SERVER_FLAGS,
    add_model_word,
    add_rows,
    chosen_model,
    numbers,
    server_of,
    values_of,
)
from hetero_llm.config.args_spec import ArgSpec, Kind, effective, grouped
from hetero_llm.core.errors import ConfigError, HeteroLLMError
from hetero_llm.utils.files import as_config_errors

if TYPE_CHECKING:
    from hetero_llm.bench_client.load import Load
    from hetero_llm.bench_client.report import Point
    from hetero_llm.bench_client.serve import ServeBench

COMPLETION_BACKENDS = ("openai", "vllm", "taco_llm", "hetero_llm")
CHAT_BACKENDS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
"""Kinds of endpoints that take conversations, and their usual paths."""
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
FEWEST_RUNS = 3
EXIT_FAILED_REQUESTS = 1
_P99 = 99.0

_SAMPLING_FIELDS = {
    "top_p": Kind.FLOAT, "top_k": Kind.INT, "min_p": Kind.FLOAT, "frequency_penalty": Kind.FLOAT,
    "presence_penalty": Kind.FLOAT, "repetition_penalty": Kind.FLOAT,
}  # fmt: skip

_LOAD_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Load",
    effective(
        "request_rate",
        Kind.STR,
        "inf",
        "Requests a second; inf sends them as fast as --max-concurrency lets. A list such as 1,2,4 "
        "measures one after another.",
    ),
    effective(
        "burstiness",
        Kind.FLOAT,
        1.0,
        "Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is burstier.",
        above=0,
    ),
    effective(
        "max_concurrency",
        Kind.STR,
        None,
        "Most requests at a time; more wait in the client. A list measures one after another.",
    ),
    effective("num_warmups", Kind.INT, 1, "Requests sent beforehand, not measured.", minimum=0),
    effective(
        "runs",
        Kind.INT,
        1,
        f"Runs of each load; from {FEWEST_RUNS} on, confidence intervals are given.",
        minimum=1,
    ),
    effective(
        "reuse_prompts",
        Kind.BOOL,
        False,
        "Send the same prompts in every run; a server's prefix cache will know them.",
    ),
    effective("seed", Kind.INT, 0, "Seed of prompts and arrival times."),
)

_REQUEST_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Requests",
    effective("backend", Kind.STR, "openai", "Kind of endpoint, and its name in the report.",
              choices=(*COMPLETION_BACKENDS, *CHAT_BACKENDS)),
    effective("endpoint", Kind.STR, None,
              "Path of the endpoint; its end says which API it speaks (default: the backend's: "
              "/v1/completions, /v1/chat/completions, /v1/responses or /v1/messages)."),
    effective("model", Kind.STR, None, "Model to ask for (default: the first that is offered)."),
    effective("tokenizer", Kind.STR, None,
              "Tokenizer that counts tokens, a folder or name (default: the server's /tokenize)."),
    effective("ignore_eos", Kind.BOOL, False, "Generate the whole length: ignore end of sequence."),
    effective("stream", Kind.BOOL, True, "Stream; without it only end-to-end times mean much."),
    effective("temperature", Kind.FLOAT, None, "Temperature (default: the server's).", minimum=0),
    *(effective(name, kind, None, f"The field {name} of every request (default: the server's).")
      for name, kind in _SAMPLING_FIELDS.items()),
    effective("header", Kind.LIST, None, "KEY=VALUE: a header of every request; several may "
              "follow, and the flag is repeatable.", many_words=True),
    effective("extra_body", Kind.JSON, None, "More fields of every request, as a JSON object."),
)  # fmt: skip

_RESULT_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Results",
    effective("percentile_metrics", Kind.STR, "ttft,tpot,itl",
              f"Metrics to show percentiles of: any of {', '.join(METRIC_NAMES)}."),
    effective("metric_percentiles", Kind.STR, "99", "Percentiles to show, with commas between."),
    effective("goodput", Kind.LIST, None, "METRIC:MILLISECONDS of ttft, tpot and e2el: count the "
              "answers a second within all of them; several may follow.", many_words=True),
    effective("save_result", Kind.BOOL, False, "Write JSON, CSV and PNG files."),
    effective("save_detailed", Kind.BOOL, False, "Also put every request into the JSON file."),
    effective("result_dir", Kind.PATH, ".", "Folder of the files; made if it is not there."),
    effective("result_filename", Kind.STR, None,
              "Name of the JSON file; the others are called alike (default: made from the load)."),
    effective("label", Kind.STR, None, "Name of the bench in files (default: the backend)."),
    effective("metadata", Kind.LIST, None, "KEY=VALUE to be kept with the results; several may "
              "follow, and the flag is repeatable.", many_words=True),
    effective("disable_tqdm", Kind.BOOL, False, "Show no progress bar."),
)  # fmt: skip

SERVE_ROWS = (*SERVER_FLAGS, *_REQUEST_FLAGS, *DATASET_FLAGS, *_LOAD_FLAGS, *_RESULT_FLAGS)


def add_bench(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Adds the three commands of `bench`; `finish` sets the function that runs one."""
    from hetero_llm.commands import bench_offline

    kinds = parser.add_subparsers(title="benches", metavar="BENCH", required=True)
    for name, add, text in (
        ("serve", _add_serve, "measure a running server over HTTP"),
        ("throughput", bench_offline.add_throughput, "measure this process on many prompts"),
        ("latency", bench_offline.add_latency, "measure this process on one batch, repeatedly"),
    ):
        add(add_command(kinds, name, text), finish)


def _add_serve(parser: argparse.ArgumentParser, finish: Finish) -> None:
    add_model_word(parser, "name of the model to ask for")
    add_rows(parser, SERVE_ROWS)
    parser.usage = "%(prog)s [MODEL] [--base-url URL] [options]"
    finish(parser, run_serve)


@dataclass(frozen=True, slots=True)
class _Output:
    """Which figures of a bench are shown and written, and where."""

    percentile_metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    label: str
    metadata: Mapping[str, str]
    save: bool
    detailed: bool
    folder: Path
    filename: str | None


def run_serve(options: argparse.Namespace) -> int:
    """Measures a server. Returns the exit code: 1 if any request failed."""
    from hetero_llm.bench_client.serve import run_bench

    values = values_of(SERVE_ROWS, options) | {"model": chosen_model(options)}
    output = _output_of(values)
    bench = _bench_of(values, output)
    if output.save:
        _make_folder(output.folder)
    points: list[Point] = []
    note_neighbours()

    def report(model: str, point: Point) -> None:
        points.append(point)
        _show(point, output)

    model = asyncio.run(run_bench(bench, report))
    if output.save:
        _save(output, points, _about(values, bench, model, output), model)
    return EXIT_FAILED_REQUESTS if any(point.pooled.failed for point in points) else 0


def _bench_of(values: Mapping[str, Any], output: _Output) -> ServeBench:
    from hetero_llm.bench_client.serve import ServeBench
    from hetero_llm.bench_client.wire_format import COMPLETIONS, api_of

    path = values["endpoint"] or CHAT_BACKENDS.get(values["backend"], COMPLETIONS)
    if not path.startswith("/"):
        raise ConfigError("endpoint", path, "must start with a slash")
    extra: dict[str, Any] = {}
    if values["ignore_eos"]:
        extra["ignore_eos"] = True
    for name in ("temperature", *_SAMPLING_FIELDS):
        if values[name] is not None:
            extra[name] = values[name]
    headers = _pairs("header", values["header"] or ())
    return ServeBench(
        server=replace(server_of(dict(values)), headers=headers),
        path=path,
        backend=values["backend"],
        model=values["model"],
        dataset=dataset_of(values, chat=api_of(path).takes_conversations, seed=values["seed"]),
        num_prompts=values["num_prompts"],
        loads=_loads(values),
        num_warmups=values["num_warmups"],
        num_runs=values["runs"],
        reuse_prompts=values["reuse_prompts"],
        stream=values["stream"],
        extra=extra | (values["extra_body"] or {}),
        tokenizer=values["tokenizer"],
        percentiles=tuple(sorted({*output.percentiles, _P99})),
        goodput=_goodput(values["goodput"] or ()),
        show_progress=sys.stderr.isatty() and not values["disable_tqdm"],
    )


def _loads(values: Mapping[str, Any]) -> tuple[Load, ...]:
    from hetero_llm.bench_client.load import Load

    if 1 < values["runs"] < FEWEST_RUNS:
        reason = f"must be 1, or at least {FEWEST_RUNS} for a confidence interval"
        raise ConfigError("runs", values["runs"], reason)
    rates = numbers("request_rate", values["request_rate"], least=0)
    text = values["max_concurrency"]
    limits: tuple[int | None, ...] = (None,)
    if text is not None:
        limits = tuple(map(int, numbers("max_concurrency", text, least=0, whole=True)))
    if len(rates) > 1 and len(limits) > 1:
        raise ConfigError("max_concurrency", text, "is a list, so --request-rate cannot be one")
    return tuple(Load(rate, values["burstiness"], limit) for rate in rates for limit in limits)


def _output_of(values: Mapping[str, Any]) -> _Output:
    chosen = tuple(filter(None, values["percentile_metrics"].split(",")))
    for name in chosen:
        if name not in METRIC_NAMES:
            reason = f"{name!r} is none of {', '.join(METRIC_NAMES)}"
            raise ConfigError("percentile_metrics", values["percentile_metrics"], reason)
    text = values["metric_percentiles"]
    percentiles = numbers("metric_percentiles", text, least=0)
    if max(percentiles) > 100:
        raise ConfigError("metric_percentiles", text, "must be at most 100")
    if values["save_detailed"] and not values["save_result"]:
        raise ConfigError("save_detailed", True, "needs --save-result")
    return _Output(
        percentile_metrics=chosen,
        percentiles=percentiles,
        label=values["label"] or values["backend"],
        metadata=_pairs("metadata", values["metadata"] or ()),
        save=values["save_result"],
        detailed=values["save_detailed"],
        folder=Path(values["result_dir"]),
        filename=values["result_filename"],
    )


def _pairs(field: str, words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(field, word, "must be KEY=VALUE")
        found[key] = value
    return found


def _goodput(words: Sequence[str]) -> dict[str, float]:
    """The most milliseconds by metric."""
    found = {}
    for word in words:
        name, _, text = word.partition(":")
        if name not in GOODPUT_NAMES:
            reason = f"must be METRIC:MILLISECONDS, with one of {', '.join(GOODPUT_NAMES)}"
            raise ConfigError("goodput", word, reason)
        (found[name],) = numbers("goodput", text, least=0)
    return found


def _show(point: Point, output: _Output) -> None:
    from hetero_llm.bench_client import report
    from hetero_llm.bench_client.load import saturation_warning

    text = report.result_block(
        point.backend,
        point.rate,
        point.pooled,
        percentile_metrics=output.percentile_metrics,
        percentiles=output.percentiles,
    )
    worst = max((run.health for run in point.runs), key=lambda health: health.lag_p99)
    text += report.remarks(point.pooled, worst, max_concurrency=point.max_concurrency)
    if len(point.runs) > 1:
        runs = [run.metrics for run in point.runs]
        text += report.confidence_table(runs, output.percentiles)
    print(text, flush=True)
    for warning in {saturation_warning(run.health) for run in point.runs} - {None}:
        print(f"warning: {warning}", file=sys.stderr)


def _about(
    values: Mapping[str, Any], bench: ServeBench, model: str, output: _Output
) -> dict[str, Any]:
    """Description of the bench, written into the JSON before its figures; without the API key."""
    return {
        **output.metadata,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": values["backend"],
        "backend": values["backend"],
        "label": output.label,
        "model_id": model,
        "tokenizer_id": bench.tokenizer or model,
        "num_prompts": bench.num_prompts,
        "burstiness": values["burstiness"],
        "dataset_name": bench.dataset.name,
        "seed": values["seed"],
    }


def _make_folder(folder: Path) -> None:
    """Creates the folder before the bench runs, so that an error shows at once."""
    with as_config_errors("result_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)


def _save(output: _Output, points: list[Point], about: dict[str, Any], model: str) -> None:
    from hetero_llm.bench_client import plots, report

    name = output.filename or _file_name(output.label, points, model, about["date"])
    path = output.folder / name
    title = f"{model}, {about['dataset_name']} prompts"
    answers = [report.as_json(point, about=about, detailed=output.detailed) for point in points]
    rows = [report.csv_row(path.stem, point, output.metadata) for point in points]
    with as_config_errors("result_dir", path):
        report.write_json(path, answers)
        report.write_csv(path.with_suffix(".csv"), rows)
        print(f"written: {path}, {path.with_suffix('.csv')}")
        try:
            plots.write_plot(path.with_suffix(".png"), points, title)
            print(f"written: {path.with_suffix('.png')}")
        except HeteroLLMError as error:
            print(f"no picture: {error}", file=sys.stderr)


def _file_name(label: str, points: Sequence[Point], model: str, date: str) -> str:
    """Name of the JSON file: vLLM's for one load, a similar one for several."""
    rates = {f"{point.rate:g}" for point in points}
    limits = {point.max_concurrency for point in points}
    rate = rates.pop() if len(rates) == 1 else "several"
    limit = limits.pop() if len(limits) == 1 else "several"
    part = "" if limit is None else f"-concurrency{limit}"
    return f"{label}-{rate}qps{part}-{model.rstrip('/').rpartition('/')[2]}-{date}.json"
