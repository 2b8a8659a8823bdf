"""Attention of one step on a CUDA device: `models.layers.Attend` over the paged cache.

Rows go through the work list of `kernels.paged_attention`. Chunks of an uncaptured step go through
libraries instead (`library_attention`), where that was measured faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import triton

from hetero_llm.core.errors import ConfigError
from hetero_llm.gpu.attention_plan import PlanLimits
from hetero_llm.gpu.kernels.launch import num_multiprocessors
from hetero_llm.gpu.kernels.paged_attention import (
    MAX_GROUP,
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
from hetero_llm.gpu.library_attention import (
    ChunkKeys,
    RaggedKeys,
    attend_chunk,
    attend_ragged,
    cudnn_works,
    flash_works,
)
from hetero_llm.gpu.step_buffer import StepInputs
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import RotaryHeads
from hetero_llm.models.rotary import StepRotary
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.scored_attention import Scoring

_PIECES_PER_SM = 8
_FEW_ROWS = 8
_MANY_ROWS = 64
_SHORT_CONTEXT = 384
_WIDE_TILES = {64: (64, 4, 3, 2), 128: (64, 8, 3, 1)}
"""By rows, keys, warps, stages and programs of tiles that one row's group fills: StarCoder has 48
heads of 128 on one KV head, Falcon-7B 71 of 64. Not timed: what fits registers and shared memory
of Hopper."""
_RAGGED_ROWS = 32
"""Chunks of at least so many rows of an uncaptured step go through FlashAttention."""
_LONG_ROWS, _LONG_ROWS_ALONE = 4096, 1024
"""Chunks of at least so many rows go through cuDNN, among others and alone."""


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
    group = config.num_heads // config.num_kv_heads
    if group > MAX_GROUP:
        raise ConfigError(
            "model",
            f"{group} query heads on each KV head",
            f"the GPU kernels serve {MAX_GROUP} at most; "
            f"batch_invariant=True or device='cpu' runs it through torch",
        )
    if cache_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(
            "kv_cache_dtype", "fp8", "needs a GPU of compute capability 8.9 or later; use auto"
        )


@dataclass(frozen=True, slots=True)
class LibraryRows:
    """Rows that go through a library: [R] int64 on the device, or a slice; and their keys."""

    rows: torch.Tensor | slice
    keys: ChunkKeys | RaggedKeys


class AttentionContext:
    """What all steps share: cache, device block tables, tile shapes and their workspaces."""

    def __init__(
        self, config: ModelConfig, cache: PagedKVCache, tables: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.cache = cache
        self.tables = tables
        self.windows = tuple(dict.fromkeys(config.sliding_windows))
        self.slopes = None
        if config.alibi_slopes is not None:
            device = tables.device
            self.slopes = torch.tensor(config.alibi_slopes, dtype=torch.float32, device=device)
        self._group = config.num_heads // config.num_kv_heads
        self._dtype = dtype
        self._workspaces: dict[int, Workspace] = {}
        programs = _PIECES_PER_SM * num_multiprocessors(tables.device)
        self.max_pieces = max(1, programs // config.num_kv_heads)
        self._keys = [cache.keys(layer) for layer in range(config.num_layers)]
        self._values = [cache.values(layer) for layer in range(config.num_layers)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, [blocks, block_size, kv_heads, head_dim]."""
        return self._keys[index], self._values[index]

    def short_tile(self, num_rows: int) -> TileShape:
        """Of decode steps whose sequences are short, or enough to fill the chip uncut."""
        tile = self._tile(16, 64, 4, 4, 3)
        if num_rows < _MANY_ROWS or tile.rows in _WIDE_TILES:
            return tile
        return dataclasses.replace(tile, num_warps=2, programs=4)

    def is_short(self, contexts: np.ndarray) -> bool:
        """Whether a step without chunks needs no tile cut: [S] keys of each sequence."""
        longest = int(contexts.max())
        if longest <= _SHORT_CONTEXT:
            return True
        places = 3 * num_multiprocessors(self.tables.device)
        fills = len(contexts) * self.config.num_kv_heads >= places
        return fills and longest * len(contexts) <= 2 * int(contexts.sum())

    def tile_for(self, num_rows: int, single: bool) -> TileShape:
        """The tile of any step.

        Args:
            num_rows: rows of the step, padding included.
            single: every sequence has one row.
        """
        if single:
            deep = num_rows <= _FEW_ROWS
            return self._tile(16, 128, 4, 5, 1) if deep else self._tile(16, 128, 4, 3, 2)
        return self._tile(32, 128, 4, 3, 2) if num_rows <= 64 else self._tile(64, 64, 4, 3, 2)

    def tree_tile(self, num_rows: int, *, short: bool) -> TileShape:
        """The tile of a step with draft trees of some rows each; `short` as `is_short` says."""
        if short:
            return self._tile(32, 64, 4, 4, 3)
        return self._tile(32, 128, 4, 5, 1) if num_rows <= 64 else self._tile(32, 64, 4, 5, 2)

    def _tile(self, rows: int, keys: int, warps: int, stages: int, programs: int) -> TileShape:
        """A shape measured for heads of 256 bytes; fewer keys where heads take more, and more rows
        where groups are larger: a tile holds whole groups."""
        least = triton.next_power_of_2(self._group)
        if least > rows:
            rows = least
            keys, warps, stages, programs = _WIDE_TILES.get(rows, (keys, warps, stages, programs))
        row_bytes = triton.next_power_of_2(self.config.head_dim) * self._dtype.itemsize
        keys = max(16, keys * 256 // max(row_bytes, 256))
        return TileShape(rows, keys, warps, stages, programs)

    def limits(self, tile: TileShape, *, cut: bool = True) -> PlanLimits:
        """What the plan of a step with this tile has to respect; `cut`: tiles may be cut."""
        programs = num_multiprocessors(self.tables.device) * tile.programs
        return PlanLimits(
            tile.rows // self._group,
            tile.keys,
            max(1, programs // self.config.num_kv_heads),
            self.max_pieces if cut else 0,
            2 * tile.keys,
        )

    def workspace(self, tile: TileShape) -> Workspace:
        """Shared by all steps with tiles of as many rows: they run one after the other. It is
        never replaced, since captured graphs know its address."""
        if tile.rows not in self._workspaces:
            config = self.config
            self._workspaces[tile.rows] = make_workspace(
                self.max_pieces,
                config.num_kv_heads,
                tile.rows,
                config.head_dim,
                self.tables.device,
            )
        return self._workspaces[tile.rows]


class StepAttention:
    """One step's attention, or that of every step that replays one graph."""

    def __init__(
        self,
        context: AttentionContext,
        inputs: StepInputs[torch.Tensor],
        tile: TileShape,
        *,
        any_cut: bool,
        library: tuple[LibraryRows, ...] = (),
        planned: bool = True,
    ) -> None:
        """
        Args:
            inputs: the step's, on the device.
            any_cut: whether the work list may have cut tiles.
            library: rows that the work list leaves out.
            planned: whether the work list has anything to do.
        """
        self._any_cut = any_cut
        self._context = context
        self._inputs = inputs
        self._tile = tile
        self._workspace = context.workspace(tile)
        self._library = library
        self._planned = planned
        tree = inputs.tree
        ancestors = None if tree is None else tree.ancestors
        self._masks = RowMasks(inputs.limits, inputs.positions, ancestors)
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
        self, layer: int, qkv: torch.Tensor, heads: RotaryHeads, rows: StepRotary
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
        )
        return self._attend(layer, q, keys, values)

    def _attend(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        config = self._context.config
        window = config.sliding_windows[layer]
        scale = config.attn_scale
        if not self._planned and len(self._library) == 1:  # it is the whole step
            return _attend_by_library(q, keys, values, self._library[0], scale, window)
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
                softcap=config.attn_softcap,
                slopes=self._context.slopes,
                any_cut=self._any_cut,
                out=out,
            )
        for part in self._library:
            out[part.rows] = _attend_by_library(q[part.rows], keys, values, part, scale, window)
        return out


def _attend_by_library(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: LibraryRows,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    if isinstance(part.keys, ChunkKeys):
        return attend_chunk(q, keys, values, part.keys, scale=scale)
    return attend_ragged(q, keys, values, part.keys, scale=scale, window=window)


class LibraryPlanner:
    """Decides which chunks of an uncaptured step go through a library.

    Measured (docs/log.md): one chunk is fastest through cuDNN from a thousand rows on; a call for
    each of many shorter ones costs more than FlashAttention's single call for all. Neither is
    given soft caps or ALiBi.

    Args:
        uploads: of its own, one for each step.
    """

    def __init__(self, context: AttentionContext, dtype: torch.dtype, uploads: Uploads) -> None:
        config = context.config
        device = context.tables.device
        shape = (dtype, config.num_heads, config.num_kv_heads, config.head_dim, device)
        self._context = context
        plain = Scoring.of(config).is_plain
        self._cudnn = plain and cudnn_works(*shape)
        self._flash = plain and flash_works(*shape)
        self._uploads = uploads
        self._has_windows = any(w is not None for w in context.windows)

    def plan(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray
    ) -> tuple[tuple[LibraryRows, ...], np.ndarray]:
        """
        Args:
            slots, starts, counts: [S], as in the step.
            tables: [slots, columns] block ids on the host.

        Returns:
            Rows for libraries, and [S] bool: sequences that are left to the work list.
        """
        first_rows = np.cumsum(counts) - counts
        ragged = np.full(len(counts), self._flash) & (counts >= _RAGGED_ROWS)
        alone = int((counts >= _RAGGED_ROWS).sum()) == 1
        long = np.zeros(len(counts), bool)
        if self._cudnn and not self._has_windows:
            long = counts >= (_LONG_ROWS_ALONE if alone else _LONG_ROWS)
            ragged &= ~long
        made = [
            self._long(int(starts[i]), int(counts[i]), int(first_rows[i]), tables[slots[i]])
            for i in np.flatnonzero(long).tolist()
        ]
        if ragged.any():
            made.append(
                self._ragged(
                    slots[ragged], starts[ragged], counts[ragged], first_rows[ragged], tables
                )
            )
        return self._sent(made), ~(long | ragged)

    def _sent(self, made: list[_Unsent]) -> tuple[LibraryRows, ...]:
        """All parts' arrays go to the device as one."""
        if not made:
            return ()
        arrays = [array for part in made for array in part.arrays]
        words = self._uploads.send(np.concatenate(arrays).astype(np.int32))
        pieces = iter(words.split([len(array) for array in arrays]))
        return tuple(part.make(*islice(pieces, len(part.arrays))) for part in made)

    def _long(self, start: int, count: int, first_row: int, table: np.ndarray) -> _Unsent:
        size = self._context.cache.shape.block_size
        rows = slice(first_row, first_row + count)

        def make(blocks: torch.Tensor) -> LibraryRows:
            return LibraryRows(rows, ChunkKeys(blocks.long(), start, count))

        return _Unsent((table[: -(-(start + count) // size)],), make)

    def _ragged(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        count: np.ndarray,
        first: np.ndarray,
        tables: np.ndarray,
    ) -> _Unsent:
        size = self._context.cache.shape.block_size
        used = starts + count
        columns = -(-used // size)
        blocks = np.concatenate(
            [tables[slot, :n] for slot, n in zip(slots, columns.tolist(), strict=True)]
        )
        total = int(count.sum())
        begin = int(first[0])
        within = np.zeros(0, np.int32)
        if int(first[-1] + count[-1]) - begin != total:  # others lie in between
            within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
            within += np.repeat(first, count)
        longest, most = int(count.max()), int((columns * size).max())

        def make(
            blocks: torch.Tensor,
            begins: torch.Tensor,
            used: torch.Tensor,
            row_begins: torch.Tensor,
            places: torch.Tensor,
        ) -> LibraryRows:
            rows = places.long() if len(places) else slice(begin, begin + total)
            return LibraryRows(
                rows, RaggedKeys(blocks.long(), begins, used, row_begins, longest, most)
            )

        return _Unsent((blocks, _ends(columns * size), used, _ends(count), within), make)


@dataclass(frozen=True, slots=True)
class _Unsent:
    """Rows for a library: integer arrays, and what is made of them on the device, int32 there."""

    arrays: tuple[np.ndarray, ...]
    make: Callable[..., LibraryRows]


def _ends(lengths: np.ndarray) -> np.ndarray:
    """[n + 1] int32 where pieces of these lengths begin, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
