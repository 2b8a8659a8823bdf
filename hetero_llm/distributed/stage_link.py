"""How the stages of a model hand over hidden states: sends and receives of torch's default group,
gloo on CPUs, NCCL on GPUs.

Hidden states go one way, from the first layers to the last ones, one tensor a step in the order of
the steps, so no two stages ever wait for each other.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

_UNSENT = 4
"""Sends whose tensors are kept before the oldest is waited for: as many steps may be in flight."""


class GroupLink:
    """`models.collectives.StageLink`.

    Args:
        before, behind: ranks in the default group that have the stage before and the next one;
            None: there is none.
    """

    def __init__(self, before: int | None, behind: int | None) -> None:
        self._before, self._behind = before, behind
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def meet(self, device: torch.device) -> None:
        """Exchanges one number with both neighbours, which connects them. All stages call it."""
        word = torch.zeros(1, 1, device=device)
        if self._before is not None:
            self.receive(word)
        if self._behind is not None:
            self.send(word + 1)

    def receive(self, out: torch.Tensor) -> None:
        """See `StageLink`. On a CPU it waits until the tensor is there.

        Raises:
            RuntimeError: the stage before is dead.
        """
        assert self._before is not None, "the first stage receives nothing"
        work = dist.irecv(out, self._before)
        assert work is not None
        try:
            work.wait()
        finally:
            # An error's traceback must not keep what belongs to a group that is left meanwhile:
            # gloo does not return from freeing it then.
            del work

    def send(self, x: torch.Tensor) -> None:
        """See `StageLink`.

        Raises:
            RuntimeError: the next stage is dead.
        """
        assert self._behind is not None, "the last stage sends nothing"
        while self._sent and (len(self._sent) == _UNSENT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        x = x.contiguous()
        work = dist.isend(x, self._behind)
        assert work is not None
        self._sent.append((work, x))
