"""`ArgSpec`: one argument of the table, and how its value is checked.

`args_table.py`, `args_features.py` and `args_server.py` hold the table; other packages import
`args.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any, NoReturn

from hetero_llm.core.errors import ConfigError


class Status(Enum):
    """How a value given by the user is treated."""

    EFFECTIVE = "effective"
    """Checked, then used."""
    OBSOLETE = "obsolete"
    """Any value is accepted with one notice line: nothing here needs it."""
    NOT_YET = "not yet"
    """The default is accepted; any other value is an error that names the missing feature."""


class Scope(Enum):
    """Which part of the program takes the argument."""

    ENGINE = "engine"
    """`LLM(...)` and every command that runs a model."""
    SERVE = "serve"
    """The HTTP server alone."""


class Kind(Enum):
    """The type of an argument's value."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STR = "str"
    PATH = "path"
    """A string or an `os.PathLike`; becomes a string."""
    DTYPE = "dtype"
    """A name, or a `torch.dtype`; becomes the name."""
    JSON = "json"
    """A mapping; a JSON object on the command line."""
    LIST = "list"
    """A string or a sequence of strings; becomes a tuple. Repeatable on the command line."""
    COUNTS = "counts"
    """A mapping of names to counts, or text such as `image=2,video=0`; becomes the mapping."""
    AUTO_FLOAT = "auto or float"
    """The word 'auto', or a number; becomes the word or a float."""
    AUTO_INT = "auto or int"
    """The word 'auto', or -1 for it, or an integer; becomes the word or an integer."""
    PYTHON = "python"
    """A Python object; has no flag."""


# large: one field for each property that an argument may have
@dataclass(frozen=True, slots=True)
class ArgSpec:
    """One argument of the engine or of the server.

    Attributes:
        name: Python name; the flag is `--` + name with hyphens.
        default: Value when the argument is not given. None is accepted as a value only where it
            is the default.
        help: One or two lines for `--help` and docs/flags.md.
        choices: The values accepted; empty for any.
        later_choices: Values of TACO-LLM or vLLM that a later version will accept.
        above: Exclusive lower bound; `minimum` and `maximum` are inclusive.
        feature: NOT_YET only: what is missing, as the subject of "... is not available yet".
        harmless: Values besides the default that mean the same as the default.
        reason: OBSOLETE only: why nothing needs the argument.
        aliases: Other Python names, as TACO-LLM, vLLM or their relatives spell them.
        short: Short flags, such as `-tp`.
        optional_value: BOOL only: the flag may be followed by `true` or `false`.
        many_words: LIST only: several words may follow the flag.
        suffixes: INT and AUTO_INT only: text may end in k, m, g, t (powers of 1000) or K, M, G, T
            (of 1024).
        group: Heading in `--help` and in the documentation.
    """

    name: str
    kind: Kind
    default: Any
    status: Status
    help: str
    scope: Scope = Scope.ENGINE
    choices: tuple[Any, ...] = ()
    later_choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    feature: str = ""
    harmless: tuple[Any, ...] = ()
    reason: str = ""
    aliases: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    required: bool = False
    optional_value: bool = False
    many_words: bool = False
    suffixes: bool = False
    group: str = ""

    @property
    def flag(self) -> str:
        """The long flag, such as `--max-model-len`."""
        return "--" + self.name.replace("_", "-")


def effective(name: str, kind: Kind, default: Any, help: str, **rest: Any) -> ArgSpec:
    """An argument whose value is checked and used."""
    return ArgSpec(name, kind, default, Status.EFFECTIVE, help, **rest)


def argument(name: str, value: Any, help: str, *, kind: Kind | None = None, **rest: Any) -> ArgSpec:
    """An argument whose value is checked and used, as the tables write it.

    Args:
        value: the default, whose type is that of the argument; or a `Kind`: the default is None.
        kind: where the type of the default does not say it.
    """
    return effective(name, *_kind_and_default(value, kind), help, **rest)


def obsolete(
    name: str, value: Any, help: str, *, reason: str, kind: Kind | None = None, **rest: Any
) -> ArgSpec:
    """An argument that is accepted without effect; `reason` says why it is not needed. `value` and
    `kind`: see `argument`."""
    typed = _kind_and_default(value, kind)
    return ArgSpec(name, *typed, Status.OBSOLETE, help, reason=reason, **rest)


def not_yet(name: str, value: Any, help: str, *, feature: str, **rest: Any) -> ArgSpec:
    """An argument of a feature that is not available yet. `value`: see `argument`."""
    typed = _kind_and_default(value, None)
    return ArgSpec(name, *typed, Status.NOT_YET, help, feature=feature, **rest)


