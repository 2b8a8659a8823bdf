"""The draft worker's process: python -m hetero_llm.cpu.draft_worker.worker SETTINGS

In a loop it reads the engine's messages, runs the most likely nodes of all trees and sends the
nodes found to the engine. It sends no requests, and the engine does not depend on its answers. It
exits when the engine has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from hetero_llm.bridge.ipc.messages import (
    BASE_LENGTH,
    EXTERNAL_NODE,
    HEADER_WORDS,
    OPENING,
    SLOT,
    WORDS,
    Hello,
    MessageKind,
    Messages,
    Outbox,
    Refusal,
    Stamps,
    put_heartbeat,
    put_hello,
    put_nodes,
    put_refused,
)
from hetero_llm.bridge.ipc.rings import Consumer, Producer, RingStatus, attach_ring
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.errors import HeteroLLMError, PromptError
from hetero_llm.core.step_times import StepTimes
from hetero_llm.cpu import native
from hetero_llm.cpu.draft_worker.draft_model import DraftModel, DraftSizes, best_format
from hetero_llm.cpu.draft_worker.step_profile import measure
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW
from hetero_llm.cpu.draft_worker.tree_pool import TreePool
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats
from hetero_llm.spec_decode.draft_model.tree_arrays import ID
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings
from hetero_llm.utils import env

logger = logging.getLogger(__name__)

IDLE_US = 50_000
"""Longest wait for messages between two checks whether the engine is alive."""

_MAX_INDEX = 2**31 - 1
_SPIN_US = 200  # of an idle wait before it sleeps: commits come every few milliseconds
_HEARTBEAT_SECONDS = 0.05
_COMMIT = MessageKind.COMMIT  # attribute access on an enum class is slow
_MAX_NODES = 64  # nodes of a step
# Maximum committed tokens of a step, with and without trees that can grow.
_PREFIX_CHUNK, _LONG_PREFIX_CHUNK = 64, 512
_MAX_WAITING = 4096  # unsent messages above which no more nodes are sent
_CONTEXT = 256  # tokens, of the steps timed at start
_SHOWN = (1, 2, 4, 8, 16, 32, 64)
_URGENT_STEPS = 2  # steps after a miss in which the slot's tree has priority


class _PartialPrompt(NamedTuple):
    """A request whose prompt has not arrived completely; `filled` of its tokens have."""

    generation: int
    depth: int
    seed: int
    sample_index: int
    temperature: float
    tokens: np.ndarray
    filled: int


# large: the state of the worker's loop: model, trees, both rings, and the state of each slot.
class Worker:
    """The worker's loop. Single-threaded.

    Args:
        model, pool: with the same request slots.
        times: step-time predictor of the model.
        inbox, answers: ends of the rings from and to the engine.
        slots, ahead, most_nodes, parent: see `WorkerSettings`.
        clock: returns seconds, for heartbeats.

    Attributes:
        tree_pool: the trees. Read only.
    """

    def __init__(
        self,
        model: DraftModel,
        pool: TreePool,
        times: StepTimes,
        inbox: Consumer,
        answers: Producer,
        *,
        slots: int,
        ahead: bool,
        most_nodes: int,
        parent: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self.tree_pool, self._times = model, pool, times
        self._inbox, self._answers = inbox, answers
        self._outbox = Outbox()
        self._generations = np.full(slots, -1, np.int64)
        self._partial_prompts: dict[int, _PartialPrompt] = {}
        self._urgent = np.zeros(slots, np.int32)
        self._weights = np.ones(slots, np.float32)
        self._num_run = np.zeros(slots, np.int32)  # nodes run since the last commit
        self._ahead, self._most_nodes = ahead, most_nodes
        self._parent = parent or os.getppid()
        self._clock = clock
        self._busy = False
        self._num_heartbeats = 0
        self._next_heartbeat = 0.0
        # By step: begin, end, tokens; generation, first and last id of the nodes sent after it.
        self._trace: list[tuple[float, float, int, int, int, int]] | None = None
        self._stopped = False

    @property
    def num_unsent(self) -> int:
        """Messages that the ring had no room for."""
        return len(self._outbox)

    def run(self) -> None:
        """Loop until the engine sends STOP or has ended."""
        trace_file = env.draft_trace()
        self._trace = None if trace_file is None else []
        while self.run_once():
            pass
        if trace_file is not None:
            np.save(trace_file, np.array(self._trace, np.float64).reshape(-1, 6))

    def run_once(self, idle_us: int = IDLE_US) -> bool:
        """Process the engine's messages, run at most one step and send the nodes found.

        Args:
            idle_us: maximum wait for messages if nothing can be run.

        Returns:
            False when the worker must exit.
        """
        popped = self._inbox.pop(0 if self._busy else idle_us)
        if len(popped.messages):
            self._handle(popped.messages)
        elif not self._busy and os.getppid() != self._parent:
            return False
        if self._stopped:
            return False
        self._busy = self._step()
        self._send_heartbeat()
        self._push()
        return True

    # -- messages from the engine -----------------------------------------------------------

    def _handle(self, messages: Messages) -> None:
        for kind, run in messages.runs():
            if kind == _COMMIT:
                self._commit(run)
                continue
            ends = np.cumsum(run.headers["words"], dtype=np.int64)
            for header, end in zip(run.headers, ends.tolist(), strict=True):
                words = run.words[end - int(header["words"]) : end]
                if kind == MessageKind.OPEN:
                    self._open(header, words)
                elif kind == MessageKind.PROMPT:
                    self._receive_prompt(header, words)
                elif kind == MessageKind.EXTERNAL_NODES:
                    self._add_external_nodes(header, words)
                elif kind == MessageKind.CLOSE:
                    self._close(int(header["slot"]), int(header["generation"]))
                elif kind == MessageKind.STOP:
                    self._stopped = True

    def _open(self, header: np.void, words: np.ndarray) -> None:
        slot, length = int(header["slot"]), int(header["base_length"])
        if slot >= len(self._generations) or words.nbytes != OPENING.itemsize:
            return
        (opening,) = words.view(OPENING)
        is_fine = 0.0 <= opening["temperature"] < np.inf and opening["sample_index"] <= _MAX_INDEX
        if not is_fine:
            return
        self._forget(slot)
        generation = int(header["generation"])
        self._generations[slot] = generation
        if not 0 < length <= self._model.max_positions:
            self._refuse(slot, Refusal.TOO_LONG)
            return
        self._partial_prompts[slot] = _PartialPrompt(
            generation, int(header["depth"]), int(opening["seed"]), int(opening["sample_index"]),
            float(opening["temperature"]), np.empty(length, np.int32), 0,
        )  # fmt: skip

    def _receive_prompt(self, header: np.void, words: np.ndarray) -> None:
        slot, start = int(header["slot"]), int(header["base_length"])
        opening = self._partial_prompts.get(slot)
        if opening is None or opening.generation != header["generation"]:
            return
        end = start + len(words)
        if start != opening.filled or end > len(opening.tokens):
            self._refuse(slot, Refusal.LOST_MESSAGE)
            return
        opening.tokens[start:end] = words
        if end < len(opening.tokens):
            self._partial_prompts[slot] = opening._replace(filled=end)
            return
        del self._partial_prompts[slot]
        try:
            self._model.kv_layout.open(
                slot, opening.tokens, temperature=opening.temperature, seed=opening.seed,
                sample_index=opening.sample_index,
            )  # fmt: skip
        except PromptError:
            self._refuse(slot, Refusal.BAD_TOKEN)
            return
        noisy = opening.temperature > 0.0
        self.tree_pool.open(slot, end, noisy=noisy, max_depth=opening.depth or None)
        self._reset_budget(slot)

    def _commit(self, messages: Messages) -> None:
        """Process COMMIT messages in batches in which each slot occurs once."""
        headers = messages.header_words.view(np.uint32).reshape(-1, HEADER_WORDS)
        taken: dict[int, int] = {}
        end = 0
        for i, (_, slot, generation, base, size, _, _) in enumerate(headers.tolist()):
            begin, end = end, end + size
            if slot in taken:
                self._commit_trees(messages, taken)
                taken.clear()
            if self._append(slot, generation, base, messages.words[begin:end]):
                taken[slot] = i
        if taken:
            self._commit_trees(messages, taken)

    def _append(self, slot: int, generation: int, base: int, tokens: np.ndarray) -> bool:
        """Append new tokens to the model's sequence. If that is impossible, refuse the request and
        return False."""
        if slot >= len(self._generations):
            return False
        if self._generations.item(slot) != generation:  # its OPEN was lost, or it was just refused
            put_refused(self._outbox, slot, generation, Refusal.LOST_MESSAGE)
            return False
        if not self.tree_pool.lengths.item(slot) == base > 0:
            self._refuse(slot, Refusal.LOST_MESSAGE)
            return False
        is_longer = len(tokens) > self._model.kv_layout.room(slot)
        try:
            self._model.kv_layout.append(slot, tokens)
        except PromptError:
            self._refuse(slot, Refusal.TOO_LONG if is_longer else Refusal.BAD_TOKEN)
            return False
        return True

    def _commit_trees(self, messages: Messages, taken: dict[int, int]) -> None:
        """Apply the commits that `_append` accepted to trees and KV. `taken`: message of each
        slot."""
        if len(taken) < len(messages):
            wanted = np.zeros(len(messages), np.bool_)
            wanted[list(taken.values())] = True
            messages = messages.only(wanted)
        headers = messages.header_words.reshape(-1, HEADER_WORDS)
        slots, bases, sizes = headers[:, SLOT], headers[:, BASE_LENGTH], headers[:, WORDS]
        moves = self.tree_pool.commit(slots, bases, messages.words, sizes)
        self._model.kv_layout.keep(slots, moves)
        self._urgent[slots[~moves.ready]] = _URGENT_STEPS
        self._reset_budget(slots)

    def _add_external_nodes(self, header: np.void, words: np.ndarray) -> None:
        """Add nodes of other proposers that the engine verifies, to draft their continuations."""
        slot, length = int(header["slot"]), int(header["base_length"])
        if slot >= len(self._generations) or self._generations[slot] != header["generation"]:
            return
        if words.nbytes % EXTERNAL_NODE.itemsize:
            return
        nodes = words.view(EXTERNAL_NODE)
        if self.tree_pool.lengths[slot] == length > 0 and len(nodes) <= MAX_NODES:
            self.tree_pool.add_external_nodes(
                slot, length, nodes["parent"], nodes["token"], nodes["path_prob"]
            )

    def _reset_budget(self, slots: int | np.ndarray) -> None:
        """Allow slots that do not grow ahead to run `most_nodes` nodes again."""
        self._num_run[slots], self._weights[slots] = 0, 1.0

    def _close(self, slot: int, generation: int) -> None:
        if slot < len(self._generations) and self._generations[slot] == generation:
            self._forget(slot)

    def _refuse(self, slot: int, refusal: Refusal) -> None:
        put_refused(self._outbox, slot, int(self._generations[slot]), refusal)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._partial_prompts.pop(slot, None)
        self._generations[slot] = -1
        if self.tree_pool.lengths[slot]:
            self.tree_pool.close(slot)
            self._model.kv_layout.close(slot)
        self._urgent[slot] = 0

    # -- drafting ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run one step. Returns False if there was nothing to run."""
        model, pool = self._model, self.tree_pool
        chunk = _PREFIX_CHUNK if pool.any_ready() else _LONG_PREFIX_CHUNK
        prefix = model.kv_layout.plan_prefix(chunk)
        num_prefix = int(prefix.counts.sum())
        rows = pool.choose(
            self._times.predict_range(num_prefix, min(_MAX_NODES, model.most_rows - num_prefix)),
            weights=self._weights, urgent=self._urgent > 0, gained=float(len(prefix.slots)),
        )  # fmt: skip
        num_rows = num_prefix + len(rows.ids)
        if not num_rows:
            return False
        begin = time.perf_counter()
        found = model.step(prefix, rows.nodes)
        end = time.perf_counter()
        self._times.observe(num_rows, end - begin)
        if self._trace is not None:
            self._trace.append((begin, end, num_rows, -1, 0, -1))
        pool.expand(found.ready, rows, found.tokens, found.log_probs)
        slots = rows.nodes.slots
        self._urgent[slots] = np.maximum(self._urgent[slots] - 1, 0)
        if not self._ahead:
            self._num_run[slots] += rows.nodes.counts
            self._weights[slots[self._num_run[slots] >= self._most_nodes]] = 0.0
        if len(self._outbox) < _MAX_WAITING:
            self._send_nodes()
        return True

    def _send_nodes(self) -> None:
        slots, counts, lengths, nodes = self.tree_pool.unsent()
        if len(slots):
            stamps = Stamps(slots, self._generations[slots], lengths)
            put_nodes(self._outbox, stamps, counts, nodes)
            if self._trace is not None and len(slots) == 1 and len(nodes):
                ids = int(nodes[0, ID]), int(nodes[-1, ID])
                self._trace[-1] = (*self._trace[-1][:3], int(self._generations[slots[0]]), *ids)

    def _send_heartbeat(self) -> None:
        now = self._clock()
        # Waiting messages are a sign of life themselves, and heartbeats must not pile up.
        if now >= self._next_heartbeat and not len(self._outbox):
            self._next_heartbeat = now + _HEARTBEAT_SECONDS
            self._num_heartbeats += 1
            put_heartbeat(self._outbox, self._num_heartbeats)

    def _push(self) -> None:
        if len(self._outbox) and self._answers.push(self._outbox) is RingStatus.FULL:
            logger.debug("%d records wait for the engine", len(self._outbox))


