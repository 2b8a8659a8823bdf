"""Scales of an e4m3 KV cache: those of a checkpoint, or of the file `quantization_param_path`.

They are [layers, 2, KV heads] float32, of keys and of values: what the stored numbers are
multiplied with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import read_json
from hetero_llm.models.weight_files import StoredTensor, WeightFile
from hetero_llm.quantization.formats.kv_cache import kv_scale_of
from hetero_llm.utils.files import user_path

logger = logging.getLogger(__name__)

_FIELD = "quantization_param_path"
_LEAST = 2.0**-126  # float32's smallest normal number
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stored_kv_scales(
    files: Iterable[WeightFile],
    config: ModelConfig,
    checkpoint_name: Callable[[str], str | None],
) -> Tensor | None:
    """The scales of a checkpoint; None: it has none. A layer without scales has 1.

    Args:
        checkpoint_name: Of the model; tensors that it skips are read over.

    Raises:
        ModelLoadError: one is not of a layer, has another shape than one number or one of each
            head, is not a positive finite number, or stands for keys or values alone.
    """
    scales = torch.ones(config.num_layers, 2, config.num_kv_heads)
    found: dict[tuple[int, int], str] = {}
    for file in files:
        served = [one for one in file.tensors if checkpoint_name(one.name) is not None]
        named = [(stored, kv_scale_of(stored.name)) for stored in served]
        wanted = [(stored, of) for stored, of in named if of is not None and of[1] != "q"]
        if not wanted:
            continue
        file.open()
        try:
            for stored, (layer, part) in wanted:
                where = f"{file.path}: {stored.name}"
                if layer >= config.num_layers:
                    raise ModelLoadError(f"{where}: the model has {config.num_layers} layers")
                value = _read(file, stored, where, config.num_kv_heads)
                for index in {"k": (0,), "v": (1,), "kv": (0, 1)}[part]:
                    scales[layer, index] = value
                    found[layer, index] = where
        finally:
            file.close()
    for (layer, index), where in found.items():
        if (layer, 1 - index) not in found:
            raise ModelLoadError(f"{where} has no counterpart: keys and values both need a scale")
    if not found:
        return None
    missing = [layer for layer in range(config.num_layers) if (layer, 0) not in found]
    if missing:
        logger.warning("layers without scales of the KV cache, which are 1 there: %s", missing)
    return scales


def _read(file: WeightFile, stored: StoredTensor, where: str, heads: int) -> Tensor:
    """[1] or [heads] float32."""
    if stored.dtype not in _FLOATS or math.prod(stored.shape) not in (1, heads):
        held = f"{stored.type_name} {list(stored.shape)}"
        raise ModelLoadError(f"{where}: {held}, where one number or {heads} are needed")
    raw = np.empty(stored.nbytes, np.uint8)
    file.read(stored, 0, raw)
    value = torch.from_numpy(raw).view(stored.dtype).float()
    if not all(map(_is_scale, value.tolist())):
        raise ModelLoadError(f"{where}: {value.tolist()}, where positive finite numbers are needed")
    return value


def read_scales_file(path: str, config: ModelConfig) -> Tensor:
    """The scales of a file of `quantization_param_path`, as vLLM 0.6 reads it:

        {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
         "scaling_factor": {"0": {"0": 0.02, "1": 0.03, ...}}}}

    by rank of tensor parallelism, then by layer; one scale for keys and values.

    Raises:
        ConfigError: the file is missing or damaged, or made for another model.
    """

    def bad(key: str, value: object, reason: str) -> ConfigError:
        return ConfigError(_FIELD, path, f"{key}={shown(value)}: {reason}")

    try:
        content = read_json(user_path(path))
    except OSError as error:
        raise ConfigError(_FIELD, path, error.strerror or str(error)) from error
    except ModelLoadError as error:
        raise ConfigError(_FIELD, path, str(error).removeprefix(f"{path}: ")) from error
    model_type = content.get("model_type")
    if model_type not in (None, config.model_type):
        raise bad("model_type", model_type, f"the model is of type {config.model_type!r}")
    cache = content.get("kv_cache")
    if not isinstance(cache, Mapping):
        raise bad("kv_cache", cache, "an object is needed")
    if cache.get("dtype") != "float8_e4m3fn":
        raise bad("kv_cache.dtype", cache.get("dtype"), "must be 'float8_e4m3fn'")
    ranks = cache.get("scaling_factor")
    if not isinstance(ranks, Mapping) or set(ranks) != {"0"}:
        reason = "an object with rank 0 alone is needed: one GPU serves the model"
        raise bad("kv_cache.scaling_factor", ranks, reason)
    key, layers = "kv_cache.scaling_factor.0", ranks["0"]
    numbers = [str(layer) for layer in range(config.num_layers)]
    if not isinstance(layers, Mapping) or set(layers) != set(numbers):
        reason = f"a scale of each layer from 0 to {config.num_layers - 1} is needed"
        raise bad(key, layers, reason)
    for number in numbers:
        if not _is_scale(layers[number]):
            raise bad(f"{key}.{number}", layers[number], "a positive finite number is needed")
    scales = torch.tensor([float(layers[number]) for number in numbers])
    return scales[:, None, None].expand(-1, 2, config.num_kv_heads).contiguous()


def _is_scale(value: Any) -> bool:
    """Whether float32 has a value and its inverse, both finite and above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _LEAST <= value <= 1 / _LEAST
