"""Tiny prompt adapters in PEFT's form, and what transformers computes with them: nothing of
hetero_llm takes part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class TinyPromptAdapter:
    """`embeddings`: [tokens, size], as they were written to `folder`."""

    folder: Path
    embeddings: Tensor


def write_prompt_adapter(
    folder: Path,
    tokens: int,
    size: int,
    *,
    seed: int = 0,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> TinyPromptAdapter:
    """Writes a random prompt adapter.

    Args:
        strength: size of its numbers.
        options: further ones of adapter_config.json.
        tensors: instead of the embeddings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    embeddings = (strength * torch.randn(tokens, size, generator=generator)).to(dtype)
    stored = {"prompt_embeddings": embeddings} if tensors is None else dict(tensors)
    save_file(stored, folder / "adapter_model.safetensors")
    config = {
        "auto_mapping": None,
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        "num_attention_heads": 4,
        "num_layers": 2,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": tokens,
        "peft_type": "PROMPT_TUNING",
        "prompt_tuning_init": "TEXT",
        "prompt_tuning_init_text": "Answer politely.",
        "revision": None,
        "task_type": "CAUSAL_LM",
        "token_dim": size,
        "tokenizer_kwargs": None,
        "tokenizer_name_or_path": "tiny",
        **(options or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return TinyPromptAdapter(folder, embeddings)


@torch.no_grad()
def reference_logits(model: Any, token_ids: list[int], adapter: TinyPromptAdapter | None) -> Tensor:
    """[tokens, vocab] float32 of a model of transformers, for the tokens alone: PEFT's forward pass
    of prompt tuning, which concatenates embeddings."""
    given = model.get_input_embeddings()(torch.tensor([token_ids]))
    count = 0
    if adapter is not None:
        count = len(adapter.embeddings)
        given = torch.cat((adapter.embeddings.to(given.dtype)[None], given), dim=1)
    return model(inputs_embeds=given).logits[0, count:].float()
