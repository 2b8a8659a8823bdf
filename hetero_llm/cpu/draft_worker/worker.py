"""The draft worker's process: python -m hetero_llm.cpu.draft_worker.worker SETTINGS

It takes in what the engine tells, runs the likeliest nodes of all trees, tells what it found, and
begins again. It asks for nothing and is waited for by nobody; when the engine is gone it ends.
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
    GRAFTED,
    HEADER_WORDS,
    OPENING,
    SLOT,
    WORDS,
    Hello,
    Kind,
    Outbox,
    Records,
    Refusal,
    Stamps,
    put_beat,
    put_hello,
    put_nodes,
    put_refused,
)
from hetero_llm.bridge.ipc.rings import Consumer, Producer, RingStatus, attach_ring
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.errors import HeteroLLMError, PromptError
from hetero_llm.cpu import native
from hetero_llm.cpu.draft_worker.draft_model import DraftModel, DraftSizes, best_format
from hetero_llm.cpu.draft_worker.kv_layout import Branches
from hetero_llm.cpu.draft_worker.step_times import StepTimes, measure
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW
from hetero_llm.cpu.draft_worker.tree_pool import Forest
from hetero_llm.spec_decode.draft_model.node_buckets import Record
from hetero_llm.spec_decode.draft_model.tree_arrays import ID
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings
from hetero_llm.utils import env

logger = logging.getLogger(__name__)

IDLE_US = 50_000
"""Between two looks at whether the engine is still there."""

_MOST_INDEX = 2**31 - 1
_SPIN_US = 200  # of an idle wait, before it sleeps: commits come every few milliseconds
_BEAT_SECONDS = 0.05
_COMMIT = Kind.COMMIT  # looking a member up takes long
_NO_GRAFTS = np.zeros(0, GRAFTED)
_MOST_NODES = 64  # of a step
_CHUNK, _LONG_CHUNK = 64, 512  # pending tokens of a step, beside trees that wait and without any
_MOST_WAITING = 4096  # records that the engine has not taken: what comes after is not told
_CONTEXT = 256  # tokens, of the steps that are timed at start
_SHOWN = (1, 2, 4, 8, 16, 32, 64)
_URGENT_STEPS = 2  # after a miss, in which its tree comes before others


class _Opening(NamedTuple):
    """A text whose tokens are still to come."""

    generation: int
    depth: int
    seed: int
    sample_index: int
    temperature: float
    tokens: np.ndarray
    filled: int


class Worker:
    """The loop and what it works on. One thread.

    Args:
        model, forest, times: of the same slots.
        ahead, most_nodes, parent: see `WorkerSettings`.
        clock: seconds since some moment, for beats.
    """

    def __init__(
        self,
        model: DraftModel,
        forest: Forest,
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
        self._model, self._forest, self._times = model, forest, times
        self._inbox, self._answers = inbox, answers
        self._outbox = Outbox()
        self._generations = np.full(slots, -1, np.int64)
        self._opening: dict[int, _Opening] = {}
        self._urgent = np.zeros(slots, np.int32)
        self._weights = np.ones(slots, np.float32)
        self._run = np.zeros(slots, np.int32)  # nodes since the last tokens came
        self._ahead, self._most_nodes = ahead, most_nodes
        self._parent = parent or os.getppid()
        self._clock = clock
        self._busy = False
        self._beats = 0
        self._next_beat = 0.0
        # Begin, end and rows of steps; generation, first and last id of the nodes told behind them.
        self._trace: list[tuple[float, float, int, int, int, int]] | None = None
        self._stopped = False

    def run(self) -> None:
        """Until the engine says so, or is gone."""
        trace = env.draft_trace()
        if trace is None:
            self._loop()
            return
        self._trace = []
        self._loop()
        np.save(trace, np.array(self._trace, np.float64).reshape(-1, 6))

    def _loop(self) -> None:
        while self.turn():
            pass

    def turn(self, idle_us: int = IDLE_US) -> bool:
        """Takes in what was told, runs a step if there is anything to run, tells what was found.

        Args:
            idle_us: how long to wait for something to do.

        Returns:
            False when it is to end.
        """
        popped = self._inbox.pop(0 if self._busy else idle_us)
        if len(popped.records):
            self._take(popped.records)
        elif not self._busy and os.getppid() != self._parent:
            return False
        if self._stopped:
            return False
        self._busy = self._step()
        self._beat()
        self._push()
        return True

    # -- what the engine tells --------------------------------------------------------------

    def _take(self, records: Records) -> None:
        for kind, run in records.runs():
            if kind == _COMMIT:
                self._commit(run)
                continue
            ends = np.cumsum(run.headers["words"], dtype=np.int64)
            for header, end in zip(run.headers, ends.tolist(), strict=True):
                words = run.words[end - int(header["words"]) : end]
                if kind == Kind.OPEN:
                    self._open(header, words)
                elif kind == Kind.PROMPT:
                    self._fill(header, words)
                elif kind == Kind.GRAFT:
                    self._graft(header, words)
                elif kind == Kind.CLOSE:
                    self._close(int(header["slot"]), int(header["generation"]))
                elif kind == Kind.STOP:
                    self._stopped = True

    def _open(self, header: np.void, words: np.ndarray) -> None:
        slot, length = int(header["slot"]), int(header["base_length"])
        if slot >= len(self._generations) or words.nbytes != OPENING.itemsize:
            return
        (opening,) = words.view(OPENING)
        is_fine = 0.0 <= opening["temperature"] < np.inf and opening["sample_index"] <= _MOST_INDEX
        if not is_fine:
            return
        self._forget(slot)
        generation = int(header["generation"])
        self._generations[slot] = generation
        if not 0 < length <= self._model.max_positions:
            self._refuse(slot, Refusal.TOO_LONG)
            return
        self._opening[slot] = _Opening(
            generation, int(header["depth"]), int(opening["seed"]), int(opening["sample_index"]),
            float(opening["temperature"]), np.empty(length, np.int32), 0,
        )  # fmt: skip

    def _fill(self, header: np.void, words: np.ndarray) -> None:
        slot, start = int(header["slot"]), int(header["base_length"])
        opening = self._opening.get(slot)
        if opening is None or opening.generation != header["generation"]:
            return
        end = start + len(words)
        if start != opening.filled or end > len(opening.tokens):
            self._refuse(slot, Refusal.LOST_RECORD)
            return
        opening.tokens[start:end] = words
        if end < len(opening.tokens):
            self._opening[slot] = opening._replace(filled=end)
            return
        del self._opening[slot]
        try:
            self._model.open(
                slot, opening.tokens, temperature=opening.temperature, seed=opening.seed,
                sample_index=opening.sample_index,
            )  # fmt: skip
        except PromptError:
            self._refuse(slot, Refusal.BAD_TOKEN)
            return
        noisy = opening.temperature > 0.0
        self._forest.open(slot, end, noisy=noisy, max_depth=opening.depth or None)
        self._restart(slot)

    def _commit(self, records: Records) -> None:
        """New tokens; a slot that is there twice is taken in twice."""
        headers = records.header_words.view(np.uint32).reshape(-1, HEADER_WORDS)
        taken: dict[int, int] = {}
        end = 0
        for i, (_, slot, generation, base, size, _, _) in enumerate(headers.tolist()):
            begin, end = end, end + size
            if slot in taken:
                self._move(records, taken)
                taken.clear()
            if self._append(slot, generation, base, records.words[begin:end]):
                taken[slot] = i
        if taken:
            self._move(records, taken)

    def _append(self, slot: int, generation: int, base: int, tokens: np.ndarray) -> bool:
        """New tokens of a text for the model; False, and it is refused, if they cannot be."""
        if slot >= len(self._generations):
            return False
        if self._generations.item(slot) != generation:  # its OPEN is lost, or it was just refused
            put_refused(self._outbox, slot, generation, Refusal.LOST_RECORD)
            return False
        if not self._forest.lengths.item(slot) == base > 0:
            self._refuse(slot, Refusal.LOST_RECORD)
            return False
        is_longer = len(tokens) > self._model.room(slot)
        try:
            self._model.append(slot, tokens)
        except PromptError:
            self._refuse(slot, Refusal.TOO_LONG if is_longer else Refusal.BAD_TOKEN)
            return False
        return True

    def _move(self, records: Records, taken: dict[int, int]) -> None:
        """Trees follow the tokens that the model has taken; the record of each slot."""
        if len(taken) < len(records):
            wanted = np.zeros(len(records), np.bool_)
            wanted[list(taken.values())] = True
            records = records.only(wanted)
        headers = records.header_words.reshape(-1, HEADER_WORDS)
        slots, bases, sizes = headers[:, SLOT], headers[:, BASE_LENGTH], headers[:, WORDS]
        moves = self._forest.commit(slots, bases, records.words, sizes)
        self._model.keep(slots, moves)
        self._urgent[slots[~moves.ready]] = _URGENT_STEPS
        self._run[slots], self._weights[slots] = 0, 1.0

    def _graft(self, header: np.void, words: np.ndarray) -> None:
        """What the engine verifies beside our own nodes: what may follow it is worth drafting."""
        slot, length = int(header["slot"]), int(header["base_length"])
        if slot >= len(self._generations) or self._generations[slot] != header["generation"]:
            return
        nodes = words.view(GRAFTED) if words.nbytes % GRAFTED.itemsize == 0 else _NO_GRAFTS
        if self._forest.lengths[slot] == length > 0 and len(nodes) <= MAX_NODES:
            self._forest.graft(slot, length, nodes["parent"], nodes["token"], nodes["chance"])

    def _restart(self, slot: int) -> None:
        self._run[slot], self._weights[slot] = 0, 1.0

    def _close(self, slot: int, generation: int) -> None:
        if slot < len(self._generations) and self._generations[slot] == generation:
            self._forget(slot)

    def _refuse(self, slot: int, refusal: Refusal) -> None:
        put_refused(self._outbox, slot, int(self._generations[slot]), refusal)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._opening.pop(slot, None)
        self._generations[slot] = -1
        if self._forest.lengths[slot]:
            self._forest.close(slot)
            self._model.close(slot)
        self._urgent[slot] = 0

    # -- drafting ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Runs one step; False if there was nothing to run."""
        model, forest = self._model, self._forest
        waits = bool(self._forest.any_ready())
        trunk = model.plan_trunk(_CHUNK if waits else _LONG_CHUNK)
        num_trunk = int(trunk.counts.sum())
        rows = forest.choose(
            self._times.beside(num_trunk, min(_MOST_NODES, model.most_rows - num_trunk)),
            weights=self._weights, urgent=self._urgent > 0, gained=float(len(trunk.slots)),
        )  # fmt: skip
        num_rows = num_trunk + len(rows.ids)
        if not num_rows:
            return False
        begin = time.perf_counter()
        found = model.step(trunk, Branches(*rows[:6]))
        end = time.perf_counter()
        self._times.observe(num_rows, end - begin)
        if self._trace is not None:
            self._trace.append((begin, end, num_rows, -1, 0, -1))
        forest.grow(found.ready, rows, found.tokens, found.log_probs)
        self._urgent[rows.slots] = np.maximum(self._urgent[rows.slots] - 1, 0)
        if not self._ahead:
            self._run[rows.slots] += rows.counts
            self._weights[rows.slots[self._run[rows.slots] >= self._most_nodes]] = 0.0
        if len(self._outbox) < _MOST_WAITING:
            self._tell()
        return True

    def _tell(self) -> None:
        slots, counts, lengths, nodes = self._forest.unsent()
        if len(slots):
            stamps = Stamps(slots, self._generations[slots], lengths)
            put_nodes(self._outbox, stamps, counts, nodes)
            if self._trace is not None and len(slots) == 1 and len(nodes):
                ids = int(nodes[0, ID]), int(nodes[-1, ID])
                self._trace[-1] = (*self._trace[-1][:3], int(self._generations[slots[0]]), *ids)

    def _beat(self) -> None:
        now = self._clock()
        # What waits tells that it lives, when there is room; nothing piles up in an idle engine.
        if now >= self._next_beat and not len(self._outbox):
            self._next_beat = now + _BEAT_SECONDS
            self._beats += 1
            put_beat(self._outbox, self._beats)

    def _push(self) -> None:
        if len(self._outbox) and self._answers.push(self._outbox) is RingStatus.FULL:
            logger.debug("%d records wait for the engine", len(self._outbox))


