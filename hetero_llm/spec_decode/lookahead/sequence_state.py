"""What the lookahead cache holds of running sequences: their tokens and what came of their drafts.

Both lie in arrays that compiled code works on. A sequence has one row in each of them from its
first step to the end of its request, whatever happens to its KV: what was learned of its tokens
survives a preemption.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.array_table import Float64Matrix, Float64Vector, Int64Matrix

SEPARATOR = -1
"""Stands between documents and at stop tokens: nothing is matched or drafted across it."""

PROMPT_TAIL = 3
"""Last tokens of a prompt, which show what kind of output follows: shared with the output."""

_INITIAL_ROWS = 16
_FEW = 4

START, END, INDEXED, SHARED, SHARED_START, SALT, NAMESPACE = range(7)
NODE_LIMIT, OUT_OF_VOCAB, CLOSED = range(7, 10)
PROPOSAL, PLACE, PROPOSAL_END, NUM_VERIFIED, NUM_FOLLOWED = range(10, 15)
_NUM_COLUMNS = 15
HITS, EXPECTED_HITS, PROPOSED_HITS = range(3)
MEAN_HITS, MEAN_EXPECTED_HITS, NUM_OUT_OF_VOCAB = range(3)


def namespace_salt(root_hash: bytes) -> int:
    """The salt in the global cache of requests with this root hash, which depends on their
    cache_salt. One bit keeps it apart from the sequences' own salts, which are small."""
    return int.from_bytes(root_hash[:7], "little") | 1 << 60


def with_separators(
    tokens: NDArray[np.int32], stop_tokens: collections.abc.Sequence[int]
) -> NDArray[np.int32]:
    """The tokens with a separator in the place of each stop token."""
    return np.where(np.isin(tokens, stop_tokens), SEPARATOR, tokens).astype(np.int32, copy=False)


@dataclass(slots=True, eq=False)
class TokenSpan:
    """The tokens of one sequence.

    Attributes:
        row: of the buffer.
        salt: belongs to this sequence alone; never used again.
        start, end: positions in `TokenBuffer.tokens`.
    """

    row: int
    salt: int
    start: int
    end: int


class TokenBuffer:
    """The tokens of running sequences in one flat array: a row of `width` tokens and a separator
    for each.

    Attributes:
        tokens: [rows * (width + 1)] int32; a separator stands behind each sequence. Replaced by a
            larger one when rows run out: take it anew after each `open`; positions stay.
    """

    def __init__(self, width: int) -> None:
        self._width = width + 1  # a separator follows
        self._free = list(range(_INITIAL_ROWS))  # a heap: low rows first, so that rows stay few
        self._num_rows = _INITIAL_ROWS
        self._next_salt = 1
        self.tokens: NDArray[np.int32] = np.empty(_INITIAL_ROWS * self._width, np.int32)

    @property
    def num_bytes(self) -> int:
        """Of memory reserved; the system grants it as rows fill."""
        return self.tokens.nbytes

    @property
    def num_open(self) -> int:
        """Rows in use."""
        return self._num_rows - len(self._free)

    def open(self) -> TokenSpan:
        """Takes a row, which has no tokens yet."""
        if not self._free:
            self._free = list(range(self._num_rows, 2 * self._num_rows))
            self._num_rows *= 2
            larger = np.empty(self._num_rows * self._width, np.int32)
            larger[: len(self.tokens)] = self.tokens
            self.tokens = larger
        row = heappop(self._free)
        start = row * self._width
        span = TokenSpan(row, self._next_salt, start, start)
        self._next_salt += 1
        return span

    def extend(self, span: TokenSpan, new: list[int] | NDArray[np.int32]) -> None:
        """Appends tokens to a sequence."""
        end = span.end + len(new)
        assert end - span.start < self._width, (end - span.start, self._width)
        if len(new) == 1:
            self.tokens[span.end] = new[0]
        else:
            self.tokens[span.end : end] = new
        self.tokens[end] = SEPARATOR
        span.end = end

    def close(self, row: int) -> None:
        """Frees a row for another sequence."""
        heappush(self._free, row)


