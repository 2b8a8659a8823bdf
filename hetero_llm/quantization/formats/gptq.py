"""GPTQ: what GPTQModel, AutoGPTQ and AutoRound ("auto_gptq" packing) write.

Layout (GPTQModel's `BaseQuantLinear.pack_original`, `dequantize_weight`), with w = bits and
c = 32 / w codes in a word of 32 bits, the first in its lowest bits:

`qweight` [K / c, N] int32, packed along K; `qzeros` [K / g, N / c] int32, packed along N; `scales`
[K / g, N]; `g_idx` [K] int32, the group of each column. Element (k, n) of the transposed matrix is
scales[g_idx[k], n] * (code - zero). Format "gptq" stores each zero point minus one: GPTQModel takes
0x11111111 (of 8 bits 0x01010101) off the words as they are, and borrows from the next zero point
where one is 0, so the same number is added to the words here (its
`convert_gptq_v2_to_v1_format_module`). "gptq_v2" stores them as they are. `desc_act` quantizes
columns in another order, so that columns of a group do not follow one another. AutoGPTQ also stores
a `bias` [N] of zeros for modules without one.

Of 8 bits, int8 has no zero points here: all must be 128, which symmetric quantization writes.
Asymmetric weights of 8 bits are refused: their codes less their zero points take nine bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hetero_llm.quantization.formats.modules import PlainModules, UniformFormat
from hetero_llm.quantization.formats.options import (
    Config,
    choice,
    first_of,
    flag,
    group_of,
    names,
    pattern,
    refused,
    table,
)
from hetero_llm.quantization.formats.scheme import FLOATS, Scheme, StoredPart
from hetero_llm.quantization.formats.values import (
    bytes_of_words,
    finite_scale,
    in_order,
    order_of_groups,
    width_of_groups,
)
from hetero_llm.quantization.matrix import INT4_ZERO, QuantizedMatrix

_ONES = {4: 0x11111111, 8: 0x01010101}
_INT8_ZERO = 128


@dataclass(frozen=True, slots=True)
class GptqScheme(Scheme):
    """One matrix; see the head of this file.

    Attributes:
        bits: 4 or 8.
        group: columns of a group; -1: all.
        desc_act: columns of a group need not follow one another.
        zeros_less_one: format "gptq".
    """

    bits: Literal[4, 8]
    group: int
    desc_act: bool
    zeros_less_one: bool

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        each = 32 // self.bits
        if rows % each or columns % each:
            raise ValueError(
                f"{self.bits} bits are packed {each} to a word, which does not divide its {rows} "
                f"rows and {columns} columns"
            )
        groups = columns // width_of_groups(columns, self.group, self.bits)
        return (
            StoredPart("qweight", ("I32",), ((columns // each, rows),)),
            StoredPart("qzeros", ("I32",), ((groups, rows // each),)),
            StoredPart("scales", FLOATS, ((groups, rows),)),
            StoredPart("g_idx", ("I32", "I64"), ((columns,),), optional=not self.desc_act),
            StoredPart("bias", FLOATS, ((rows,),), optional=True),
        )

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        group = width_of_groups(columns, self.group, self.bits)
        if (bias := stored.get("bias")) is not None and bool(bias.any()):
            raise ValueError("bias: it is not zero, and the model has none")
        scale = finite_scale("scales", stored["scales"].t().contiguous())
        order = self._order(stored.get("g_idx"), columns // group)
        words = stored["qzeros"]
        if self.zeros_less_one:
            words = words + _ONES[self.bits]
        data, zeros = bytes_of_words(stored["qweight"].t()), bytes_of_words(words)
        if self.bits == 8:
            if bool((zeros != _INT8_ZERO).any()):
                raise ValueError(f"qzeros: of 8 bits, zero points other than {_INT8_ZERO}")
            data = (data if order is None else data[:, order.long()]) ^ _INT8_ZERO
            return QuantizedMatrix("int8", data.view(torch.int8), scale, group, order=order)
        codes = torch.stack((zeros & 15, zeros >> 4), dim=-1).flatten(1)  # [groups, N]
        zero = None if bool((codes == INT4_ZERO).all()) else codes.t().contiguous()
        return QuantizedMatrix("int4", in_order(data, order), scale, group, zero=zero, order=order)

    def column_step(self, columns: int) -> int:
        if self.desc_act and self.group != -1:
            raise ValueError("its columns are quantized in an order of their own (desc_act=True)")
        return 32 // self.bits if self.group == -1 else self.group

    def slice_steps(self, columns: int) -> tuple[int, int]:
        """See `Scheme`. An index of groups may name an order: columns need the whole of it."""
        return 32 // self.bits, 0

    def _order(self, g_idx: Tensor | None, groups: int) -> Tensor | None:
        """Without `desc_act`, an index of zeros is one that nothing was written into."""
        if g_idx is None or (not self.desc_act and not bool(g_idx.any())):
            return None
        return order_of_groups("g_idx", g_idx, groups)


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """See `CheckpointFormat` and `read`.

    Attributes:
        uniform: the format without rules.
        rules: GPTQModel's `dynamic`: what the names of modules begin with, and their schemes; None:
            they are plain.
    """

    uniform: UniformFormat
    rules: tuple[tuple[re.Pattern[str], Scheme | None], ...]
    name: str = "gptq"

    def scheme(self, module: str) -> Scheme | None:
        """See `CheckpointFormat`. The first rule that the module's name begins with counts."""
        base = self.uniform.scheme(module)
        if base is None:
            return None
        return next((changed for one, changed in self.rules if one.match(module)), base)


def read(config: Config) -> GptqFormat:
    """The format of a config whose `quant_method` is "gptq", or of AutoGPTQ's
    quantize_config.json.

    Raises:
        ValueError: an option is not supported.
    """
    if config.get("is_marlin_format"):
        raise refused("is_marlin_format", config["is_marlin_format"], (False,))
    choice(config, "pack_dtype", ("int32",), "int32")
    plain = PlainModules("modules_to_not_convert", names(config, "modules_to_not_convert"))
    head = flag(config, "lm_head", False)
    uniform = UniformFormat("gptq", scheme_of(config), plain, head)
    rules = []
    for key, changes in table(config, "dynamic").items():
        if not isinstance(changes, Mapping):
            raise refused(f"dynamic.{key}", changes, "an object")
        begins = pattern("dynamic", key.removeprefix("-:").removeprefix("+:"))
        changed = None if key.startswith("-:") else scheme_of({**config, **changes})
        rules.append((begins, changed))
    return GptqFormat(uniform, tuple(rules))


def scheme_of(config: Config) -> GptqScheme:
    """The scheme of a module with these options.

    Raises:
        ValueError: one of them is not supported.
    """
    bits = choice(config, "bits", (4, 8))
    if not flag(config, "sym", True) and bits == 8:
        raise ValueError("sym=False is not supported for bits=8, sym=True is")
    form = first_of(config, ("checkpoint_format", "format"), "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise refused("checkpoint_format", form, ("gptq", "gptq_v2"))
    group = group_of("group_size", config.get("group_size"))
    return GptqScheme(bits, group, flag(config, "desc_act", False), form == "gptq")
