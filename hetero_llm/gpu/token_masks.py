"""Token masks of steps on a device: computed beside it, by a thread, in memory that it reads.

A step is launched before its masks exist; its sampling kernel waits for each one's flag
(`kernels.sample`). One thread serves the steps in the order of their launch: it writes a step's
masks once it has waited for the tokens that the steps before it sample and shown those to the
grammars. So the masks of a step that was launched ahead of its inputs' values are written while its
model runs, whatever the engine does meanwhile. The tokens of a step behind which none was launched
are shown to the grammars by `finish` itself: waking up the thread would take longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.kernels.layer_ready import MOST_LOOKS
from hetero_llm.gpu.kernels.sample import make_mask_places
from hetero_llm.sampling.token_masks import NO_MASK, PlannedMasks, TokenMasks

_PARTS = 3
"""Steps that may run at once, each with places of its own."""

WaitForTokens = Callable[[], tuple[Sequence[int], Sequence[int]]]
"""Waits for a step: its tokens, and how many each sequence got (see `ModelRunnerOutput`)."""


@dataclass(slots=True)
class StepMasks:
    """The masks of one launched step.

    Attributes:
        places: [N] int32 of each sample, in `DeviceTokenMasks.places`; `NO_MASK` for none.
        first: place of the step's first mask.
        errors: by request slot, why a grammar cannot be followed; complete with `filled`.
        filled: the thread's work on the step; None before it is asked for.
        wait: for the step's tokens; None before it is launched.
        observed: whether the grammars have seen its tokens.
    """

    planned: PlannedMasks
    places: NDArray[np.int32]
    first: int
    errors: dict[int, str] = field(default_factory=dict)
    filled: Future[None] | None = None
    wait: WaitForTokens | None = None
    observed: bool = False


class DeviceTokenMasks:
    """Owns the places of masks, and the thread that writes them.

    Between `start_fill` and the end of `finish` the grammars of a step's sequences are touched here
    alone: in the order of the steps, by the thread or by `finish`.

    Args:
        masks: the grammars of request slots.
        vocab_size: number of logits.
        capacity: most masks of a step.
        pin: places in page-locked memory: there is a GPU, else Triton's interpreter, for tests.
        most_looks: see `kernels.sample.MaskPlaces`.

    Attributes:
        places: that the sampling kernel reads.
    """

    def __init__(
        self,
        masks: TokenMasks,
        vocab_size: int,
        capacity: int,
        *,
        pin: bool,
        most_looks: int = MOST_LOOKS,
    ) -> None:
        self.places = make_mask_places(
            _PARTS * capacity, vocab_size, pin=pin, most_looks=most_looks
        )
        self._masks = masks
        self._capacity = capacity
        self._words = self.places.words.numpy()
        self._ready = self.places.ready.numpy()
        self._gave_up = self.places.gave_up.numpy()
        self._next = 0
        self._launched: list[StepMasks] = []  # not finished, oldest first
        self._observing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "token-masks")  # starts with the first task

    def fits(self, num_samples: int) -> bool:
        """Whether a step of `num_samples` samples has places for its masks."""
        return num_samples <= self._capacity or not self._masks

    def plan(self, step: SchedulerOutput, serves: Callable[[int], bool]) -> StepMasks | None:
        """Takes places for a step that is about to be launched; None if no sequence in these
        request slots follows a grammar and samples."""
        planned = self._masks.plan(step, serves)
        if planned is None:
            return None
        assert planned.num_places <= self._capacity
        first = self._next * self._capacity
        self._next = (self._next + 1) % _PARTS
        own = slice(first, first + planned.num_places)
        self._ready[own] = self._gave_up[own] = 0
        places = np.where(planned.places == NO_MASK, NO_MASK, planned.places + first)
        return StepMasks(planned, places.astype(np.int32), first)

    def start_fill(self, step: StepMasks) -> None:
        """Lets the thread write the step's masks, once the tokens of the launched steps before it
        have been observed."""
        step.filled = self._thread.submit(self._fill, step, tuple(self._launched))

    def launched(self, step: StepMasks, wait: WaitForTokens) -> None:
        """Notes that the step, whose masks are being written, has been launched."""
        step.wait = wait
        self._launched.append(step)

    def finish(self, step: StepMasks) -> dict[int, str]:
        """By request slot, why the tokens of a step that has run are invalid. Steps finish in the
        order of their launches."""
        assert step.filled is not None
        step.filled.result()
        self._observe(step)
        self._launched.remove(step)
        for part in step.planned.parts:
            place = step.first + part.first
            if self._gave_up[place : place + part.count].any():
                slot = part.guided.slot
                step.errors.setdefault(slot, "its token mask was not ready in time")
        return step.errors

    def _fill(self, step: StepMasks, before: Sequence[StepMasks]) -> None:
        for one in before:
            self._observe(one)
        own = slice(step.first, step.first + step.planned.num_places)
        step.errors.update(self._masks.fill(step.planned, self._words[own]))
        self._ready[own] = 1  # behind the words: the kernel reads in the other order

    def _observe(self, step: StepMasks) -> None:
        """Shows the step's tokens to the grammars, unless the other thread has: the engine's, which
        finishes the step, or the own one, which writes the next one's masks. Its masks are
        written."""
        with self._observing:
            if step.observed:
                return
            assert step.wait is not None
            token_ids, num_tokens = step.wait()
            self._masks.observe_sampled(step.planned, token_ids, num_tokens)
            step.observed = True
