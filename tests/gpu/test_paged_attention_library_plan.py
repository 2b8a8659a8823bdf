"""Which rows of a step go through a library, and where their keys are said to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.gpu import paged_attention
from hetero_llm.gpu.library_attention import ChunkKeys, RaggedKeys
from hetero_llm.gpu.paged_attention import LibraryPlanner

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TABLES = np.arange(9 * 600, dtype=np.int32).reshape(9, 600)


def planner(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cudnn: bool = True,
    flash: bool = True,
    windows: tuple[int | None, ...] = (None,),
    softcap: float | None = None,
    slopes: tuple[float, ...] | None = None,
    sinks: bool = False,
) -> LibraryPlanner:
    monkeypatch.setattr(paged_attention, "cudnn_works", lambda *shape: cudnn)
    monkeypatch.setattr(paged_attention, "flash_works", lambda *shape: flash)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            attn_scale=0.125,
            attn_softcap=softcap,
            alibi_slopes=slopes,
            attn_sinks=sinks,
        ),
        cache=SimpleNamespace(shape=SimpleNamespace(block_size=16)),
        block_tables=torch.zeros(2048, device="cuda" if torch.cuda.is_available() else "cpu"),
        windows=windows,
    )
    return LibraryPlanner(context, torch.bfloat16, 6000)


def plan(made: LibraryPlanner, *work: tuple[int, int, int]) -> tuple[list[Any], list[bool]]:
    """Sequences as (slot, start, count)."""
    slots, starts, counts = np.array(work, np.int32).T
    parts, left = made.plan(slots, starts, counts, TABLES)
    return list(parts), left.tolist()


def test_long_chunks_ragged_ones_and_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner(monkeypatch)
    parts, left = plan(made, (3, 5, 1), (1, 0, 40), (8, 100, 33), (2, 4000, 5000))
    assert left == [True, False, False, False]
    long, ragged = parts
    assert isinstance(long.keys, ChunkKeys) and long.rows == slice(74, 5074)
    assert (long.keys.start, long.keys.count) == (4000, 5000)
    assert long.keys.blocks.tolist() == list(range(1200, 1200 + 563))
    keys = ragged.keys
    assert isinstance(keys, RaggedKeys) and ragged.rows == slice(1, 74)
    assert keys.blocks.tolist() == [600, 601, 602, *range(4800, 4809)]
    assert keys.starts.tolist() == [0, 48, 192] and keys.used.tolist() == [40, 133]
    assert keys.row_starts.tolist() == [0, 40, 73] and (keys.max_rows, keys.max_keys) == (40, 144)


def test_rows_of_others_may_lie_between(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, left = plan(planner(monkeypatch), (0, 0, 33), (1, 9, 2), (2, 0, 34))
    assert left == [False, True, False]
    assert parts[0].rows.tolist() == [*range(33), *range(35, 69)]


def test_one_chunk_alone_is_long_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner(monkeypatch)
    assert isinstance(plan(made, (0, 0, 1024))[0][0].keys, ChunkKeys)
    assert isinstance(plan(made, (0, 0, 1024), (1, 0, 1024))[0][0].keys, RaggedKeys)
    assert plan(made, (0, 50, 31)) == ([], [True])


def test_windows_and_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = planner(monkeypatch, windows=(None, 100))
    assert isinstance(plan(windowed, (0, 0, 5000))[0][0].keys, RaggedKeys)
    no_flash = planner(monkeypatch, flash=False)
    assert plan(no_flash, (0, 0, 500), (1, 0, 600)) == ([], [True, True])
    none = planner(monkeypatch, flash=False, cudnn=False)
    assert plan(none, (0, 0, 5000)) == ([], [True])


@pytest.mark.parametrize(
    "change", [{"softcap": 50.0}, {"slopes": (0.5, 0.25, 0.1, 0.05)}, {"sinks": True}]
)
def test_no_library_has_soft_caps_alibi_or_sinks(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    assert plan(planner(monkeypatch, **change), (0, 0, 5000), (1, 0, 40)) == ([], [True, True])
