"""GPT-J ("GPT-J-6B", Wang and Komatsuzaki 2021): parallel layers with one norm, rotary embedding of
neighbours, a head with a bias."""

from __future__ import annotations

from hetero_llm.models.blocks import LayerNames, LayerNormLM, ModelNames


class GPTJForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = ModelNames("transformer", "wte", "h", "ln_f")
    layer_names = LayerNames(
        norms=("ln_1",),
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        mlp_in=("mlp.fc_in",),
        mlp_out="mlp.fc_out",
        rotates_neighbours=True,
    )
