"""Prompt adapters are read as PEFT saves them; whatever else a folder holds is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.prompt_adapter import VirtualPrompt
from hetero_llm.lora.prompt_tuning import num_virtual_tokens, read_virtual_prompt
from tests.helpers.prompt_adapters import write_prompt_adapter

SIZE = 16


def read(folder: Path, *, max_tokens: int = 8) -> VirtualPrompt:
    return read_virtual_prompt(str(folder), size=SIZE, max_tokens=max_tokens)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_their_hash(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    written = write_prompt_adapter(tmp_path, 5, SIZE, dtype=dtype, options={"peft_type": kind})
    found = read(tmp_path)
    assert found.embeddings.dtype == np.float32
    assert torch.equal(torch.from_numpy(found.embeddings), written.embeddings.float())
    assert found.num_tokens == num_virtual_tokens(str(tmp_path)) == 5
    assert read(tmp_path).content_hash == found.content_hash
    write_prompt_adapter(tmp_path, 5, SIZE, dtype=dtype, seed=1)
    assert read(tmp_path).content_hash != found.content_hash


def test_a_pickled_file(tmp_path: Path) -> None:
    written = write_prompt_adapter(tmp_path, 5, SIZE)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"prompt_embeddings": written.embeddings}, tmp_path / "adapter_model.bin")
    assert torch.equal(torch.from_numpy(read(tmp_path).embeddings), written.embeddings)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type='PREFIX_TUNING': only PROMPT_TUNING"),
        ({"peft_type": "LORA"}, "peft_type='LORA': only PROMPT_TUNING and P_TUNING"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules=2: must be 1"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens=0: must be an integer"),
        ({"num_virtual_tokens": "5"}, "num_virtual_tokens='5': must be an integer"),
        ({"num_virtual_tokens": 9}, r"num_virtual_tokens=9: exceeds max_prompt_adapter_token \(8"),
        ({"num_virtual_tokens": 4}, r"tensor='prompt_embeddings': is \[5, 16\], .* need \[4, 16\]"),
        ({"num_ranks": 2}, "num_ranks=2: is unknown here"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_prompt_adapter(tmp_path, 5, SIZE, options=options)
    with pytest.raises(AdapterError, match=reason):
        read(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"other": torch.zeros(5, SIZE)}, "'other': is no part of a prompt adapter"),
        ({}, "'prompt_embeddings': is missing"),
        ({"prompt_embeddings": torch.zeros(5, 8)}, r"is \[5, 8\], .* need \[5, 16\]"),
        ({"prompt_embeddings": torch.full((5, SIZE), float("nan"))}, "number that is not finite"),
        (
            {"prompt_embeddings": torch.zeros(5, SIZE), "prefix_task_cols": torch.zeros(1)},
            "'prefix_task_cols': is no part",
        ),
    ],
)
def test_tensors_that_are_refused(
    tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    write_prompt_adapter(tmp_path, 5, SIZE, tensors=tensors)
    with pytest.raises(AdapterError, match=reason):
        read(tmp_path)


def test_embeddings_too_large_to_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prompt_adapter(tmp_path, 5, SIZE)
    monkeypatch.setattr("hetero_llm.lora.prompt_tuning.MOST_PROMPT_BYTES", 5 * SIZE * 4 - 1)
    reason = "num_virtual_tokens=5: takes 320 bytes, at most 319 are accepted"
    with pytest.raises(AdapterError, match=reason):
        read(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    write_prompt_adapter(tmp_path, 5, SIZE)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(AdapterError, match="prompt_adapter_local_path="):
        read(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"holds no adapter_model\.safetensors"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(AdapterError, match="prompt_adapter_local_path="):
        read(tmp_path)
    with pytest.raises(AdapterError, match="no such folder"):
        read(tmp_path / "none")
