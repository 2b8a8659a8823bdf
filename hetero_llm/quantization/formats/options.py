"""Values of a quantization config. Errors name the key, its value and what is supported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Config = Mapping[str, Any]


def refused(key: str, value: object, supported: Iterable[object] | str) -> ValueError:
    """The error of an option that is not supported."""
    if not isinstance(supported, str):
        supported = " or ".join(repr(one) for one in supported)
    return ValueError(f"{key}={value!r} is not supported, {supported} is")


def first_of(config: Config, keys: Iterable[str], default: Any = None) -> Any:
    """The value of the first key that is there and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def choice(config: Config, key: str, supported: Iterable[Any], default: Any = None) -> Any:
    """The value of a key, which must be one of several; `default` where it is missing or null.

    Raises:
        ValueError: it is none of them.
    """
    value = config.get(key)
    if value is None:
        value = default
    supported = tuple(supported)
    # True == 1 in Python, but a flag is no number of bits.
    if not any(type(value) is type(one) and value == one for one in supported):
        raise refused(key, value, supported)
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    """A boolean; `default` where it is missing or null.

    Raises:
        ValueError: it is something else.
    """
    return bool(choice(config, key, (False, True), default))


def group_of(key: str, value: object) -> int:
    """Columns of a group, -1 for all columns.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or (value != -1 and value < 1):
        raise refused(key, value, "a number of columns, or -1 for all,")
    return value


def names(config: Config, key: str) -> tuple[str, ...]:
    """A list of strings; empty where it is missing or null.

    Raises:
        ValueError: it is something else.
    """
    value = config.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise refused(key, value, "a list of names of modules")
    return tuple(value)


def table(config: Config, key: str) -> dict[str, Any]:
    """An object; empty where it is missing or null.

    Raises:
        ValueError: it is something else.
    """
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise refused(key, value, "an object")
    return dict(value)


def pattern(key: str, text: str) -> re.Pattern[str]:
    """A regular expression.

    Raises:
        ValueError: it is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{key}: {text!r} is no regular expression: {error}") from error
