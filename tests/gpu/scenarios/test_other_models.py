"""Other shapes and families on the GPU, judged token by token by transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.gpu.scenarios.serving import GREEDY, TIES, generate, regrets, start
from tests.models.tiny import make_tiny_checkpoint

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 608,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "window of 24": ("Mistral", {"head_dim": 64, "sliding_window": 24}),
    "two kinds of layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "head norms": ("Qwen3", {"head_dim": 128, "num_key_value_heads": 1}),
    "heads of 80 in threes": (
        "Llama",
        {"hidden_size": 480, "head_dim": 80, "num_attention_heads": 6},
    ),
    "heads of 256": ("Llama", {"head_dim": 256, "num_attention_heads": 2, "attention_bias": True}),
}


def make_model(folder: Path, shape: str) -> Path:
    """A random model whose choices are clear: no two tokens are often near each other."""
    if shape == "learned positions":
        return make_tiny_checkpoint(folder, "opt", "heads_of_16")
    family, changes = SHAPES[shape]
    config = getattr(transformers, family + "Config")(**{**_SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, family + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", [*SHAPES, "learned positions"])
def test_other_models(tmp_path: Path, shape: str) -> None:
    folder = make_model(tmp_path, shape)
    context = 64 if shape == "learned positions" else 256
    vocab = 96 if shape == "learned positions" else 512
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 7, 16, 17, 23, 24, 33, *([] if context == 64 else [47, 49, 95, 100, 128, 200])]
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    params = [GREEDY] * len(prompts)
    with start(folder, max_model_len=context, skip_tokenizer_init=True) as llm:
        found = regrets(generate(llm, prompts, params), params, folder)
        assert found.max() < TIES
        found = regrets(generate(llm, prompts, params), params, folder)  # with prefix hits
        assert found.max() < TIES
