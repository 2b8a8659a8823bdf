"""Collectives of a model's products over a group of torch: gloo on CPUs, NCCL on GPUs.

Sums add the ranks' parts in rank order in float32. Few rows are gathered by all ranks and added by
each of them. Of many rows each rank adds a part of the rows, which all ranks gather then: two
exchanges that move 2 / N of what one would.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hetero_llm.models.collectives import Rank

_FEW_BYTES = 256 << 10
"""Of a product: up to here one exchange is faster than two."""


class GroupCollectives:
    """`models.collectives.Collectives`.

    Args:
        rank: of this process in the group.
        group: None: torch's default group.

    Attributes:
        rank: see Args.
        in_graphs: False: its exchanges are not captured in CUDA graphs.
    """

    in_graphs = False

    def __init__(self, rank: Rank, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in its dtype.

        Args:
            x: [T, ...], of the same shape in all ranks.
        """
        size = self.rank.size
        if size == 2 or x.nbytes <= _FEW_BYTES or len(x) < size:
            return _add_up(self._gather(x), x.dtype)
        rows = -(-len(x) // size)
        padded = x.new_zeros(rows * size, *x.shape[1:])
        padded[: len(x)] = x
        own = _add_up(self._exchange(padded), x.dtype)
        return self._gather(own).flatten(0, 1)[: len(x)]

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` side by side.

        Args:
            x: [T, columns], of the same shape in all ranks.

        Returns:
            [T, size * columns], those of rank 0 first.
        """
        return self._gather(x).permute(1, 0, 2).flatten(1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] of all ranks' `x`."""
        parts = x.new_empty(self.rank.size, *x.shape)
        if x.device.type == "cuda":
            _gather_single(parts.flatten(0, 1), x.contiguous(), group=self._group)
        else:
            dist.all_gather(list(parts.unbind()), x.contiguous(), group=self._group)
        return parts

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[size, T / size, ...]: this rank's part of the rows of all ranks' `x` [T, ...]."""
        parts = x.new_empty(self.rank.size, len(x) // self.rank.size, *x.shape[1:])
        dist.all_to_all_single(parts.flatten(0, 1), x, group=self._group)
        return parts


def _add_up(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over the first dimension, in its order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _gather_function() -> Callable[..., object]:
    """Its name has changed in torch."""
    found = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    assert callable(found)
    return found


_gather_single = _gather_function()
