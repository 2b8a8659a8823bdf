"""`ModelConfig`: shape and arithmetic of a decoder-only model as one frozen object, which
`read_config` makes from a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_llm.models.collectives import Rank
from hetero_llm.models.rope_config import RopeConfig
from hetero_llm.quantization.names import OnlineName

__all__ = ["ClampedSwish", "Gate", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True)
class ClampedSwish:
    """(up + 1) * gate * sigmoid(alpha * gate), with gates of at most `limit` and ups within it on
    both sides: what the experts of gpt-oss have for a gate. In float32, rounded once."""

    alpha: float
    limit: float


Gate = str | ClampedSwish
"""Of a `GatedActivation`: the name of an `Activation`, or all of it."""


# large: one field for each number that shape or arithmetic of a decoder-only model depends on.
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of one decoder-only model. Families with arithmetic of their own
    subclass it (in their reader's file); engine and kernels read these fields only.

    Attributes:
        architecture: Name from `architectures`, a key of the registry.
        max_model_len: Context length in tokens that the checkpoint allows, rope scaling included,
            as vLLM derives it. The rotary table has this many rows; to serve a shorter limit,
            `dataclasses.replace` it before the model is built.
        max_position_embeddings: As in the file: rows of a learned position table.
        torch_dtype: "float32", "bfloat16" or "float16", as stored.
        rope: None without a rotary embedding (OPT, GPT-2, BLOOM).
        qkv_bias, out_bias: Biases of the attention's input and output projections.
        head_bias: Bias of the language model's head.
        qk_norm: RMS norm of each query and key head before the rotary embedding (Qwen3).
        sliding_windows: Per layer, the window in tokens or None for full attention.
        attn_scale: Multiplies the attention scores.
        attn_softcap: The scaled scores become cap * tanh(score / cap) (Gemma2); None: no cap.
        alibi_slopes: Per query head; slope * (position of the key - position of the query) is added
            to the scores ("Train Short, Test Long", Press et al. 2022). None: nothing is added.
        attn_sinks: Each layer gives `Attend` one more score for the softmax of each head (gpt-oss).
        eos_token_ids: Those of config.json, then those of generation_config.json, each once.
        word_embed_size: Width of the embedding table; differs from hidden_size in OPT-350m.
        quantization: `quantization_config` of the checkpoint; None: its weights are plain.
        online_quantization: What plain weights become while they are loaded; None: they stay so.
        rank: Whose part of the model this is (`sharding.sharded_config`): heads, inner sizes and
            layers are those of the rank, all others those of the whole model.
        first_layer: Number of the first of its layers in the whole model.
        pre_norm, final_norm, norm_affine: OPT only: norms before attention and MLP (else after), a
            norm after the last layer, norms with weights.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    max_position_embeddings: int
    torch_dtype: str
    norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig | None
    hidden_act: str
    sliding_windows: tuple[int | None, ...]
    attn_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    word_embed_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    attn_softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    attn_sinks: bool = False
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    online_quantization: OnlineName | None = None
    rank: Rank = Rank(0, 1)
    first_layer: int = 0
