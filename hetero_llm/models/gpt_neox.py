"""GPT-NeoX (Black et al. 2022; Pythia, Dolly, OpenAssistant): parallel layers with a norm each for
attention and MLP, or sequential ones; partial rotary embedding, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from hetero_llm.models.blocks import LayerNormLM, ModelNames
from hetero_llm.models.bloom import BloomForCausalLM


class GPTNeoXForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    names = ModelNames("gpt_neox", "embed_in", "layers", "final_layer_norm", "embed_out")
    layer_names = replace(
        BloomForCausalLM.layer_names, qkv=("attention.query_key_value",), out="attention.dense"
    )

    def checkpoint_name(self, name: str) -> str | None:
        """Some releases of transformers call the head lm_head."""
        if name.startswith("lm_head."):
            name = name.replace("lm_head", self.names.head, 1)
        return super().checkpoint_name(name)
