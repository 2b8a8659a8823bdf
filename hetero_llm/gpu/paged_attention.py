"""Attention of one step on a CUDA device: `models.layers.Attend` over the paged cache.

Rows go through the work list of `kernels.paged_attention`. Long chunks of an uncaptured step may go
through the library instead (`library_attention`), where that was measured faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from hetero_llm.core.errors import ConfigError
from hetero_llm.gpu.attention_plan import PlanLimits
from hetero_llm.gpu.kernels.launch import num_multiprocessors
from hetero_llm.gpu.kernels.paged_attention import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    RowMasks,
    TileShape,
    Work,
    Workspace,
    make_workspace,
    paged_attention,
)
from hetero_llm.gpu.kernels.rope_store import rope_store, store
from hetero_llm.gpu.library_attention import ChunkKeys, attend_chunk
from hetero_llm.gpu.step_inputs import StepInputs
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import RotaryHeads
from hetero_llm.models.rotary import RotaryRows
from hetero_llm.runner.kv_cache import PagedKVCache

_PIECES_PER_PLACE = 4
_FEW_ROWS = 8


def check_supported(config: ModelConfig, cache_dtype: torch.dtype) -> None:
    """Raises ConfigError for a model whose attention the kernels do not serve."""
    dim = config.head_dim
    if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % 8:
        raise ConfigError(
            "model",
            f"head size {dim}",
            f"the GPU kernels serve multiples of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; "
            f"batch_invariant=True or device='cpu' runs it through torch",
        )
    if cache_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(
            "kv_cache_dtype", "fp8", "needs a GPU of compute capability 8.9 or later; use auto"
        )


@dataclass(frozen=True, slots=True)
class LongChunk:
    """A chunk for the library: its rows in the step, and where its keys are."""

    rows: slice
    keys: ChunkKeys


class AttentionContext:
    """What all steps share: cache, device block tables, tile shapes and their workspaces."""

    def __init__(
        self, config: ModelConfig, cache: PagedKVCache, tables: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.cache = cache
        self.tables = tables
        self.windows = tuple(dict.fromkeys(config.sliding_windows))
        self._group = config.num_heads // config.num_kv_heads
        self._dtype = dtype
        self._workspaces: dict[int, Workspace] = {}
        self._keys = [cache.keys(layer) for layer in range(config.num_layers)]
        self._values = [cache.values(layer) for layer in range(config.num_layers)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, [blocks, block_size, kv_heads, head_dim]."""
        return self._keys[index], self._values[index]

    def tile_for(self, num_rows: int, single: bool) -> TileShape:
        """The tile of a step.

        Args:
            num_rows: rows of the step, padding included.
            single: every sequence has one row.
        """
        least = max(16, triton.next_power_of_2(self._group))
        row_bytes = triton.next_power_of_2(self.config.head_dim) * self._dtype.itemsize
        keys = 128 if row_bytes <= 256 else 64 if row_bytes <= 512 else 32
        if single:
            if num_rows <= _FEW_ROWS:
                return TileShape(least, keys, 4, 5, 1)
            return TileShape(least, keys, 4, 3, 2)
        if num_rows <= 64:
            return TileShape(max(least, 32), keys, 4, 3, 2)
        return TileShape(max(least, 64), max(keys // 2, 32), 4, 3, 2)

    def limits(self, tile: TileShape) -> PlanLimits:
        """What the plan of a step with this tile has to respect."""
        parallel = self._parallel(tile)
        return PlanLimits(
            tile.rows // self._group,
            tile.keys,
            parallel,
            _PIECES_PER_PLACE * parallel,
            2 * tile.keys,
        )

    def workspace(self, tile: TileShape) -> Workspace:
        """Shared by all steps with tiles of as many rows: they run one after the other."""
        pieces = _PIECES_PER_PLACE * self._parallel(tile)
        found = self._workspaces.get(tile.rows)
        if found is None or found.num_pieces < pieces:
            config = self.config
            found = make_workspace(
                pieces, config.num_kv_heads, tile.rows, config.head_dim, self.tables.device
            )
            self._workspaces[tile.rows] = found
        return found

    def _parallel(self, tile: TileShape) -> int:
        programs = num_multiprocessors(self.tables.device) * tile.programs
        return max(1, programs // self.config.num_kv_heads)


class StepAttention:
    """One step's attention, or that of every step that replays one graph."""

    def __init__(
        self,
        context: AttentionContext,
        inputs: StepInputs[torch.Tensor],
        tile: TileShape,
        *,
        any_cut: bool,
        long_chunks: tuple[LongChunk, ...] = (),
        planned: bool = True,
    ) -> None:
        """
        Args:
            inputs: the step's, on the device.
            any_cut: whether the work list may have cut tiles.
            long_chunks: chunks whose rows the work list leaves out.
            planned: whether the work list has anything to do.
        """
        self._any_cut = any_cut
        self._context = context
        self._inputs = inputs
        self._tile = tile
        self._workspace = context.workspace(tile)
        self._long_chunks = long_chunks
        self._planned = planned
        self._masks = RowMasks(inputs.limits, inputs.positions)
        self._work = {
            window: Work(inputs.items[i], inputs.cut_rows[i], inputs.work_counts[i])
            for i, window in enumerate(context.windows)
        }

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._context.layer(layer)
        store(k, v, self._inputs.cache_rows, keys, values)
        return self._attend(layer, q, keys, values)

    def rotary(
        self, layer: int, qkv: torch.Tensor, heads: RotaryHeads, rows: RotaryRows
    ) -> torch.Tensor:
        keys, values = self._context.layer(layer)
        norm = heads.qk_norm
        q = rope_store(
            qkv,
            self._inputs.positions,
            self._inputs.cache_rows,
            rows.table,
            None if norm is None else norm.q_weight,
            None if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            keys,
            values,
            heads.num_heads,
            ahead=heads.ahead,
        )
        return self._attend(layer, q, keys, values)

    def _attend(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        config = self._context.config
        window = config.sliding_windows[layer]
        scale = config.attn_scale
        if not self._planned and len(self._long_chunks) == 1:  # it is the whole step
            return attend_chunk(q, keys, values, self._long_chunks[0].keys, scale=scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._planned:
            paged_attention(
                q,
                keys,
                values,
                self._context.tables,
                self._masks,
                self._work[window],
                self._workspace,
                self._tile,
                scale=scale,
                window=window,
                any_cut=self._any_cut,
                out=out,
            )
        for chunk in self._long_chunks:
            rows = chunk.rows
            out[rows] = attend_chunk(q[rows], keys, values, chunk.keys, scale=scale)
        return out


def find_long_chunks(
    context: AttentionContext,
    starts: np.ndarray,
    counts: np.ndarray,
    first_rows: np.ndarray,
    tables: np.ndarray,
    *,
    min_rows: int,
) -> tuple[tuple[LongChunk, ...], np.ndarray]:
    """Chunks of at least `min_rows` rows that the library can serve.

    Args:
        starts, counts, first_rows: [S], as in the step.
        tables: [S, columns] block ids on the host.

    Returns:
        The chunks, and [S] bool: sequences that are left to the work list.
    """
    left = np.ones(len(counts), bool)
    chunks = []
    size = context.cache.shape.block_size
    shortest = min((w for w in context.windows if w is not None), default=None)
    for index in np.flatnonzero(counts >= min_rows).tolist():
        start, count = int(starts[index]), int(counts[index])
        end = start + count
        if shortest is not None and end > shortest:
            continue  # the library knows no sliding window
        blocks = torch.from_numpy(tables[index, : -(-end // size)].astype(np.int64))
        first = int(first_rows[index])
        keys = ChunkKeys(blocks.to(context.tables.device, non_blocking=True), start, count)
        chunks.append(LongChunk(slice(first, first + count), keys))
        left[index] = False
    return tuple(chunks), left
