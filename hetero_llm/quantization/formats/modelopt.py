"""NVIDIA ModelOpt: FP8 and NVFP4.

`quant_algo` chooses (ModelOpt's `process_layer_quant_config`, vLLM's modelopt.py):

FP8: `weight` [N, K] float8_e4m3fn, `weight_scale` [] float32.
FP8_PER_CHANNEL_PER_TOKEN: `weight_scale` [N].
FP8_PB_WO: `weight_scale` [N / 128, 1, K / 128, 1].
NVFP4, W4A16_NVFP4: `weight` [N, K / 2] uint8, the first column in the low half; `weight_scale`
    [N, K / 16] float8_e4m3fn; `weight_scale_2` [], which *multiplies* it, other than the global
    scale of compressed-tensors.
MIXED_PRECISION: `quantized_layers` has a `quant_algo` for each module.

`exclude_modules` (hf_quant_config.json) or `ignore` (config.json) have wildcards, and older
releases parts of names. Scales of activations are read over, see `fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from hetero_llm.quantization.formats.compressed_tensors import Fp4
from hetero_llm.quantization.formats.fp8 import Fp8Blocks, Fp8Rows
from hetero_llm.quantization.formats.modules import PlainModules, is_embedding
from hetero_llm.quantization.formats.options import Config, choice, names, refused, table
from hetero_llm.quantization.formats.scheme import Scheme

_ACTIVATIONS = ("input_scale",)
_NVFP4 = Fp4("nv", "weight", "weight_scale_2", divides=False, activations=_ACTIVATIONS)
_SCHEMES: dict[str, Scheme] = {
    "FP8": Fp8Rows(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Rows(),
    "FP8_PB_WO": Fp8Blocks((128, 128), flat=False),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
_MIXED = "MIXED_PRECISION"


class ModelOptFormat:
    """See `CheckpointFormat` and `read`."""

    name = "modelopt"

    def __init__(
        self, base: Scheme | None, layers: Mapping[str, Scheme], excluded: tuple[str, ...]
    ) -> None:
        self._base, self._layers = base, layers
        self._wildcards = tuple(one for one in excluded if set(one) & set("*?["))
        self._parts = PlainModules("exclude_modules", set(excluded) - set(self._wildcards))

    def scheme(self, module: str) -> Scheme | None:
        if is_embedding(module) or module in self._parts:
            return None
        if any(fnmatchcase(module, one) for one in self._wildcards):
            return None
        return self._layers.get(module, self._base)


def read(config: Config) -> ModelOptFormat:
    """The format of a config whose `quant_method` is "modelopt", or of hf_quant_config.json.

    Raises:
        ValueError: an option is not supported.
    """
    inner = table(config, "quantization") or config
    excluded = names(inner, "exclude_modules") or names(inner, "ignore")
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm != _MIXED:
        return ModelOptFormat(_scheme(inner, "quant_algo", (*_SCHEMES, _MIXED)), {}, excluded)
    layers = {}
    for module, options in table(inner, "quantized_layers").items():
        key = f"quantized_layers.{module}"
        if not isinstance(options, Mapping):
            raise refused(key, options, "an object")
        layers[module] = _scheme(options, f"{key}.quant_algo", tuple(_SCHEMES))
    if not layers:
        raise refused("quantized_layers", inner.get("quantized_layers"), "a scheme of each module")
    return ModelOptFormat(None, layers, excluded)


def _scheme(options: Config, key: str, supported: tuple[str, ...]) -> Scheme:
    algorithm = options.get("quant_algo")
    found = _SCHEMES.get(str(algorithm).upper())
    if found is None:
        raise refused(key, algorithm, supported)
    if isinstance(found, Fp4):
        choice(options, "group_size", (found.group,), found.group)
    choice(options, "has_zero_point", (False,), False)
    choice(options, "pre_quant_scale", (False,), False)
    return found
