"""The checkpoint factory, which the engine's tests rely on, and what importing models costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import VARIANTS, make_tiny_checkpoint


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=True)
    config = load_model_config(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config.vocab_size == len(tokenizer) == 259
    assert config.eos_token_ids == (tokenizer.eos_token_id,) == (2,)
    for text in ("def f(x):\n\treturn x", " two  spaces", "größer 🙂"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_every_family_has_variants() -> None:
    assert {family for family, _ in VARIANTS} >= {"llama", "mistral", "qwen2", "qwen3", "opt"}


def test_models_import_neither_transformers_nor_the_hub() -> None:
    code = (
        "import sys, hetero_llm.models.loader, hetero_llm.models.llama, hetero_llm.models.opt, "
        "hetero_llm.models.gpt2, hetero_llm.models.invariant\n"
        "sys.exit(' '.join({'transformers', 'huggingface_hub'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
