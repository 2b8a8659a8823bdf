"""A draft worker in this process: both ends of its rings, and a loop that runs when a test says so.

`LocalWorker` has the face of `DraftWorker`, for a `DraftModelProposer` and whole engines: its
worker runs a few rounds whenever it is asked for news, so that what it drafts depends on nothing
but the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_llm.bridge.ipc.messages import Kind, Outbox, Records
from hetero_llm.bridge.ipc.rings import Consumer, Producer, create_ring
from hetero_llm.cpu.draft_worker.draft_model import DraftModel, DraftSizes
from hetero_llm.cpu.draft_worker.step_times import StepTimes
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW
from hetero_llm.cpu.draft_worker.tree_pool import Forest
from hetero_llm.cpu.draft_worker.worker import Worker
from hetero_llm.spec_decode.draft_model.node_buckets import Record
from hetero_llm.spec_decode.draft_model.worker_client import WorkerCounters


@dataclass(frozen=True, slots=True)
class Setting:
    """Of workers: see `WorkerSettings`; ring_slots: of the answers."""

    slots: int = 8
    max_model_len: int = 112
    window: int = 64
    max_depth: int = 8
    ahead: bool = True
    most_nodes: int = 16
    ring_slots: int = 1 << 12


def load_model(folder: Path, setting: Setting) -> DraftModel:
    """In float32, on one thread."""
    sizes = DraftSizes(setting.slots, setting.max_model_len, window=setting.window)
    return DraftModel.load(
        folder, sizes, dtype=torch.float32, weight_format="float", threads=1, load_format="auto"
    )


class Bed:
    """A worker and the engine's ends of its rings.

    Args:
        model: without any text.

    Attributes:
        now: time of the worker's clock.
        outbox: what it is to be told: see `tell`.
    """

    def __init__(self, model: DraftModel, setting: Setting, *, parent: int = 0) -> None:
        self.now = 0.0
        self.outbox = Outbox()
        self._model, self._setting = model, setting
        with ExitStack() as stack:
            requests = stack.enter_context(create_ring())
            answers = stack.enter_context(create_ring(setting.ring_slots))
            self.requests = stack.enter_context(Producer(requests))
            self.answers = stack.enter_context(Consumer(answers, max_records=1024))
            self.rings = requests, answers
            self.worker = Worker(
                model,
                Forest(
                    setting.slots, max_depth=setting.max_depth, record=Record(),
                    max_positions=model.max_positions, vocab_size=model.vocab_size,
                ),
                StepTimes([1], [1.0], 8 * WINDOW),  # steps cost the same: they are full
                stack.enter_context(Consumer(requests)),
                stack.enter_context(Producer(answers)),
                slots=setting.slots, ahead=setting.ahead, most_nodes=setting.most_nodes,
                parent=parent, clock=lambda: self.now,
            )  # fmt: skip
            self._stack = stack.pop_all()

    def tell(self) -> None:
        """Pushes what is in the outbox."""
        self.requests.push(self.outbox)
        assert not len(self.outbox)

    def turns(self, count: int) -> bool:
        """So many rounds, none of which waits; False if the worker has ended."""
        return all(self.worker.turn(0) for _ in range(count))

    def hear(self) -> Records:
        """All that it has said and not been heard yet, without beats."""
        heard = [self.answers.pop().records.copy()]
        while len(heard[-1]):
            heard.append(self.answers.pop().records.copy())
        parts = zip(*((records.headers, records.words) for records in heard))
        records = Records(*map(np.concatenate, parts))
        return records.only(records.headers["kind"] != Kind.BEAT)

    def close(self) -> None:
        """The model is free for another one then."""
        self._stack.close()
        for slot in range(self._setting.slots):
            self._model.close(slot)


class LocalWorker:
    """See the module.

    Args:
        turns: how many rounds it runs when it is asked for news.
        before_poll: called before, to crash or stop it.
    """

    def __init__(
        self,
        model: DraftModel,
        setting: Setting,
        *,
        turns: int = 3,
        before_poll: Callable[[LocalWorker], None] = lambda _: None,
    ) -> None:
        self._model, self._setting = model, setting
        self._turns, self._before_poll = turns, before_poll
        self._bed: Bed | None = Bed(model, setting)
        self._back_in = 0
        self._generation = 0
        self.stands_still = False
        self.outbox = Outbox()
        self.counters = WorkerCounters(starts=1)
        self.is_up = True
        self.why_off: str | None = None

    @property
    def bed(self) -> Bed:
        assert self._bed is not None
        return self._bed

    def crash(self, looks: int = 3) -> None:
        """It is gone, with all it knew; another one is there after so many looks."""
        if self._bed is not None:
            self._bed.close()
            self._bed, self.is_up = None, False
            self.stands_still = False
            self.outbox.clear()
            self.counters.deaths += 1
            self._back_in = looks

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def poll(self, timeout_us: int = 0) -> Records | None:
        self._before_poll(self)
        if self._bed is None:
            return None
        if not self.stands_still:
            self._bed.turns(self._turns)
        heard = self._bed.hear()
        return heard if len(heard) else None

    def push(self) -> None:
        if self._bed is None:
            self.outbox.clear()
        else:
            self._bed.requests.push(self.outbox)

    def look_after(self) -> None:
        if self._bed is None and self.why_off is None:
            self._back_in -= 1
            if self._back_in <= 0:
                self._bed, self.is_up = Bed(self._model, self._setting), True
                self.counters.starts += 1

    def close(self) -> None:
        self.crash()
        self.why_off = "closed"


def as_any(worker: LocalWorker) -> Any:
    """For who wants a `DraftWorker`."""
    return worker
