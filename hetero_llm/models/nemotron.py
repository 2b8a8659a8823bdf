"""Nemotron (Nemotron-3; "Nemotron-4", Parmar et al. 2024; Minitron): sequential layers, partial
rotary embedding, squared ReLU, norm weights stored less one."""

from __future__ import annotations

from torch import Tensor

from hetero_llm.models.blocks import LayerNames, LayerNormLM, Tensors
from hetero_llm.models.layers import RearrangedView


class NemotronForCausalLM(LayerNormLM):
    """See `CausalLM`."""

    layer_names = LayerNames(mlp_in=("mlp.up_proj",))

    def checkpoint_tensors(self) -> Tensors:
        tensors = super().checkpoint_tensors()
        for name, view in tensors.items():
            if name.endswith("norm.weight"):
                assert isinstance(view, Tensor)
                tensors[name] = RearrangedView.of(view, _plus_one, by_row=True)
        return tensors


def _plus_one(stored: Tensor) -> Tensor:
    # In the served dtype, as transformers adds it.
    return stored + 1.0
