"""What a drafter is asked, and what else it may be told. Those who draft are in `spec_decode`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Request, Sequence


class Drafter(Protocol):
    """Guesses what comes next. Any guess is safe: it changes how fast tokens come, never which."""

    @property
    def idle(self) -> bool:
        """Whether it expects to propose nothing. It is not asked then, and a step may be launched
        before the tokens of the last one are known."""
        ...

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        """Drafts for sequences whose last token has just become known.

        Args:
            sequences: to be read, not to be changed, nor kept after `close`.
            limits: most nodes of each one's draft, at least 1.
            num_rows: of the step without drafts, theirs included.

        Returns:
            One draft for each, in order, which may be empty.
        """
        ...

    def close(self, request: Request) -> None:
        """A request has ended, whether it was ever asked about or not; its tokens are final."""
        ...

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows, drafts included, took so long."""
        ...

    def run_deferred(self) -> None:
        """Called once a step while the device works: for what the next proposals can do without."""
        ...


@runtime_checkable
class CostAware(Protocol):
    """A drafter that weighs what its nodes cost."""

    def set_step_times(self, profile: list[tuple[int, float]]) -> None:
        """Tells rows and seconds of every size that steps are padded to (or of sizes between which
        they differ), ascending and beginning with a single row, before the first step. Without
        it the steps themselves tell."""
        ...


@runtime_checkable
class PromptObserver(Protocol):
    """A drafter that wants to know of prompts early."""

    def prompts_started(self, sequences: list[Sequence]) -> None:
        """The prompts of these are being computed: time to prepare. Called while the device works,
        once for a sequence; those that fork from another are met by `propose` first."""
        ...


@runtime_checkable
class BackgroundDrafter(Protocol):
    """A drafter with something that runs beside the engine's process."""

    def metrics(self) -> dict[str, float]:
        """Counters and states of it, flat."""
        ...

    def shut_down(self) -> None:
        """Ends it."""
        ...