_KINDS: dict[type, Kind] = {
    bool: Kind.BOOL,
    int: Kind.INT,
    float: Kind.FLOAT,
    str: Kind.STR,
    tuple: Kind.LIST,
}


def _kind_and_default(value: Any, kind: Kind | None) -> tuple[Kind, Any]:
    return (value, None) if isinstance(value, Kind) else (kind or _KINDS[type(value)], value)


def grouped(group: str, *specs: ArgSpec) -> tuple[ArgSpec, ...]:
    """The arguments with the heading `group`."""
    return tuple(replace(spec, group=group) for spec in specs)


def checked(spec: ArgSpec, value: Any) -> Any:
    """The value of an EFFECTIVE argument, normalised.

    Raises:
        ConfigError: Wrong type, NaN or infinity, out of range, or not among the choices.
    """
    if is_harmless(spec, value):
        return spec.default
    if value is None:
        if spec.required:
            raise ConfigError(spec.name, value, "is required")
        if spec.default is None:
            return None
    value = _CONVERTERS[spec.kind](spec, value)
    _check_choice(spec, value)
    _check_range(spec, value)
    return value


def is_harmless(spec: ArgSpec, value: Any) -> bool:
    """Whether `value` is one of those that mean the same as the default."""
    return any(type(value) is type(known) and value == known for known in spec.harmless)


def is_default(spec: ArgSpec, value: Any) -> bool:
    """Whether `value` is None, harmless, or equals the default and has its type."""
    if value is None or is_harmless(spec, value):
        return True
    if isinstance(value, bool) is not isinstance(spec.default, bool):
        return False  # True == 1, but tensor_parallel_size=True is a mistake
    return type(value) in (int, float, bool, str) and bool(value == spec.default)


def from_text(spec: ArgSpec, text: str) -> Any:
    """Converts one command-line word to the argument's value.

    If the argument is not EFFECTIVE, text that cannot be converted is returned as it is:
    `resolve_engine_args`, not the parser, then accepts or refuses it.

    Raises:
        ConfigError: The text is not a value of the argument's kind.
    """
    if text == "None" and None in (spec.default, *spec.harmless) and not spec.required:
        return None
    try:
        return _PARSERS.get(spec.kind, _parse_str)(spec, text)
    except ConfigError:
        if spec.status is Status.EFFECTIVE:
            raise
        return text


def _must_be(spec: ArgSpec, value: Any, what: str) -> NoReturn:
    raise ConfigError(spec.name, value, f"must be {what}")


