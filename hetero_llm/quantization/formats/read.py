"""From the value of `quantization_config` in config.json to the reader of its format.

Older tools wrote files of their own, with the same content: see `names.older_method`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hetero_llm.quantization.formats import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    modelopt,
    mxfp4,
)
from hetero_llm.quantization.formats.options import Config, first_of, refused
from hetero_llm.quantization.formats.scheme import CheckpointFormat

_READERS: Mapping[str, Callable[[Config], CheckpointFormat]] = {
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "gguf": gguf.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "auto-round": auto_round.read,
    "intel/auto-round": auto_round.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "modelopt_mixed": modelopt.read,
    "bitsandbytes": bitsandbytes.read,
    "mxfp4": mxfp4.read,
}


def read_format(config: Config) -> CheckpointFormat:
    """The format that `quantization_config` names.

    Raises:
        ValueError: its method or one of its options is not supported; the message names the key,
            its value and what is supported.
    """
    _check_object("quantization_config", config)
    method: Any = first_of(config, ("quant_method", "method"))  # the second one: GPTQModel's
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise refused("quant_method", method, _READERS)
    return reader(config)


def _check_object(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise refused(name, value, "an object")
