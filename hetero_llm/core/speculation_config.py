"""Which drafts an engine makes, out of the arguments that say so: single flags in TACO's, Angel's
and older vLLM's spelling, or newer vLLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero_llm.core.args_features import LOOKAHEAD_CACHE, SPECULATIVE
from hetero_llm.core.args_spec import ArgSpec, Kind, checked, effective, one_of
from hetero_llm.core.errors import ConfigError, shown
from hetero_llm.core.lookahead_config import (
    KEYS,
    Given,
    LookaheadConfig,
    lookahead_config,
    read_lookahead_file,
    why_unknown,
)

LOOKAHEAD, NGRAM = "lookahead", "ngram"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Where drafts come from.

    Attributes:
        method: "lookahead" (the cache) or "ngram" (prompt lookup).
        lookahead: of the cache; None with "ngram".
        num_speculative_tokens: most draft tokens of a sequence in one step, 1 to 63; None with
            "lookahead", whose `copy_length` holds it.
        prompt_lookup_min, prompt_lookup_max: shortest and longest match of "ngram" in tokens; 0
            with "lookahead".
        memory_utilization: share of the host's memory that the cache may take, in (0, 1]. It
            sizes the cache where `lookahead.cache_size` is None.
    """

    method: str
    lookahead: LookaheadConfig | None
    num_speculative_tokens: int | None
    prompt_lookup_min: int
    prompt_lookup_max: int
    memory_utilization: float


_NGRAM_NAMES = ("[ngram]", NGRAM)
_COUNT, _SHORTEST, _LONGEST = "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"
_FOLDER, _MEMORY, _MODEL = "config_dir", "cpu_decoding_memory_utilization", "model"

_ROWS = {spec.name: spec for spec in (*SPECULATIVE, *LOOKAHEAD_CACHE)}
_DEFAULT_LOOKUP = 5  # vLLM's, for both ends of the range of lengths

_FLAGS = {
    "num_speculative_tokens": _COUNT,
    "ngram_prompt_lookup_max": _LONGEST,
    "ngram_prompt_lookup_min": _SHORTEST,
    "lookahead_cache_config_dir": _FOLDER,
    "ignore_prompt_for_lookahead_cache": "ignore_prompt",
    "cpu_decoding_memory_utilization": _MEMORY,
}
"""Flags and the names that their values have in `speculative_config`."""

_MAPPING_ROWS: dict[str, ArgSpec] = {
    "method": effective(
        "method",
        Kind.STR,
        None,
        "",
        choices=(NGRAM, LOOKAHEAD, "[ngram]"),
        later_choices=("draft_model",),
    ),
    _MODEL: effective(_MODEL, Kind.PATH, None, ""),
    _COUNT: _ROWS["num_speculative_tokens"],
    _LONGEST: _ROWS["ngram_prompt_lookup_max"],
    _SHORTEST: _ROWS["ngram_prompt_lookup_min"],
    _FOLDER: _ROWS["lookahead_cache_config_dir"],
}
"""Keys of `speculative_config` beside those of `LookaheadConfig`; None is as good as absent."""

_LATER_KEYS = (
    "disable_by_batch_size",
    "draft_tensor_parallel_size",
    "max_model_len",
    "quantization",
    "revision",
)
"""Keys of vLLM's that concern draft models."""

_NEEDED = {
    _COUNT: f"speculative_model={_NGRAM_NAMES[0]!r} or the lookahead cache",
    _LONGEST: f"speculative_model={_NGRAM_NAMES[0]!r}",
    _SHORTEST: f"speculative_model={_NGRAM_NAMES[0]!r}",
}
_NEEDED_ELSE = "the lookahead cache (use_lookahead or lookahead_cache_config_dir)"


def speculation_from_args(args: Mapping[str, Any]) -> SpeculationConfig | None:
    """What the arguments ask for; None if they ask for no drafts.

    A value may be given by a flag or in `speculative_config`; given by both, it must be the same.
    `num_speculative_tokens` is the cache's `copy_length` by another name.

    The lengths of matches follow the vLLM that each spelling is of. With flags alone (0.6):
    the longest is required, the shortest is 1 unless given. With `speculative_config` (0.9): one
    that is missing is as the other, and both are 5 if both are missing.

    Args:
        args: The complete dict of `core.args.resolve_engine_args`.

    Raises:
        ConfigError: A key is unknown, a value wrong, two of them contradict each other, one is
            missing or without effect.
    """
    given, methods = _from_flags(args)
    mapping = args["speculative_config"]
    if mapping is not None:
        inside, named = _from_mapping(mapping)
        given = _merged(inside, given)
        methods += named
    method = _one_method(methods)
    _refuse_idle(given, method)
    if mapping is not None and method is None:
        reason = f"must be {one_of((NGRAM, LOOKAHEAD))}"
        raise ConfigError("speculative_config: method", None, reason)
    if method is None:
        return None
    if method == NGRAM:
        return _prompt_lookup(given, args[_MEMORY], in_mapping=mapping is not None)
    return SpeculationConfig(LOOKAHEAD, _lookahead(given), None, 0, 0, args[_MEMORY])


