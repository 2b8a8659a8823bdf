"""config.json and generation_config.json of a model folder -> `ModelConfig`.

Each architecture has a reader in `models.configs`. Defaults of absent keys are those of the
family's transformers class. A feature that is not computed is a `ModelLoadError` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import (
    ConfigSource,
    Reader,
    read_config,
    read_json,
    values_of,
)
from hetero_llm.models.quantization_config import online_quantization, stored_quantization
from hetero_llm.models.registry import FAMILIES, REFUSED, shown_architectures


def load_model_config(
    folder: Path,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    disable_sliding_window: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
) -> ModelConfig:
    """Reads the configuration of a model folder.

    Args:
        folder: Holds config.json and maybe generation_config.json.
        rope_scaling: Replaces the file's rope scaling; a mistake in it is a `ConfigError`.
        rope_theta: Replaces the file's rotary base.
        disable_sliding_window: Full attention everywhere, with the context capped to the window,
            inside which both are the same.
        hf_overrides: Keys of config.json to add or to replace.
        quantization: The argument of that name; None: weights are served as they are stored.

    Raises:
        ModelLoadError: A file cannot be read, or names something that is not supported.
        ConfigError: `quantization` does not go with the checkpoint; `rope_scaling` or `rope_theta`
            is wrong, or the model has no rotary embedding.
    """
    reader = read_config(folder, hf_overrides)
    generation_path = Path(folder) / "generation_config.json"
    generation = Reader({}, str(generation_path))
    if generation_path.exists():
        generation = Reader(read_json(generation_path), str(generation_path))
    architecture = _architecture(reader)
    source = ConfigSource(
        reader, generation, architecture, rope_scaling, rope_theta, disable_sliding_window
    )
    stored = stored_quantization(Path(folder), reader)
    online = online_quantization(quantization, stored)
    with values_of(Path(reader.where)):
        config = FAMILIES[architecture].read(source)
    config = replace(config, quantization=stored, online_quantization=online)
    if config.rope is None:
        for field, value in (("rope_scaling", rope_scaling), ("rope_theta", rope_theta)):
            if value is not None:
                raise ConfigError(field, value, f"{architecture} has no rotary embedding")
    return config


def _architecture(reader: Reader) -> str:
    for name in reader.class_names():
        if name in FAMILIES:
            return name
        if name in REFUSED:
            raise reader.bad("architectures", f"not supported, {REFUSED[name]}")
    raise reader.bad("architectures", "supported are " + shown_architectures())
