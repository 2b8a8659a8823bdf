"""Flags of the benches that choose their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
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
        None,
        "random: drawn from --seed; prefix_repetition: random with some shared beginnings; "
        "sharegpt and jsonl (vLLM's custom): a file; heldout: the package's Python files that the "
        "demo models have not seen (default: by the ending of --dataset-path, else random).",
        choices=("random", "prefix_repetition", "sharegpt", "jsonl", "custom", "heldout"),
    ),
    effective(
        "dataset_path",
        Kind.PATH,
        None,
        'File for sharegpt (its JSON) or jsonl (lines like {"prompt": "...", "output_len": 64}, or '
        "output_tokens).",
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
        aliases=(
            "random_output_len",
            "sharegpt_output_len",
            "custom_output_len",
            "prefix_repetition_output_len",
        ),  # fmt: skip
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
    effective(
        "prefix_repetition_prefix_len",
        Kind.INT,
        256,
        "Tokens of each shared beginning.",
        minimum=1,
    ),
    effective(
        "prefix_repetition_suffix_len",
        Kind.INT,
        256,
        "Tokens behind a shared beginning.",
        minimum=1,
    ),
    effective(
        "prefix_repetition_num_prefixes",
        Kind.INT,
        10,
        "Shared beginnings; prompts take them in turns.",
        minimum=1,
    ),
    effective(
        "custom_skip_chat_template",
        Kind.BOOL,
        True,
        "Send a file's prompts as they are. The other way is a chat endpoint (--backend "
        "openai-chat), whose server has the template.",
    ),
)
_BY_ENDING = {".jsonl": "jsonl", ".json": "sharegpt"}


def dataset_of(values: Mapping[str, Any], *, chat: bool, seed: int) -> DatasetOptions:
    """The data set that the values of `DATASET_FLAGS` name. `chat`: the prompts go to a chat
    endpoint, so they are text by default.

    Raises:
        ConfigError: the values contradict each other.
    """
    from hetero_llm.bench_client.datasets import DatasetOptions

    path = values["dataset_path"]
    given = values["dataset_name"] or _BY_ENDING.get(PurePath(path or "").suffix.lower())
    if given is None and path is not None:
        reason = "--dataset-name says what it is: sharegpt or jsonl"
        raise ConfigError("dataset_path", path, reason)
    name: str = "jsonl" if given == "custom" else given or "random"
    if path is not None and name not in ("sharegpt", "jsonl"):
        raise ConfigError("dataset_path", path, f"{name} prompts are no file")
    if not values["custom_skip_chat_template"]:
        reason = "a server's chat endpoint has the template: --backend openai-chat"
        raise ConfigError("custom_skip_chat_template", False, reason)
    repeats = name == "prefix_repetition"
    return DatasetOptions(
        name=name,
        path=path,
        prompt_as=values["prompt_as"] or ("text" if chat else "ids"),
        input_len=values["prefix_repetition_suffix_len" if repeats else "input_len"],
        output_len=values["output_len"],
        range_ratio=values["random_range_ratio"],
        prefix_len=values["prefix_repetition_prefix_len" if repeats else "random_prefix_len"],
        num_prefixes=values["prefix_repetition_num_prefixes"] if repeats else 1,
        vocab_size=values["random_vocab_size"],
        seed=seed,
    )
