"""Which parts of a model `speed_up` replaces, and which tiles attention is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.gpu import fused
from hetero_llm.gpu.kernels.norm import (
    MAX_NORM_SIZE,
    add_gemma_rms_norm,
    add_layer_norm,
    add_rms_norm,
)
from hetero_llm.gpu.paged_attention import AttentionContext, check_supported
from hetero_llm.models import layers


class Blocks(nn.Module):
    """One of each block whose arithmetic may be replaced."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=hidden_size)
        self.norms = nn.ModuleList(
            [
                layers.RMSNorm(64, 1e-5),
                layers.GemmaRMSNorm(64, 1e-5),
                layers.AddLayerNorm(64, 1e-5),
                layers.AddLayerNorm(64, 1e-5, affine=False),
            ]
        )
        self.gate = layers.GatedActivation("relu2")


def test_every_norm_has_a_kernel(device: torch.device) -> None:
    torch.manual_seed(0)
    model: Any = Blocks(64).to(device)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x, gate_up = torch.randn(3, 64, device=device), torch.randn(3, 128, device=device)
    expected = [norm(x, x.clone()) for norm in model.norms] + [(model.gate(gate_up),)]
    fused.speed_up(model)
    functions = [norm.function for norm in model.norms]
    assert functions == [add_rms_norm, add_gemma_rms_norm, add_layer_norm, add_layer_norm]
    assert model.gate.function != model.gate.plain
    found = [norm(x, x.clone()) for norm in model.norms] + [(model.gate(gate_up),)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_too_long_for_one_program_stay_on_torch() -> None:
    model: Any = Blocks(MAX_NORM_SIZE + 8)
    before = [norm.function for norm in model.norms]
    fused.speed_up(model)
    assert [norm.function for norm in model.norms] == before


def context_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> AttentionContext:
    config: Any = SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        num_layers=0,
        sliding_windows=(),
        alibi_slopes=None,
    )
    return AttentionContext(config, SimpleNamespace(), torch.zeros(1, 1), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 3, 8, 12, 16, 24, 48, 71, 128])
def test_a_tile_holds_whole_groups(group: int) -> None:
    context = context_of(2 * group, 2, 64, torch.bfloat16)
    for rows in (1, 8, 64, 512):
        tiles = [context.tile_for(rows, single) for single in (False, True)]
        tiles += [context.tree_tile(rows, short=short) for short in (False, True)]
        for tile in (*tiles, context.short_tile(rows)):
            assert tile.rows >= group and tile.rows & (tile.rows - 1) == 0
            assert context.limits(tile).tile_rows == tile.rows // group
            # What was seen to spill registers: so many values of a tile on so few threads.
            assert tile.rows * tile.keys <= 1536 * tile.num_warps


@pytest.mark.parametrize(
    ("heads", "dim", "message"),
    [(129, 64, "129 query heads on each KV head"), (4, 12, "head size 12"), (4, 264, "head size")],
)
def test_what_the_kernels_do_not_serve_is_said(heads: int, dim: int, message: str) -> None:
    config: Any = SimpleNamespace(num_heads=heads, num_kv_heads=1, head_dim=dim)
    with pytest.raises(ConfigError, match=message):
        check_supported(config, torch.bfloat16)
