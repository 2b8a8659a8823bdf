"""The join of two parts against its reference, and against attention over the whole."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.join_parts import join_parts, join_parts_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_equals_its_twin(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    first, second = (torch.randn(7, 3, 80, device=device).to(dtype) for _ in range(2))
    weights = [torch.randn(3, 7, device=device).mul_(20).t() for _ in range(2)]
    expected = join_parts_reference(first, second, *weights)
    joined = join_parts(first, second, *weights)
    assert joined is first
    torch.testing.assert_close(joined, expected, rtol=2e-3, atol=2e-3)


def test_two_parts_make_the_whole(device: torch.device) -> None:
    torch.manual_seed(1)
    scores = torch.randn(5, 2, 12, device=device) * 4
    values = torch.randn(12, 2, 64, device=device)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[:, :, keys]
        out = torch.einsum("thk,khd->thd", part.softmax(-1), values[keys])
        return out.contiguous(), part.logsumexp(-1)

    whole, _ = attend(slice(0, 12))
    (first, first_weight), (second, second_weight) = attend(slice(0, 5)), attend(slice(5, 12))
    joined = join_parts(first, second, first_weight, second_weight)
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)
