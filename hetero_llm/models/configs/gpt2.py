"""config.json of GPT-2."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, eos_and_bos, heads_of, torch_dtype


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    for key in (
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    ):
        if reader.flag(key, False):
            raise reader.bad(key, "not supported with GPT2LMHeadModel")
    hidden, heads, head_dim = heads_of(reader, "n_head", "n_embd")
    if not head_dim:
        raise reader.bad("n_head", f"does not divide n_embd={hidden}")
    num_layers = reader.integer("n_layer")
    max_position = reader.integer("n_positions")
    eos, bos = eos_and_bos(reader, source.generation)
    return ModelConfig(
        architecture="GPT2LMHeadModel",
        model_type=str(reader.raw.get("model_type", "")),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("n_inner", 4 * hidden),
        max_model_len=max_position,
        max_position_embeddings=max_position,
        torch_dtype=torch_dtype(reader),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        hidden_act=reader.activation("activation_function", "gelu_new"),
        sliding_windows=(None,) * num_layers,
        attn_scale=head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=hidden,
    )
