"""Attention of one step on a CUDA device: `models.layers.Attend` over the paged cache.

Tokens go through the work list of `kernels.paged_attention`. Prompt chunks of an uncaptured step go
through libraries instead (`library_attention`), where that was measured faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch

from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.gathered_kv import CacheKV, GatheredKV
from hetero_llm.gpu.kernels.paged_attention import (
    RowMasks,
    TileShape,
    Work,
    Workspace,
    paged_attention,
)
from hetero_llm.gpu.kernels.rope_store import rope_store, store
from hetero_llm.gpu.library_attention import (
    ChunkKeys,
    RaggedKeys,
    attend_chunk,
    attend_ragged,
    cudnn_pays,
    cudnn_works,
    flash_works,
    plan_cudnn,
)
from hetero_llm.gpu.step_buffer import StepInputs
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.models.layers import RotaryHeads
from hetero_llm.models.rotary import StepRotary
from hetero_llm.runner.scored_attention import Scoring

_RAGGED_TOKENS = 32
"""Chunks of at least this many tokens of an uncaptured step go through FlashAttention."""
_MOST_WORDS = 1 << 19
"""Numbers that a plan sends without waiting."""


@dataclass(frozen=True, slots=True)
class LibraryRows:
    """Tokens whose attention goes through a library.

    Attributes:
        rows: [R] int64 on the device, or a slice: their indices in the step.
        keys: what they attend to.
    """

    rows: torch.Tensor | slice
    keys: ChunkKeys | RaggedKeys


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Tokens whose attention goes through a work list. `any_cut`: it may have cut tiles."""

    masks: RowMasks
    work: Work
    workspace: Workspace
    tile: TileShape
    any_cut: bool


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that its last layer computes to the end; see `sampled_rows`.

    Attributes:
        layer: the last one.
        rows: [N] int64 on the device, their indices in the step; N > 0.
        planned: as of a step in which N sequences decode.
    """

    layer: int
    rows: torch.Tensor
    planned: PlannedRows


class StepAttention:
    """The attention of one step, or of every step that replays one graph."""

    def __init__(
        self,
        context: AttentionContext,
        inputs: StepInputs[torch.Tensor],
        tile: TileShape,
        *,
        any_cut: bool,
        library: tuple[LibraryRows, ...] = (),
        planned: bool = True,
        sampled: SampledRows | None = None,
        kv: GatheredKV | None = None,
    ) -> None:
        """
        Args:
            inputs: the step's, on the device.
            any_cut: the work list may have cut tiles.
            library: tokens that the work list leaves out.
            planned: the work list has items.
            sampled: rows for which the last layer's attention returns results; None: all.
            kv: where keys and values go; None: into the cache.
        """
        self._context = context
        self._inputs = inputs
        self._library = library
        self._is_planned = planned
        self._sampled = sampled
        self._kv = kv or CacheKV(context, inputs.slot_mapping)
        tree = inputs.tree
        ancestors = None if tree is None else tree.ancestors
        masks = RowMasks(inputs.limits, inputs.positions, ancestors)
        lists = zip(inputs.items, inputs.cut_rows, inputs.work_counts, strict=True)
        workspace = context.workspace(tile)
        self._planned = {
            window: PlannedRows(masks, Work(*one), workspace, tile, any_cut)
            for window, one in zip(context.windows, lists, strict=True)
        }

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        to = self._kv.target(layer)
        store(k, v, to.slot_mapping, to.keys, to.values, inverses=to.inverses)
        self._kv.stored(layer)
        return self._attend(layer, q, sinks)

    def rotary(
        self,
        layer: int,
        qkv: torch.Tensor,
        heads: RotaryHeads,
        rows: StepRotary,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        to, norm = self._kv.target(layer), heads.qk_norm
        q = rope_store(
            qkv,
            self._inputs.positions,
            to.slot_mapping,
            rows.table,
            None if norm is None else norm.q_weight,
            None if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            to.keys,
            to.values,
            heads.num_heads,
            inverses=to.inverses,
        )
        self._kv.stored(layer)
        return self._attend(layer, q, sinks)

    def select(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if self._sampled is None or layer != self._sampled.layer:
            return x
        return x.index_select(0, self._sampled.rows)

    def _attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        if self._sampled is not None and layer == self._sampled.layer:
            own = self.select(layer, q)
            return self._by_kernel(layer, own, self._sampled.planned, sinks)
        assert not self._library or sinks is None, "`LibraryPlanner` leaves sinks to our kernel"
        if not self._is_planned and len(self._library) == 1:  # it is the whole step
            return self._by_library(layer, q, self._library[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._is_planned:
            window = self._context.config.sliding_windows[layer]
            self._by_kernel(layer, q, self._planned[window], sinks, out)
        for part in self._library:
            out[part.rows] = self._by_library(layer, q[part.rows], part)
        return out

    def _by_kernel(
        self,
        layer: int,
        q: torch.Tensor,
        rows: PlannedRows,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [R, H, D] of these rows."""
        context, config = self._context, self._context.config
        return paged_attention(
            q,
            context.keys[layer],
            context.values[layer],
            context.block_tables,
            rows.masks,
            rows.work,
            rows.workspace,
            rows.tile,
            scale=config.attn_scale,
            window=config.sliding_windows[layer],
            softcap=config.attn_softcap,
            slopes=context.slopes,
            kv_scales=context.kv_scales[layer],
            sinks=sinks,
            any_cut=rows.any_cut,
            out=out,
        )

    def _by_library(self, layer: int, q: torch.Tensor, part: LibraryRows) -> torch.Tensor:
        """q: of the rows of `part`."""
        context, scale = self._context, self._context.config.attn_scale
        cache, scales = (context.keys[layer], context.values[layer]), context.kv_scales[layer]
        if isinstance(part.keys, ChunkKeys):
            return attend_chunk(q, *cache, part.keys, scale=scale, kv_scales=scales)
        window = context.config.sliding_windows[layer]
        return attend_ragged(q, *cache, part.keys, scale=scale, window=window, kv_scales=scales)


