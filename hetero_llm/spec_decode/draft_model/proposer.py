"""Proposes drafts of the draft worker; one of the proposers of a `HybridDrafter`.

The engine holds a replica of the worker's trees (tree_replica.py). A proposal receives new nodes,
walks the new tokens down the replica and returns the nodes below them, mostly without waiting: the
worker has drafted for this outcome while the target verified it. If a sequence left its tree, the
worker needs some steps to draft again; each proposal estimates whether waiting for them pays.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_llm.bridge.ipc.messages import (
    EXTERNAL_NODE,
    MessageKind,
    Messages,
    OpenRequest,
    Refusal,
    Stamps,
    put_close,
    put_commits,
    put_external_nodes,
    put_open,
)
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.request import Sequence
from hetero_llm.spec_decode.array_table import (
    ArrayTable,
    BoolVector,
    Int32Matrix,
    Int32Vector,
    Int64Vector,
    reader_of,
)
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats, first_choice_rate
from hetero_llm.spec_decode.draft_model.tree_replica import (
    ReplicaArrays,
    TreeReplica,
    caught_up_all,
    commit_all,
    has_answered,
    propose_all,
)
from hetero_llm.spec_decode.draft_model.worker_client import DraftWorkerClient
from hetero_llm.spec_decode.proposals import Proposals, rows_of
from hetero_llm.utils.jit import njit

_CLOSED, _REFUSED = -1, -2  # instead of a generation
_MAX_WAIT_SECONDS = 2e-3  # unless configured
_INITIAL_LEVEL_SECONDS = 5e-4  # time of the worker for a tree's next level, until measured
_EMA_WEIGHT = 0.1  # of a new observation in moving averages
_PROBE_EVERY = 64  # proposals that would not wait, after which one waits, to learn what it brings
_MAX_TIMED_OUT = 3  # consecutive waits without a message after which proposals stop waiting
_MAX_SENDS = 8  # of a whole sequence to a worker that loses messages of it
_MIN_SENT_PROB = np.float32(0.02)  # path probability of external nodes sent to the worker
_INITIAL_ROOM = 16

NUM_EXTENDED_LEAVES = 4
"""Leaves of a draft that one step of the worker extends, about."""


class _Buffers(NamedTuple):
    """Arrays that compiled functions write.

    Attributes:
        commits: [4, S] int32: slots, generations, lengths before and numbers of new tokens, of
            sequences that the worker knows.
        fresh: [N] int32 new tokens of these sequences.
        query: [3, S] int32: slots (-1: no draft), maximum nodes, maximum depths of a proposal.
        caught_up: [S] bool, see `TreeReplica.caught_up`.
    """

    commits: Int32Matrix
    fresh: Int32Vector
    query: Int32Matrix
    caught_up: BoolVector


class _Arrays:
    """What compiled functions find by name."""

    replica: ReplicaArrays
    lengths: Int64Vector
    generations: Int64Vector
    drafts: Proposals
    buffers: _Buffers


_read = reader_of(_Arrays)


class WaitWorth:
    """What waiting for one message of the worker has brought, in steps of about the same number of
    sequences."""

    def __init__(self) -> None:
        self._seconds = _INITIAL_LEVEL_SECONDS  # moving average of a wait
        self._kept = 1.0  # moving average: tokens that a wait brought, over those promised
        self._num_observed = 0
        self._num_declined = 0

    def pays(self, promised: float, tokens: float, step_seconds: float) -> bool:
        """Whether to wait. Now and then it says so although it would not pay, to learn.

        Args:
            promised: expected accepted tokens that the next level of all drafts adds.
            tokens: of a step as it is. step_seconds: its duration.
        """
        if promised * self._kept * step_seconds > tokens * self._seconds:
            return True
        # A promise of little would teach nothing.
        self._num_declined += promised * step_seconds > tokens * _INITIAL_LEVEL_SECONDS
        if self._num_declined < _PROBE_EVERY:
            return False
        self._num_declined = 0
        return True

    def observe(self, promised: float, brought: float, seconds: float) -> None:
        """Report a wait: the tokens promised before, those that it brought, and its duration."""
        self._num_observed += 1
        weight = max(_EMA_WEIGHT, 1.0 / (self._num_observed + 1))
        self._seconds += weight * (seconds - self._seconds)
        self._kept += weight * (brought / max(promised, 1e-6) - self._kept)


# large: state of every sequence in the worker, the array table, and the estimate of waiting.
class DraftModelProposer:
    """See the module. A sequence's `row` in the drafter is its request slot in the worker. One
    thread at a time.

    Args:
        worker: a client whose worker is up.
        slots: request slots of the worker; sequences in higher rows get no drafts.
        vocab_size: vocabulary size of target and draft model.
        max_positions: longest sequence, in tokens, that the draft model can run.
        clock: returns seconds.

    Attributes:
        worker: see Args.
        drafts: buffer whose first rows hold the last proposal; `propose` may replace it by a larger
            one.
    """

    def __init__(
        self,
        worker: DraftWorkerClient,
        config: DraftModelConfig,
        *,
        slots: int,
        vocab_size: int,
        max_positions: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.worker, self._config, self._clock = worker, config, clock
        self._stats = BucketStats()
        self._replica = TreeReplica(slots, vocab_size=vocab_size, stats=self._stats)
        self._slots, self._max_positions = slots, max_positions
        self._generations = np.full(slots, _CLOSED, np.int64)
        self._lengths = np.zeros(slots, np.int64)
        self._num_sends = np.zeros(slots, np.int64)  # of the whole sequence to the present worker
        self._sequences: dict[int, Sequence] = {}
        self._unsent: list[int] = []  # slots whose sequence must be sent (again)
        self._worker_was_up = True
        self._wait_worth: dict[int, WaitWorth] = {}  # by bit length of the number of sequences
        self._num_timed_out = 0
        self._arrays = ArrayTable(_Arrays)
        self._arrays.put("replica", self._replica.arrays)
        self._arrays.put("lengths", self._lengths)
        self._arrays.put("generations", self._generations)
        self._make_room(_INITIAL_ROOM, _INITIAL_ROOM)
        self._counts = dict.fromkeys(("hits", "misses", "waits", "timeouts", "rejected"), 0)
        self._waited = 0.0
        self._tokens_per_step = 1.0  # moving average, of one sequence
        TreeReplica.compile()
        nothing = np.zeros(0, np.int64)
        _observe_tokens(self._arrays.table, nothing, nothing, nothing)
        self._fill_drafts(nothing, np.zeros(0, np.int32))
        external = _pack_external_nodes(self.drafts, np.zeros(_INITIAL_ROOM, np.int32))
        assert not len(external[1])
        _expected_gain(self._arrays.table, 0, self.drafts.path_probs, self.drafts.counts)
        _expected_tokens(self._arrays.table, 0, self.drafts.path_probs, self.drafts.counts, 0.0)

    def _make_room(self, rows: int, tokens: int) -> None:
        """Allocate buffers for `rows` sequences and `tokens` new tokens."""
        self._buffers = _Buffers(
            commits=np.empty((4, rows), np.int32),
            fresh=np.empty(tokens, np.int32),
            query=np.empty((3, rows), np.int32),
            caught_up=np.empty(rows, np.bool_),
        )
        self._arrays.put("buffers", self._buffers)
        self.drafts = Proposals.empty(rows)
        self._arrays.put("drafts", self.drafts)

    # -- sequences --------------------------------------------------------------------------

    def commit(
        self,
        rows: NDArray[np.int64],
        fresh: NDArray[np.int64],
        sizes: NDArray[np.int64],
        sequences: list[Sequence],
    ) -> None:
        """Send new tokens to the worker, and the whole sequence for new rows.

        Args:
            rows: [S] rows of the sequences.
            fresh: new tokens, concatenated.
            sizes: [S] new tokens of each.
            sequences: [S].
        """
        self.receive()
        fresh, sizes = np.asarray(fresh, np.int64), np.asarray(sizes, np.int64)
        held, room = len(self._buffers.caught_up), len(self._buffers.fresh)
        if len(rows) > held or len(fresh) > room:
            self._make_room(max(held, 2 * len(rows)), max(room, 2 * len(fresh)))
        count, size, num_new = _observe_tokens(self._arrays.table, rows, sizes, fresh)
        assert count >= 0, "proposer and replica disagree on the length of a sequence"
        if num_new:
            ends = np.cumsum(sizes)
            for index, row in enumerate(rows.tolist()):
                if row < self._slots and self._lengths[row] == 0:
                    tokens = fresh[ends[index] - sizes[index] : ends[index]].astype(np.int32)
                    self._open(row, sequences[index], tokens)
        if count:
            self._tokens_per_step += _EMA_WEIGHT * (size / count - self._tokens_per_step)
            slots, generations, bases, counts = self._buffers.commits[:, :count]
            stamps = Stamps(slots, generations, bases)
            put_commits(self.worker.outbox, stamps, counts, self._buffers.fresh[:size])
        self.worker.push()

    def close(self, rows: list[int]) -> None:
        """Close the rows of ended sequences."""
        for row in rows:
            if row >= self._slots:
                continue
            if self._generations[row] >= 0:
                put_close(self.worker.outbox, row, int(self._generations[row]))
                self._replica.close(row)
            self._generations[row], self._lengths[row] = _CLOSED, 0
            self._sequences.pop(row, None)

    @property
    def num_sequences(self) -> int:
        """Open sequences, those included that the worker refused."""
        return len(self._sequences)

    @property
    def is_caught_up(self) -> bool:
        """Whether the worker has drafted for every sequence that it knows."""
        known = np.flatnonzero(self._generations >= 0)
        return bool(self._replica.caught_up(known).all())

    def check_integrity(self) -> None:
        """Assert that the arrays hold state of open sequences only."""
        open_rows = sorted(self._sequences)
        assert np.flatnonzero(self._lengths).tolist() == open_rows
        assert set(np.flatnonzero(self._generations != _CLOSED).tolist()) <= set(open_rows)

    def run_deferred(self) -> None:
        """Work done while the device runs a step: receive messages, check the worker's health, send
        sequences that a restarted worker does not know."""
        worker = self.worker
        self.receive()
        worker.check_health()
        if not worker.is_up:
            if self._worker_was_up:
                self._on_worker_lost()
            self._worker_was_up = False
            return
        if not self._worker_was_up:
            self._worker_was_up = True
            self._unsent = list(self._sequences)
        for row in self._unsent:
            sequence = self._sequences.get(row)
            if sequence is not None and self._generations[row] == _CLOSED:
                tokens = np.array(sequence.token_ids[: int(self._lengths[row])], np.int32)
                self._send_sequence(row, sequence, tokens)
        self._unsent.clear()
        worker.push()

    def _open(self, row: int, sequence: Sequence, tokens: NDArray[np.int32]) -> None:
        self._lengths[row], self._num_sends[row] = len(tokens), 0
        self._sequences[row] = sequence
        if self.worker.is_up and self._worker_was_up:
            self._send_sequence(row, sequence, tokens)

    def _send_sequence(self, row: int, sequence: Sequence, tokens: NDArray[np.int32]) -> None:
        if len(tokens) >= self._max_positions:
            self._generations[row] = _REFUSED
            return
        generation = self.worker.next_generation()
        self._generations[row] = generation
        self._num_sends[row] += 1
        self._replica.open(row, generation, len(tokens))
        request = sequence.request
        put_open(
            self.worker.outbox,
            OpenRequest(
                row, generation, tokens, seed=request.seed, sample_index=sequence.index,
                temperature=request.params.temperature,
            ),
        )  # fmt: skip

    def _on_worker_lost(self) -> None:
        """Reset what the lost worker knew and refused."""
        for row in self._sequences:
            self._replica.close(row)
        self._generations[:] = _CLOSED
        self._num_sends[:] = 0

    # -- drafts -----------------------------------------------------------------------------

    def propose(
        self,
        rows: NDArray[np.int64],
        most: NDArray[np.int32],
        seconds: float,
        found: Proposals,
        least: float,
        *,
        may_wait: bool,
    ) -> None:
        """Fill the first S rows of `drafts` with the most likely nodes below each sequence.

        Args:
            rows: [S] rows of the sequences.
            most: [S] maximum number of nodes.
            seconds: duration of the step without drafts, idle time included.
            found: proposals of other proposers, the first S of these sequences; they make waiting
                less worthwhile.
            least: path probability below which nodes were not verified lately.
            may_wait: whether to wait for the worker where that pays.
        """
        num_queried, misses = self._fill_drafts(rows, most)
        if misses and self.receive():
            num_queried, misses = self._fill_drafts(rows, most)
        self._counts["misses"] += misses
        self._counts["hits"] += num_queried - misses
        may_wait = may_wait and self._config.overlap != "enumerate" and self.worker.is_up
        if may_wait and self._num_timed_out < _MAX_TIMED_OUT:
            self._wait(rows, most, seconds, found, least)

    def _fill_drafts(self, rows: NDArray[np.int64], most: NDArray[np.int32]) -> tuple[int, int]:
        """Fill `drafts` from the replica's present state. Returns the number of sequences that may
        have drafts, and the number of those without nodes from the worker yet."""
        if len(rows) > len(self._buffers.caught_up):
            self._make_room(2 * len(rows), len(self._buffers.fresh))
        counts: tuple[int, int] = _fill_drafts(
            self._arrays.table, rows, most, self._config.num_tokens, self._max_positions
        )
        return counts

    def add_external_nodes(
        self, rows: NDArray[np.int64], found: Proposals, kept: NDArray[np.int32]
    ) -> None:
        """Send the worker nodes of other proposers that are being verified, so that it drafts their
        continuations. Called while the device runs the step.

        Args:
            rows: [S] rows of the last proposal.
            found: its merged drafts.
            kept: [S] number of first nodes of each draft that are verified.
        """
        used = rows < self._slots
        is_open = used & (self._generations[np.where(used, rows, 0)] >= 0)
        counts, nodes = _pack_external_nodes(found, np.where(is_open, kept, 0).astype(np.int32))
        some = counts > 0
        if not some.any():
            return
        slots = rows[some]
        stamps = Stamps(slots, self._generations[slots], self._lengths[slots])
        put_external_nodes(
            self.worker.outbox, stamps, counts[some], nodes.reshape(-1).view(EXTERNAL_NODE)
        )

    def _wait(
        self,
        rows: NDArray[np.int64],
        most: NDArray[np.int32],
        seconds: float,
        found: Proposals,
        least: float,
    ) -> None:
        """Wait for messages of the worker as long as earlier waits brought more tokens than the
        device yields in the time that they took."""
        table, count = self._arrays.table, len(rows)
        worth = self._wait_worth.setdefault(count.bit_length(), WaitWorth())
        tokens = count * self._tokens_per_step
        limit = _MAX_WAIT_SECONDS if self._config.timeout is None else self._config.timeout
        others = found.path_probs, found.counts
        promised = _expected_gain(table, count, *others)
        begin = now = self._clock()
        while now - begin < limit and worth.pays(promised, tokens, seconds + now - begin):
            before = _expected_tokens(table, count, *others, least)
            round_begin = now
            came = self.receive(int((limit - (now - begin)) * 1e6) + 1)
            now = self._clock()
            self._counts["waits"] += 1
            if came:
                self._fill_drafts(rows, most)
            brought = _expected_tokens(table, count, *others, least) - before
            worth.observe(promised, brought, now - round_begin)
            if not came:
                self._num_timed_out += 1
                self._counts["timeouts"] += 1
                break
            promised = _expected_gain(table, count, *others)
        self._waited += now - begin

    def receive(self, timeout_us: int = 0) -> bool:
        """Process messages of the worker. Returns whether there were any.

        Args:
            timeout_us: how long to wait for the first one.
        """
        messages = self.worker.poll(timeout_us)
        if messages is None:
            return False
        self._num_timed_out = 0
        for kind, run in messages.runs():
            if kind == MessageKind.NODES:
                if not self._replica.add(run):
                    self._counts["rejected"] += len(run)
            elif kind == MessageKind.REFUSED:
                self._on_refused(run)
            else:
                self._counts["rejected"] += len(run)
        return True

    def _on_refused(self, messages: Messages) -> None:
        for header in messages.headers:
            row = int(header["slot"])
            if row >= self._slots or self._generations[row] != header["generation"]:
                continue
            self._replica.close(row)
            lost = header["value"] == Refusal.LOST_MESSAGE
            again = lost and self._num_sends[row] < _MAX_SENDS
            self._generations[row] = _CLOSED if again else _REFUSED
            if again:
                self._unsent.append(row)

    def metrics(self) -> dict[str, float]:
        """Counters since start and the present state, flat."""
        counters, dropped = self.worker.counters, self._replica.dropped
        return {
            "draft_worker_up": float(self.worker.is_up),
            "draft_restarts": counters.starts - 1,
            "draft_hits": self._counts["hits"],
            "draft_misses": self._counts["misses"],
            "draft_timeouts": self._counts["timeouts"],
            "draft_waits": self._counts["waits"],
            "draft_wait_seconds": self._waited,
            "draft_first_accepted_rate": first_choice_rate(self._stats.table),
            "draft_rejected_messages": self._counts["rejected"]
            + counters.corrupt
            + dropped["malformed"],
        }

    def shut_down(self) -> None:
        """Ends the worker."""
        self.worker.close()


# -- compiled -------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _observe_tokens(
    table: np.ndarray, rows: np.ndarray, sizes: np.ndarray, tokens: np.ndarray
) -> tuple[int, int, int]:
    """Append new tokens to sequences and replica, and collect the commits to send.

    Returns:
        The number of commits, -1 if the replica has another length for one of them; their total
        number of tokens; the number of new sequences, which are skipped.
    """
    lengths, generations = _read(table, "lengths"), _read(table, "generations")
    commits, fresh, _, _ = _read(table, "buffers")
    first = count = size = num_new = 0
    for i in range(len(rows)):
        row, new = rows[i], tokens[first : first + sizes[i]]
        first += sizes[i]
        if row >= len(lengths):
            continue
        if lengths[row] == 0:
            num_new += 1
            continue
        if generations[row] >= 0 and len(new) > 0:
            commits[0, count], commits[1, count] = row, generations[row]
            commits[2, count], commits[3, count] = lengths[row], len(new)
            fresh[size : size + len(new)] = new
            count += 1
            size += len(new)
        lengths[row] += len(new)
    fine = commit_all(
        _read(table, "replica"), commits[0, :count], commits[2, :count], fresh[:size],
        commits[3, :count],
    )  # fmt: skip
    return count if fine else -1, size, num_new


@njit(cache=True, nogil=True)
def _fill_drafts(
    table: np.ndarray, rows: np.ndarray, most: np.ndarray, depth: int, max_positions: int
) -> tuple[int, int]:
    """See `DraftModelProposer._fill_drafts`.

    Args:
        depth: maximum depth of a draft.
        max_positions: positions of the draft model.
    """
    count = len(rows)
    lengths, generations = _read(table, "lengths"), _read(table, "generations")
    _, _, query, caught_up = _read(table, "buffers")
    num_queried = 0
    for i in range(count):
        row = rows[i]
        query[0, i], query[1, i], query[2, i] = -1, most[i], 0
        if row < len(lengths) and generations[row] >= 0 and lengths[row] < max_positions:
            query[0, i], query[2, i] = row, min(max_positions - lengths[row], depth)
            num_queried += 1
    replica, own = _read(table, "replica"), rows_of(_read(table, "drafts"), 0, count)
    caught_up_all(replica.state, query[0, :count], caught_up)
    propose_all(replica, query[0, :count], query[1, :count], query[2, :count], own)
    num_missing = count
    for i in range(count):
        num_missing -= caught_up[i]
        for node in range(own.counts[i]):
            own.buckets[i, node] = -1  # the replica updates the statistics of these
    return num_queried, num_missing


@njit(cache=True, nogil=True)
def _expected_gain(
    table: np.ndarray, count: int, path_probs: np.ndarray, counts: np.ndarray
) -> float:
    """Expected accepted tokens that one more level of all drafts adds to a step.

    Args:
        count: number of sequences, S.
        path_probs, counts: [S, MAX_NODES], [S] path probabilities and sizes of other proposals.
    """
    own, (_, _, query, caught_up) = _read(table, "drafts"), _read(table, "buffers")
    deepest, state = query[2], _read(table, "replica").state
    gain = 0.0
    for i in range(count):
        comes = not caught_up[i] and has_answered(state, query[0, i])
        start = 1.0 if comes else 0.0
        if own.counts[i] > 0:
            start = open_leaves(own.parents[i], own.path_probs[i], own.counts[i], deepest[i])
        other = float(path_probs[i, 0]) if counts[i] > 0 else 0.0
        gain += (1.0 - other) * start
    return gain * first_choice_rate(_read(table, "replica").table)


@njit(cache=True, nogil=True)
def _expected_tokens(
    table: np.ndarray, count: int, path_probs: np.ndarray, counts: np.ndarray, least: float
) -> float:
    """Expected accepted tokens of the worker's drafts where other proposals have none.

    Args:
        count, path_probs, counts: see `_expected_gain`.
        least: nodes of a lower path probability do not count.
    """
    own = _read(table, "drafts")
    total = 0.0
    for i in range(count):
        other = float(path_probs[i, 0]) if counts[i] > 0 else 0.0
        for node in range(own.counts[i]):
            if own.path_probs[i, node] >= least:
                total += (1.0 - other) * own.path_probs[i, node]
    return total


@njit(cache=True, nogil=True)
def open_leaves(parents: np.ndarray, path_probs: np.ndarray, count: int, deepest: int) -> float:
    """Sum of the path probabilities of the first (most likely) `NUM_EXTENDED_LEAVES` leaves, which
    the worker's next step extends. Leaves at the maximum depth are excluded: nothing below them
    would be proposed."""
    depths = np.empty(MAX_NODES, np.int32)
    is_leaf = np.ones(MAX_NODES, np.bool_)
    for node in range(count):
        parent = parents[node]
        depths[node] = 1
        if parent >= 0:
            depths[node] = depths[parent] + 1
            is_leaf[parent] = False
    total, left = 0.0, NUM_EXTENDED_LEAVES
    for node in range(count):
        if left > 0 and is_leaf[node] and depths[node] < deepest:
            total += path_probs[node]
            left -= 1
    return total


@njit(cache=True, nogil=True)
def _pack_external_nodes(found: Proposals, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Select and pack the external nodes to send: of each draft its first kept nodes that are
    likely enough, unless all of them came from the worker.

    Returns:
        [S] number of nodes of each draft, and the nodes as [N, 3] int32 words of `EXTERNAL_NODE`.
    """
    tokens, parents, path_probs, kind, counts = found
    num_sent = np.zeros(len(counts), np.int32)
    total = 0
    for row in range(len(counts)):
        likely = 0
        while likely < min(kept[row], counts[row]) and path_probs[row, likely] >= _MIN_SENT_PROB:
            likely += 1
        for node in range(likely):
            if kind[row, node] >= 0:
                num_sent[row] = likely
        total += num_sent[row]
    words = np.empty((total, 3), np.int32)
    floats = words.view(np.float32)
    at = 0
    for row in range(len(counts)):
        for node in range(num_sent[row]):
            words[at, 0], words[at, 1] = tokens[row, node], parents[row, node]
            floats[at, 2] = path_probs[row, node]
            at += 1
    return num_sent, words
