"""Whether a model generates or pools, and how it pools, as the arguments say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.config.args_spec import one_of
from hetero_llm.core.errors import ConfigError

_OF_TASK = {
    "generate": ("generate", ""),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", ""),
}
"""Runner and conversion that a task asks for."""
_TYPES = ("CLS", "MEAN", "LAST")
_KEYS = ("pooling_type", "seq_pooling_type", "normalize", "use_activation", "dimensions")


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """What the arguments say about pooling.

    Attributes:
        runner: "generate" or "pooling"; "": as the model's files say.
        convert: "embed" or "classify": what a pooling model returns; "": as its files say.
        pooling_type: "CLS", "MEAN" or "LAST"; "": as the model's files say.
        normalize, use_activation: defaults of requests; None: as the model's files say.
        dimensions: length of embeddings for requests that do not ask for one; 0: the model's.
    """

    runner: str = ""
    convert: str = ""
    pooling_type: str = ""
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int = 0


def pooling_from_args(args: Mapping[str, Any]) -> PoolingConfig:
    """Reads `task`, `runner`, `convert` and `pooler_config`.

    Raises:
        ConfigError: they contradict each other, or a key of `pooler_config` is wrong.
    """
    task = args["task"]
    runner, convert = ("", "") if task == "auto" else _OF_TASK[task]
    for name, known in (("runner", runner), ("convert", convert)):
        value = args[name]
        if value not in ("auto", "none") and known and value != known:
            raise ConfigError(name, value, f"contradicts task={task!r}")
    if args["runner"] != "auto":
        runner = args["runner"]
    if args["convert"] not in ("auto", "none"):
        convert = args["convert"]
    if convert and runner == "generate":
        raise ConfigError("convert", convert, "contradicts runner='generate'")
    return _with_pooler(runner or ("pooling" if convert else ""), convert, args["pooler_config"])


def _with_pooler(runner: str, convert: str, pooler: Mapping[str, Any] | None) -> PoolingConfig:
    given = {name: value for name, value in (pooler or {}).items() if value is not None}
    for name in given:
        if name not in _KEYS:
            raise ConfigError("pooler_config", name, f"is no key of it; use {one_of(_KEYS)}")
    for name in ("normalize", "use_activation"):
        if not isinstance(given.get(name, True), bool):
            raise ConfigError(f"pooler_config.{name}", given[name], "must be true or false")
    dimensions = given.get("dimensions", 0)
    if type(dimensions) is not int or dimensions < 0:
        raise ConfigError("pooler_config.dimensions", dimensions, "must be a positive integer")
    kind = given.get("seq_pooling_type", given.get("pooling_type", ""))
    if kind and str(kind).upper() not in _TYPES:
        raise ConfigError("pooler_config.pooling_type", kind, f"must be {one_of(_TYPES)}")
    return PoolingConfig(
        runner,
        convert,
        str(kind).upper(),
        given.get("normalize"),
        given.get("use_activation"),
        dimensions,
    )