class SequenceArrays(NamedTuple):
    """State of all rows as compiled functions see it.

    Attributes:
        numbers: [rows, 15] int64.
            START and END: positions of the sequence in `TokenBuffer.tokens`.
            INDEXED: positions before it are in the local indexes.
            SHARED: positions before it are in the global cache; those before SHARED_START never
            will be.
            SALT and NAMESPACE: salts of its entries in the local indexes and in the global cache.
            NODE_LIMIT: most nodes of a draft that its request wants.
            OUT_OF_VOCAB: 1 if it has a token beyond the vocabulary; it gets no drafts then.
            CLOSED: 1 if its request has ended.
            PROPOSAL: number of the last proposal that it was in; PLACE: its index there;
            PROPOSAL_END: its END then; NUM_VERIFIED: nodes of its draft that were verified.
            NUM_FOLLOWED: tokens that `SequenceStates.follow` has returned or a drafter has taken in
            by itself.
        averages: [rows, 3] float64. Moving averages of accepted nodes per draft (HITS) and of their
            estimate (EXPECTED_HITS); the estimate for its last draft (PROPOSED_HITS).
        totals: [3] float64. MEAN_HITS and MEAN_EXPECTED_HITS: the averages over all sequences;
            NUM_OUT_OF_VOCAB: sequences found with a token beyond the vocabulary.
    """

    numbers: Int64Matrix
    averages: Float64Matrix
    totals: Float64Vector


class NewTokens(NamedTuple):
    """New tokens of S sequences: see `SequenceStates.follow`.

    Attributes:
        num_sequences: S.
        batch: [3 * S + tokens] int64: the sequences' rows, the most nodes of each one's draft, the
            number of each one's new tokens; then these tokens, one sequence after the other.
    """

    num_sequences: int
    batch: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """[S]."""
        return self.batch[: self.num_sequences]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[S] number of new tokens of each sequence."""
        return self.batch[2 * self.num_sequences : 3 * self.num_sequences]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[sum of sizes]."""
        return self.batch[3 * self.num_sequences :]


class SequenceRows(NamedTuple):
    """S sequences in `TokenBuffer.tokens`, as the local indexes take them.

    Attributes:
        rows: [S] int64.
        salts: [S] int64 of their entries.
        starts, indexed, ends: [S] int64 positions: the first token, the first one that is not
            in the indexes, and the end.
    """

    rows: NDArray[np.int64]
    salts: NDArray[np.int64]
    starts: NDArray[np.int64]
    indexed: NDArray[np.int64]
    ends: NDArray[np.int64]


