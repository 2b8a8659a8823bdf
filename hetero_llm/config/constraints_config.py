"""How the engine treats constraints of outputs, as the arguments say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.config.args_spec import one_of
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.reasoning_formats import OFF, REASONING_PARSER_NAMES
from hetero_llm.core.structured_outputs import BACKENDS

_NAME = "structured_outputs_config"
_SWITCHES = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "enable_in_reasoning",
)
_KEYS = ("backend", *_SWITCHES, "reasoning_parser")


@dataclass(frozen=True, slots=True)
class ConstraintsConfig:
    """What holds for the constraints of all requests.

    Attributes:
        disable_any_whitespace: JSON has no whitespace between its parts, unless the request has a
            pattern for it.
        disable_additional_properties: as in every request's `StructuredOutputsParams`.
        reasoning_parser: the name of the model's format of reasoning, behind which constraints
            begin; "none": there is none. None: not given.
        enable_in_reasoning: constraints begin at once all the same.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str | None = None
    enable_in_reasoning: bool = False


def constraints_from_args(args: Mapping[str, Any]) -> ConstraintsConfig:
    """Reads `structured_outputs_config`, `guided_decoding_*` and `reasoning_parser`.

    Raises:
        ConfigError: a key of the mapping is wrong, or contradicts an argument.
    """
    given = _checked(args[_NAME] or {})
    for key, argument in (
        ("backend", "guided_decoding_backend"),
        ("reasoning_parser", "reasoning_parser"),
    ):
        value, other = given.get(key), args[argument]
        if value is not None and other is not None and value != other:
            raise ConfigError(f"{_NAME}.{key}", value, f"contradicts {argument}={other!r}")

    def switch(key: str, argument: str) -> bool:
        return bool(given.get(key)) or bool(args[argument])

    return ConstraintsConfig(
        switch("disable_any_whitespace", "guided_decoding_disable_any_whitespace"),
        switch("disable_additional_properties", "guided_decoding_disable_additional_properties"),
        given.get("reasoning_parser") or args["reasoning_parser"],
        bool(given.get("enable_in_reasoning")),
    )


def _checked(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the mapping that say something."""
    given = {name: value for name, value in mapping.items() if value not in (None, "")}
    if "reasoning_parser_plugin" in given:
        value = given["reasoning_parser_plugin"]
        reason = "a parser of reasoning of your own is not available yet"
        raise ConfigError(f"{_NAME}.reasoning_parser_plugin", value, reason)
    for name in mapping:
        if name not in (*_KEYS, "reasoning_parser_plugin"):
            raise ConfigError(_NAME, name, f"is no key of it; use {one_of(_KEYS)}")
    for name in _SWITCHES:
        if not isinstance(given.get(name, True), bool):
            raise ConfigError(f"{_NAME}.{name}", given[name], "must be true or false")
    for name, known in (
        ("backend", BACKENDS),
        ("reasoning_parser", (OFF, *REASONING_PARSER_NAMES)),
    ):
        if name in given and given[name] not in known:
            raise ConfigError(f"{_NAME}.{name}", given[name], f"must be {one_of(known)}")
    return given
