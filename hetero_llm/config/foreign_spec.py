"""`ForeignArg`: an argument that vLLM knows and this engine does not have.

`foreign_args.py` holds the table; `args.py` looks a name up there if its own table lacks it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

from hetero_llm.config.args_spec import Scope
from hetero_llm.core.errors import ConfigError

logger = logging.getLogger(__name__)

_WORDS = {"none": None, "null": None, "true": True, "false": False}


class Takes(Enum):
    """How many words follow the flag on a command line."""

    NOTHING = "nothing"
    """A switch; `--no-x` is its opposite."""
    ONE = "one"
    MANY = "many"
    """One or more words."""


@dataclass(frozen=True, slots=True)
class ForeignArg:
    """An argument of vLLM, by its Python name.

    Attributes:
        feature: what a value asks for, as the subject of "... is not available yet"; empty if any
            value is accepted.
        harmless: values that ask for what is done anyway. None, and empty texts, lists and
            mappings always do.
        reason: for the notice line: why the value has no effect.
        instead: what to use in place of the argument.
        scope: the part of the program whose argument it is.
        short: short flags.
        aliases: other Python names.
    """

    name: str
    takes: Takes
    feature: str = ""
    harmless: tuple[Any, ...] = ()
    reason: str = "it asks for what is done anyway."
    instead: str = ""
    scope: Scope = Scope.ENGINE
    short: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The long flag, such as `--kv-transfer-config`."""
        return "--" + self.name.replace("_", "-")


def check_foreign(arg: ForeignArg, value: Any) -> None:
    """Accepts a value that has no effect here, with one notice line.

    Raises:
        ConfigError: the value asks for something that is not available.
    """
    if not arg.feature or is_harmless(arg, value):
        logger.warning("%s has no effect and can be left out: %s", arg.flag, arg.reason)
        return
    reason = f"{arg.feature} is not available yet"
    if arg.instead:
        reason += f"; use {arg.instead}"
    raise ConfigError(arg.name, value, reason)


def is_harmless(arg: ForeignArg, value: Any) -> bool:
    """Whether the value, or a command line's text of it, asks for what is done anyway."""
    value = read_value(value)
    if value is None or (isinstance(value, (str, list, tuple, set, Mapping)) and not value):
        return True
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return is_harmless(arg, value[0])
    return any(_same(value, known) for known in arg.harmless)


def read_value(value: Any) -> Any:
    """The value of a text that is a word of Python's or JSON's, a number, or JSON."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, bool) or isinstance(known, bool):
        return value is known  # True == 1, but a count of True is a mistake
    if isinstance(value, Real) and isinstance(known, Real):
        return bool(value == known)
    return type(value) is type(known) and bool(value == known)
