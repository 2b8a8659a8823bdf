"""What a rank reads of weight files: its slices, and no more."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from hetero_llm.models import weight_reader
from hetero_llm.models.rank_slices import runs_of
from tests.helpers.rank_models import Ranks, load_rank
from tests.models.loading import edit_weights
from tests.models.mxfp4_checkpoints import make_both
from tests.models.test_quantized_weights import FORMATS, both
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

# Parts of rows of two ranks are a page or more.
WIDE = {"head_dim": 512, "intermediate_size": 4096}


@pytest.fixture
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns the bytes that were read from weight files since the last call."""
    read: list[int] = []
    plain = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = plain(descriptor, buffers, offset)
        read.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)

    def taken() -> int:
        total = sum(read)
        read.clear()
        return total

    return taken


def test_ranks_read_what_they_have(tmp_path: Path, count_bytes: Callable[[], int]) -> None:
    ranks = Ranks(make_tiny_checkpoint(tmp_path, "llama", changes=WIDE), 2)
    held = [sum(p.nbytes for p in model.parameters()) for model in ranks.models]
    assert held[0] == held[1] and count_bytes() == sum(held)


def test_small_parts_of_rows_are_read_with_what_lies_between(
    tmp_path: Path, count_bytes: Callable[[], int]
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    whole = load_rank(folder)
    stored = count_bytes()
    ranks = Ranks(folder, 2)
    held = sum(p.nbytes for model in ranks.models for p in model.parameters())
    between = sum(
        p.nbytes
        for n, p in whole.named_parameters()
        if n.endswith(("out_proj.weight", "down_proj.weight"))
    )
    assert held < count_bytes() <= held + between
    assert stored == sum(p.nbytes for p in whole.parameters())


@pytest.mark.parametrize(
    ("family", "variant"), [("gpt2", "tied"), ("phi3", ""), ("glm", ""), ("falcon", "grouped"),
                            ("mixtral", ""), ("gpt_oss", "")],
)  # fmt: skip
def test_rows_in_another_order_are_read_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count_bytes: Callable[[], int],
    family: str,
    variant: str,
) -> None:
    """Fused, transposed, interleaved and permuted rows."""
    monkeypatch.setattr(weight_reader, "SMALL_ROW", 1)
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    whole = load_rank(folder)
    stored = count_bytes()
    ranks = Ranks(folder, 2)
    matrices = sum(p.nbytes for m in ranks.models for p in m.parameters() if p.dim() > 1)
    vectors = sum(p.nbytes for n, p in whole.named_parameters() if p.dim() == 1 or "bias" in n)
    assert count_bytes() <= matrices + 2 * vectors < 2 * stored


@pytest.mark.parametrize(
    "form", ["fp8", "float-quantized", "int-quantized", "pack-quantized asymmetric", "nvfp4", "awq"]
)
def test_quantized_matrices_are_read_by_parts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count_bytes: Callable[[], int],
    form: str,
) -> None:
    monkeypatch.setattr(weight_reader, "SMALL_ROW", 1)
    quantized, _ = both(tmp_path, FORMATS[form])
    whole = load_rank(quantized)
    stored = count_bytes()
    Ranks(quantized, 2)
    # What every rank reads whole: the embedding, norms, scales of rows, sizes and whole scales.
    names = ("embed_tokens.weight", "norm.weight")
    shared = sum(p.nbytes for n, p in whole.named_parameters() if n.endswith(names))
    scales = sum(
        m.quantized.scale.numel() * 4
        for m in whole.modules()
        if getattr(m, "quantized", None) is not None
    )
    assert stored <= count_bytes() <= stored + shared + 2 * scales


def test_mxfp4_banks_are_read_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count_bytes: Callable[[], int]
) -> None:
    monkeypatch.setattr(weight_reader, "SMALL_ROW", 1)
    quantized, _ = make_both(tmp_path, changes={"intermediate_size": 128})
    whole = load_rank(quantized)
    stored = count_bytes()
    Ranks(quantized, 2)
    shared = sum(
        p.nbytes
        for n, p in whole.named_parameters()
        if "bias" in n or "norm" in n or "embed" in n or "router" in n or "sinks" in n
    )
    assert stored <= count_bytes() <= stored + shared


def test_a_tied_head_that_is_stored_alone(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", "tied")
    expected = load_rank(folder).get_parameter("embed_tokens.weight")
    name = "model.embed_tokens.weight"
    edit_weights(
        folder, lambda t: {("lm_head.weight" if k == name else k): v for k, v in t.items()}
    )
    rewrite_config(folder, tie_word_embeddings=True)
    for model in Ranks(folder, 2).models:
        assert torch.equal(model.get_parameter("embed_tokens.weight"), expected)


def test_runs_of_indices() -> None:
    assert runs_of(torch.tensor([], dtype=torch.int64)) == ()
    assert runs_of(torch.tensor([3, 4, 5, 9, 11, 12])) == ((3, 3), (9, 1), (11, 2))