def load(settings: WorkerSettings) -> tuple[DraftModel, StepTimes]:
    """Load the model and measure its step times.

    Raises:
        ConfigError, ModelLoadError: see `DraftModel.load`.
    """
    sizes = DraftSizes(
        slots=settings.slots, max_model_len=settings.max_model_len, window=settings.window
    )
    dtype: torch.dtype = getattr(torch, settings.dtype)
    folder, weight_format = Path(settings.folder), settings.weight_format
    if weight_format == "auto":
        weight_format = best_format(folder, dtype)
    model = DraftModel.load(
        folder, sizes, dtype=dtype, weight_format=weight_format,
        threads=settings.threads, cpus=settings.cpus or None, load_format=settings.load_format,
        allow_pickle=settings.allow_pickle,
    )  # fmt: skip
    context = max(1, min(_CONTEXT, settings.max_model_len // 2))
    times = measure(model, settings.slots, context)
    shown = ", ".join(f"{rows}: {times.predict(rows) * 1e3:.2f}" for rows in _SHOWN)
    logger.info("milliseconds of steps by rows: %s", shown)
    return model, times


def serve(settings: WorkerSettings) -> None:
    """Run a worker from loading its model to its exit."""
    if settings.cpus and native.load() is not None:
        os.sched_setaffinity(0, settings.cpus[:1])  # the other threads of the team pin themselves
    with attach_ring(settings.requests) as requests, attach_ring(settings.answers) as answers:
        model, times = load(settings)
        TreePool.compile()
        pool = TreePool(
            settings.slots, max_depth=settings.max_depth, max_positions=model.max_positions,
            vocab_size=model.vocab_size, stats=BucketStats(),
        )  # fmt: skip
        with Consumer(requests, spin_us=_SPIN_US) as inbox, Producer(answers) as producer:
            outbox = Outbox()
            put_hello(outbox, Hello(model.vocab_size))
            producer.push(outbox)
            Worker(
                model, pool, times, inbox, producer, slots=settings.slots, ahead=settings.ahead,
                most_nodes=min(settings.most_nodes, WINDOW), parent=settings.parent,
            ).run()  # fmt: skip


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the group; this ends with the engine
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="draft worker: %(message)s")
    settings = WorkerSettings.from_json(sys.argv[1])
    try:
        serve(settings)
    except HeteroLLMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _end(2)
    _end(0)


def _end(code: int) -> NoReturn:
    """Exit at once: shutting down an interpreter with torch can take seconds on busy cores."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
