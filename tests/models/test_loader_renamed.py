"""Families of remote code against transformers' Llama, Qwen2 or Glm with the same weights; what
those do not compute (ALiBi, log n, QWen's NTK) against the definitions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.rotary import half_split_order
from tests.models import renamed
from tests.models.definition import by_definition, plain_frequencies
from tests.models.test_registry import LENGTH, TOLERANCE, log_probs, random_sequences

FAMILIES: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "internlm": renamed.internlm,
    "internlm_without_bias": lambda folder: renamed.internlm(folder, bias=False),
    "internlm2": renamed.internlm2,
    "internlm2_without_bias": lambda folder: renamed.internlm2(folder, bias=False),
    "xverse": renamed.xverse,
    "baichuan": renamed.baichuan,
    "chatglm": renamed.chatglm,
    "chatglm_without_bias": lambda folder: renamed.chatglm(folder, bias=False),
    "chatglm_multi_head": lambda folder: renamed.chatglm(folder, multi_query=False),
    "qwen": renamed.qwen,
    "qwen_with_biases": lambda folder: renamed.qwen(folder, no_bias=False),
}


def ours(folder: Path, sequences: list[Tensor], **changes: Any) -> list[Tensor]:
    config = dataclasses.replace(load_model_config(folder), **changes)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    return log_probs(model, sequences)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_equals_transformers(tmp_path: Path, make: Callable[[Path], tuple[Path, Any]]) -> None:
    folder, model = make(tmp_path / "model")
    sequences = random_sequences(LENGTH, 1, 9)
    for mine, sequence in zip(ours(folder, sequences), sequences, strict=True):
        with torch.no_grad():
            theirs = model(sequence[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)


def test_the_definition_is_that_of_transformers(tmp_path: Path) -> None:
    _, model = renamed.qwen(tmp_path)
    (ids,) = random_sequences(LENGTH)
    with torch.no_grad():
        theirs = model(ids[None]).logits[0].log_softmax(-1)
    mine = by_definition(model, ids, frequencies=plain_frequencies())
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)


def test_baichuan_with_alibi(tmp_path: Path) -> None:
    folder, model = renamed.baichuan(tmp_path, alibi=True)
    (ids,) = random_sequences(40)
    expected = by_definition(model, ids, slopes=[1 / 4, 1 / 16, 1 / 64, 1 / 256])
    torch.testing.assert_close(ours(folder, [ids])[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("logn", "ntk", "context", "stretch"),
    [
        (True, False, 64, 1),
        (False, True, 16, 1),
        (False, True, 17, 3),
        (False, True, 32, 3),
        (True, True, 64, 7),
    ],
)
def test_qwen_beyond_its_trained_context(
    tmp_path: Path, logn: bool, ntk: bool, context: int, stretch: int
) -> None:
    folder, model = renamed.qwen(
        tmp_path,
        seq_length=16,
        max_position_embeddings=64,
        use_logn_attn=logn,
        use_dynamic_ntk=ntk,
    )
    assert load_model_config(folder).max_model_len == 64
    (ids,) = random_sequences(min(context, 40))
    scales = [max(1.0, math.log(n + 1) / math.log(16)) for n in range(len(ids))]
    expected = by_definition(
        model,
        ids,
        frequencies=plain_frequencies(10000.0 * stretch ** (8 / 6)),
        query_scales=scales if logn else None,
    )
    mine = ours(folder, [ids], max_model_len=context)[0]
    torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=0)


def test_rows_of_baichuan2s_head_have_length_1(tmp_path: Path) -> None:
    model = renamed.random_model(
        "Llama",
        vocab_size=125696,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=64,
    )
    tensors = renamed.renamed(model, {})
    letters = [tensors.pop(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv"]
    tensors["model.layers.0.self_attn.W_pack.weight"] = torch.cat(letters)
    config = {
        "architectures": ["BaiChuanForCausalLM"],
        "vocab_size": 125696,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
    renamed.save(tmp_path, config, tensors)
    with torch.no_grad():
        model.lm_head.weight /= model.lm_head.weight.norm(dim=1, keepdim=True)
        sequences = random_sequences(5)
        theirs = model(sequences[0][None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(ours(tmp_path, sequences)[0], theirs, atol=TOLERANCE, rtol=0)


def test_half_split_order() -> None:
    assert half_split_order(8, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 7]
