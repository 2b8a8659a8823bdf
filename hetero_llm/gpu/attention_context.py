"""What the attention of all steps shares: cache, device block tables, tile shapes, workspaces."""

from __future__ import annotations

import dataclasses

import torch
import triton

from hetero_llm.core.errors import ConfigError
from hetero_llm.gpu.attention_plan import PlanLimits
from hetero_llm.gpu.kernels.launch import num_multiprocessors
from hetero_llm.gpu.kernels.paged_attention import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    TileShape,
    Workspace,
    make_workspace,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.runner.kv_cache import PagedKVCache

_PIECES_PER_SM = 8
_FEW_ROWS = 8
_MANY_ROWS = 64
_WIDE_TILES = {64: (64, 4, 3, 2), 128: (64, 8, 3, 1)}
"""By tile rows: keys, warps, stages and programs of tiles that the group of one token fills.
StarCoder has 48 heads of 128 on one KV head, Falcon-7B 71 of 64. Not timed: what fits the registers
and shared memory of Hopper."""
_SINGLE_TILE, _SEVERAL_TILE = (16, 32, 4, 3, 2), (32, 32, 8, 3, 2)
"""Of float32, by rows, keys, warps, stages and programs: sequences of one token, and of several.
Products of float32 are unrolled multiply-adds, whose compilation takes seconds and grows with the
tile, so few kernels with small tiles serve all steps."""


def check_supported(config: ModelConfig) -> None:
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


class AttentionContext:
    """What the attention of all steps shares.

    Args:
        block_tables: [slots, columns] int32 block ids on the device.
        dtype: of queries.

    Attributes:
        dtype: see Args.
        windows: the different sliding windows of the layers, None for full attention.
        slopes: [heads] float32 of ALiBi, or None.
        keys, values: of each layer, [blocks, block size, KV heads, head_dim].
        kv_scales, inverses: of each layer, see `PagedKVCache`.
        max_pieces: pieces of cut tiles that a workspace holds.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: PagedKVCache,
        block_tables: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.cache = cache
        self.block_tables = block_tables
        self.windows = tuple(dict.fromkeys(config.sliding_windows))
        self.slopes = None
        if config.alibi_slopes is not None:
            device = block_tables.device
            self.slopes = torch.tensor(config.alibi_slopes, dtype=torch.float32, device=device)
        self._group = config.num_heads // config.num_kv_heads
        self.dtype = dtype
        self._unrolled = dtype == torch.float32
        self._workspaces: dict[int, Workspace] = {}
        programs = _PIECES_PER_SM * num_multiprocessors(block_tables.device)
        self.max_pieces = max(1, programs // config.num_kv_heads)
        self.keys = [cache.keys(layer) for layer in range(config.num_layers)]
        self.values = [cache.values(layer) for layer in range(config.num_layers)]
        none = [None] * config.num_layers
        self.kv_scales = none if cache.scales is None else list(cache.scales)
        self.inverses = none if cache.inverses is None else list(cache.inverses)

    def decode_tile(self, num_tokens: int, *, short: bool) -> TileShape:
        """The tile of a step in which every sequence has one token.

        Args:
            num_tokens: tokens of the step, padding included.
            short: see `graph_set.is_short`.
        """
        if self._unrolled:
            return self._tile(*_SINGLE_TILE)
        if not short:
            few = num_tokens <= _FEW_ROWS
            return self._tile(16, 128, 4, 5, 1) if few else self._tile(16, 128, 4, 3, 2)
        tile = self._tile(16, 64, 4, 4, 3)
        if num_tokens < _MANY_ROWS or tile.rows in _WIDE_TILES:
            return tile
        return dataclasses.replace(tile, num_warps=2, programs=4)

    def chunk_tile(self, num_tokens: int) -> TileShape:
        """The tile of a step in which sequences have several tokens, but no draft trees."""
        if self._unrolled:
            return self._tile(*_SEVERAL_TILE)
        return self._tile(32, 128, 4, 3, 2) if num_tokens <= 64 else self._tile(64, 64, 4, 3, 2)

    def tree_tile(self, num_tokens: int, *, short: bool) -> TileShape:
        """The tile of a step with draft trees; arguments as of `decode_tile`."""
        if self._unrolled:
            return self._tile(*_SEVERAL_TILE)
        if short:
            return self._tile(32, 64, 4, 4, 3)
        return self._tile(32, 128, 4, 5, 1) if num_tokens <= 64 else self._tile(32, 64, 4, 5, 2)

    def _tile(self, rows: int, keys: int, warps: int, stages: int, programs: int) -> TileShape:
        """A shape measured for heads of 256 bytes; fewer keys where heads take more, and more rows
        where groups are larger: a tile holds whole groups."""
        least = triton.next_power_of_2(self._group)
        if least > rows:
            rows = least
            keys, warps, stages, programs = _WIDE_TILES.get(rows, (keys, warps, stages, programs))
        if self._unrolled:
            keys = min(keys, _SINGLE_TILE[1])
        row_bytes = triton.next_power_of_2(self.config.head_dim) * self.dtype.itemsize
        keys = max(16, keys * 256 // max(row_bytes, 256))
        return TileShape(rows, keys, warps, stages, programs)

    def limits(self, tile: TileShape, *, cut: bool = True) -> PlanLimits:
        """Limits of the work list of a step with this tile; `cut`: tiles may be cut."""
        programs = num_multiprocessors(self.block_tables.device) * tile.programs
        return PlanLimits(
            tile.rows // self._group,
            tile.keys,
            max(1, programs // self.config.num_kv_heads),
            self.max_pieces if cut else 0,
            2 * tile.keys,
        )

    def workspace(self, tile: TileShape) -> Workspace:
        """Shared by all steps with tiles of as many rows, which run one at a time. It is never
        replaced: captured graphs hold its address."""
        if tile.rows not in self._workspaces:
            config = self.config
            self._workspaces[tile.rows] = make_workspace(
                self.max_pieces,
                config.num_kv_heads,
                tile.rows,
                config.head_dim,
                self.block_tables.device,
            )
        return self._workspaces[tile.rows]
