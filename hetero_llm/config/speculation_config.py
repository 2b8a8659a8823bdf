"""Configuration of speculation, built from the arguments: single flags in the spelling of TACO,
Angel and older vLLM, or the `speculative_config` of newer vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero_llm.config.args_features import LOOKAHEAD_CACHE, SPECULATIVE
from hetero_llm.config.args_spec import ArgSpec, Kind, checked, effective, one_of
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.lookahead_config import (
    KEYS,
    Given,
    LookaheadConfig,
    lookahead_config,
    read_lookahead_file,
    why_unknown,
)
from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.errors import ConfigError, shown

LOOKAHEAD, NGRAM, DRAFT_MODEL = "lookahead", "ngram", "draft_model"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Where drafts come from.

    Attributes:
        method: "lookahead" (the cache), "ngram" (prompt lookup) or "draft_model", alone or beside
            the cache.
        lookahead: configuration of the lookahead cache; None without it.
        num_speculative_tokens: "ngram" only: maximum draft tokens of a sequence in one step, 1 to
            63. None with other methods: see `copy_length` of the cache and `num_tokens` of the
            draft model.
        prompt_lookup_min, prompt_lookup_max: shortest and longest match of "ngram" in tokens; 0
            with other methods.
        memory_utilization: share of the host's memory for the lookahead cache, in (0, 1]; used if
            `lookahead.cache_size` is None.
        draft: configuration of the draft model; None without one.
        most_sequences: steps of more sequences have no drafts; None: no limit.
        typical: also accept likely draft tokens that were not sampled; None: lossless.
    """

    method: str
    lookahead: LookaheadConfig | None
    num_speculative_tokens: int | None
    prompt_lookup_min: int
    prompt_lookup_max: int
    memory_utilization: float
    draft: DraftModelConfig | None = None
    most_sequences: int | None = None
    typical: TypicalAcceptance | None = None


_NGRAM_NAMES = ("[ngram]", NGRAM)
_COUNT, _SHORTEST, _LONGEST = "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"
_FOLDER, _MEMORY, _MODEL = "config_dir", "cpu_decoding_memory_utilization", "model"
_LONGEST_TEXT, _MOST_SEQUENCES = "max_model_len", "disable_by_batch_size"
_REVISION = "revision"
_ACCEPTANCE, _THRESHOLD, _ALPHA = "acceptance_method", "posterior_threshold", "posterior_alpha"
_OF_ACCEPTANCE = (_ACCEPTANCE, _THRESHOLD, _ALPHA)
_TYPICAL = "typical_acceptance_sampler"
_OF_WORKER = (
    "cpu_draft_worker", "speculative_overlap", "draft_timeout_ms", "draft_threads",
    "draft_weight_dtype", "draft_optional",
)  # fmt: skip
_OF_WORKER_ALONE = tuple(
    name for name in _OF_WORKER if name not in ("cpu_draft_worker", "draft_optional")
)

_ROWS = {spec.name: spec for spec in (*SPECULATIVE, *LOOKAHEAD_CACHE)}
_DEFAULT_LOOKUP = 5  # vLLM's default of the shortest and of the longest match

_FLAGS = {
    "num_speculative_tokens": _COUNT,
    "ngram_prompt_lookup_max": _LONGEST,
    "ngram_prompt_lookup_min": _SHORTEST,
    "lookahead_cache_config_dir": _FOLDER,
    "ignore_prompt_for_lookahead_cache": "ignore_prompt",
    "cpu_decoding_memory_utilization": _MEMORY,
    "speculative_max_model_len": _LONGEST_TEXT,
    "speculative_disable_by_batch_size": _MOST_SEQUENCES,
    "spec_decoding_acceptance_method": _ACCEPTANCE,
    "typical_acceptance_sampler_posterior_threshold": _THRESHOLD,
    "typical_acceptance_sampler_posterior_alpha": _ALPHA,
    **{name: name for name in _OF_WORKER},
}
"""Flag -> name of its value in `speculative_config`."""

_MAPPING_ROWS: dict[str, ArgSpec] = {
    "method": effective(
        "method",
        Kind.STR,
        None,
        "",
        choices=(NGRAM, LOOKAHEAD, DRAFT_MODEL, "[ngram]"),
    ),
    _MODEL: effective(_MODEL, Kind.PATH, None, ""),
    _COUNT: _ROWS["num_speculative_tokens"],
    _LONGEST: _ROWS["ngram_prompt_lookup_max"],
    _SHORTEST: _ROWS["ngram_prompt_lookup_min"],
    _FOLDER: _ROWS["lookahead_cache_config_dir"],
    _LONGEST_TEXT: _ROWS["speculative_max_model_len"],
    _MOST_SEQUENCES: _ROWS["speculative_disable_by_batch_size"],
    _REVISION: effective(_REVISION, Kind.STR, None, ""),
    _ACCEPTANCE: _ROWS["spec_decoding_acceptance_method"],
    _THRESHOLD: _ROWS["typical_acceptance_sampler_posterior_threshold"],
    _ALPHA: _ROWS["typical_acceptance_sampler_posterior_alpha"],
}
"""Keys of `speculative_config` besides those of `LookaheadConfig`; None counts as absent."""

