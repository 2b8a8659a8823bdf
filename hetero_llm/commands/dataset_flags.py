"""Flags of the benches that choose their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetero_llm.config.args_spec import ArgSpec, Kind, effective, grouped
from hetero_llm.core.errors import ConfigError

if TYPE_CHECKING:
    from hetero_llm.bench_client.datasets import DatasetOptions

DATASET_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Prompts",
    effective(
        "dataset_name",
        Kind.STR,
        "random",
        "random: drawn from --seed; sharegpt and jsonl: a file; heldout: the package's Python "
        "files that the demo models have not seen.",
        choices=("random", "sharegpt", "jsonl", "heldout"),
    ),
    effective(
        "dataset_path",
        Kind.PATH,
        None,
        'File for sharegpt (its JSON) or jsonl (lines like {"prompt": "...", "output_len": 64}).',
    ),
    effective("num_prompts", Kind.INT, 100, "Requests of each run.", minimum=1),
    effective(
        "prompt_as",
        Kind.STR,
        None,
        "How random and held-out prompts are sent (default: ids; text to chat endpoints). Random "
        "text is counted in words.",
        choices=("ids", "text"),
    ),
    effective(
        "input_len",
        Kind.INT,
        1024,
        "Length of random and held-out prompts in tokens.",
        minimum=1,
        aliases=("random_input_len",),
    ),
    effective(
        "output_len",
        Kind.INT,
        None,
        "Tokens to generate (default: what a file says, else 128).",
        minimum=1,
        aliases=("random_output_len", "sharegpt_output_len"),
    ),
    effective(
        "random_range_ratio",
        Kind.FLOAT,
        0.0,
        "r: random lengths lie evenly between (1 - r) and (1 + r) times the given ones.",
        minimum=0,
        maximum=1,
    ),
    effective(
        "random_prefix_len",
        Kind.INT,
        0,
        "Tokens that all random prompts begin with, on top of their length.",
        minimum=0,
    ),
    effective(
        "random_vocab_size",
        Kind.INT,
        2000,
        "Random token ids are below this.",
        minimum=2,
    ),
)


def dataset_of(values: Mapping[str, Any], *, chat: bool, seed: int) -> DatasetOptions:
    """The data set that the values of `DATASET_FLAGS` name. `chat`: the prompts go to a chat
    endpoint, so they are text by default."""
    from hetero_llm.bench_client.datasets import DatasetOptions

    name = values["dataset_name"]
    in_file = name in ("sharegpt", "jsonl")
    if values["dataset_path"] is not None and not in_file:
        raise ConfigError("dataset_path", values["dataset_path"], f"{name} prompts are no file")
    return DatasetOptions(
        name=name,
        path=values["dataset_path"],
        prompt_as=values["prompt_as"] or ("text" if chat else "ids"),
        input_len=values["input_len"],
        output_len=values["output_len"],
        range_ratio=values["random_range_ratio"],
        prefix_len=values["random_prefix_len"],
        vocab_size=values["random_vocab_size"],
        seed=seed,
    )
