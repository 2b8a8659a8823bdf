"""The runner of rank 0: what the engine lets it do, the other ranks do as well."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from hetero_llm.core.errors import RankDeadError
from hetero_llm.core.grammar import OpenMatcher
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.distributed.rank_processes import RankProcesses
from hetero_llm.distributed.rank_share import never

P = TypeVar("P")

GAVE_UP = "a collective has ended without a rank that did not come to it in time"


class ParallelRunner(Generic[P]):
    """`ModelRunner` that announces each call to the other ranks and then makes it.

    All ranks make the same calls in the same order, so their collectives meet. Nothing comes back:
    all ranks sample the same tokens.

    Args:
        runner: of this rank.
        ranks: the others.
        gave_up: see `RankShare`.
        timed_out: whether another rank has given up a load of KV that the oldest step waited for;
            called once for each step with loads, when it has finished here.

    Attributes:
        runner: see Args.
    """

    def __init__(
        self,
        runner: ModelRunner[P],
        ranks: RankProcesses,
        gave_up: Callable[[], bool],
        timed_out: Callable[[], bool] = never,
    ) -> None:
        self.runner = runner
        self._gave_up = gave_up
        self._ranks = ranks
        self._timed_out = timed_out
        self._waits: deque[bool] = deque()  # whether each launched step waits for loads

    def launch(self, step: SchedulerOutput) -> P:
        """Raises HeteroLLMError: a rank has failed."""
        self._ranks.launch(step)
        self._waits.append(bool(step.kv_loads))
        try:
            return self.runner.launch(step)
        except Exception as error:
            self._raise(error)
            raise

    def set_open_matcher(self, open_matcher: OpenMatcher) -> None:
        """Sets that of this rank; the others have their own."""
        self.runner.set_open_matcher(open_matcher)

    def finish(self, pending: P) -> ModelRunnerOutput:
        """Raises HeteroLLMError: a rank has failed."""
        self._ranks.finish()
        try:
            output = self.runner.finish(pending)
        except Exception as error:
            self._raise(error)
            raise
        self._ranks.check()  # collectives that were aborted return, too, with anything
        if self._gave_up():
            self._raise(RuntimeError(GAVE_UP))
            raise RankDeadError(GAVE_UP)
        if self._waits.popleft() and self._timed_out():
            output = replace(output, kv_loads_timed_out=True)
        return output

    def _raise(self, error: Exception) -> None:
        """Raises the failure of a rank that has caused an error here, if there is one."""
        found = self._ranks.why(error)
        if found is not error:
            # Frames of torch keep operations of the group, which never end: gloo does not return
            # from freeing them when the group has been left.
            traceback.clear_frames(error.__traceback__)
            raise found from error
