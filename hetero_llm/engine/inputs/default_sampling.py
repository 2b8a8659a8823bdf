"""Sampling defaults of a model, for requests that leave a field out: vLLM's `--generation-config`.

Their source is generation_config.json, or the metadata of a GGUF file, changed by
`override_generation_config`. What a request states itself always counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_llm.config.engine_config import GenerationDefaults
from hetero_llm.core.errors import ConfigError, ModelLoadError, SamplingError, shown
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.models.config_reader import read_json
from hetero_llm.models.gguf.config import read_gguf_sampling
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.utils.files import user_path

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "skip_special_tokens": "skip_special_tokens",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json that are read -> fields of `SamplingParams`."""
_OVERRIDES_ONLY = {"stop_token_ids": "stop_token_ids"}
_NOT_WITH_BEAMS = ("temperature", "top_p", "top_k", "min_p")


def default_sampling(wanted: GenerationDefaults, model_folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` and their defaults; those that are not set anywhere are left out.

    Logs one line if generation_config.json or a GGUF file sets any.

    Raises:
        ConfigError: `generation_config` is no folder with such a file, or
            `override_generation_config` has an unknown key or a wrong value.
        ModelLoadError: the file cannot be read, or a value in it is wrong.
    """
    found: dict[str, Any] = {}
    path = _file(wanted.source, model_folder)
    if path is not None:
        found = _known(read_gguf_sampling(path) if is_gguf(path) else read_json(path))
        try:
            SamplingParams(**found)
        except SamplingError as error:
            raise ModelLoadError(
                f"{path}: {error}; --generation-config vllm leaves its values out"
            ) from None
        if found:
            logger.warning(
                "sampling defaults of %s: %s; --generation-config vllm leaves them out", path, found
            )
    given = _known(wanted.override, **_OVERRIDES_ONLY)
    for key in wanted.override:
        if key not in _FIELDS and key not in _OVERRIDES_ONLY:
            names = ", ".join((*_FIELDS, *_OVERRIDES_ONLY))
            reason = f"{shown(key)} is no sampling default; known are {names}"
            raise ConfigError("override_generation_config", dict(wanted.override), reason)
    try:
        SamplingParams(**{**found, **given})
    except SamplingError as error:
        raise ConfigError("override_generation_config", dict(wanted.override), str(error)) from None
    return {**found, **given}


def with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request: `given`, then `defaults`. Defaults that shape a distribution are not
    for beam search, which samples nothing."""
    beams = given.get("use_beam_search")
    return {
        **{
            name: value
            for name, value in defaults.items()
            if not (beams and name in _NOT_WITH_BEAMS)
        },
        **given,
    }


def _file(source: str, model_folder: Path) -> Path | None:
    """generation_config.json of the source, or a GGUF file; None if none is to be read."""
    if source == "vllm":
        return None
    if source == "auto":
        if is_gguf(model_folder):
            return model_folder
        path = model_folder / FILE
        return path if path.exists() else None
    wanted = f"must be auto, vllm or a folder with {FILE}"
    try:
        path = user_path(source) / FILE
    except OSError as error:
        reason = f"{wanted}: {error.strerror or error}"
        raise ConfigError("generation_config", source, reason) from error
    if not path.is_file():
        raise ConfigError("generation_config", source, wanted)
    return path


def _known(values: Mapping[str, Any], **more: str) -> dict[str, Any]:
    """The values of keys that are sampling defaults, by the field's name; null is not set."""
    fields = {**_FIELDS, **more}
    return {field: values[key] for key, field in fields.items() if values.get(key) is not None}