class SequenceStates:
    """Rows of running sequences. One thread at a time.

    Args:
        width: tokens of the longest sequence.

    Attributes:
        buffer: their tokens.
        arrays: their state; replaced by larger ones by `follow`.
    """

    def __init__(self, width: int) -> None:
        self.buffer = TokenBuffer(width)
        self.arrays = SequenceArrays(
            np.zeros((0, _NUM_COLUMNS), np.int64), np.zeros((0, 3)), np.array([1.0, 1.0, 0.0])
        )
        self._row_of: dict[Sequence, int] = {}
        self._of_request: dict[str, list[Sequence]] = {}

    @property
    def num_out_of_vocab(self) -> int:
        """Sequences that got no drafts for a token beyond the vocabulary."""
        return int(self.arrays.totals[NUM_OUT_OF_VOCAB])

    @property
    def num_followed(self) -> int:
        """Number of sequences that are followed."""
        return len(self._row_of)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are followed."""
        return list(self._row_of)

    def row_of(self, sequence: Sequence) -> int:
        """The row of a sequence that is followed."""
        return self._row_of[sequence]

    def follow(
        self, sequences: list[Sequence], limits: list[int], index_from: int | None
    ) -> NewTokens:
        """Returns the tokens that sequences have got since the last call; opens rows for new ones.

        Args:
            limits: [S] most nodes of each one's draft.
            index_from: first token to be indexed, counted from the end of the prompt; None for the
                first token of the prompt.
        """
        rows: list[int] = []
        new: list[int] = []
        sizes: list[int] = []
        row_of = self._row_of
        for sequence in sequences:
            row = row_of.get(sequence)
            rows.append(self._open(sequence, index_from) if row is None else row)
        numbers = self.arrays.numbers
        # One by one a few are sooner read and written than as an array.
        few = len(rows) <= _FEW
        num_followed: list[int] = (
            [numbers.item(row, NUM_FOLLOWED) for row in rows]
            if few
            else numbers[rows, NUM_FOLLOWED].tolist()
        )
        lengths = [len(sequence.token_ids) for sequence in sequences]
        for sequence, before, known in zip(sequences, num_followed, lengths, strict=True):
            sizes.append(max(known - before, 0))  # a stop string may have taken some back
            if known - before == 1:
                new.append(sequence.token_ids[before])
            else:
                new += sequence.token_ids[before:]
        if few:
            for row, known in zip(rows, lengths, strict=True):
                numbers[row, NUM_FOLLOWED] = known
        else:
            numbers[rows, NUM_FOLLOWED] = lengths
        return NewTokens(len(rows), np.array(rows + limits + sizes + new, np.int64))

    def rows_of(self, sequences: list[Sequence]) -> NDArray[np.int64] | None:
        """[S] rows of sequences all of whose tokens have been followed; None if they are not."""
        found = [self._row_of.get(sequence, -1) for sequence in sequences]
        if -1 in found:
            return None
        rows = np.array(found, np.int64)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        followed = self.arrays.numbers[:, NUM_FOLLOWED]
        return rows if followed[rows].tolist() == lengths else None

    def spans(self, rows: NDArray[np.int64]) -> SequenceRows:
        """Where the sequences of these rows lie."""
        columns = self.arrays.numbers[rows][:, [SALT, START, INDEXED, END]].T
        return SequenceRows(rows, *np.ascontiguousarray(columns))

    def end_request(self, request: Request) -> list[Sequence]:
        """The sequences of an ended request, to be passed to `follow_last`."""
        return self._of_request.pop(request.request_id, [])

    def follow_last(self, sequences: list[Sequence]) -> NewTokens:
        """The last new tokens of sequences, which are not followed any more. Their rows stay in use
        until `close`."""
        new = self.follow(sequences, [0] * len(sequences), None)
        for sequence in sequences:
            del self._row_of[sequence]
        return new

    def close(self, row: int) -> None:
        """Frees a row for another sequence."""
        self.buffer.close(row)

    def check_integrity(self) -> None:
        """Asserts that sequences, requests and rows agree; not for the time between `follow_last`
        and `close`."""
        assert self.buffer.num_open == len(self._row_of)
        of_requests = [one for sequences in self._of_request.values() for one in sequences]
        assert set(of_requests) == set(self._row_of)

    def _open(self, sequence: Sequence, index_from: int | None) -> int:
        request = sequence.request
        span = self.buffer.open()
        row, start = span.row, span.start
        numbers, averages, totals = self.arrays
        if row >= len(numbers):
            more = 2 * row + 1 - len(numbers)
            numbers = np.concatenate([numbers, np.zeros((more, _NUM_COLUMNS), np.int64)])
            averages = np.concatenate([averages, np.zeros((more, 3))])
            self.arrays = SequenceArrays(numbers, averages, totals)
        prompt_end = start + sequence.num_prompt_tokens
        shared_start = max(prompt_end - PROMPT_TAIL, start)
        indexed = start if index_from is None else prompt_end + index_from
        wanted = request.params.num_speculative_tokens
        limit = MAX_NODES if wanted is None else min(wanted, MAX_NODES)
        numbers, averages, totals = self.arrays
        numbers[row] = (
            start, start, indexed, shared_start, shared_start, span.salt,
            namespace_salt(request.root_hash), limit, 0, 0, -1, 0, 0, 0, 0,
        )  # fmt: skip
        averages[row] = totals[MEAN_HITS], totals[MEAN_EXPECTED_HITS], 0.0
        self._row_of[sequence] = row
        self._of_request.setdefault(request.request_id, []).append(sequence)
        return row
