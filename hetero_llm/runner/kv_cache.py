"""The paged KV cache tensor.

Layout, the same on device and host: `[block][layer][K|V][token][kv_head][dim]`. A block is one
contiguous row, each layer of it one contiguous piece: moving KV between memories is plain copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.runner.upload import upload


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """Sizes of the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of tokens over all layers."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class PagedKVCache:
    """Owns the tensor.

    It starts as zeros: attention reads past a sequence's end, where a weight of 0 hides any number,
    but not NaN. On a CPU the zeros are the operating system's: a block that was never written costs
    no memory.

    Attributes:
        data: [blocks, layers, 2, block size, KV heads, head dim].
        pieces: [blocks * layers * 2, block size * KV heads * head dim] view: K or V of a layer of a
            block in each row.
        tokens: [blocks * layers * 2 * block size, KV heads * head dim] view: K or V of a token in a
            layer in each row.
        scales: [layers, 2, KV heads] float32, what the stored K and V of a layer are multiplied
            with when attention reads them; None: 1. `inverses`: what they are multiplied with when
            they are stored.
    """

    def __init__(
        self,
        shape: KVCacheShape,
        num_blocks: int,
        device: torch.device,
        scales: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            scales: as of the class, on any device; for a cache of 8-bit floats, and read by the
                GPU's kernels alone.
        """
        assert scales is None or shape.dtype.itemsize == 1
        self.shape = shape
        self.num_blocks = num_blocks
        sizes = (
            num_blocks,
            shape.num_layers,
            2,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        if device.type == "cpu":  # torch.zeros would write every page
            raw = torch.from_numpy(np.zeros(num_blocks * shape.block_bytes, np.uint8))
            self.data = raw.view(shape.dtype).view(sizes)
        else:
            self.data = torch.zeros(sizes, dtype=shape.dtype, device=device)
        self.scales = None if scales is None else scales.to(device)
        self.inverses = None if self.scales is None else 1.0 / self.scales
        self.pieces = self.data.view(num_blocks * shape.num_layers * 2, -1)
        self.tokens = self.data.view(-1, shape.num_kv_heads * shape.head_dim)

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, block_size, kv_heads, head_dim] view of one layer's keys."""
        return self.data[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[blocks, block_size, kv_heads, head_dim] view of one layer's values."""
        return self.data[:, layer, 1]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks from source to destination, one pair after the other."""
        for source, destination in pairs:
            self.data[destination].copy_(self.data[source])

    def move_tokens(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies K and V of tokens in all layers; everything is read before anything is written.

        Args:
            sources, targets: [M] KV slots (block * block size + offset); no target twice.
        """
        data, size = self.data, self.shape.block_size
        if data.device.type == "cpu":  # numpy: torch's threads would wait for the executor's
            numbers = data.view(torch.uint8).numpy()
            numbers[targets // size, :, :, targets % size] = numbers[
                sources // size, :, :, sources % size
            ]
            return
        if self.shape.dtype.itemsize == 1:  # few operators support 8-bit floats
            data = data.view(torch.uint8)
        source, target = (
            upload(slots.astype(np.int64), data.device) for slots in (sources, targets)
        )
        kept = data[source // size, :, :, source % size]  # [M, layers, 2, kv_heads, head_dim]
        data[target // size, :, :, target % size] = kept
