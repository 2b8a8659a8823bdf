"""AutoRound: the packings of `gptq` and `awq` under a config of its own.

`packing_format` is "auto_round:auto_gptq" or "auto_round:auto_awq". `extra_config` has options of
single modules, by name or by a regular expression that the name contains; 16 bits: the module is
plain. `block_name_to_quantize` has beginnings of the names of quantized modules (vLLM's
`AutoRoundConfig`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hetero_llm.quantization.formats import awq, gptq
from hetero_llm.quantization.formats.modules import is_embedding, is_head
from hetero_llm.quantization.formats.options import (
    Config,
    choice,
    first_of,
    names,
    pattern,
    refused,
    table,
)
from hetero_llm.quantization.formats.scheme import Scheme

_PLAIN_BITS = 16
_OPTIONS = ("bits", "group_size", "sym")
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")


class AutoRoundFormat:
    """See `CheckpointFormat` and `read`."""

    name = "auto-round"

    def __init__(
        self,
        base: Scheme,
        exact: Mapping[str, Scheme | None],
        patterns: tuple[tuple[re.Pattern[str], Scheme | None], ...],
        blocks: tuple[str, ...],
    ) -> None:
        self._base, self._exact, self._patterns, self._blocks = base, exact, patterns, blocks

    def scheme(self, module: str) -> Scheme | None:
        if module in self._exact:
            return self._exact[module]
        for one, scheme in self._patterns:
            if one.search(module):
                return scheme
        inside = not is_head(module) and not is_embedding(module)
        if self._blocks:
            inside = module.startswith(self._blocks)
        return self._base if inside else None


def read(config: Config) -> AutoRoundFormat:
    """The format of a config whose `quant_method` is "auto-round".

    Raises:
        ValueError: an option is not supported.
    """
    packing = choice(config, "packing_format", _PACKINGS, _PACKINGS[0])
    choice(config, "data_type", ("int",), "int")
    base = {name: config.get(name) for name in _OPTIONS}
    scheme = _scheme(base, packing)
    if scheme is None:
        raise refused("bits", base["bits"], (4, 8))
    exact: dict[str, Scheme | None] = {}
    patterns = []
    for module, changes in table(config, "extra_config").items():
        if not isinstance(changes, Mapping):
            raise refused(f"extra_config.{module}", changes, "an object")
        changed = _scheme(base | {n: changes[n] for n in _OPTIONS if n in changes}, packing)
        if set(module) & set("*+?^$()[]{}|\\"):
            patterns.append((pattern("extra_config", module), changed))
        else:
            exact[module] = changed
    key = "block_name_to_quantize"
    blocks = first_of(config, (key, "to_quant_block_names"), ())
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    return AutoRoundFormat(scheme, exact, tuple(patterns), names({key: blocks}, key))


def _scheme(options: dict[str, Any], packing: str) -> Scheme | None:
    """The scheme of a module; None: it is plain."""
    bits = options["bits"]
    if type(bits) is int and bits >= _PLAIN_BITS:
        return None
    return awq.scheme_of(options) if packing.endswith("awq") else gptq.scheme_of(options)