def _from_flags(args: Mapping[str, Any]) -> tuple[dict[str, Given], list[tuple[str, Given]]]:
    """Values that are not the default, by their common name; methods, and what named them."""
    given, methods = {}, []
    for flag, name in _FLAGS.items():
        if args[flag] != _ROWS[flag].default:
            given[name] = Given(flag, args[flag])
    model = args["speculative_model"]
    if model is not None:
        if model != _NGRAM_NAMES[0]:
            raise _no_draft_model("speculative_model", model, _NGRAM_NAMES[0])
        methods.append((NGRAM, Given("speculative_model", model)))
    if args["use_lookahead"]:
        methods.append((LOOKAHEAD, Given("use_lookahead", True)))
    if _FOLDER in given:
        methods.append((LOOKAHEAD, given[_FOLDER]))
    return given, methods


def _from_mapping(
    mapping: Mapping[str, Any],
) -> tuple[dict[str, Given], list[tuple[str, Given]]]:
    """As `_from_flags`, for `speculative_config`."""
    given, methods = {}, []
    for key, value in mapping.items():
        path = f"speculative_config: {key}"
        if key in KEYS:
            given[key] = Given(path, value)
        elif key in _MAPPING_ROWS:
            value = checked(replace(_MAPPING_ROWS[key], name=path), value)
            if value is not None:
                given[key] = Given(path, value)
        elif key not in _LATER_KEYS:
            known = (*_MAPPING_ROWS, *KEYS)
            raise ConfigError(path, value, why_unknown(str(key), known))
        elif value is not None:
            raise ConfigError(path, value, "is not available yet")
    model = given.pop(_MODEL, None)
    if model is not None:
        if model.value not in _NGRAM_NAMES:
            raise _no_draft_model(model.path, model.value, NGRAM)
        methods.append((NGRAM, model))
    named = given.pop("method", None)
    if named is not None:
        methods.append((NGRAM if named.value in _NGRAM_NAMES else LOOKAHEAD, named))
    if _FOLDER in given:
        methods.append((LOOKAHEAD, given[_FOLDER]))
    return given, methods


def _no_draft_model(path: str, value: str, instead: str) -> ConfigError:
    reason = f"a draft model is not available yet; use {instead!r} or the lookahead cache"
    return ConfigError(path, value, reason)


def _merged(first: dict[str, Given], second: Mapping[str, Given]) -> dict[str, Given]:
    """Both, where none contradicts the other."""
    merged = dict(first)
    for name, (path, value) in second.items():
        other = merged.setdefault(name, Given(path, value))
        if other.value != value:
            raise _contradiction(Given(path, value), other)
    return merged


def _contradiction(one: Given, other: Given) -> ConfigError:
    return ConfigError(
        one.path, one.value, f"contradicts {other.path}={shown(other.value)}; give one of them"
    )


def _one_method(methods: list[tuple[str, Given]]) -> str | None:
    if not methods:
        return None
    first, source = methods[0]
    for method, other in methods[1:]:
        if method != first:
            raise _contradiction(other, source)
    return first


def _refuse_idle(given: Mapping[str, Given], method: str | None) -> None:
    """Raises for a value that the method, or the lack of one, leaves without effect."""
    for name, (path, value) in given.items():
        if name == _COUNT:
            idle = method is None
        elif name in (_LONGEST, _SHORTEST):
            idle = method != NGRAM
        else:
            idle = method != LOOKAHEAD
        if idle:
            raise ConfigError(path, value, f"needs {_NEEDED.get(name, _NEEDED_ELSE)}")


def _prompt_lookup(
    given: Mapping[str, Given], memory: float, *, in_mapping: bool
) -> SpeculationConfig:
    prefix = "speculative_config: " if in_mapping else ""
    if _COUNT not in given:
        reason = "prompt lookup needs the number of draft tokens for each step"
        raise ConfigError(prefix + _COUNT, None, reason)
    low, high = given.get(_SHORTEST), given.get(_LONGEST)
    if in_mapping:
        least = (low or high or Given("", _DEFAULT_LOOKUP)).value
        most = (high or low or Given("", _DEFAULT_LOOKUP)).value
    elif high is None:
        reason = "prompt lookup needs the longest match to look for"
        raise ConfigError("ngram_prompt_lookup_max", None, reason)
    else:
        least, most = 1 if low is None else low.value, high.value
    if low is not None and least > most:
        assert high is not None
        raise ConfigError(low.path, least, f"exceeds {high.path} ({most})")
    return SpeculationConfig(NGRAM, None, given[_COUNT].value, least, most, memory)


def _lookahead(given: Mapping[str, Given]) -> LookaheadConfig:
    settings = {name: one for name, one in given.items() if name in KEYS}
    if _FOLDER in given:
        settings = _merged(read_lookahead_file(given[_FOLDER].value), settings)
    count = given.get(_COUNT)
    if count is not None:
        if "copy_length" in settings:
            raise _contradiction(count, settings["copy_length"])
        settings["copy_length"] = count
    size = settings.get("cache_size")
    if size is not None and size.value is not None and _MEMORY in given:
        raise _contradiction(given[_MEMORY], size)
    return lookahead_config(settings)