_LATER_KEYS = ("draft_tensor_parallel_size", "quantization")
"""Keys of vLLM's for draft models that are not available yet."""

_ANY = frozenset((NGRAM, LOOKAHEAD, DRAFT_MODEL))
_OF_ALL = (_ANY, "drafts of some kind, such as the lookahead cache")
_OF_NGRAM = (frozenset((NGRAM,)), f"speculative_model={_NGRAM_NAMES[0]!r}")
_OF_MODEL = (frozenset((DRAFT_MODEL,)), "a draft model (speculative_model)")
_OF_CACHE = (
    frozenset((LOOKAHEAD,)),
    "the lookahead cache (use_lookahead or lookahead_cache_config_dir)",
)
_NEEDS = {
    _COUNT: (_ANY, f"a draft model, {_OF_NGRAM[1]} or the lookahead cache"),
    _LONGEST: _OF_NGRAM,
    _SHORTEST: _OF_NGRAM,
    **dict.fromkeys((_MOST_SEQUENCES, *_OF_ACCEPTANCE), _OF_ALL),
    **dict.fromkeys((*_OF_WORKER, _LONGEST_TEXT, _REVISION, _MODEL), _OF_MODEL),
}
"""Methods one of which each value needs to have an effect, and their names in errors; all other
values need the lookahead cache."""


def speculation_from_args(args: Mapping[str, Any]) -> SpeculationConfig | None:
    """The configuration that the arguments give; None without drafts.

    A value may be given by a flag or in `speculative_config`; if by both, they must be equal.
    `num_speculative_tokens` is another name of the cache's `copy_length`.

    Defaults of the match lengths are those of the vLLM version of each spelling. With flags alone
    (0.6): the longest is required, the shortest is 1. With `speculative_config` (0.9): a missing
    one equals the other, and both are 5 if both are missing.

    Args:
        args: The complete dict of `config.args.resolve_engine_args`.

    Raises:
        ConfigError: A key is unknown, a value is wrong, missing or has no effect, or two values
            contradict each other.
    """
    given, methods = _from_flags(args)
    mapping = args["speculative_config"]
    if mapping is not None:
        inside, named = _from_mapping(mapping)
        given = _merged(inside, given)
        methods += named
    chosen = _together(methods)
    _refuse_idle(given, chosen)
    if mapping is not None and not chosen:
        reason = f"must be {one_of((NGRAM, LOOKAHEAD, DRAFT_MODEL))}"
        raise ConfigError("speculative_config: method", None, reason)
    if not chosen:
        return None
    config = _from_methods(given, args, chosen, in_mapping=mapping is not None)
    limit = given.get(_MOST_SEQUENCES)
    return replace(
        config, most_sequences=None if limit is None else limit.value, typical=_typical(given)
    )


def _from_methods(
    given: Mapping[str, Given], args: Mapping[str, Any], chosen: frozenset[str], *, in_mapping: bool
) -> SpeculationConfig:
    """The configuration without the values that are common to all methods."""
    memory = args[_MEMORY]
    if NGRAM in chosen:
        return _prompt_lookup(given, memory, in_mapping=in_mapping)
    draft = _draft_model(given, args, in_mapping=in_mapping) if DRAFT_MODEL in chosen else None
    lookahead = _lookahead(given, with_draft=draft is not None) if LOOKAHEAD in chosen else None
    if lookahead is not None and draft is not None and not draft.on_cpu:
        reason = (
            "drafts of the lookahead cache are merged with those of the CPU worker alone; set "
            "cpu_draft_worker=True, or leave the cache out"
        )
        raise ConfigError("cpu_draft_worker", False, reason)
    method = LOOKAHEAD if draft is None else DRAFT_MODEL
    return SpeculationConfig(method, lookahead, None, 0, 0, memory, draft)


def _typical(given: Mapping[str, Given]) -> TypicalAcceptance | None:
    """The bounds of typical acceptance; None for lossless acceptance.

    Raises:
        ConfigError: a bound is given, but acceptance is lossless.
    """
    method = given.get(_ACCEPTANCE)
    if method is None or method.value != _TYPICAL:
        for path, value in (given[name] for name in (_THRESHOLD, _ALPHA) if name in given):
            reason = f"needs spec_decoding_acceptance_method={_TYPICAL!r}"
            raise ConfigError(path, value, reason)
        return None
    threshold, alpha = (
        given[name].value if name in given else _MAPPING_ROWS[name].default
        for name in (_THRESHOLD, _ALPHA)
    )
    return TypicalAcceptance(threshold, alpha)


