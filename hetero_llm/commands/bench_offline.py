"""`hetero-llm bench throughput` and `bench latency`: measure an engine in this process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_llm.commands.console import DEMO_MODEL, Finish, llm_class, note_neighbours
from hetero_llm.commands.dataset_flags import DATASET_FLAGS, dataset_of
from hetero_llm.commands.options import add_model_word, add_rows, chosen_model, values_of
from hetero_llm.config.args import add_engine_arguments, engine_args_from_namespace
from hetero_llm.config.args_spec import ArgSpec, Kind, effective, grouped
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.utils.files import as_config_errors

_REQUEST_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Requests",
    effective("n", Kind.INT, 1, "Samples of each prompt.", minimum=1),
    effective("temperature", Kind.FLOAT, 0.0, "Temperature.", minimum=0),
    effective(
        "ignore_eos",
        Kind.BOOL,
        True,
        "Generate the whole length: ignore end of sequence.",
    ),
    effective("output_json", Kind.PATH, None, "File for the figures."),
)

_BACKEND_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Engine of the bench",
    effective(
        "backend", Kind.STR, "hetero_llm", "This engine alone, by either name.",
        choices=("hetero_llm", "vllm"),
    ),
)  # fmt: skip

_LATENCY_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Batch",
    effective("input_len", Kind.INT, 32, "Tokens of each prompt, drawn at random.", minimum=1),
    effective("output_len", Kind.INT, 128, "Tokens to generate for each prompt.", minimum=1),
    effective("batch_size", Kind.INT, 8, "Prompts at a time.", minimum=1),
    effective("num_iters_warmup", Kind.INT, 3, "Batches that are not measured.", minimum=0),
    effective("num_iters", Kind.INT, 10, "Batches that are measured.", minimum=1),
    effective("random_vocab_size", Kind.INT, 2000, "Token ids are below this.", minimum=2),
)


def add_throughput(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `bench throughput`."""
    _add_flags(parser, (*DATASET_FLAGS, *_REQUEST_FLAGS, *_BACKEND_FLAGS))
    finish(parser, run_throughput)


def add_latency(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `bench latency`."""
    _add_flags(parser, (*_LATENCY_FLAGS, *_REQUEST_FLAGS))
    finish(parser, run_latency)


def run_throughput(options: argparse.Namespace) -> int:
    """Prints requests/s and tokens/s of one call of `generate`."""
    from hetero_llm.bench_client import offline
    from hetero_llm.bench_client.datasets import load_samples

    values = values_of((*DATASET_FLAGS, *_REQUEST_FLAGS, *_BACKEND_FLAGS), options)
    engine_args = _engine_args(options)
    dataset = dataset_of(values, chat=False, seed=engine_args.get("seed", 0))
    params = _params(values)
    note_neighbours()
    with llm_class()(**engine_args) as llm:
        samples = load_samples(dataset, values["num_prompts"], _counter(llm))
        figures = offline.run_throughput(llm, samples, params=params, use_tqdm=sys.stderr.isatty())
    _report(figures, values)
    return 0


def run_latency(options: argparse.Namespace) -> int:
    """Prints the duration of one batch: mean and percentiles."""
    from hetero_llm.bench_client import offline
    from hetero_llm.bench_client.datasets import DatasetOptions

    values = values_of((*_LATENCY_FLAGS, *_REQUEST_FLAGS), options)
    engine_args = _engine_args(options)
    dataset = DatasetOptions(
        input_len=values["input_len"],
        output_len=values["output_len"],
        vocab_size=values["random_vocab_size"],
        seed=engine_args.get("seed", 0),
    )
    params = _params(values)
    note_neighbours()
    with llm_class()(**engine_args) as llm:
        figures = offline.run_latency(
            llm,
            dataset,
            batch_size=values["batch_size"],
            params=params,
            num_warmups=values["num_iters_warmup"],
            num_iters=values["num_iters"],
        )
    _report(figures, values)
    return 0


def _add_flags(parser: argparse.ArgumentParser, rows: Sequence[ArgSpec]) -> None:
    add_model_word(parser, f"folder or Hugging Face name of the model (default: {DEMO_MODEL})")
    add_rows(parser, rows)
    add_engine_arguments(parser)
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.epilog = "--seed is the engine's seed and draws the prompts, too."


def _engine_args(options: argparse.Namespace) -> dict[str, Any]:
    given = engine_args_from_namespace(options)
    return {**given, "model": chosen_model(options) or DEMO_MODEL}


def _counter(llm: Any) -> Callable[[str], int] | None:
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _params(values: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        n=values["n"],
        temperature=values["temperature"],
        ignore_eos=values["ignore_eos"],
        max_tokens=None,
    )


def _report(figures: Any, values: Mapping[str, Any]) -> None:
    print(figures.as_text(), end="", flush=True)
    path = values["output_json"]
    if path is None:
        return
    with as_config_errors("output_json", path):
        Path(path).write_text(json.dumps(figures.as_json(), indent=1) + "\n", encoding="utf-8")
