"""Names of tensors in GGUF files -> those in the checkpoints that transformers writes, and what
the conversion to GGUF did to a tensor (convert_hf_to_gguf.py of llama.cpp)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; part of the configuration, not of the weights."""
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

_OUTSIDE = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_FUSED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
"""Matrices of a layer that the engine multiplies with at once."""
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z0-9_]+)\.(weight|bias)")
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA2_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture of GGUF files that can be read.

    Attributes:
        model_class: in transformers.
        model_type: in config.json.
        layer: names of a layer's tensors there.
        rotates_neighbours: rows of the projections of queries and keys are in the order in which
            entry 2i of a head is rotated with entry 2i + 1; transformers rotates entry i with entry
            i + half.
        norms_plus_one: weights of norms are stored as they are multiplied; transformers adds 1.
    """

    model_class: str
    model_type: str
    layer: Mapping[str, str]
    rotates_neighbours: bool = False
    norms_plus_one: bool = False

    def name(self, stored: str) -> str:
        """The name of a tensor in transformers; its own if it has none there."""
        match = _LAYER.fullmatch(stored)
        if match is not None and match[2] in self.layer:
            return f"model.layers.{int(match[1])}.{self.layer[match[2]]}.{match[3]}"
        return _OUTSIDE.get(stored, stored)

    def module(self, stored: str) -> str:
        """The module of a weight."""
        return self.name(stored).removesuffix(".weight")

    def fused_with(self, stored: str) -> tuple[str, ...]:
        """The tensors that the engine fuses with one, itself included; empty if it is none of
        `Linear` layers."""
        match = _LAYER.fullmatch(stored)
        if match is None:
            return (stored,) if stored == HEAD else ()
        if match[3] != "weight" or match[2].endswith("norm"):
            return ()
        parts = next((parts for parts in _FUSED if match[2] in parts), (match[2],))
        return tuple(f"blk.{match[1]}.{part}.weight" for part in parts)

    def is_rotated(self, stored: str) -> bool:
        """Whether the rows of a tensor are to be reordered, see `rotates_neighbours`."""
        match = _LAYER.fullmatch(stored)
        return self.rotates_neighbours and match is not None and match[2] in ("attn_q", "attn_k")

    def is_plus_one(self, stored: str) -> bool:
        """Whether 1 is to be taken off, see `norms_plus_one`."""
        return self.norms_plus_one and stored.endswith("norm.weight")


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("LlamaForCausalLM", "llama", _IN_LAYER, rotates_neighbours=True),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _IN_LAYER),
        "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _IN_LAYER),
        "gemma": GgufFamily("GemmaForCausalLM", "gemma", _IN_LAYER, norms_plus_one=True),
        "gemma2": GgufFamily(
            "Gemma2ForCausalLM", "gemma2", {**_IN_LAYER, **_GEMMA2_NORMS}, norms_plus_one=True
        ),
    }
)
"""By `general.architecture`."""
