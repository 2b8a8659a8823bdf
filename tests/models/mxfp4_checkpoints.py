"""Checkpoints of gpt-oss as they are published: banks of experts in MXFP4, all else plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hetero_llm.quantization.matrix import FP4_VALUES
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
        *("model.embed_tokens", "lm_head"),
    ],
}
SIZES = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}


def quantize(bank: Tensor) -> tuple[Tensor, Tensor]:
    """A plain bank [experts, columns, rows] as blocks [experts, rows, columns / 32, 16] and scales
    [experts, rows, columns / 32], both uint8: the largest number of a group of 32 becomes 4 to 8
    before it is rounded (OCP Microscaling Formats 1.0, section 6.3)."""
    experts, columns, rows = bank.shape
    groups = bank.float().transpose(1, 2).reshape(experts, rows, columns // 32, 32)
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    values = torch.tensor(FP4_VALUES)
    scaled = groups / 2.0 ** exponents.unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - values).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks.contiguous(), (exponents + 127).to(torch.uint8)


def make_mxfp4_checkpoint(folder: Path, **options: Any) -> Path:
    """A tiny gpt-oss; `options`: of `make_tiny_checkpoint`."""
    changes = {**SIZES, **options.pop("changes", {})}
    make_tiny_checkpoint(folder, "gpt_oss", changes=changes, **options)
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = quantize(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})
    return rewrite_config(folder, quantization_config=CONFIG)


def make_both(folder: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the plain one that transformers' dequantization makes of it."""
    packed = make_mxfp4_checkpoint(folder / "mxfp4", **options)
    plain = make_mxfp4_checkpoint(folder / "plain", **options)
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj_blocks")]:
        bank = name.removesuffix("blocks")
        parts = tensors.pop(name), tensors.pop(f"{bank}scales")
        tensors[bank[:-1]] = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, rewrite_config(plain, remove=("quantization_config",))
