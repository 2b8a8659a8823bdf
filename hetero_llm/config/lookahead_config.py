"""Configuration of the lookahead cache: the keys of TACO's `lookahead_cache_config.json`.

Names, defaults and meanings are those of TACO-LLM's page on the lookahead cache. `LookaheadConfig`
documents our choices where that page says nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, NamedTuple

from hetero_llm.config.args import nearest
from hetero_llm.config.args_spec import ArgSpec, Kind, checked, effective
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.files import MIB, check_regular, read_text

FILE_NAME = "lookahead_cache_config.json"
FOLDER_ARGUMENT = "lookahead_cache_config_dir"

LARGEST_INT32 = 2**31 - 1
_MOST_FILE_BYTES = MIB
_HEAD_BYTES = 4096  # read from a warm-up file to recognise its format


# large: one field for each key of TACO's file
@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """All keys of the lookahead cache, checked at construction.

    Args:
        cache_mode: 0: Raw (n-grams). 1: Turbo (suffix trie). 2: Turbo, and Raw for a sequence
            without a match of Turbo. 3 (ours): both merged into one tree, in which Turbo also
            matches single tokens if `is_hybrid` and drafts twice as many continuations.
        cache_size: Token positions of the global cache; None: as many as fit in memory.
        copy_length: Maximum tokens of a drafted path (but see `sure_copy_length`).
        sure_copy_length: (ours) Maximum tokens of a path of Turbo's that is more likely right than
            wrong, if that is more than `copy_length`. If `copy_length` is given and this is not,
            it is `copy_length`: what is given is the longest draft.
        match_length: Number of tokens that Raw matches.
        turbo_match_length: Maximum tokens that Turbo matches.
        min_match_length: Minimum tokens that Turbo matches.
        cell_max_size: Maximum continuations that are kept for one match.
        voc_size: Sequences with a token id of this or above get no drafts and are not cached.
        max_seq_len: Maximum length of a sequence in tokens; None: the model's.
        eos_token_id: Tokens at which a text ends; no match or draft crosses them. One id or
            several, becomes a tuple; None: the model's.
        top_k: Continuations that Raw drafts for one match, the most frequent and newest first.
        threshold: A full cell evicts its oldest continuation with a count of at most this.
        decay: If all counts are above, they are multiplied by this before one is evicted.
        is_hybrid: Raw falls back on shorter matches, down to one token.
        is_debug: Log the metrics of drafts.
        log_interval: Verified steps between two such log lines.
        target_parallelism: Maximum tokens of a step, of all sequences and their drafts. With
            `cache_mode` 0 each sequence's draft shrinks by its hit rate, as on TACO's page; else
            the least likely nodes are dropped.
        top_k_in_cell: Continuations of one match that Turbo considers.
        token_paths_top_k: Continuations of one match that Turbo drafts, its beam width. The page
            gives two defaults: 2, but 1 if `cache_mode` is set to 0, 1 or 2 and this key is not
            (see `lookahead_config`).
        start_freq: Initial count of a continuation in a sequence's own cache. Counts in the global
            cache start at 1, so a sequence's own text is drafted first.
        num_threads: Threads of lookups and of cache updates.
        global_cache_switch: Cache the tokens of all sequences; else each sequence drafts from its
            own tokens only.
        ignore_prompt: Cache outputs only.
        warmup_file: JSON file of `[{"prompt": [ids], "output": [ids]}]`, or a snapshot of the
            cache, that is cached at start. A relative path is taken from the folder of the
            configuration file. Its tokens, up to `cache_size`, stay in the cache in addition to
            `cache_size` other tokens.

    Raises:
        ConfigError: A value is of the wrong type, out of range or contradicts another one. Its
            field is the key.
    """

    cache_mode: int = 2
    cache_size: int | None = None
    copy_length: int = 7
    sure_copy_length: int = 15
    match_length: int = 2
    turbo_match_length: int = 7
    min_match_length: int = 2
    cell_max_size: int = 16
    voc_size: int = 200_000
    max_seq_len: int | None = None
    eos_token_id: tuple[int, ...] | None = None
    top_k: int = 1
    threshold: float = 2.0
    decay: float = 0.5
    is_hybrid: bool = True
    is_debug: bool = False
    log_interval: int = 3000
    target_parallelism: int = 512
    top_k_in_cell: int = 16
    token_paths_top_k: int = 2
    start_freq: float = 10.0
    num_threads: int = 8
    global_cache_switch: bool = True
    ignore_prompt: bool = False
    warmup_file: str | None = None

    def __post_init__(self) -> None:
        values = {key: _checked_value(key, key, getattr(self, key)) for key in KEYS}
        problem = _contradiction(values, KEYS)
        if problem is not None:
            key, reason = problem
            raise ConfigError(key, values[key], reason)
        for key, value in values.items():
            object.__setattr__(self, key, value)


KEYS = tuple(field.name for field in fields(LookaheadConfig))

_MERGED = 3  # cache_mode
_KINDS = {"int": Kind.INT, "float": Kind.FLOAT, "bool": Kind.BOOL, "str": Kind.PATH}

# Drafts have at most 63 nodes (as in core/draft_tree.py, whose import would load numpy). Counts are
# float32, which cannot count in ones beyond 2**24. The other upper bounds are far above any use.
_MOST_NODES = 63
_MOST_COUNTED = 2**24
_MOST_MATCHED = 64
_MOST_CHOICES = 1024
_LARGEST_CELL = 256  # of the suffix trie
_BOUNDS: dict[str, tuple[float, float]] = {
    "cache_mode": (0, 3),
    "cache_size": (1, LARGEST_INT32),
    "copy_length": (1, _MOST_NODES),
    "sure_copy_length": (1, _MOST_NODES),
    "match_length": (1, _MOST_MATCHED),
    "turbo_match_length": (1, _MOST_MATCHED),
    "min_match_length": (1, _MOST_MATCHED),
    "cell_max_size": (1, _LARGEST_CELL),
    "voc_size": (1, LARGEST_INT32),
    "max_seq_len": (1, LARGEST_INT32),
    "top_k": (1, _MOST_NODES),
    "threshold": (0, _MOST_COUNTED),
    "log_interval": (1, LARGEST_INT32),
    "target_parallelism": (1, LARGEST_INT32),
    "top_k_in_cell": (1, _MOST_CHOICES),
    "token_paths_top_k": (1, _MOST_NODES),
    "start_freq": (0, _MOST_COUNTED),
    "num_threads": (1, 1024),
}


def _specs() -> dict[str, ArgSpec]:
    specs = {}
    for field in fields(LookaheadConfig):
        kind = _KINDS.get(str(field.type).removesuffix(" | None"))
        if kind is not None:
            low, high = _BOUNDS.get(field.name, (None, None))
            specs[field.name] = effective(
                field.name, kind, field.default, "", minimum=low, maximum=high
            )
    for key in ("decay", "start_freq"):
        specs[key] = replace(specs[key], above=0)
    return specs


SPECS = _specs()


class Given(NamedTuple):
    """A value as the user wrote it, and its name in errors, such as `copy_length`."""

    path: str
    value: Any


def lookahead_config(given: Mapping[str, Given]) -> LookaheadConfig:
    """The configuration with some keys given.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or the warm-up file is not one. Its field
            is the path of the key.
    """
    for key, (path, value) in given.items():
        if key not in KEYS:
            raise ConfigError(path, value, why_unknown(key, KEYS))
    values = {key: _checked_value(key, path, value) for key, (path, value) in given.items()}
    if values.get("cache_mode", _MERGED) != _MERGED:
        values.setdefault("token_paths_top_k", 1)
    if "copy_length" in values:
        values.setdefault("sure_copy_length", values["copy_length"])
    problem = _contradiction(values, given)
    if problem is not None:
        key, reason = problem
        raise ConfigError(given[key].path, values[key], reason)
    warmup = values.get("warmup_file")
    if warmup is not None:
        try:
            is_snapshot(warmup)
        except ValueError as error:
            raise ConfigError(given["warmup_file"].path, warmup, str(error)) from None
    return LookaheadConfig(**values)


def is_snapshot(path: str) -> bool:
    """Whether a warm-up file is a snapshot of the cache, else JSON. Reads only its beginning.

    Raises:
        ValueError: It is neither, or cannot be read.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            start = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    if b"\0" in start[:8]:  # a snapshot begins with the size of its header; text has no zero byte
        return True
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] not in (b"[", b"{"):
        what = "is neither JSON objects with prompt and output nor a snapshot"
        raise ValueError(what if text else "holds nothing")
    return False


