"""torch.distributed between the ranks of one host: gloo on CPUs, and NCCL beside it on GPUs.

The ranks find each other through a file without a name that they inherit, and gloo connects them
over the loopback interface: nothing can be reached from other machines, and nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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


def check_no_group(size: int, argument: str = "tensor_parallel_size") -> None:
    """Raises ConfigError: this process is in a default group, so it can be no rank of `size`.

    Args:
        argument: that asks for ranks, which the error names.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        reason = "torch.distributed is in use in this process; leave its group first"
        raise ConfigError(argument, size, reason)


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
    from torch.distributed import distributed_c10d

    check_no_group(rank.size)
    on_gpu = device.type == "cuda"
    # Torch opens the file again when it frees the group's last part, perhaps long after the group
    # was left, and would write to whatever had the number then: this one is never given back.
    kept = os.dup(store)
    # A start that failed leaves a thread behind that still waits in here, see `run_watched`. Torch
    # names groups by a count, which a rank's new process would begin anew: rank 0 would wait for
    # keys of another name.
    distributed_c10d._world.group_count = 0
    with group_environment():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(f"/proc/self/fd/{kept}", rank.size),
            rank=rank.index,
            world_size=rank.size,
            timeout=timedelta(seconds=timeout),
            device_id=device if on_gpu else None,
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def group_within(members: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
    """The group of some of the ranks that has this one. All ranks call it alike; a group of all
    of them is the default one.

    Args:
        members: ranks of each group; each rank is in one of them.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None and sorted(sum(map(list, members), [])) == list(range(world.size()))
    if len(members) == 1:
        return world
    with group_environment():
        groups = [dist.new_group(list(one)) for one in members]
    return next(group for group, one in zip(groups, members, strict=True) if rank in one)


def close_group() -> None:
    """Leaves the group, and those within it; does nothing without one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def abort_group(within: Sequence[dist.ProcessGroup] = ()) -> None:
    """Ends collectives of NCCL that wait for a dead rank; any thread may call it. Their kernels
    return then, and leave anything in their results.

    Args:
        within: groups of `group_within`, whose collectives are ended, too.
    """
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None:
        for group in dict.fromkeys((world, *within)):
            group._get_backend(torch.device("cuda")).abort()
