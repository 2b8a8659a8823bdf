"""The protocol of drafters, and three more that a drafter may support. Drafters are in
`spec_decode`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Request, Sequence


class Drafter(Protocol):
    """Proposes tokens that may follow. Any draft is safe: it changes speed, never output."""

    @property
    def idle(self) -> bool:
        """Whether it expects to propose nothing. Then `propose` is not called, and a step may be
        launched before the tokens of the last one are known."""
        ...

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        """Drafts for sequences all of whose tokens are known.

        Args:
            sequences: to be read, not to be changed, nor kept after `close`.
            limits: maximum number of nodes of each draft, at least 1.
            num_rows: tokens of the step without drafts; one of each sequence is among them.

        Returns:
            One draft for each sequence, in order; drafts may be empty.
        """
        ...

    def close(self, request: Request) -> None:
        """Drops the state of an ended request, whose tokens are final; `propose` may not have seen
        it."""
        ...

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Reports a finished step: its token count (drafts included) and duration in seconds."""
        ...

    def run_deferred(self) -> None:
        """Does work that the next proposals do not need; called once a step while the device
        works."""
        ...


@runtime_checkable
class CostAware(Protocol):
    """A drafter that chooses the size of its drafts by the time that nodes take to verify."""

    def set_step_times(self, profile: list[tuple[int, float]]) -> None:
        """Sets measured step times before the first step; without them the drafter learns from
        `observe_step`.

        Args:
            profile: (tokens, seconds) of every size that steps are padded to, or of sizes between
                which times differ; ascending, the first of one token.
        """
        ...


@runtime_checkable
class PromptObserver(Protocol):
    """A drafter that prepares for new prompts before it is asked for drafts."""

    def prompts_started(self, sequences: list[Sequence]) -> None:
        """Called while the device works, once for each sequence whose prompt a launched step has
        begun to compute. Sequences that fork from another first appear in `propose`."""
        ...


@runtime_checkable
class BackgroundDrafter(Protocol):
    """A drafter with a worker that runs beside the engine's thread."""

    def metrics(self) -> dict[str, float]:
        """Counters and states of the worker, flat."""
        ...

    def shut_down(self) -> None:
        """Ends the worker."""
        ...
