"""Attention over the paged KV cache in plain torch: the reference every kernel is tested with.

`plan` does the host work once per step; the returned object is called once per layer, stores the
step's K and V and attends. A row at position p sees the keys at 0..p of its sequence, or the last
`window` of them. A node of a draft tree sees those before the root and its own path.

Shapes: T rows, H query heads in groups of G per KV head (H = N * G), head size D. Groups become
rows of one matrix, so K and V are never repeated in memory.

Models with a soft cap or ALiBi go through `scored_attention`; everything else through torch's
attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import RotaryHeads
from hetero_llm.models.rotary import StepRotary
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.scored_attention import Reach, ScoredAttention, Scoring
from hetero_llm.spec_decode.verify import TreeRows


class RowKernel(Protocol):
    """A faster store, and a faster attention for rows that are alone in their sequence and,
    where `supports_chunks`, for several rows of one sequence."""

    @property
    def supports_chunks(self) -> bool: ...

    @property
    def scoring(self) -> Scoring: ...

    def plan(self, contexts: np.ndarray, pieces: np.ndarray, window: int | None) -> Any: ...

    def attend(self, plan: Any, layer: int, q: torch.Tensor) -> torch.Tensor: ...

    def plan_chunk(self, start: int, count: int, pieces: np.ndarray, window: int | None) -> Any: ...

    def attend_chunk(self, plan: Any, layer: int, q: torch.Tensor) -> torch.Tensor: ...

    def store(
        self, layer: int, token_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Tree:
    """A draft tree behind `start` cached tokens; its keys lie in the order of its rows.

    positions: [start + count] of all keys. sees: [count, start + count] bool, whether a row's path
    leads through the key.
    """

    positions: np.ndarray
    sees: np.ndarray

    def keys(self, row: int, window: int | None) -> np.ndarray:
        """[seen] the keys that a row sees, in order of their positions."""
        return np.flatnonzero(self.sees[row])[-(window or 0) :]

    def hidden(self, window: int | None) -> np.ndarray:
        """[count, start + count] bool."""
        hidden = ~self.sees
        if window is not None:
            own = self.positions[-len(hidden) :]
            hidden |= self.positions <= own[:, None] - window
        return hidden


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences attended in one call: equal numbers of rows, contexts padded to the longest.

    rows: the flattened rows. start: tokens in the cache before the first sequence's rows.
    plans: by window, the row kernel's plan; pieces and masks are not needed then.
    pieces: [B * blocks] index of the K piece of layer 0. masks: by window, [B * N, 1, count,
    context] added to the scores (None: plain causal over a context that starts empty).
    tree: the sequence's rows are a draft tree. reach: for `ScoredAttention`, instead of masks.
    """

    rows: slice
    batch: int
    count: int
    start: int
    context: int
    pieces: torch.Tensor
    masks: dict[int | None, torch.Tensor | None]
    plans: dict[int | None, Any] | None = None
    tree: _Tree | None = None
    reach: Reach | None = None


_NO_PIECES = torch.empty(0, dtype=torch.int64)


