"""The last steps from a pooled vector to what the user gets, against torch's functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_llm.core.pooling import Finish
from hetero_llm.pooling.finish import cosine, finish
from hetero_llm.pooling.pooler import ChunkPool, pool_padded


def test_finish() -> None:
    values = np.random.default_rng(0).normal(size=16).astype(np.float32) * 9
    tensor = torch.from_numpy(values)
    for wanted, expected in (
        (Finish(), tensor),
        (Finish(normalize=True), F.normalize(tensor, dim=0)),
        (Finish(dimensions=4, normalize=True), F.normalize(tensor[:4], dim=0)),
        (Finish(activation="sigmoid"), tensor.sigmoid()),
        (Finish(activation="softmax"), tensor.softmax(0)),
    ):
        found = finish(values, wanted)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-7)
    assert not finish(np.zeros(3, np.float32), Finish(normalize=True)).any()
    extreme = finish(np.array([-2e4, 2e4], np.float32), Finish(activation="sigmoid"))
    assert extreme.tolist() == [0.0, 1.0]


def test_cosine() -> None:
    one = np.array([3.0, 4.0], np.float32)
    assert cosine(one, one * 7) == pytest.approx(1.0, abs=1e-12)
    assert cosine(one, -one) == pytest.approx(-1.0, abs=1e-12)
    assert cosine(one, np.zeros(2, np.float32)) == 0.0


@pytest.mark.parametrize("pooling", ["CLS", "MEAN", "LAST"])
def test_padding_and_chunks_pool_as_whole_inputs(pooling: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 8])
    hidden = torch.randn(3, 8, 4, generator=generator)
    padded = pool_padded(hidden, lengths, pooling)
    for row, length in enumerate(lengths.tolist()):
        whole = hidden[row, :length]
        wanted = {"CLS": whole[0], "MEAN": whole.mean(0), "LAST": whole[-1]}[pooling]
        torch.testing.assert_close(padded[row], wanted)
        chunks = ChunkPool(pooling)
        for first in range(0, length, 3):
            chunks.add(whole[first : first + 3])
        torch.testing.assert_close(chunks.value(), wanted)