def load(settings: WorkerSettings) -> tuple[DraftModel, StepTimes]:
    """The model, and what its steps take.

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
    shown = ", ".join(f"{rows}: {times.of(rows) * 1e3:.2f}" for rows in _SHOWN)
    logger.info("milliseconds of steps by rows: %s", shown)
    return model, times


def serve(settings: WorkerSettings) -> None:
    """The whole life of a worker."""
    if settings.cpus and native.load() is not None:
        os.sched_setaffinity(0, settings.cpus[:1])  # the team's others pin themselves
    with attach_ring(settings.requests) as requests, attach_ring(settings.answers) as answers:
        model, times = load(settings)
        Forest.compile()
        forest = Forest(
            settings.slots, max_depth=settings.max_depth, max_positions=model.max_positions,
            vocab_size=model.vocab_size, record=Record(),
        )  # fmt: skip
        with Consumer(requests, spin_us=_SPIN_US) as inbox, Producer(answers) as producer:
            outbox = Outbox()
            put_hello(outbox, Hello(model.vocab_size))
            producer.push(outbox)
            Worker(
                model, forest, times, inbox, producer, slots=settings.slots, ahead=settings.ahead,
                most_nodes=min(settings.most_nodes, WINDOW), parent=settings.parent,
            ).run()  # fmt: skip


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to answer
    logging.basicConfig(level=logging.INFO, format="draft worker: %(message)s")
    settings = WorkerSettings.from_json(sys.argv[1])
    try:
        serve(settings)
    except HeteroLLMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _end(2)
    _end(0)


def _end(code: int) -> NoReturn:
    """Ends at once: taking an interpreter with torch down can take seconds on busy cores."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
