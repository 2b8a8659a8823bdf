"""torch.distributed between the ranks of one host: gloo on CPUs, and NCCL beside it on GPUs.

The ranks find each other through a file without a name that they inherit, and gloo connects them
over the loopback interface: nothing can be reached from other machines, and nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.env import group_environment

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from hetero_llm.models.collectives import Rank

TIMEOUT_SECONDS = 600.0
"""Of a collective whose peers live and do not come. A dead peer ends it at once: the engine's watch
kills the others, and gloo sees the connections close."""


def create_store() -> int:
    """The descriptor of an empty file in memory, for `process_group` in every rank."""
    return os.memfd_create("hetero-llm-ranks", os.MFD_CLOEXEC)


def check_no_group(size: int, field: str = "tensor_parallel_size") -> None:
    """Raises ConfigError: this process is in a default group, so it can be no rank of `size`.

    Args:
        field: the argument that asks for ranks.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        reason = "torch.distributed is in use in this process; leave its group first"
        raise ConfigError(field, size, reason)


@contextmanager
def process_group(
    rank: Rank, store: int, device: torch.device, *, timeout: float = TIMEOUT_SECONDS
) -> Iterator[dist.ProcessGroup]:
    """Joins the group of all ranks and leaves it in the end; see `open_group`."""
    group = open_group(rank, store, device, timeout=timeout)
    try:
        yield group
    finally:
        close_group()


def open_group(
    rank: Rank, store: int, device: torch.device, *, timeout: float = TIMEOUT_SECONDS
) -> dist.ProcessGroup:
    """Waits for all ranks and joins their group: torch's default group of this process.

    Args:
        rank: with the number of ranks.
        store: descriptor of a file of `create_store`, the same in all ranks.
        device: of this rank. On a GPU, which has to be the current one, tensors there go through
            NCCL and tensors on the host through gloo.
        timeout: seconds, for the start and for each collective.

    Raises:
        ConfigError: the process has a default group already.
        RuntimeError: not all ranks came in time.
    """
    import torch.distributed as dist

    check_no_group(rank.size)
    on_gpu = device.type == "cuda"
    with group_environment():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(f"/proc/self/fd/{store}", rank.size),
            rank=rank.index,
            world_size=rank.size,
            timeout=timedelta(seconds=timeout),
            device_id=device if on_gpu else None,
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def open_stage_group(rank: Rank, members: int) -> dist.ProcessGroup | None:
    """The group of the ranks that share this rank's stage; all ranks call it at the same time.

    Args:
        rank: with the number of all ranks.
        members: ranks of a stage, neighbours.

    Returns:
        None: a stage has one rank, or all of them.
    """
    import torch.distributed as dist

    if members in (1, rank.size):
        return None
    with group_environment():
        groups = [
            dist.new_group(list(range(first, first + members)))
            for first in range(0, rank.size, members)
        ]
    group = groups[rank.index // members]
    assert isinstance(group, dist.ProcessGroup)
    return group


def close_group() -> None:
    """Leaves the group; does nothing without one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def abort_group(*further: dist.ProcessGroup) -> None:
    """Ends what NCCL exchanges and waits for a dead rank; any thread may call it. Its kernels
    return then, and leave anything in their results.

    Args:
        further: groups beside the default one.
    """
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        for one in (group, *further):
            one._get_backend(torch.device("cuda")).abort()
