"""The protocol of drafters, and five more that a drafter may support. Drafters are in
`spec_decode`."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Request, Sequence


class StepReport(NamedTuple):
    """A finished step.

    Attributes:
        num_sequences: scheduled in it.
        num_tokens: its tokens, drafts included.
        seconds: its duration.
        idle_seconds: how long the device had waited for its launch; 0.0 if it was launched ahead.
        proposed: whether drafts were proposed for it, be it none.
        num_sampled: tokens that it yielded; 0 if that is not known.
    """

    num_sequences: int
    num_tokens: int
    seconds: float
    idle_seconds: float
    proposed: bool
    num_sampled: int = 0


class Drafter(Protocol):
    """Proposes tokens that may follow. Any draft is safe: it changes speed, never output."""

    @property
    def idle(self) -> bool:
        """Whether it expects to propose nothing. Then `propose` is not called, and a step may be
        launched before the tokens of the last one are known."""

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        """Drafts for sequences all of whose tokens are known.

        Args:
            sequences: to be read, not to be changed, nor kept after `close`.
            limits: maximum number of nodes of each draft, at least 1.
            num_rows: tokens of the step without drafts; one of each sequence is among them.

        Returns:
            One draft for each sequence, in order; drafts may be empty.
        """

    def close(self, request: Request) -> None:
        """Drops the state of an ended request, whose tokens are final; `propose` may not have seen
        it."""

    def observe_step(self, report: StepReport) -> None:
        """Reports a finished step without prompt chunks."""

    def run_deferred(self) -> None:
        """Does work that the next proposals do not need; called once a step while the device
        works."""


ROW, NUM_KNOWN, MAX_KNOWN, NUM_WRITABLE, FIRST_END_ID = range(5)
"""Columns of a steady batch's numbers, [S, 4 + E] int64, before the results of its step. ROW: the
drafter's number of a sequence, see `ArrayDrafter.rows_of`. NUM_KNOWN: tokens known. MAX_KNOWN:
tokens at which it ends. NUM_WRITABLE: leading positions with KV blocks of its own. FIRST_END_ID and
the columns behind it: tokens that end it, padded with -1."""


class SteadyStep(NamedTuple):
    """The step behind the results of a steady batch, for the T sequences that go on.

    Attributes:
        going_on: [T] int64 indices of these sequences, ascending; None: all go on.
        num_computed_tokens: [T] int32, before the step.
        token_ids: [T] int32 last token of each sequence, the step's input.
        drafts: of T sequences.
        has_blocks: whether each sequence has KV blocks for all of its nodes.
    """

    going_on: NDArray[np.int64] | None
    num_computed_tokens: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    drafts: DraftBatch
    has_blocks: bool


@runtime_checkable
class ArrayDrafter(Protocol):
    """A drafter that takes in the results of a steady batch itself: S running sequences with a step
    in flight that samples one token of each, or verifies a draft of each. So there is no work for
    each sequence between the results and the drafts."""

    def rows_of(self, sequences: list[Sequence]) -> NDArray[np.int64] | None:
        """Called while the device works.

        Returns:
            [S] a number for each sequence, for the next `propose_next`; None if that must not be
            called for these.
        """

    def propose_next(
        self,
        sequences: list[Sequence],
        numbers: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        most_nodes: int,
    ) -> SteadyStep | None:
        """Takes in results and drafts for the sequences that go on: those that have got no token
        which ends them, and fewer tokens than at which they end. A draft leaves room for one token
        behind it before its sequence ends, and may be empty.

        Args:
            sequences: [S], which have not got the tokens yet; not to be read.
            numbers: [S, 4 + E], see `FIRST_END_ID`.
            token_ids: new tokens, one sequence after the other. sizes: [S] of each, at least 1.
            most_nodes: of one draft, at least 1.

        Returns:
            None if all sequences end, or if one that goes on has no KV block yet for its next
            token. Then nothing was taken in. What was taken in is not passed to `propose` again,
            even if the step comes to nothing.
        """


@runtime_checkable
class CostAware(Protocol):
    """A drafter that chooses the size of its drafts by the time that nodes take to verify."""

    def set_step_times(self, profile: list[tuple[int, float]], launches_ahead: bool = True) -> None:
        """Sets measured step times before the first step; without them the drafter learns from
        `observe_step`.

        Args:
            profile: (tokens, seconds) of every size that steps are padded to, or of sizes between
                which times differ; ascending, the first of one token.
            launches_ahead: whether the engine launches steps ahead while the drafter is idle.
                Otherwise it waits before these steps, too, but for the drafter.
        """


@runtime_checkable
class PromptObserver(Protocol):
    """A drafter that prepares for new prompts before it is asked for drafts."""

    def prompts_started(self, sequences: list[Sequence]) -> None:
        """Called while the device works, once for each sequence whose prompt a launched step has
        begun to compute. Sequences that fork from another first appear in `propose`."""


@runtime_checkable
class SleepingDrafter(Protocol):
    """A drafter that may pause for a number of steps in which nothing is called, so that a pause
    costs nothing.

    Attributes:
        num_to_sleep: steps, changed by `run_deferred` and `wake` alone. If it is not 0, the drafter
            is idle, and neither `observe_step` nor `run_deferred` has to be called for that many
            steps, unless a prompt starts or a request is closed.
    """

    num_to_sleep: int

    def wake(self, num_steps: int) -> None:
        """Called before the next call of any other method, once the drafter has slept for
        `num_steps` steps."""


@runtime_checkable
class BackgroundDrafter(Protocol):
    """A drafter with a worker that runs beside the engine's thread."""

    def metrics(self) -> dict[str, float]:
        """Counters and states of the worker, flat."""

    def shut_down(self) -> None:
        """Ends the worker."""
