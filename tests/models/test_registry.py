"""Every family and variant against transformers' own logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import (
    VARIANTS,
    VOCAB_SIZE,
    DenseAttend,
    make_tiny_checkpoint,
    reference_attention,
)

LENGTH = 24
TOLERANCE = 3e-5  # of log-probabilities down to about -20, in fp32


def log_probs(model: CausalLM, sequences: list[Tensor]) -> list[Tensor]:
    """[length, vocab] per sequence, all computed in one flattened forward."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    attend = DenseAttend(model.config, lengths)
    with torch.no_grad():
        hidden = model(torch.cat(sequences), positions, attend)
        logits = model.logits(hidden)
    assert attend.layers_seen == list(range(model.config.num_layers))
    assert hidden.shape == (sum(lengths), model.config.hidden_size)
    return list(logits.float().log_softmax(-1).split(lengths))


class EndsOnly(DenseAttend):
    """In the last layer it returns the last token of each sequence alone."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        return self.select(layer, super().__call__(layer, q, k, v, sinks=sinks))

    def select(self, layer: int, x: Tensor) -> Tensor:
        if layer < self.config.num_layers - 1:
            return x
        return x[torch.tensor(self.lengths).cumsum(0) - 1]


def reference_log_probs(folder: Path, sequences: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=reference_attention(folder)
    )
    with torch.no_grad():
        return [model(s[None]).logits[0].float().log_softmax(-1) for s in sequences]


def random_sequences(*lengths: int) -> list[Tensor]:
    return [torch.randint(3, VOCAB_SIZE, (n,)) for n in lengths]


@pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=["-".join(v) for v in VARIANTS])
def test_equals_transformers(tmp_path: Path, family: str, variant: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    config = load_model_config(folder)
    if variant == "dynamic":
        # Plain frequencies up to the original context, as transformers has for short sequences.
        config = dataclasses.replace(config, max_model_len=LENGTH)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    sequences = random_sequences(LENGTH, 1, 9)
    expected = reference_log_probs(folder, sequences, torch.float32)
    for ours, theirs in zip(log_probs(model, sequences), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    # A last layer that goes on with a part of the rows.
    assert model.selects_rows
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    with torch.no_grad():
        hidden = model(torch.cat(sequences), positions, EndsOnly(config, [LENGTH, 1, 9]))
        ends = model.logits(hidden).float().log_softmax(-1)
    for ours, theirs in zip(ends, expected, strict=True):
        torch.testing.assert_close(ours, theirs[-1], atol=TOLERANCE, rtol=0)


def test_dynamic_rope_beyond_the_original_context(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", "dynamic")
    config = load_model_config(folder)
    assert config.max_model_len == 48
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    sequences = random_sequences(config.max_model_len)
    expected = reference_log_probs(folder, sequences, torch.float32)
    torch.testing.assert_close(log_probs(model, sequences)[0], expected[0], atol=TOLERANCE, rtol=0)


def test_window_is_shorter_than_the_test_sequences(tmp_path: Path) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path, "mistral", "window"))
    assert config.sliding_windows == (5, 5, 5)
    assert max(w or 0 for w in config.sliding_windows) < LENGTH


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2", "gemma", "gemma2"])
def test_bfloat16_stays_close_to_transformers(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    config = load_model_config(folder)
    assert config.torch_dtype == "bfloat16"
    model = load_model(folder, config, dtype=torch.bfloat16, device="cpu", show_progress=False)
    sequences = random_sequences(LENGTH)
    exact = reference_log_probs(folder, sequences, torch.float32)[0]
    theirs = reference_log_probs(folder, sequences, torch.bfloat16)[0]
    ours = log_probs(model, sequences)[0]
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()
