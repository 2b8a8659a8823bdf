"""Weights into a GPU: pinned buffers that are used again and again while copies still run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetero_llm.models.layers import RearrangedView
from hetero_llm.models.loader import load_model, pieces_into
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.weight_reader import ReadAhead, copy_pieces
from tests.models.loading import load
from tests.models.tiny import make_tiny_checkpoint
from tests.models.weights_in_memory import MemoryFile

CUDA = torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("stored", [FP32, BF16, FP16, torch.float64])
@pytest.mark.parametrize("kept", [FP32, BF16])
def test_buffers_are_not_written_to_too_soon(stored: torch.dtype, kept: torch.dtype) -> None:
    """300 MB through 2 MiB of buffers, contiguous, transposed and arranged, beside a busy GPU."""
    tensors = {str(i): torch.randn(1024, 300 + i).to(stored) for i in range(48)}
    file = MemoryFile(tensors)
    kept_as: list[Tensor] = []
    targets: list[Tensor | RearrangedView] = []
    for i, tensor in enumerate(file.tensors):
        rows, columns = tensor.shape
        parameter = torch.zeros(columns, rows, dtype=kept, device=CUDA)
        target: Tensor | RearrangedView = parameter.t()
        if i % 3 == 1:
            target = parameter.view(rows, columns)
        elif i % 3 == 2:
            target = RearrangedView(parameter, tensor.shape, Tensor.t)
        kept_as.append(parameter.view(rows, columns) if i % 3 == 1 else parameter.t())
        targets.append(target)
    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(50):
        busy = busy @ busy * 1e-3
    ahead = ReadAhead(2 << 20, 128 << 10)
    pieces = (
        piece
        for tensor, target in zip(file.tensors, targets, strict=True)
        for piece in pieces_into(file, tensor, target, piece_bytes=ahead.piece_bytes)
    )
    assert copy_pieces(pieces, ahead, file.copied) == []
    for x, found in zip(tensors.values(), kept_as, strict=True):
        assert torch.equal(found, x.to(CUDA).to(kept))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_same_weights_as_on_the_cpu(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, max_shard_size="20KB")
    found = load_model(
        folder, load_model_config(folder), dtype=dtype, device=CUDA, show_progress=False
    )
    assert all(parameter.is_cuda for parameter in found.parameters())
    expected = dict(load(folder, dtype=dtype).named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter.cpu(), expected.pop(name))
    assert not expected


def test_weights_that_are_not_finite() -> None:
    file = MemoryFile({"x": torch.full((100,), torch.nan), "y": torch.ones(100)})
    target = torch.empty(100, device=CUDA)
    pieces = (
        piece
        for tensor in file.tensors
        for piece in pieces_into(file, tensor, target, piece_bytes=128)
    )
    assert copy_pieces(pieces, ReadAhead(4096, 128), file.copied) == ["x"]
