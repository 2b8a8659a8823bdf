"""Attention over the paged KV cache in plain torch: the reference every kernel is tested with.

`TorchPagedAttention.plan` does the host work once per step; the returned object is called once per
layer, stores the step's K and V and attends. A token at position p sees the keys at 0..p of its
sequence, or the last `window` of them. A node of a draft tree sees those before the root and its
own path.

Shapes: T tokens, H query heads in groups of G per KV head (H = N * G), head size D. The heads of a
group become rows of one matrix, so K and V are never repeated in memory.

Models with a soft cap, ALiBi or sinks go through `scored_attention`, all others through torch's
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.scored_attention import Reach, ScoredAttention, Scoring
from hetero_llm.spec_decode.verify import TreeTokens

GatherKV = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of the tokens that attend, [R, N, D] each, to those that are stored, [T, N, D]:
see `sequence_parallel.SharedStep`."""


def as_they_are(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `GatherKV` of a step whose tokens all attend here."""
    return k, v


class RowKernel(Protocol):
    """A faster store, and a faster attention for sequences with one token in the step and, where
    `supports_chunks`, for sequences with several."""

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
    """A draft tree of `count` tokens behind `start` cached ones; its keys lie in the order of its
    tokens.

    Attributes:
        positions: [start + count] of all keys.
        sees: [count, start + count] bool, whether the token's path leads through the key.
    """

    positions: np.ndarray
    sees: np.ndarray

    def keys(self, token: int, window: int | None) -> np.ndarray:
        """[seen] the keys that a token sees, in order of their positions."""
        return np.flatnonzero(self.sees[token])[-(window or 0) :]

    def hidden(self, window: int | None) -> np.ndarray:
        """[count, start + count] bool, whether the token does not see the key."""
        hidden = ~self.sees
        if window is not None:
            own = self.positions[-len(hidden) :]
            hidden |= self.positions <= own[:, None] - window
        return hidden


@dataclass(frozen=True, slots=True)
class _Group:
    """B sequences attended in one call, with equally many tokens in the step.

    Attributes:
        tokens: of the step.
        batch: B.
        count: tokens of each sequence.
        start: tokens in the cache before the first sequence's.
        context: keys of each sequence, padded to the longest.
        pieces: [B * blocks] index of each block's K piece in layer 0 (`PagedKVCache.pieces`).
        masks: by window, [B * N, 1, count, context] added to the scores; None: plain causal over a
            context that starts empty.
        plans: by window, the row kernel's plan; replaces pieces and masks.
        tree: the draft tree that the only sequence's tokens are.
        reach: for `ScoredAttention`, replaces masks.
    """

    tokens: slice
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
    """Plans attention for one model and cache.

    Args:
        row_by_row: every token is a call of its own, whose shapes depend on its context alone:
            equal shapes give equal bits in any batch.
        row_kernel: attends where it can; not used with `row_by_row`.
    """

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
        num_computed_tokens: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        block_tables: np.ndarray,
        kv_indices: np.ndarray,
        blocks: np.ndarray,
        trees: TreeTokens | None = None,
        gather_kv: GatherKV = as_they_are,
    ) -> PlannedAttention:
        """Prepares one step.

        Args:
            num_computed_tokens: [S] tokens in the cache before the sequence's own that attend.
            num_scheduled_tokens: [S] tokens that attend.
            block_tables: [S, columns] block ids.
            kv_indices: [T] index of each token's K and V within its sequence.
            blocks: [T] block that each token's K and V are stored to.
            trees: the draft trees that attend; None: there are none.
            gather_kv: makes the K and V that are stored.
        """
        shape = self._cache.shape
        device = self._cache.data.device
        token_rows = blocks.astype(np.int64) * (shape.num_layers * 2 * shape.block_size)
        token_rows += kv_indices % shape.block_size
        groups = self._groups(num_computed_tokens, num_scheduled_tokens, block_tables, trees)
        return PlannedAttention(
            self._config,
            self._cache,
            torch.from_numpy(token_rows).to(device),
            groups,
            self._row_by_row,
            self._row_kernel,
            self._scored,
            gather_kv,
        )

    def _groups(
        self, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, trees: TreeTokens | None
    ) -> list[_Group]:
        """Batches neighbouring sequences of one token; every longer chunk is a group of its own."""
        groups: list[_Group] = []
        token = index = 0
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
                tree = _tree(trees, index, slice(token, token + count), int(starts[index]))
            groups.append(self._group(token, starts[picked], count, tables[picked], tree))
            token += count * (last - index)
            index = last
        return groups

    def _group(
        self, first: int, starts: np.ndarray, count: int, tables: np.ndarray, tree: _Tree | None
    ) -> _Group:
        size = self._cache.shape.block_size
        device = self._cache.data.device
        context = int(starts.max()) + count
        columns = -(-context // size)
        if (len(starts) > 1 or count == 1) and tree is None:
            context = columns * size  # whole blocks: the gathered keys need no cut
        pieces = tables[:, :columns].astype(np.int64) * (self._cache.shape.num_layers * 2)
        tokens = slice(first, first + count * len(starts))
        kernel = self._row_kernel
        plans: dict[int | None, Any] | None = None
        if kernel is not None and count == 1 and tree is None:
            plans = {w: kernel.plan(starts + 1, pieces, w) for w in self._windows}
        elif kernel is not None and kernel.supports_chunks and tree is None:
            start = int(starts[0])
            plans = {w: kernel.plan_chunk(start, count, pieces[0], w) for w in self._windows}
        if plans is not None:
            return _Group(tokens, len(starts), count, 0, context, _NO_PIECES, {}, plans)
        masks: dict[int | None, torch.Tensor | None] = {}
        reach = None
        if self._row_by_row:
            pass  # `_attend_rows` selects the keys that each token sees
        elif self._scored is not None:
            reach = self._reach(starts, count, context, tree)
        else:
            masks = {w: self._mask(starts, count, context, w, tree) for w in self._windows}
        return _Group(
            tokens,
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


def _tree(trees: TreeTokens, index: int, tokens: slice, start: int) -> _Tree:
    """The tree of sequence `index`, which is these tokens of the step."""
    count = tokens.stop - tokens.start
    base = start if trees.bases is None else int(trees.bases[index])
    bits = trees.ancestors[tokens, None] >> np.arange(start + count - base, dtype=np.uint64)
    sees = np.ones((count, start + count), bool)
    sees[:, base:] = bits & np.uint64(1)
    return _Tree(np.concatenate((np.arange(start), trees.positions[tokens])), sees)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAttention(Attend):
    """One step's attention: `models.layers.Attend`."""

    _config: ModelConfig
    _cache: PagedKVCache
    _token_rows: torch.Tensor
    _groups: list[_Group]
    _row_by_row: bool
    _row_kernel: RowKernel | None
    _scored: ScoredAttention | None
    _gather_kv: GatherKV

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores K and V of this layer, then attends: q [R, H, D], k and v [R, N, D]."""
        self._store(layer, *self._gather_kv(k, v))
        window = self._config.sliding_windows[layer]
        if len(self._groups) == 1:
            return self._attend(self._groups[0], layer, window, q, k, v, sinks)
        out = torch.empty_like(q)
        for group in self._groups:
            own = group.tokens
            out[own] = self._attend(group, layer, window, q[own], k[own], v[own], sinks)
        return out

    def _store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v: [T, N, D]."""
        if self._row_kernel is not None:
            self._row_kernel.store(layer, self._token_rows, k, v)
            return
        size = self._cache.shape.block_size
        rows = self._token_rows + layer * 2 * size
        self._cache.tokens.index_copy_(0, rows, k.reshape(len(k), -1))
        self._cache.tokens.index_copy_(0, rows + size, v.reshape(len(v), -1))

    def _attend(
        self,
        group: _Group,
        layer: int,
        window: int | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if group.plans is not None:
            assert self._row_kernel is not None
            plan = group.plans[window]
            if group.count == 1:
                return self._row_kernel.attend(plan, layer, q)
            return self._row_kernel.attend_chunk(plan, layer, q)
        if self._row_by_row:
            return self._attend_rows(group, layer, window, q, sinks)
        if self._scored is not None:
            return self._attend_scored(self._scored, group, layer, window, q, k, v, sinks)
        heads, dim = q.shape[1:]
        kv_heads = k.shape[1]
        mask = group.masks[window]
        batch, count = group.batch, group.count
        if mask is None:  # the whole context is in this step
            keys, values = k.unsqueeze(0), v.unsqueeze(0)
        else:
            keys, values = self._gather(group, layer)
        # [B * N, G, count, D] against K, V shared by the group's heads: [B * N, 1, context, D]
        query = q.view(batch, count, kv_heads, heads // kv_heads, dim)
        query = query.permute(0, 2, 3, 1, 4).flatten(0, 1)
        keys = keys.transpose(1, 2).flatten(0, 1).unsqueeze(1)
        values = values.transpose(1, 2).flatten(0, 1).unsqueeze(1)
        if count == 1:  # the heads of a group are the rows, one "head" per KV head
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
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if group.batch == 1 and group.count == group.context:  # all keys are in this step
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
            sinks,
        ).flatten(0, 1)

    def _attend_rows(
        self,
        group: _Group,
        layer: int,
        window: int | None,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call per token, over exactly the keys it sees, which are at consecutive positions."""
        keys, values = (piece[0].transpose(0, 1) for piece in self._gather(group, layer))
        kv_heads, _, dim = keys.shape
        out = torch.empty_like(q)
        for token in range(group.count):
            seen: slice | torch.Tensor
            if group.tree is None:
                last = group.start + token + 1
                seen = slice(0 if window is None else max(0, last - window), last)
            else:
                seen = torch.from_numpy(group.tree.keys(token, window)).to(q.device)
            own_keys, own_values = (t[None, :, seen].contiguous() for t in (keys, values))
            if self._scored is None:
                query = q[token].view(1, kv_heads, -1, dim)
                attended = scaled_dot_product_attention(
                    query, own_keys, own_values, scale=self._config.attn_scale
                )
            else:
                positions = torch.arange(own_keys.shape[2], dtype=torch.float32, device=q.device)
                reach = Reach(positions[None, -1:], positions)
                attended = self._scored.attend(
                    q[token][None, None], own_keys, own_values, reach, None, sinks
                )
            out[token] = attended.reshape(-1, dim)
        return out

    def _gather(self, group: _Group, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a group's context: two [B, context, N, D]."""
        shape = self._cache.shape
        pieces = group.pieces + 2 * layer
        size = (group.batch, -1, shape.num_kv_heads, shape.head_dim)
        keys = self._cache.pieces.index_select(0, pieces).view(size)
        values = self._cache.pieces.index_select(0, pieces + 1).view(size)
        return keys[:, : group.context], values[:, : group.context]
