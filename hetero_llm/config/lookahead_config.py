"""Configuration of the lookahead cache: the keys of TACO's `lookahead_cache_config.json`.

Names, defaults and meanings are those of TACO-LLM's page on the lookahead cache; where that page
is silent, `LookaheadConfig` says what was chosen.
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

FILE_NAME = "lookahead_cache_config.json"
FOLDER_ARGUMENT = "lookahead_cache_config_dir"

LARGEST_INT32 = 2**31 - 1
_LOOKED_AT = 4096  # bytes of a warm-up file


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Every key of the lookahead cache, checked at construction.

    Args:
        cache_mode: 0 Raw (n-grams), 1 Turbo (suffix trie), 2 Turbo, and Raw for a sequence for
            which Turbo finds nothing, 3 both merged into one tree (ours), in which Turbo matches
            single tokens too if `is_hybrid` and drafts twice as many continuations.
        cache_size: Token positions of the global cache; None means as many as fit in memory.
        copy_length: Most tokens on one drafted path; Turbo goes twice as deep and one more where
            the path is more likely right than not.
        match_length: Tokens that must match for Raw to draft.
        turbo_match_length: Most tokens that Turbo matches.
        min_match_length: Fewest tokens that Turbo matches.
        cell_max_size: Continuations remembered for one match.
        voc_size: Sequences with a token id of this or above are left alone.
        max_seq_len: Longest sequence in tokens; None means the model's.
        eos_token_id: Tokens at which a text ends; nothing is matched or drafted across them. One
            id or several, becomes a tuple; None means the model's.
        top_k: Continuations that Raw drafts for one match, the most frequent and newest first.
        threshold: A full cell forgets its oldest continuation seen no more often than this.
        decay: If all were seen more often, their counts are multiplied by this before one goes.
        is_hybrid: Raw falls back on ever shorter matches, down to one token.
        is_debug: Log how often drafts hit.
        log_interval: Verified steps between two such log lines.
        target_parallelism: Most rows (tokens of all sequences and their drafts) of a step. With
            `cache_mode` 0 drafts shrink by how often each sequence's hit, as the page has it; else
            the least likely nodes are left out.
        top_k_in_cell: Continuations of one match that Turbo considers.
        token_paths_top_k: Continuations of one match that Turbo drafts, its beam width. The page
            gives two defaults: it is 2, but 1 where `cache_mode` is set to 0, 1 or 2 and this is
            not (see `lookahead_config`).
        start_freq: Count that a continuation starts with in a sequence's own cache, so that its
            own text comes before the texts of others, whose counts start at 1.
        num_threads: Threads that look up and build.
        global_cache_switch: Learn from all sequences; otherwise each from itself alone.
        ignore_prompt: Learn from outputs only.
        warmup_file: JSON file of `[{"prompt": [ids], "output": [ids]}]`, or a snapshot of the
            cache, to learn from at start. A relative path is taken from the folder of the
            configuration file. It stays in the cache, beside `cache_size` other tokens, and may
            hold as many itself.

    Raises:
        ConfigError: A value is of the wrong type, out of range or contradicts another one. Its
            field is the key.
    """

    cache_mode: int = 2
    cache_size: int | None = None
    copy_length: int = 7
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

# Drafts have at most 63 nodes (core/draft_tree.py, which would load numpy). Counts are float32:
# beyond 2**24 one more occurrence would be lost. The other upper bounds are far from any use.
_MOST_NODES = 63
_MOST_COUNTED = 2**24
_MOST_MATCHED = 64
_MOST_CHOICES = 1024
_LARGEST_CELL = 256  # of the suffix trie
_BOUNDS: dict[str, tuple[float, float]] = {
    "cache_mode": (0, 3),
    "cache_size": (1, LARGEST_INT32),
    "copy_length": (1, _MOST_NODES),
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
    """A value as the user wrote it, and what errors call it, such as `copy_length`."""

    path: str
    value: Any


def load_lookahead_config(folder: str | None) -> LookaheadConfig:
    """The configuration in a folder, or the defaults if it holds none or is None.

    Raises:
        ConfigError: As `read_lookahead_file` and `lookahead_config`.
    """
    return lookahead_config({} if folder is None else read_lookahead_file(folder))


def lookahead_config(given: Mapping[str, Given]) -> LookaheadConfig:
    """The configuration with some keys given.

    Raises:
        ConfigError: A key is unknown, a value wrong, the warm-up file is none. Its field is the
            path of the key.
    """
    for key, (path, value) in given.items():
        if key not in KEYS:
            raise ConfigError(path, value, why_unknown(key, KEYS))
    values = {key: _checked_value(key, path, value) for key, (path, value) in given.items()}
    if values.get("cache_mode", _MERGED) != _MERGED:
        values.setdefault("token_paths_top_k", 1)
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
    """Whether a warm-up file is a snapshot of the cache; else it is JSON. Reads its beginning only.

    Raises:
        ValueError: It is neither, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(_LOOKED_AT)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    if b"\0" in start[:8]:  # the size of a header: no text has that
        return True
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] not in (b"[", b"{"):
        what = "is neither JSON objects with prompt and output nor a snapshot"
        raise ValueError(what if text else "holds nothing")
    return False


def read_lookahead_file(folder: str) -> dict[str, Given]:
    """What `lookahead_cache_config.json` in the folder says; nothing if there is no such file.

    Keys and values are not checked yet. A relative `warmup_file` is taken from the folder.

    Raises:
        ConfigError: The folder does not exist (the field is the argument that named it), the file
            cannot be read, is no JSON object or gives a key twice.
    """
    if not os.path.isdir(folder):
        raise ConfigError(FOLDER_ARGUMENT, folder, "is not a folder")
    path = os.path.join(folder, FILE_NAME)
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file, object_pairs_hook=_without_twins)
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
    """The reason for refusing a key, with the one that was probably meant."""
    guess = nearest(key, known)
    return "unknown key" + (f"; did you mean {guess!r}?" if guess else "")


def _path(key: str) -> str:
    return f"{FILE_NAME}: {key}"


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ConfigError(_path(key), value, "is given twice")
        content[key] = value
    return content


def _checked_value(key: str, path: str, value: Any) -> Any:
    """The value, normalised; errors call it `path`."""
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
    """What is wrong with checked values together: a key that is among those given, and why.

    Args:
        values: Keys that are missing have their defaults.
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
