"""A draft worker inside the test process.

`Bed` holds a `Worker`, both ends of its rings, and runs the loop on demand. `LocalWorker` has the
interface of `DraftWorkerClient`: its worker runs a few rounds at each `poll`, so that its drafts
depend on nothing but the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_llm.bridge.ipc.messages import MessageKind, Messages, Outbox, Refusal, put_refused
from hetero_llm.bridge.ipc.rings import Consumer, Producer, create_ring
from hetero_llm.core.step_times import StepTimes
from hetero_llm.cpu.draft_worker.draft_model import DraftModel, DraftSizes
from hetero_llm.cpu.draft_worker.tree_pool import TreePool
from hetero_llm.cpu.draft_worker.worker import Worker
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats
from hetero_llm.spec_decode.draft_model.worker_client import WorkerCounters


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a worker, see `WorkerSettings`; ring_slots: slots of the ring to the engine."""

    slots: int = 8
    max_model_len: int = 112
    window: int = 64
    max_depth: int = 8
    ahead: bool = True
    most_nodes: int = 16
    ring_slots: int = 1 << 12


def load_model(folder: Path, setting: Setting) -> DraftModel:
    """The draft model in float32 on one thread."""
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
        outbox: messages for the next `send`.
    """

    def __init__(self, model: DraftModel, setting: Setting, *, parent: int = 0) -> None:
        self.now = 0.0
        self.outbox = Outbox()
        self._model, self._setting = model, setting
        with ExitStack() as stack:
            requests = stack.enter_context(create_ring())
            answers = stack.enter_context(create_ring(setting.ring_slots))
            self.requests = stack.enter_context(Producer(requests))
            self.answers = stack.enter_context(Consumer(answers, max_messages=1024))
            self.rings = requests, answers
            self.worker_end = stack.enter_context(Producer(answers))
            self.worker = Worker(
                model,
                TreePool(
                    setting.slots, max_depth=setting.max_depth, stats=BucketStats(),
                    max_positions=model.max_positions, vocab_size=model.vocab_size,
                ),
                StepTimes([1], [1.0]),  # steps cost the same: they are full
                stack.enter_context(Consumer(requests)),
                self.worker_end,
                slots=setting.slots, ahead=setting.ahead, most_nodes=setting.most_nodes,
                parent=parent, clock=lambda: self.now,
            )  # fmt: skip
            self._stack = stack.pop_all()

    def send(self) -> None:
        """Pushes what is in the outbox."""
        self.requests.push(self.outbox)
        assert not len(self.outbox)

    def refuse(self, slot: int, generation: int, refusal: Refusal) -> None:
        """Sends a refusal in the worker's name."""
        outbox = Outbox()
        put_refused(outbox, slot, generation, refusal)
        self.worker_end.push(outbox)

    def turns(self, count: int) -> bool:
        """Run the loop `count` times without waiting; False if the worker has ended."""
        return all(self.worker.run_once(0) for _ in range(count))

    def receive(self) -> Messages:
        """All messages of the worker not received yet, without heartbeats."""
        heard = [self.answers.pop().messages.copy()]
        while len(heard[-1]):
            heard.append(self.answers.pop().messages.copy())
        parts = zip(*((messages.headers, messages.words) for messages in heard))
        messages = Messages(*map(np.concatenate, parts))
        return messages.only(messages.headers["kind"] != MessageKind.HEARTBEAT)

    def close(self) -> None:
        """Close the rings and free all slots of the model."""
        self._stack.close()
        for slot in range(self._setting.slots):
            self._model.kv_layout.close(slot)


class LocalWorker:
    """See the module.

    Args:
        turns: how many rounds it runs at each `poll`.
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
        self.turns, self._before_poll = turns, before_poll
        self._bed: Bed | None = Bed(model, setting)
        self._back_in = 0
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
        """End the worker; a new one starts after `looks` health checks."""
        if self._bed is not None:
            self._bed.close()
            self._bed, self.is_up = None, False
            self.stands_still = False
            self.outbox.clear()
            self.counters.deaths += 1
            self._back_in = looks

    def next_generation(self) -> int:
        self.counters.generations += 1
        return self.counters.generations

    def poll(self, timeout_us: int = 0) -> Messages | None:
        self._before_poll(self)
        if self._bed is None:
            return None
        if not self.stands_still:
            self._bed.turns(self.turns)
        heard = self._bed.receive()
        return heard if len(heard) else None

    def push(self) -> None:
        if self._bed is None:
            self.outbox.clear()
        else:
            self._bed.requests.push(self.outbox)

    def check_health(self) -> None:
        if self._bed is None and self.why_off is None:
            self._back_in -= 1
            if self._back_in <= 0:
                self._bed, self.is_up = Bed(self._model, self._setting), True
                self.counters.starts += 1

    def close(self) -> None:
        self.crash()
        self.why_off = "closed"


def as_any(worker: LocalWorker) -> Any:
    """The worker, for parameters of type `DraftWorkerClient`."""
    return worker
