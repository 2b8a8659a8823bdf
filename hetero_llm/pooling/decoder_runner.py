"""Decoders of `hetero_llm.models` as pooling models: hidden states over a paged KV cache.

Inputs are computed in the order of their arrival, a budget of tokens a step. All but the last one
of a step are computed whole; the rest of that one is computed in later steps, so only it keeps KV
between steps. The cache therefore holds one longest input and one step, and no input is ever
preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.models.headless import HeadlessLM
from hetero_llm.pooling.input_queue import InputQueue, QueuedInput
from hetero_llm.pooling.pooler import ChunkPool, DenseLayers
from hetero_llm.pooling.pooling_model import PoolingModel
from hetero_llm.pooling.runner import PooledStep
from hetero_llm.runner.attention import RowKernel, TorchPagedAttention
from hetero_llm.runner.kv_cache import PagedKVCache


def blocks_needed(max_model_len: int, step_tokens: int, step_inputs: int, block_size: int) -> int:
    """KV blocks that never run out: one longest input, one step, and the unused rest of each
    input's last block."""
    return -(-(max_model_len + step_tokens) // block_size) + step_inputs + 1


@dataclass(slots=True)
class _Begun:
    """An input, its KV blocks, and how many of its tokens are computed."""

    queued: QueuedInput
    pool: ChunkPool
    blocks: list[int]
    computed: int = 0


class DecoderRunner:
    """See `PoolingRunner`.

    Args:
        network: on the cache's device.
        cache: of at least `blocks_needed` blocks.
        row_by_row, row_kernel: see `TorchPagedAttention`.
        max_num_seqs, max_num_batched_tokens: most inputs and tokens of a step.
    """

    def __init__(
        self,
        network: HeadlessLM,
        model: PoolingModel,
        cache: PagedKVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        row_by_row: bool = False,
        row_kernel: RowKernel | None = None,
    ) -> None:
        self._network = network
        self._cache = cache
        self._device = cache.data.device
        self._pooling = model.pooling
        self._dense = DenseLayers(model.dense, self._device)
        self._most = max_num_seqs
        self._tokens = max_num_batched_tokens
        self._attention = TorchPagedAttention(network.config, cache, row_by_row, row_kernel)
        self._free = list(range(cache.num_blocks - 1, -1, -1))
        self._begun: _Begun | None = None

    @property
    def num_running(self) -> int:
        return int(self._begun is not None)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def drop(self, key: str) -> None:
        if self._begun is not None and self._begun.queued.key == key:
            self._end(self._begun)
            self._begun = None

    @torch.inference_mode()
    def step(self, queue: InputQueue) -> PooledStep:
        parts = self._parts(queue)
        hidden = self._forward(parts)
        first, done = 0, []
        for begun, count in parts:
            begun.pool.add(hidden[first : first + count])
            begun.computed += count
            first += count
            if begun.computed == len(begun.queued):
                done.append(begun)
                self._end(begun)
        last = parts[-1][0]
        self._begun = None if last.computed == len(last.queued) else last
        if not done:
            return PooledStep([], first)
        pooled = torch.stack([begun.pool.value() for begun in done])
        if self._network.score is not None:
            pooled = self._network.classes(pooled.to(hidden.dtype))
        values = self._dense(pooled.float()).cpu().numpy()
        queued = [begun.queued for begun in done]
        return PooledStep(list(zip(queued, values, strict=True)), first)

    def _parts(self, queue: InputQueue) -> list[tuple[_Begun, int]]:
        """The inputs of a step, each with the number of its tokens in it."""
        parts, left = [], self._tokens
        if self._begun is not None:
            count = min(left, len(self._begun.queued) - self._begun.computed)
            parts.append((self._begun, count))
            left -= count
        taken = queue.take_first(self._most - len(parts)) if left else []
        for place, queued in enumerate(taken):
            if not left:
                queue.put_back(taken[place:])
                break
            count = min(left, len(queued))
            parts.append((_Begun(queued, ChunkPool(self._pooling), []), count))
            left -= count
        return parts

    def _forward(self, parts: list[tuple[_Begun, int]]) -> torch.Tensor:
        """Hidden states [T, D] of the step's tokens."""
        size = self._cache.shape.block_size
        for begun, count in parts:
            needed = -(-(begun.computed + count) // size)
            while len(begun.blocks) < needed:
                begun.blocks.append(self._free.pop())
        starts = np.array([begun.computed for begun, _ in parts], np.int32)
        counts = np.array([count for _, count in parts], np.int32)
        tables = np.zeros((len(parts), max(len(begun.blocks) for begun, _ in parts)), np.int32)
        for row, (begun, _) in enumerate(parts):
            tables[row, : len(begun.blocks)] = begun.blocks
        owner = np.repeat(np.arange(len(parts)), counts)
        before = np.cumsum(counts) - counts
        positions = (np.arange(counts.sum()) - (before - starts)[owner]).astype(np.int32)
        blocks = tables[owner, positions // size]
        attend = self._attention.plan(starts, counts, tables, positions, blocks)
        token_ids = np.concatenate(
            [
                begun.queued.input.token_ids[begun.computed : begun.computed + count]
                for begun, count in parts
            ]
        )
        return self._network(
            torch.from_numpy(token_ids.astype(np.int64)).to(self._device),
            torch.from_numpy(positions.astype(np.int64)).to(self._device),
            attend,
        )

    def _end(self, begun: _Begun) -> None:
        self._free += begun.blocks
        begun.blocks = []
