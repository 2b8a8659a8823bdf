"""Rows of an embedding's output are replaced for the passes that want it, and no others."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetero_llm.core.prompt_adapter import VirtualPrompt
from hetero_llm.models.layers import CausalLM, Embedding
from hetero_llm.runner.virtual_tokens import VirtualTokens

CPU = torch.device("cpu")


class Tiny(CausalLM):
    """An embedding and nothing else; `batched`: it sees [1, T], as classes of transformers do."""

    def __init__(self, *, batched: bool) -> None:
        super().__init__()
        self.table = Embedding(5, 4)
        nn.init.normal_(self.table.weight)
        self.batched = batched

    def input_embedding(self) -> nn.Module:
        return self.table

    def run(self, ids: list[int]) -> Tensor:
        tokens = torch.tensor(ids)
        return self.table(tokens[None])[0] if self.batched else self.table(tokens)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_are_replaced(batched: bool, dtype: torch.dtype) -> None:
    model = Tiny(batched=batched).to(dtype)
    virtual = VirtualTokens(model, CPU)
    rows = torch.randn(2, 4)
    own = model.table.weight[[0, 3, 0, 4]]
    table = model.table.weight.clone()
    with virtual.given((torch.tensor([0, 2]), rows)):
        found = model.run([0, 3, 0, 4])
    assert torch.equal(found[[0, 2]], rows.to(dtype))
    assert torch.equal(found[[1, 3]], own[[1, 3]])
    assert torch.equal(model.table.weight, table)
    for _ in range(2):
        assert torch.equal(model.run([0, 3, 0, 4]), own)
        with virtual.given(None):
            assert torch.equal(model.run([0, 3, 0, 4]), own)


@torch.inference_mode()
def test_a_failed_pass_leaves_no_rows_behind() -> None:
    model = Tiny(batched=False)
    virtual = VirtualTokens(model, CPU)
    with pytest.raises(IndexError), virtual.given((torch.tensor([9]), torch.zeros(1, 4))):
        model.run([0])
    assert torch.equal(model.run([1]), model.table.weight[[1]])


def test_embeddings_that_cannot_be_written_to() -> None:
    """Those of a request from another process."""
    given = np.ones((3, 4), np.float32)
    given.flags.writeable = False
    (image,) = VirtualPrompt(given, "key").as_images().items
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = VirtualTokens(Tiny(batched=False), CPU).encode(image)
    assert torch.equal(found, torch.ones(3, 4))
