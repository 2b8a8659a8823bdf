"""Keys of mappings on the command line, as vLLM has them: `--speculative-config.method ngram`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hetero_llm.core.errors import ConfigError

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w-]+(?:\.[\w-]+)*)(\+?)(?:=(.*))?", re.DOTALL)


def join_dotted_flags(words: Sequence[str]) -> list[str]:
    """A command line in which the dotted words of each flag have become one JSON object.

    `--flag.a.b 1 --flag.c=x` becomes `--flag {"a": {"b": 1}, "c": "x"}`, where the first of them
    stood. Values that are JSON are read as such, all others are texts; `--flag.a+ 1` appends to a
    list. Words behind `--` stay as they are.

    Raises:
        ConfigError: a dotted flag has no value, contradicts another one, or its flag is also given
            as a whole.
    """
    joined: list[str] = []
    found: dict[str, tuple[int, dict[str, Any]]] = {}  # place in `joined`, and the object
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        match = None if word == "--" else _DOTTED.fullmatch(word)
        if word == "--":
            joined += words[index - 1 :]
            break
        if match is None:
            joined.append(word)
            continue
        flag, path, appends, text = match.groups()
        if text is None:
            if index == len(words) or words[index].startswith("--"):
                raise ConfigError(f"{flag}.{path}", None, "needs a value")
            text = words[index]
            index += 1
        flag = flag.replace("_", "-")
        if flag not in found:
            found[flag] = len(joined) + 1, {}
            joined += [flag, ""]
        _put(found[flag][1], path.split("."), _read(text), appends=bool(appends), flag=flag)
    for flag, (place, value) in found.items():
        spellings = (flag, flag[:2] + flag[2:].replace("-", "_"))
        given = [one for one in joined if one.partition("=")[0] in spellings]
        if len(given) > 1:
            raise ConfigError(flag, value, "is given as a whole, too")
        joined[place] = json.dumps(value)
    return joined


def _put(target: dict[str, Any], keys: list[str], value: Any, *, appends: bool, flag: str) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{flag}.{'.'.join(keys)}", value, f"{key!r} has a value of its own")
    last = keys[-1]
    if appends:
        values = target.setdefault(last, [])
        if isinstance(values, list):
            values.append(value)
            return
    if last in target:
        raise ConfigError(f"{flag}.{'.'.join(keys)}", value, "is given twice")
    target[last] = value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)