def _from_flags(args: Mapping[str, Any]) -> tuple[dict[str, Given], list[tuple[str, Given]]]:
    """Returns the flags that differ from their default, by their name in `speculative_config`, and
    the methods, each with the flag that named it."""
    given, methods = {}, []
    for flag, name in _FLAGS.items():
        if args[flag] != _ROWS[flag].default:
            given[name] = Given(flag, args[flag])
    model = args["speculative_model"]
    if model == _NGRAM_NAMES[0]:
        methods.append((NGRAM, Given("speculative_model", model)))
    elif model is not None:
        given[_MODEL] = Given("speculative_model", model)
        methods.append((DRAFT_MODEL, given[_MODEL]))
    if args["use_lookahead"]:
        methods.append((LOOKAHEAD, Given("use_lookahead", True)))
    if _FOLDER in given:
        methods.append((LOOKAHEAD, given[_FOLDER]))
    return given, methods


def _from_mapping(
    mapping: Mapping[str, Any],
) -> tuple[dict[str, Given], list[tuple[str, Given]]]:
    """Does the same as `_from_flags` for `speculative_config`."""
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
    model = given.get(_MODEL)
    if model is not None and model.value in _NGRAM_NAMES:
        methods.append((NGRAM, given.pop(_MODEL)))
    elif model is not None:
        methods.append((DRAFT_MODEL, model))
    named = given.pop("method", None)
    if named is not None:
        methods.append((NGRAM if named.value in _NGRAM_NAMES else named.value, named))
    if _FOLDER in given:
        methods.append((LOOKAHEAD, given[_FOLDER]))
    return given, methods


def _merged(first: dict[str, Given], second: Mapping[str, Given]) -> dict[str, Given]:
    """The values of both.

    Raises:
        ConfigError: they differ in a value that both have.
    """
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


def _together(methods: list[tuple[str, Given]]) -> frozenset[str]:
    """The configured methods: one, or a draft model and the lookahead cache.

    Raises:
        ConfigError: other methods are combined.
    """
    for method, source in methods:
        for other, another in methods:
            if method != other and NGRAM in (method, other):
                raise _contradiction(another, source)
    return frozenset(method for method, _ in methods)


def _refuse_idle(given: Mapping[str, Given], methods: frozenset[str]) -> None:
    """Raises ConfigError for a value that has no effect with these methods."""
    for name, (path, value) in given.items():
        needed, words = _NEEDS.get(name, _OF_CACHE)
        if not needed & methods:
            raise ConfigError(path, value, f"needs {words}")


def _draft_model(
    given: Mapping[str, Given], args: Mapping[str, Any], *, in_mapping: bool
) -> DraftModelConfig:
    prefix = "speculative_config: " if in_mapping else ""
    model, count = given.get(_MODEL), given.get(_COUNT)
    if model is None:
        raise ConfigError(prefix + _MODEL, None, "a draft model is a folder or a hub id")
    if count is None:
        reason = "a draft model needs the number of draft tokens for each step"
        raise ConfigError(prefix + _COUNT, None, reason)
    on_cpu = args["cpu_draft_worker"]
    for path, value in (given[name] for name in _OF_WORKER_ALONE if name in given and not on_cpu):
        reason = "is a setting of the draft worker on the CPU; it needs cpu_draft_worker=True"
        raise ConfigError(path, value, reason)
    longest, revision = given.get(_LONGEST_TEXT), given.get(_REVISION)
    timeout = args["draft_timeout_ms"]
    return DraftModelConfig(
        model=model.value,
        revision=None if revision is None else revision.value,
        num_tokens=count.value,
        max_model_len=None if longest is None else longest.value,
        threads=args["draft_threads"],
        weight_dtype=args["draft_weight_dtype"],
        overlap=args["speculative_overlap"],
        timeout=None if timeout is None else timeout / 1e3,
        optional=args["draft_optional"],
        on_cpu=on_cpu,
    )


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
    count = given[_COUNT].value
    return SpeculationConfig(NGRAM, None, count, least, most, memory)


def _lookahead(given: Mapping[str, Given], *, with_draft: bool) -> LookaheadConfig:
    settings = {name: one for name, one in given.items() if name in KEYS}
    if _FOLDER in given:
        settings = _merged(read_lookahead_file(given[_FOLDER].value), settings)
    count = None if with_draft else given.get(_COUNT)
    if count is not None:
        if "copy_length" in settings:
            raise _contradiction(count, settings["copy_length"])
        settings["copy_length"] = count
    size = settings.get("cache_size")
    if size is not None and size.value is not None and _MEMORY in given:
        raise _contradiction(given[_MEMORY], size)
    return lookahead_config(settings)
