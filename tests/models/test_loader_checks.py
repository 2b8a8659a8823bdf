"""What the loader makes of checkpoints that are not quite the model: tied heads stored in any way,
other vocabularies, types and NaN."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.layers import RearrangedView
from hetero_llm.models.loader import pieces_into
from hetero_llm.models.weight_reader import ReadAhead, copy_pieces
from tests.models.loading import edit_weights, load, same_parameters
from tests.models.tiny import make_tiny_checkpoint, rewrite_config
from tests.models.weights_in_memory import MemoryFile

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path, "llama", "tied")


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path, "llama")


class TestTiedHead:
    def test_both_are_stored(self, tied: Path, caplog: pytest.LogCaptureFixture) -> None:
        expected = load(tied)
        edit_weights(tied, lambda t: {**t, HEAD: t[EMBEDDING].clone()})
        assert same_parameters(load(tied), expected)
        assert not caplog.records

    @pytest.mark.parametrize("place", [0, 1000, -1])
    def test_both_and_not_the_same(
        self, tied: Path, place: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        expected = load(tied)

        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            head = tensors[EMBEDDING].clone()
            head.view(-1)[place] += 1
            return {**tensors, HEAD: head}

        edit_weights(tied, change)
        assert same_parameters(load(tied), expected)
        (record,) = caplog.records
        assert f"{HEAD} is not {EMBEDDING}" in record.getMessage()

    @pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
    def test_the_head_alone_is_stored(self, tmp_path: Path, family: str) -> None:
        variant = {"llama": "tied", "gpt2": "tied", "opt": "bare"}[family]
        folder = make_tiny_checkpoint(tmp_path, family, variant)
        expected = load(folder)
        name = {
            "llama": EMBEDDING, "gpt2": "transformer.wte.weight",
            "opt": "model.decoder.embed_tokens.weight",
        }[family]  # fmt: skip
        edit_weights(folder, lambda t: {HEAD if k == name else k: v for k, v in t.items()})
        assert same_parameters(load(folder), expected)

    def test_neither_is_stored(self, tied: Path) -> None:
        edit_weights(tied, lambda t: {k: v for k, v in t.items() if k != EMBEDDING})
        with pytest.raises(ModelLoadError, match=rf"tensors missing: {EMBEDDING}$"):
            load(tied)

    def test_an_untied_head_is_missing(self, untied: Path) -> None:
        edit_weights(untied, lambda t: {k: v for k, v in t.items() if k != HEAD})
        with pytest.raises(ModelLoadError, match=rf"tensors missing: {HEAD}$"):
            load(untied)


@pytest.mark.parametrize("rows", [64, 112])
def test_another_vocabulary(untied: Path, rows: int) -> None:
    """Padded embeddings are refused, too: vocab_size has to say what is stored."""
    stored = torch.ones(rows, 32)
    edit_weights(untied, lambda t: {**t, EMBEDDING: stored, HEAD: stored.clone()})
    with pytest.raises(ModelLoadError) as caught:
        load(untied)
    for name in (EMBEDDING, HEAD):
        assert f"{name} has {rows} rows, config.json says vocab_size=96" in str(caught.value)
    rewrite_config(untied, vocab_size=rows)
    assert torch.equal(load(untied).get_parameter(HEAD), stored)


def test_a_place_is_filled_when_all_of_it_is_read() -> None:
    """Pieces are read and converted; the last one arranges the tensor on the parameter's device."""
    stored = torch.arange(6000.0).view(3, 1000, 2)
    file = MemoryFile({"x": stored, "plain": stored[0]})
    kept, plain = torch.zeros(2, 3000, dtype=torch.bfloat16), torch.zeros(2000)

    def arrange(x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return x.flatten(0, 1).t()

    targets = (RearrangedView(kept, (3, 1000, 2), arrange), RearrangedView(plain, (1000, 2)))
    pieces = [
        piece
        for stored_as, target in zip(file.tensors, targets, strict=True)
        for piece in pieces_into(file, stored_as, target, piece_bytes=512)
    ]
    assert len(pieces) > 50
    assert copy_pieces(pieces, ReadAhead(4096, 512), file.copied) == []
    assert torch.equal(kept, stored.flatten(0, 1).t().bfloat16())
    assert torch.equal(plain, stored[0].flatten())


def test_types_that_need_scales(untied: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(untied, lambda t: {**t, name: t[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelLoadError, match=rf"cannot be loaded: {name} \(F8_E4M3\)"):
        load(untied)


def test_double_precision(untied: Path) -> None:
    expected = load(untied)
    edit_weights(untied, lambda t: {name: x.double() for name, x in t.items()})
    assert same_parameters(load(untied), expected)


class TestNotFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_warning_names_the_tensor(
        self, untied: Path, value: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = "model.layers.1.mlp.down_proj.weight"

        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            tensors[name][3, 5] = value
            return tensors

        edit_weights(untied, change)
        model = load(untied, dtype=dtype)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().endswith(f": {name}")
        stored = model.get_parameter("layers.1.mlp.down_proj.weight")
        assert stored.isfinite().sum() == stored.numel() - 1

    def test_what_the_type_cannot_hold(
        self, untied: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        edit_weights(untied, lambda t: {**t, "model.norm.weight": torch.full((32,), 1e5)})
        load(untied)
        load(untied, dtype=torch.bfloat16)
        assert not caplog.records
        load(untied, dtype=torch.float16)
        (record,) = caplog.records
        assert "infinite as float16): model.norm.weight" in record.getMessage()

    def test_transposed_and_many(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = make_tiny_checkpoint(tmp_path, "gpt2")
        edit_weights(folder, lambda t: {k: torch.full_like(v, torch.nan) for k, v in t.items()})
        load(folder)
        (record,) = caplog.records
        assert "transformer." in record.getMessage() and " more" in record.getMessage()

    def test_ordinary_weights_pass(self, untied: Path, caplog: pytest.LogCaptureFixture) -> None:
        load(untied)
        assert not caplog.records
