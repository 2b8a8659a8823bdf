"""Writes GGUF files: any metadata and tensors, or a tiny model with random blocks beside the model
of transformers that has the same numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from tests.helpers.gguf_blocks import LAYOUTS, NUMBERS, numbers, random_tensor
from tests.models.tiny import make_tiny_checkpoint

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(10)
UINT64, INT64, FLOAT64 = 10, 11, 12
_FORMS = {
    UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", FLOAT32: "f",
    BOOL: "?", UINT64: "Q", INT64: "q", FLOAT64: "d",
}  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """A value of metadata with its type; `of`: of an array's entries."""

    kind: int
    value: Any
    of: int | None = None


@dataclass
class GgufWriter:
    """What a file is to hold.

    Attributes:
        tensors: name -> type, shape with rows first, bytes.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def add(self, name: str, type_name: str, raw: np.ndarray, shape: tuple[int, ...]) -> None:
        self.tensors[name] = (NUMBERS[type_name], shape, raw.tobytes())

    def contents(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            typed = value if isinstance(value, Typed) else _typed(value)
            out += _string(key) + struct.pack("<I", typed.kind) + _value(typed)
        data = b""
        for name, (kind, shape, raw) in self.tensors.items():
            out += _string(name) + struct.pack("<I", len(shape))
            out += b"".join(struct.pack("<Q", size) for size in reversed(shape))
            out += struct.pack("<IQ", kind, len(data))
            data += raw + bytes(-len(raw) % self.alignment)
        return out + bytes(-len(out) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.contents())
        return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> Typed:
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
    if isinstance(value, list):
        return Typed(ARRAY, value, kinds[type(value[0])] if value else UINT32)
    return Typed(kinds[type(value)], value)


def _value(typed: Typed) -> bytes:
    if typed.kind == STRING:
        return _string(typed.value)
    if typed.kind == ARRAY:
        assert typed.of is not None
        entries = [
            _value(entry if isinstance(entry, Typed) else Typed(typed.of, entry))
            for entry in typed.value
        ]
        return struct.pack("<IQ", typed.of, len(entries)) + b"".join(entries)
    return struct.pack("<" + _FORMS[typed.kind], typed.value)


# tiny models

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe"}
"""Those with a name of their own."""
_GEMMA2_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True)
class TinyGguf:
    """A GGUF file and the model of transformers with its numbers, in float32.

    Attributes:
        folder: a checkpoint of the same configuration, with other weights.
    """

    path: Path
    folder: Path
    model: Any


def make_tiny_gguf(
    folder: Path,
    family: str,
    variant: str = "",
    *,
    types: Callable[[str], str] = lambda name: "Q8_0",
    changes: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    vocab_size: int = 96,
    seed: int = 0,
) -> TinyGguf:
    """Writes model.gguf.

    Args:
        family: of `tests.models.tiny`.
        types: name of a matrix in the file -> type.
        changes: of the variant's configuration.
        metadata: to add, such as a tokenizer.
    """
    rng = np.random.default_rng(seed)
    checkpoint = make_tiny_checkpoint(
        folder / "checkpoint", family, variant, changes=changes, vocab_size=vocab_size, seed=seed
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    writer = GgufWriter({**_metadata(family, config), **(metadata or {})})
    state = model.state_dict()
    tied = config.tie_word_embeddings
    for name, tensor, stored in _stored_parts(family, state):
        if tied and name == "lm_head.weight":
            continue
        heads = 0
        if family == "llama" and stored.partition(".attn_")[2][:2] in ("q.", "k."):
            is_q = ".attn_q." in stored
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
        if tensor.dim() == 1:
            values = _to_neighbours(tensor, heads)
            if family.startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1
                tensor.copy_(values - 1)  # rounded
            writer.add(stored, "F32", values.contiguous().numpy(), tuple(tensor.shape))
            continue
        kind = types(stored)
        raw = random_tensor(kind, tensor[..., 0].numel(), tensor.shape[-1], rng)
        writer.add(stored, kind, raw, tuple(tensor.shape))
        values = torch.from_numpy(numbers(kind, raw).copy()).view(tensor.shape)
        tensor.copy_(_from_neighbours(values, heads))
    model.load_state_dict(state)
    return TinyGguf(writer.write(folder / "model.gguf"), checkpoint, model.eval())


def sizes_for(type_name: str) -> dict[str, int]:
    """Sizes of a tiny model whose rows are whole blocks."""
    width = LAYOUTS[type_name][1] if type_name in LAYOUTS else 32
    return {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "head_dim": width // 4,
    }  # fmt: skip


def _stored_parts(family: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, str]]:
    """Each tensor of transformers, or part of one, and its name in the file."""
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, tensor, _stored_name(family, name)
            continue
        layer = name.split(".")[2]
        parts = {"down": tensor}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True))
        for part, values in parts.items():
            yield name, values, f"blk.{layer}.ffn_{part}_exps.weight"


def _stored_name(family: str, name: str) -> str:
    names = {**_NAMES, **(_GEMMA2_NAMES if family == "gemma2" else {})}
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{names[module]}.{kind}"
    return f"{names[module]}.{kind}"


def _to_neighbours(rows: Tensor, heads: int) -> Tensor:
    """`permute` of llama.cpp's convert_hf_to_gguf.py; as it is with 0 heads."""
    if not heads:
        return rows
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _from_neighbours(rows: Tensor, heads: int) -> Tensor:
    if not heads:
        return rows
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _metadata(family: str, config: Any) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": hidden,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    rope = config.rope_parameters
    values["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    if family == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
        values["attention.sliding_window"] = config.sliding_window
    if family == "qwen3_moe":
        values["expert_count"] = config.num_experts
        values["expert_used_count"] = config.num_experts_per_tok
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    family = _ARCHITECTURES.get(family, family)
    general = {"general.architecture": family, "tokenizer.ggml.bos_token_id": 1}
    general["tokenizer.ggml.eos_token_id"] = 2
    return {**general, **{f"{family}.{key}": value for key, value in values.items()}}