def one_of(values: Iterable[Any]) -> str:
    """`'a', 'b' or 'c'`, for error messages."""
    *head, last = [repr(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last


def _check_choice(spec: ArgSpec, value: Any) -> None:
    if not spec.choices or value in spec.choices:
        return
    if value in spec.later_choices:
        reason = f"is not available yet; use {one_of(spec.choices)}"
        raise ConfigError(spec.name, value, reason)
    _must_be(spec, value, one_of(spec.choices))


def _check_range(spec: ArgSpec, value: Any) -> None:
    if isinstance(value, str):  # the word of `Kind.AUTO_FLOAT` and `Kind.AUTO_INT`
        return
    if spec.above is not None and not value > spec.above:
        _must_be(spec, value, f"greater than {spec.above:g}")
    if spec.minimum is not None and value < spec.minimum:
        _must_be(spec, value, f"at least {spec.minimum}")
    if spec.maximum is not None and value > spec.maximum:
        _must_be(spec, value, f"at most {spec.maximum}")


# Conversion of Python values.


def _as_bool(spec: ArgSpec, value: Any) -> bool:
    if not isinstance(value, bool):
        _must_be(spec, value, "True or False")
    return value


def _as_int(spec: ArgSpec, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        _must_be(spec, value, "an integer")
    return int(value)


def _as_float(spec: ArgSpec, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        _must_be(spec, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _must_be(spec, value, "a finite number")
    return number


def _as_auto_float(spec: ArgSpec, value: Any) -> float | str:
    if isinstance(value, str):
        return _parse_auto_float(spec, value)
    return _as_float(spec, value)


def _as_auto_int(spec: ArgSpec, value: Any) -> int | str:
    if value == "auto" or (value == -1 and type(value) is int):
        return "auto"
    if isinstance(value, bool) or not isinstance(value, Integral):
        _must_be(spec, value, "'auto' or an integer")
    return int(value)


def _as_str(spec: ArgSpec, value: Any) -> str:
    if not isinstance(value, str):
        _must_be(spec, value, "a string")
    if not value:
        raise ConfigError(spec.name, value, "must not be empty")
    return value


def _as_path(spec: ArgSpec, value: Any) -> str:
    return _as_str(spec, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _as_dtype(spec: ArgSpec, value: Any) -> str:
    name = type(value)
    if (name.__module__, name.__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    return _as_str(spec, value)


def _as_json(spec: ArgSpec, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _must_be(spec, value, "a mapping (a JSON object on the command line)")
    return dict(value)


def _as_counts(spec: ArgSpec, value: Any) -> dict[str, int]:
    if isinstance(value, str):
        value = _parse_counts(spec, value)
    named = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if not named or any(type(count) is not int or count < 0 for count in value.values()):
        _must_be(spec, value, "counts by name, such as image=2")
    return dict(value)


def _as_list(spec: ArgSpec, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_as_str(spec, value),)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        _must_be(spec, value, "a string or a list of strings")
    return tuple(value)


_CONVERTERS: dict[Kind, Callable[[ArgSpec, Any], Any]] = {
    Kind.BOOL: _as_bool,
    Kind.INT: _as_int,
    Kind.FLOAT: _as_float,
    Kind.STR: _as_str,
    Kind.PATH: _as_path,
    Kind.DTYPE: _as_dtype,
    Kind.JSON: _as_json,
    Kind.LIST: _as_list,
    Kind.COUNTS: _as_counts,
    Kind.AUTO_FLOAT: _as_auto_float,
    Kind.AUTO_INT: _as_auto_int,
}


# Conversion of command-line words.

_SUFFIXES = "kmgt"
_WITH_SUFFIX = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])")
_TRUE_WORDS = ("true", "1", "yes", "on")
_FALSE_WORDS = ("false", "0", "no", "off")


def _parse_str(spec: ArgSpec, text: str) -> str:
    return text


def _parse_bool(spec: ArgSpec, text: str) -> bool:
    word = text.lower()
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        _must_be(spec, text, "true or false")
    return word in _TRUE_WORDS


def _parse_int(spec: ArgSpec, text: str) -> int:
    found = _WITH_SUFFIX.fullmatch(text.strip()) if spec.suffixes else None
    if found is not None:
        return _scaled(spec, text, found[1], found[2])
    try:
        return int(text)
    except ValueError:
        _must_be(spec, text, "an integer")


def _parse_auto_int(spec: ArgSpec, text: str) -> int | str:
    return text if text == "auto" else _parse_int(spec, text)


def _scaled(spec: ArgSpec, text: str, number: str, suffix: str) -> int:
    """`10k` is 10,000, `10K` is 10,240 and `25.6k` is 25,600, as in vLLM."""
    power = _SUFFIXES.index(suffix.lower()) + 1
    whole, _, part = number.partition(".")
    if suffix.islower():
        scaled, rest = divmod(int(whole + part) * 1000**power, 10 ** len(part))
        if rest:
            _must_be(spec, text, "an integer")
        return scaled
    if part:
        reason = f"a fraction cannot have the suffix {suffix}; did you mean {text.strip().lower()}?"
        raise ConfigError(spec.name, text, reason)
    return int(whole) * 1024**power


def _parse_float(spec: ArgSpec, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        _must_be(spec, text, "a number")


def _parse_auto_float(spec: ArgSpec, text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return _as_float(spec, float(text))
    except ValueError:
        _must_be(spec, text, "'auto' or a number")


def _parse_json(spec: ArgSpec, text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ConfigError(spec.name, text, f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(spec.name, text, f"is not valid JSON: {error}") from None


def _parse_counts(spec: ArgSpec, text: str) -> Any:
    """`image=2,video=0`, or a JSON object as in later vLLM."""
    if text.lstrip().startswith("{"):
        return _parse_json(spec, text)
    counts = {}
    for item in text.split(","):
        name, _, count = item.partition("=")
        if not name.strip() or not (count.strip().isascii() and count.strip().isdecimal()):
            _must_be(spec, text, "counts by name, such as image=2")
        counts[name.strip()] = int(count)
    return counts


_PARSERS: dict[Kind, Callable[[ArgSpec, str], Any]] = {
    Kind.BOOL: _parse_bool,
    Kind.INT: _parse_int,
    Kind.FLOAT: _parse_float,
    Kind.JSON: _parse_json,
    Kind.COUNTS: _parse_counts,
    Kind.AUTO_FLOAT: _parse_auto_float,
    Kind.AUTO_INT: _parse_auto_int,
}
