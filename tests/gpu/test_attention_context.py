"""Tiles of attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.kernels.paged_attention import TileShape


def tiles(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> set[TileShape]:
    """Of steps of all kinds and sizes."""
    config: Any = SimpleNamespace(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, num_layers=0, sliding_windows=(),
        alibi_slopes=None,
    )  # fmt: skip
    cache: Any = SimpleNamespace(scales=None, inverses=None)
    context = AttentionContext(config, cache, torch.zeros(1, 1), dtype)
    sizes = (1, 8, 16, 64, 128, 512)
    found = {context.chunk_tile(size) for size in sizes}
    for short in (False, True):
        found |= {context.decode_tile(size, short=short) for size in sizes}
        found |= {context.tree_tile(size, short=short) for size in sizes}
    return found


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_float32_has_a_tile_for_one_token_and_one_for_several(dim: int) -> None:
    """Each takes seconds to compile, by the products of a turn of its loop."""
    found = tiles(torch.float32, 8, 2, dim)
    assert {tile.rows for tile in found} == {16, 32} and len(found) == 2
    assert all(tile.rows * tile.keys * dim <= 128 * 1024 for tile in found)
    assert len(tiles(torch.bfloat16, 8, 2, dim)) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 16, 48, 71, 128])
def test_a_tile_holds_the_group_of_a_token(dtype: torch.dtype, group: int) -> None:
    for tile in tiles(dtype, group, 1, 64):
        assert tile.rows >= group
        assert tile.keys >= 16
