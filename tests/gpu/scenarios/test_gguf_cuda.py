"""Matrices of GGUF files on a GPU, in the engine's quantized form: the tokens of transformers with
the numbers that the blocks stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_llm.models.gguf.config import block_types
from hetero_llm.models.gguf.container import read_header
from tests.gpu.scenarios.serving import GREEDY, TIES, generate, regrets, start
from tests.helpers.gguf_files import make_tiny_gguf, sizes_for

PROMPTS = [[9], list(range(3, 23)), [5, 17, 80, 3, 44]]
HEADS_OF_16 = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
}  # fmt: skip
# Scales of Q4_K and Q6_K are products of two numbers, rounded to float16.
CASES = [
    ("llama", "Q4_0", HEADS_OF_16, TIES),
    ("qwen3", "Q4_1", HEADS_OF_16, TIES),
    ("gemma", "Q8_0", {**HEADS_OF_16, "attention_bias": False}, TIES),
    ("llama", "Q4_K", sizes_for("Q4_K"), 0.3),
    ("llama", "Q6_K", sizes_for("Q6_K"), 0.3),
]


@pytest.mark.parametrize(("family", "kind", "changes", "bound"), CASES)
def test_the_tokens_of_transformers(
    tmp_path: Path, family: str, kind: str, changes: dict[str, Any], bound: float
) -> None:
    tiny = make_tiny_gguf(tmp_path, family, types=lambda _: kind, changes=changes)
    assert set(block_types(read_header(tiny.path)).values()) == {kind}
    tiny.model.save_pretrained(tiny.folder)
    with start(tiny.path, max_model_len=64, skip_tokenizer_init=True) as llm:
        outputs = generate(llm, PROMPTS)
    assert regrets(outputs, [GREEDY] * len(PROMPTS), tiny.folder).max() < bound
