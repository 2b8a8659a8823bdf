"""`quantization_config` of a checkpoint -> its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_llm.quantization.formats.gguf import GgufFormat
from hetero_llm.quantization.formats.scheme import CheckpointFormat


def read_format(config: Mapping[str, Any]) -> CheckpointFormat:
    """The format that a quantization_config describes.

    Raises:
        ValueError: it asks for what is not built; the message names key and value.
    """
    if config.get("quant_method") == GgufFormat.name:
        return GgufFormat(config)
    raise ValueError(f"quant_method={config.get('quant_method')!r} is not supported")
