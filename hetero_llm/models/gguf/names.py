"""Names of tensors in GGUF files -> those in the checkpoints that transformers writes, and what
the conversion to GGUF did to a tensor (convert_hf_to_gguf.py of llama.cpp)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.gguf.container import GgufHeader, GgufTensor

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
_EXPERTS = {"ffn_gate_exps": "ffn_gate", "ffn_up_exps": "ffn_up", "ffn_down_exps": "ffn_down"}
"""Tensors with a matrix of every expert of a layer; and what each matrix is called here, with the
expert's number behind it, as llama.cpp did before it had such tensors."""
_EXPERT = re.compile(r"blk\.([0-9]+)\.(ffn_gate|ffn_up|ffn_down)\.([0-9]+)\.weight")
_MOST_MATRICES = 1 << 20  # 100 layers of 512 experts have 153,600
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_IN_MIXTURE = {name: ours for name, ours in _IN_LAYER.items() if name not in _DENSE}
_IN_MIXTURE["ffn_gate_inp"] = "mlp.gate"
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
        has_experts: every layer is a mixture of experts.
    """

    model_class: str
    model_type: str
    layer: Mapping[str, str]
    rotates_neighbours: bool = False
    norms_plus_one: bool = False
    has_experts: bool = False

    def name(self, stored: str) -> str:
        """The name of a tensor in transformers; its own if it has none there."""
        match = self._expert(stored)
        if match is not None:
            part = _IN_LAYER[match[2]].removeprefix("mlp.")
            return f"model.layers.{int(match[1])}.mlp.experts.{int(match[3])}.{part}.weight"
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
        match, expert = self._expert(stored), ""
        if match is not None:
            expert = f".{match[3]}"
        else:
            match = _LAYER.fullmatch(stored)
            if match is None:
                return (stored,) if stored == HEAD else ()
            if match[3] != "weight" or match[2].endswith(("norm", "_inp")):
                return ()
        parts = next((parts for parts in _FUSED if match[2] in parts), (match[2],))
        return tuple(f"blk.{match[1]}.{part}{expert}.weight" for part in parts)

    def is_rotated(self, stored: str) -> bool:
        """Whether the rows of a tensor are to be reordered, see `rotates_neighbours`."""
        match = _LAYER.fullmatch(stored)
        return self.rotates_neighbours and match is not None and match[2] in ("attn_q", "attn_k")

    def is_plus_one(self, stored: str) -> bool:
        """Whether 1 is to be taken off, see `norms_plus_one`."""
        return self.norms_plus_one and stored.endswith("norm.weight")

    def _expert(self, stored: str) -> re.Match[str] | None:
        return _EXPERT.fullmatch(stored) if self.has_experts else None


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("LlamaForCausalLM", "llama", _IN_LAYER, rotates_neighbours=True),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _IN_LAYER),
        "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _IN_LAYER),
        "gemma": GgufFamily("GemmaForCausalLM", "gemma", _IN_LAYER, norms_plus_one=True),
        "gemma2": GgufFamily(
            "Gemma2ForCausalLM", "gemma2", {**_IN_LAYER, **_GEMMA2_NORMS}, norms_plus_one=True
        ),
        "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _IN_MIXTURE, has_experts=True),
    }
)
"""By `general.architecture`."""


def family_of(header: GgufHeader) -> GgufFamily:
    """Raises ModelLoadError: the architecture is not supported, or the file is a part of one."""
    name = header.text("general.architecture")
    if name not in GGUF_FAMILIES:
        names = ", ".join(GGUF_FAMILIES)
        raise header.bad("general.architecture", f"not supported in GGUF files; {names} are")
    if (header.integer("split.count") or 1) > 1:
        raise header.bad("split.count", "one file is needed: llama-gguf-split --merge makes it")
    return GGUF_FAMILIES[name]


def matrices_apart(header: GgufHeader) -> GgufHeader:
    """The header with an entry for each expert's matrix, instead of one for those of a layer.

    Raises:
        ModelLoadError: a tensor does not have one matrix for each expert; those of `family_of`.
    """
    if not family_of(header).has_experts:
        return header
    key = f"{header.text('general.architecture')}.expert_count"
    count = header.integer(key)
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None or match[2] not in _EXPERTS or match[3] != "weight":
            tensors[name] = tensor
            continue
        if len(tensor.shape) != 3 or tensor.shape[0] != count:
            raise ModelLoadError(
                f"{header.path}: {name} is {list(tensor.shape)}: a matrix for each of "
                f"{key}={count} experts is needed"
            )
        if len(tensors) + count > _MOST_MATRICES:
            raise header.bad(key, f"at most {_MOST_MATRICES} matrices are read")
        each = tensor.nbytes // count
        for expert in range(count):
            own = f"blk.{match[1]}.{_EXPERTS[match[2]]}.{expert}.weight"
            start = tensor.start + expert * each
            tensors[own] = GgufTensor(own, tensor.type, tensor.shape[1:], start)
    return replace(header, tensors=tensors)
