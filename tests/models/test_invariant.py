"""Batch invariance: a row's bits do not depend on the rows around it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.invariant import (
    TILE_ROWS,
    make_batch_invariant,
    product_of_rows,
    product_of_tiles,
)
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import VARIANTS, VOCAB_SIZE, DenseAttend, make_tiny_checkpoint

BATCHES = (1, 7, 33, 64)


def load(folder: Path, config: ModelConfig, dtype: torch.dtype, *, dummy: bool) -> CausalLM:
    model = load_model(
        folder,
        config,
        dtype=dtype,
        device="cpu",
        show_progress=False,
        load_format="dummy" if dummy else "auto",
    )
    make_batch_invariant(model)
    return model


def rows_of(model: CausalLM, sequences: list[Tensor]) -> list[Tensor]:
    """Hidden states and logits of each sequence, [length, hidden + vocab], from one forward."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden = model(torch.cat(sequences), positions, DenseAttend(model.config, lengths))
        return list(torch.cat((hidden, model.logits(hidden)), dim=-1).split(lengths))


def check_batches(model: CausalLM, vocab_size: int) -> None:
    """One sequence of 3 rows, alone and anywhere among others that fill the batch up."""
    probe = torch.randint(0, vocab_size, (3,))
    alone = rows_of(model, [probe])[0]
    assert alone.isfinite().all()
    for batch in BATCHES[1:]:
        for before in (0, 1, (batch - 3) // 2, batch - 3):
            after = batch - 3 - before
            others = [torch.randint(0, vocab_size, (1,)) for _ in range(before + after)]
            sequences = [*others[:before], probe, *others[before:]]
            assert torch.equal(rows_of(model, sequences)[before], alone), (batch, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "variant"),
    [*((f, v) for f, v in VARIANTS if v in ("gqa", "full", "pre_norm", "tied"))],
)
def test_tiny(tmp_path: Path, family: str, variant: str, dtype: torch.dtype) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    check_batches(load(folder, load_model_config(folder), dtype, dummy=False), VOCAB_SIZE)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mid_size(tmp_path: Path, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    folder = make_tiny_checkpoint(tmp_path, "llama")
    tiny = load_model_config(folder)
    assert tiny.rope is not None
    config = dataclasses.replace(
        tiny,
        vocab_size=1000,
        hidden_size=512,
        word_embed_size=512,
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        # Odd on purpose: rows then start anywhere, and vector loops have tails.
        intermediate_size=1371,
        rope=dataclasses.replace(tiny.rope, rotary_dim=64),
        sliding_windows=(None,),
    )
    check_batches(load(folder, config, dtype, dummy=True), config.vocab_size)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("product", [product_of_tiles, product_of_rows])
def test_products_agree_with_the_library(product, threads: int) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(threads)
    linear = Linear(130, 77, bias=True)
    with torch.no_grad():
        linear.weight.normal_()
        linear.bias.normal_()  # type: ignore[union-attr]
        for rows in (0, 1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 50):
            x = torch.randn(rows, 130)
            expected = F.linear(x, linear.weight, linear.bias)
            torch.testing.assert_close(
                product(x, linear.weight, linear.bias), expected, atol=1e-4, rtol=1e-5
            )


def test_falls_back_to_rows_when_tiles_are_not_independent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dependent(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # A library whose last row of a call rounds differently.
        out = torch.matmul(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
        if x.shape[0] > 1:
            out[-1] = out[-1] * (1 + 1e-6)
        return out

    folder = make_tiny_checkpoint(tmp_path, "llama")
    config = load_model_config(folder)
    monkeypatch.setattr(F, "linear", dependent)
    model = load(folder, config, torch.float32, dummy=False)
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    assert all(m.product is product_of_rows for m in linears)
    check_batches(model, VOCAB_SIZE)
