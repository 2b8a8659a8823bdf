"""config.json of OPT."""

from __future__ import annotations

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, eos_and_bos, heads_of, torch_dtype


def read(source: ConfigSource) -> ModelConfig:
    """Raises ModelLoadError: a key is wrong or asks for what is not computed."""
    reader = source.config
    hidden, heads, head_dim = heads_of(reader, "num_attention_heads", "hidden_size")
    if not head_dim:
        raise reader.bad("num_attention_heads", f"does not divide hidden_size={hidden}")
    num_layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    bias = reader.flag("enable_bias", True)
    pre_norm = reader.flag("do_layer_norm_before", True)
    eos, bos = eos_and_bos(reader, source.generation)
    return ModelConfig(
        architecture="OPTForCausalLM",
        model_type=str(reader.raw.get("model_type", "")),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("ffn_dim"),
        max_model_len=max_position,
        max_position_embeddings=max_position,
        torch_dtype=torch_dtype(reader),
        norm_eps=1e-5,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        hidden_act=reader.activation("activation_function", "relu"),
        sliding_windows=(None,) * num_layers,
        attn_scale=head_dim**-0.5,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=reader.integer("word_embed_proj_dim", hidden),
        pre_norm=pre_norm,
        final_norm=pre_norm and not reader.flag("_remove_final_layer_norm", False),
        norm_affine=reader.flag("layer_norm_elementwise_affine", True),
    )
