"""Checkpoints of any family in any quantized format, with random values and with the lists of plain
modules as the tools of each format write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.formats.scheme import ANY_LENGTH, Scheme, StoredPart
from hetero_llm.quantization.matrix import NF4_VALUES, dequantize

Config = dict[str, Any]
Lists = Callable[[Iterable[str]], Config]
"""How a format says which modules are plain, by the names of those beside head and embedding."""

MATRICES = re.compile(r".*(_proj|\.w[123]|\.gate|lm_head)\.weight")
"""Names of weights that tools quantize if they are not told otherwise."""
PLAIN = re.compile(r".*\.gate|lm_head|model\.layers\.1\.self_attn\..*")
"""Names of modules that are plain here: routers, the head, and all of one attention."""


@dataclass(frozen=True)
class Form:
    """A format of the tests.

    Attributes:
        config: `quantization_config` without a list.
        lists: adds one.
        with_optional: suffixes of optional parts that are stored.
    """

    config: Config
    lists: Lists
    with_optional: tuple[str, ...] = ()

    def written(self, plain: Iterable[str]) -> Config:
        """`quantization_config` of a checkpoint in which these modules are plain."""
        return {**self.config, **self.lists(plain)}


def _all_names(plain: Iterable[str]) -> Config:
    return {"modules_to_not_convert": sorted(plain)}


def _ignore(plain: Iterable[str]) -> Config:
    return {"ignore": ["lm_head", r"re:.*\.gate$", r"re:.*layers\.1\.self_attn\..*"]}


def _dynamic(plain: Iterable[str]) -> Config:
    return {"dynamic": {r"-:.*\.gate$": {}, r"-:.*\.layers\.1\.self_attn.*": {}}}


def _parts_of_names(plain: Iterable[str]) -> Config:
    return {"modules_to_not_convert": ["gate", "layers.1.self_attn"]}


def _wildcards(plain: Iterable[str]) -> Config:
    return {"exclude_modules": ["lm_head", "*.gate", "model.layers.1.self_attn*"]}


def _skipped(plain: Iterable[str]) -> Config:
    return {"llm_int8_skip_modules": ["lm_head", "gate", "model.layers.1.self_attn"]}


def _extra(plain: Iterable[str]) -> Config:
    exact = {name: {"bits": 16} for name in plain if not name.endswith(".gate")}
    return {"extra_config": {r".*\.gate$": {"bits": 16, "data_type": "float"}, **exact}}


def _tensors(form: str, **weights: Any) -> Form:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}
    return Form(config, _ignore)


def _fp8(*with_optional: str, method: str = "fp8", **more: Any) -> Form:
    return Form({"quant_method": method, **more}, _all_names, with_optional)


def _gptq(**options: Any) -> Form:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return Form({**config, **options}, _dynamic, ("g_idx",))


def _bitsandbytes(*with_optional: str, **options: Any) -> Form:
    return Form({"quant_method": "bitsandbytes", **options}, _skipped, with_optional)


_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FLOAT = {"num_bits": 8, "type": "float"}
_BLOCKS = [128, 128]

FORMS: dict[str, Form] = {
    "fp8": _fp8("weight_scale"),
    "fp8 blocks": _fp8("weight_scale_inv", weight_block_size=_BLOCKS),
    "fp8 blocks e8m0": _fp8("weight_scale_inv", weight_block_size=_BLOCKS, scale_fmt="ue8m0"),
    "fbgemm": _fp8("weight_scale", method="fbgemm_fp8"),
    "float channel": _tensors("float-quantized", strategy="channel", **_FLOAT),
    "float tensor": _tensors("float-quantized", strategy="tensor", **_FLOAT),
    "float block": _tensors("float-quantized", strategy="block", block_structure=_BLOCKS, **_FLOAT),
    "int8 channel": _tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    "pack int4": _tensors("pack-quantized", **_INT4),
    "pack int4 asymmetric": _tensors("pack-quantized", **_INT4, symmetric=False),
    "pack int4 channel": _tensors("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "pack int4 ordered": _tensors("pack-quantized", **_INT4, actorder="group"),
    "pack int8": _tensors("pack-quantized", **{**_INT4, "num_bits": 8}),
    "nvfp4": _tensors("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
    "mxfp4": _tensors(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    ),
    "modelopt fp8": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, _wildcards),
    "modelopt blocks": Form({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, _wildcards),
    "modelopt nvfp4": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _wildcards),
    "gptq": _gptq(),
    "gptq asymmetric": _gptq(sym=False),
    "gptq v2": _gptq(sym=False, checkpoint_format="gptq_v2"),
    "gptq ordered": _gptq(desc_act=True),
    "gptq 8 bits": _gptq(bits=8),
    "awq": Form(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, _parts_of_names
    ),
    "auto-round": Form(
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}, _extra
    ),
    "nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4 nested": _bitsandbytes(
        *_NESTED, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "int8 rows": _bitsandbytes(load_in_8bit=True),
}


def quantize(
    form: Form, tensors: Mapping[str, Tensor], plain_names: re.Pattern[str] = PLAIN
) -> tuple[Config, dict[str, Tensor], dict[str, Tensor]]:
    """Random matrices for those of a checkpoint.

    Returns:
        `quantization_config`; the tensors of the quantized checkpoint; those of the plain one that
        it stands for.
    """
    modules = [name.removesuffix(".weight") for name in tensors if MATRICES.fullmatch(name)]
    plain = [module for module in modules if plain_names.fullmatch(module)]
    config = form.written(plain)
    read = read_format(config)
    stored, dense = dict(tensors), dict(tensors)
    for number, module in enumerate(modules):
        scheme = read.scheme(module)
        assert (scheme is None) == (module in plain), module
        if scheme is None:
            continue
        rows, columns = stored.pop(f"{module}.weight").shape
        rng = np.random.default_rng(number)
        parts = _random_parts(form, scheme, (rows, columns), rng)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        dense[f"{module}.weight"] = dequantize(scheme.convert(parts, rows, columns), torch.float32)
    return config, stored, dense


def _random_parts(
    form: Form, scheme: Scheme, shape: tuple[int, int], rng: np.random.Generator
) -> dict[str, Tensor]:
    wanted = [
        part
        for part in scheme.parts(*shape)
        if not part.optional or part.suffix in form.with_optional
    ]
    parts = {part.suffix: _random_part(part, shape, rng) for part in wanted}
    nested = "weight.nested_absmax" in parts
    if "weight.absmax" in parts:
        blocks = parts["weight.absmax"].numel()
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(shape)}
        if nested:
            state |= {"nested_blocksize": 256, "nested_offset": 0.0625}
            parts["weight.absmax"] = torch.from_numpy(rng.integers(0, 256, blocks, np.uint8))
            parts["weight.nested_absmax"] = torch.full((-(-blocks // 256),), 0.01)
        data = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(data), dtype=torch.uint8)
    if "g_idx" in parts and not form.config.get("desc_act"):
        parts["g_idx"] = torch.arange(shape[1], dtype=torch.int32) // 32
    if form.config.get("bits") == 8:  # symmetric: 128, which is stored less one
        parts["qzeros"] = torch.full_like(parts["qzeros"], 0x7F7F7F7F)
    return parts


def _random_part(part: StoredPart, shape: tuple[int, int], rng: np.random.Generator) -> Tensor:
    """A stored tensor with values that a checkpoint may have."""
    rows, columns = shape
    size = tuple(1 if length == ANY_LENGTH else length for length in part.shapes[0])
    found: Any
    if part.suffix == "weight.quant_map":
        return torch.tensor(NF4_VALUES)
    if part.suffix == "weight.nested_quant_map":
        return torch.from_numpy(rng.uniform(-1, 1, 256)).float()
    if part.suffix in ("g_idx", "weight_g_idx"):  # the same for matrices that read alike
        found = np.random.default_rng(columns).permutation(columns) // 32
        return torch.from_numpy(found.astype(np.int32))
    if "F8_E8M0" in part.types and "F32" not in part.types:
        return torch.from_numpy(rng.integers(117, 121, size, np.uint8))
    if "F32" in part.types:
        low = 1.0 if "global" in part.suffix else 0.01
        return torch.from_numpy(rng.uniform(low, 2 * low, size)).float()
    kind = part.types[0]
    if kind == "F8_E4M3":
        return torch.from_numpy(0.5 * rng.standard_normal(size)).to(torch.float8_e4m3fn)
    if kind == "I64":
        return torch.tensor([rows, columns])
    low_high = {"I8": (-20, 20), "U8": (0, 256), "I32": (-(2**31), 2**31)}[kind]
    types = {"I8": np.int8, "U8": np.uint8, "I32": np.int32}
    return torch.from_numpy(rng.integers(*low_high, size).astype(types[kind]))