def read_lookahead_file(folder: str) -> dict[str, Given]:
    """The contents of `lookahead_cache_config.json` in a folder; empty if there is no such file.

    Keys and values are not checked yet. A relative `warmup_file` is taken from the folder.

    Raises:
        ConfigError: The folder does not exist (the field is the argument that named it), the file
            cannot be read, is not a JSON object or gives a key twice.
    """
    if not os.path.isdir(folder):
        raise ConfigError(FOLDER_ARGUMENT, folder, "is not a folder")
    path = os.path.join(folder, FILE_NAME)
    try:
        text = read_text(path, most=_MOST_FILE_BYTES, encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except ConfigError:
        raise
    except FileNotFoundError:
        if os.path.islink(path):
            raise ConfigError(
                FOLDER_ARGUMENT, folder, f"{FILE_NAME} is a link that leads nowhere"
            ) from None
        return {}
    except OSError as error:
        reason = f"{FILE_NAME} cannot be read: {error.strerror or error}"
        raise ConfigError(FOLDER_ARGUMENT, folder, reason) from None
    except (ValueError, RecursionError) as error:
        reason = f"{FILE_NAME} is not valid JSON: {error}"
        raise ConfigError(FOLDER_ARGUMENT, folder, reason) from None
    if not isinstance(content, dict):
        raise ConfigError(FOLDER_ARGUMENT, folder, f"{FILE_NAME} must hold a JSON object")
    warmup = content.get("warmup_file")
    if isinstance(warmup, str) and warmup:
        content["warmup_file"] = os.path.join(folder, warmup)
    return {key: Given(_path(key), value) for key, value in content.items()}


def why_unknown(key: str, known: Sequence[str]) -> str:
    """Reason for refusing a key, with the most similar known key."""
    guess = nearest(key, known)
    return "unknown key" + (f"; did you mean {guess!r}?" if guess else "")


def _path(key: str) -> str:
    return f"{FILE_NAME}: {key}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ConfigError(_path(key), value, "is given twice")
        content[key] = value
    return content


def _checked_value(key: str, path: str, value: Any) -> Any:
    """The checked and normalised value; errors name it `path`."""
    if key == "eos_token_id":
        return _token_ids(path, value)
    return checked(replace(SPECS[key], name=path), value)


def _token_ids(path: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(item, bool) or not isinstance(item, Integral) for item in items):
        raise ConfigError(path, value, "must be a token id or a list of token ids")
    ids = tuple(map(int, items))
    if any(not 0 <= token <= LARGEST_INT32 for token in ids):
        raise ConfigError(path, value, f"token ids are 0 to {LARGEST_INT32}")
    return ids


def _contradiction(values: Mapping[str, Any], given: Container[str]) -> tuple[str, str] | None:
    """Checks values against each other. Returns one of the given keys and the reason why it is
    wrong; None if there is no contradiction.

    Args:
        values: Checked values; missing keys have their defaults.
    """

    def value(key: str) -> Any:
        return values.get(key, SPECS[key].default)

    if value("decay") >= 1:
        return "decay", "must be less than 1"
    if value("warmup_file") is not None and not value("global_cache_switch"):
        return "warmup_file", "is learned by the global cache, which global_cache_switch turns off"
    shortest, longest = value("min_match_length"), value("turbo_match_length")
    if shortest > longest:
        if "min_match_length" in given:
            return "min_match_length", f"exceeds turbo_match_length ({longest})"
        return "turbo_match_length", f"is less than min_match_length ({shortest})"
    size, path = value("cache_size"), longest + value("copy_length")
    if size is not None and size < path:
        return "cache_size", (
            f"is less than one path: turbo_match_length + copy_length is {path} tokens"
        )
    return None