class TorchPagedAttention:
    """Plans attention for one model and cache. `row_by_row` makes every row its own call with
    shapes that depend on its context alone (batch invariance by call-shape identity).
    `row_kernel` takes over where it can."""

    def __init__(
        self,
        config: ModelConfig,
        cache: PagedKVCache,
        row_by_row: bool,
        row_kernel: RowKernel | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._row_by_row = row_by_row
        scoring = Scoring.of(config)
        assert row_kernel is None or row_kernel.scoring == scoring
        self._scored = None
        if not scoring.is_plain:
            self._scored = ScoredAttention(scoring, cache.data.device)
        self._row_kernel = None if row_by_row else row_kernel
        self._windows = tuple(dict.fromkeys(config.sliding_windows))

    def plan(
        self,
        starts: np.ndarray,
        counts: np.ndarray,
        tables: np.ndarray,
        places: np.ndarray,
        blocks: np.ndarray,
        trees: TreeRows | None = None,
    ) -> PlannedAttention:
        """Prepares one step.

        Args:
            starts, counts: [S] tokens in the cache before the step, and rows of the step.
            tables: [S, columns] block ids.
            places: [T] index of each row's K and V in its sequence's; but for draft nodes this is
                its position.
            blocks: [T] block that each row's K and V go to.
            trees: the step's draft trees.
        """
        shape = self._cache.shape
        device = self._cache.data.device
        token_rows = blocks.astype(np.int64) * (shape.num_layers * 2 * shape.block_size)
        token_rows += places % shape.block_size
        groups = self._groups(starts, counts, tables, trees)
        return PlannedAttention(
            self._config,
            self._cache,
            torch.from_numpy(token_rows).to(device),
            groups,
            self._row_by_row,
            self._row_kernel,
            self._scored,
        )

    def _groups(
        self, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, trees: TreeRows | None
    ) -> list[_Group]:
        """Neighbouring single-row sequences are batched; every longer chunk is a group."""
        groups: list[_Group] = []
        row = index = 0
        total = len(starts)
        is_tree = np.zeros(total, np.uint8) if trees is None else trees.is_tree
        while index < total:
            last = index + 1
            if counts[index] == 1 and not is_tree[index] and not self._row_by_row:
                while last < total and counts[last] == 1 and not is_tree[last]:
                    last += 1
            picked, count = slice(index, last), int(counts[index])
            tree = None
            if trees is not None and is_tree[index]:
                tree = _tree(trees, index, slice(row, row + count), int(starts[index]))
            groups.append(self._group(row, starts[picked], count, tables[picked], tree))
            row += count * (last - index)
            index = last
        return groups

    def _group(
        self, row: int, starts: np.ndarray, count: int, tables: np.ndarray, tree: _Tree | None
    ) -> _Group:
        size = self._cache.shape.block_size
        device = self._cache.data.device
        context = int(starts.max()) + count
        columns = -(-context // size)
        if (len(starts) > 1 or count == 1) and tree is None:
            context = columns * size  # whole blocks: the gathered keys need no cut
        pieces = tables[:, :columns].astype(np.int64) * (self._cache.shape.num_layers * 2)
        rows = slice(row, row + count * len(starts))
        kernel = self._row_kernel
        plans: dict[int | None, Any] | None = None
        if kernel is not None and count == 1 and tree is None:
            plans = {w: kernel.plan(starts + 1, pieces, w) for w in self._windows}
        elif kernel is not None and kernel.supports_chunks and tree is None:
            start = int(starts[0])
            plans = {w: kernel.plan_chunk(start, count, pieces[0], w) for w in self._windows}
        if plans is not None:
            return _Group(rows, len(starts), count, 0, context, _NO_PIECES, {}, plans)
        masks: dict[int | None, torch.Tensor | None] = {}
        reach = None
        if self._row_by_row:
            pass  # each row is given what it sees
        elif self._scored is not None:
            reach = self._reach(starts, count, context, tree)
        else:
            masks = {w: self._mask(starts, count, context, w, tree) for w in self._windows}
        return _Group(
            rows,
            len(starts),
            count,
            int(starts[0]),
            context,
            torch.from_numpy(pieces.reshape(-1)).to(device),
            masks,
            tree=tree,
            reach=reach,
        )

    def _reach(self, starts: np.ndarray, count: int, context: int, tree: _Tree | None) -> Reach:
        keys, sees = np.arange(context), None
        rows = starts[:, None] + np.arange(count)
        device = self._cache.data.device
        if tree is not None:
            keys, rows = tree.positions, tree.positions[None, -count:]
            sees = torch.from_numpy(tree.sees).to(device)
        own, all_keys = (torch.from_numpy(p.astype(np.float32)).to(device) for p in (rows, keys))
        return Reach(own, all_keys, sees)

    def _mask(
        self,
        starts: np.ndarray,
        count: int,
        context: int,
        window: int | None,
        tree: _Tree | None,
    ) -> torch.Tensor | None:
        device = self._cache.data.device
        if tree is not None:
            hidden = torch.from_numpy(tree.hidden(window)).to(device).unsqueeze(0)
        elif starts[0] == 0 and count == context and (window is None or window >= context):
            return None
        else:
            last = torch.from_numpy(starts[:, None] + np.arange(count)).to(device).unsqueeze(-1)
            keys = torch.arange(context, device=device)
            hidden = keys > last
            if window is not None:
                hidden |= keys <= last - window
        mask = torch.zeros(hidden.shape, dtype=self._cache.shape.dtype, device=device)
        mask.masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self._config.num_kv_heads, dim=0).unsqueeze(1)


def _tree(trees: TreeRows, index: int, rows: slice, start: int) -> _Tree:
    """The tree of a sequence, in these rows of a step."""
    count = rows.stop - rows.start
    base = start if trees.bases is None else int(trees.bases[index])
    bits = trees.ancestors[rows, None] >> np.arange(start + count - base, dtype=np.uint64)
    sees = np.ones((count, start + count), bool)
    sees[:, base:] = bits & np.uint64(1)
    return _Tree(np.concatenate((np.arange(start), trees.positions[rows])), sees)


class PlannedAttention:
    """One step's attention: `models.layers.Attend`."""

    def __init__(
        self,
        config: ModelConfig,
        cache: PagedKVCache,
        token_rows: torch.Tensor,
        groups: list[_Group],
        row_by_row: bool,
        row_kernel: RowKernel | None,
        scored: ScoredAttention | None,
    ) -> None:
        self._row_kernel = row_kernel
        self._scored = scored
        self._config = config
        self._cache = cache
        self._token_rows = token_rows
        self._groups = groups
        self._row_by_row = row_by_row

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Stores K and V of this layer, then attends: q [T, H, D], k and v [T, N, D]."""
        if self._row_kernel is not None:
            self._row_kernel.store(layer, self._token_rows, k, v)
        else:
            size = self._cache.shape.block_size
            rows = self._token_rows + layer * 2 * size
            self._cache.tokens.index_copy_(0, rows, k.reshape(len(k), -1))
            self._cache.tokens.index_copy_(0, rows + size, v.reshape(len(v), -1))
        window = self._config.sliding_windows[layer]
        if len(self._groups) == 1:
            return self._attend(self._groups[0], layer, window, q, k, v)
        out = torch.empty_like(q)
        for group in self._groups:
            rows_of = group.rows
            out[rows_of] = self._attend(group, layer, window, q[rows_of], k[rows_of], v[rows_of])
        return out

    def rotary(
        self, layer: int, qkv: torch.Tensor, heads: RotaryHeads, rows: StepRotary
    ) -> torch.Tensor:
        return self(layer, *heads(qkv, rows))

    def _attend(
        self,
        group: _Group,
        layer: int,
        window: int | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if group.plans is not None:
            assert self._row_kernel is not None
            plan = group.plans[window]
            if group.count == 1:
                return self._row_kernel.attend(plan, layer, q)
            return self._row_kernel.attend_chunk(plan, layer, q)
        if self._row_by_row:
            return self._attend_rows(group, layer, window, q)
        if self._scored is not None:
            return self._attend_scored(self._scored, group, layer, window, q, k, v)
        heads, dim = q.shape[1:]
        kv_heads = k.shape[1]
        mask = group.masks[window]
        batch, count = group.batch, group.count
        if mask is None:  # the whole context is in this step's rows
            keys, values = k.unsqueeze(0), v.unsqueeze(0)
        else:
            keys, values = self._gather(group, layer)
        # [B * N, G, count, D] against K, V shared by the group's heads: [B * N, 1, context, D]
        query = q.view(batch, count, kv_heads, heads // kv_heads, dim)
        query = query.permute(0, 2, 3, 1, 4).flatten(0, 1)
        keys = keys.transpose(1, 2).flatten(0, 1).unsqueeze(1)
        values = values.transpose(1, 2).flatten(0, 1).unsqueeze(1)
        if count == 1:  # one row each: the group's heads are the rows, one "head" per KV head
            query = query.transpose(1, 2)
        else:
            keys = keys.expand(-1, heads // kv_heads, -1, -1)
            values = values.expand(-1, heads // kv_heads, -1, -1)
        out = scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and count > 1,
            scale=self._config.attn_scale,
        )
        if count == 1:
            out = out.transpose(1, 2)
        out = out.view(batch, kv_heads, heads // kv_heads, count, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(batch * count, heads, dim)

    def _attend_scored(
        self,
        scored: ScoredAttention,
        group: _Group,
        layer: int,
        window: int | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if group.batch == 1 and group.count == group.context:  # all keys are in this step's rows
            keys, values = k.unsqueeze(0), v.unsqueeze(0)
        else:
            keys, values = self._gather(group, layer)
        assert group.reach is not None
        return scored(
            q.view(group.batch, group.count, *q.shape[1:]),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            group.reach,
            window,
        ).flatten(0, 1)

    def _attend_rows(
        self, group: _Group, layer: int, window: int | None, q: torch.Tensor
    ) -> torch.Tensor:
        """One call per row, over exactly the keys it sees. These are at consecutive positions."""
        keys, values = (piece[0].transpose(0, 1) for piece in self._gather(group, layer))
        kv_heads, _, dim = keys.shape
        out = torch.empty_like(q)
        for row in range(group.count):
            seen: slice | torch.Tensor
            if group.tree is None:
                last = group.start + row + 1
                seen = slice(0 if window is None else max(0, last - window), last)
            else:
                seen = torch.from_numpy(group.tree.keys(row, window)).to(q.device)
            own_keys, own_values = (t[None, :, seen].contiguous() for t in (keys, values))
            if self._scored is None:
                query = q[row].view(1, kv_heads, -1, dim)
                attended = scaled_dot_product_attention(
                    query, own_keys, own_values, scale=self._config.attn_scale
                )
            else:
                places = torch.arange(own_keys.shape[2], dtype=torch.float32, device=q.device)
                reach = Reach(places[None, -1:], places)
                attended = self._scored.attend(
                    q[row][None, None], own_keys, own_values, reach, None
                )
            out[row] = attended.reshape(-1, dim)
        return out

    def _gather(self, group: _Group, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a group's context: two [B, context, N, D]."""
        shape = self._cache.shape
        pieces = group.pieces + 2 * layer
        size = (group.batch, -1, shape.num_kv_heads, shape.head_dim)
        keys = self._cache.pieces.index_select(0, pieces).view(size)
        values = self._cache.pieces.index_select(0, pieces + 1).view(size)
        return keys[:, : group.context], values[:, : group.context]