class LibraryPlanner:
    """Decides which chunks of an uncaptured step go through a library.

    Measured (docs/history/log.md): one chunk is fastest through cuDNN from a thousand tokens on; a
    call for each of many shorter ones costs more than FlashAttention's single call for all. Models
    with soft caps, ALiBi or sinks use neither.

    Args:
        most_tokens: of a step.
    """

    def __init__(self, context: AttentionContext, dtype: torch.dtype, most_tokens: int) -> None:
        config = context.config
        device = context.block_tables.device
        self._shape = (dtype, config.num_heads, config.num_kv_heads, config.head_dim, device)
        self._context = context
        self._most_tokens = most_tokens
        self._plain = Scoring.of(config).is_plain
        self._uploads = Uploads(min(2 * context.block_tables.numel(), _MOST_WORDS), device)
        self._has_windows = any(w is not None for w in context.windows)

    def try_libraries(self) -> None:
        """Tries the libraries, each once in a process: seconds that no request shall wait for."""
        _ = self._flash
        if self._cudnn and not self._has_windows:
            plan_cudnn(*self._shape, most_tokens=self._most_tokens)

    @cached_property
    def _cudnn(self) -> bool:
        return self._plain and cudnn_works(*self._shape)

    @cached_property
    def _flash(self) -> bool:
        return self._plain and flash_works(*self._shape)

    def plan(
        self,
        request_slots: np.ndarray,
        num_computed_tokens: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        block_tables: np.ndarray,
    ) -> tuple[tuple[LibraryRows, ...], np.ndarray]:
        """
        Args:
            request_slots, num_computed_tokens, num_scheduled_tokens: [S], of the step.
            block_tables: [slots, columns] block ids on the host.

        Returns:
            Tokens for libraries, and [S] bool: sequences that are left to the work list.
        """
        counts = num_scheduled_tokens
        first_rows = np.cumsum(counts) - counts
        chunks = counts >= _RAGGED_TOKENS
        ragged = np.full(len(counts), self._flash) & chunks
        alone = len(np.unique(request_slots[chunks])) == 1  # in one piece or in two
        long = np.zeros(len(counts), bool)
        if self._cudnn and not self._has_windows:
            for i in np.flatnonzero(chunks).tolist():
                start, count = int(num_computed_tokens[i]), int(counts[i])
                full = 4 * count >= 3 * self._most_tokens
                long[i] = cudnn_pays(start, count, alone=alone, full=full)
            ragged &= ~long
        unsent = [
            self._long(
                int(num_computed_tokens[i]),
                int(counts[i]),
                int(first_rows[i]),
                block_tables[request_slots[i]],
            )
            for i in np.flatnonzero(long).tolist()
        ]
        if ragged.any():
            unsent.append(
                self._ragged(
                    request_slots[ragged],
                    num_computed_tokens[ragged],
                    counts[ragged],
                    first_rows[ragged],
                    block_tables,
                )
            )
        return self._send(unsent), ~(long | ragged)

    def _send(self, unsent: list[_Unsent]) -> tuple[LibraryRows, ...]:
        """The arrays of all parts go to the device as one."""
        if not unsent:
            return ()
        arrays = [array for part in unsent for array in part.arrays]
        words = self._uploads.send(np.concatenate(arrays).astype(np.int32))
        pieces = iter(words.split([len(array) for array in arrays]))
        return tuple(part.make(*islice(pieces, len(part.arrays))) for part in unsent)

    def _long(self, start: int, count: int, first_row: int, block_table: np.ndarray) -> _Unsent:
        size = self._context.cache.shape.block_size
        rows = slice(first_row, first_row + count)

        def make(blocks: torch.Tensor) -> LibraryRows:
            return LibraryRows(rows, ChunkKeys(blocks.long(), start, count))

        return _Unsent((block_table[: -(-(start + count) // size)],), make)

    def _ragged(
        self,
        request_slots: np.ndarray,
        starts: np.ndarray,
        count: np.ndarray,
        first: np.ndarray,
        block_tables: np.ndarray,
    ) -> _Unsent:
        size = self._context.cache.shape.block_size
        used = starts + count
        columns = -(-used // size)
        blocks = np.concatenate(
            [
                block_tables[slot, :n]
                for slot, n in zip(request_slots, columns.tolist(), strict=True)
            ]
        )
        total = int(count.sum())
        begin = int(first[0])
        within = np.zeros(0, np.int32)
        if int(first[-1] + count[-1]) - begin != total:  # tokens of other sequences lie in between
            within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
            within += np.repeat(first, count)
        longest, most = int(count.max()), int((columns * size).max())

        def make(
            blocks: torch.Tensor,
            begins: torch.Tensor,
            used: torch.Tensor,
            row_begins: torch.Tensor,
            within: torch.Tensor,
        ) -> LibraryRows:
            rows = within.long() if len(within) else slice(begin, begin + total)
            return LibraryRows(
                rows, RaggedKeys(blocks.long(), begins, used, row_begins, longest, most)
            )

        return _Unsent((blocks, _ends(columns * size), used, _ends(count), within), make)


@dataclass(frozen=True, slots=True)
class _Unsent:
    """Tokens for a library, not on the device yet.

    Attributes:
        arrays: integers, sent as int32.
        make: makes the result from the arrays on the device.
    """

    arrays: tuple[np.ndarray, ...]
    make: Callable[..., LibraryRows]


def _ends(lengths: np.ndarray) -> np.ndarray:
    """[n + 1] int32 where consecutive pieces of these lengths begin, and where the last one
    ends."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
