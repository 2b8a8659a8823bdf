"""What the lookahead cache remembers of live sequences, in arrays that compiled code works on.

A step's bookkeeping is compiled: `catch_up` takes in the sequences' new tokens and judges their
last drafts by them, `hand_over` notes what they got this time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.acceptance_stats import judge
from hetero_llm.spec_decode.lookahead.token_buffer import HEADER, SEPARATOR, Text, Texts, namespace
from hetero_llm.spec_decode.proposals import Proposals

FIRST, END, INDEXED, TOLD, HEAD, SALT, SPACE, MOST, FOREIGN, CLOSED = range(10)
_ASKED, _PLACE, _ASKED_END, _KEPT = range(10, 14)
_NUM_NUMBERS = 14
HITS, _EXPECTED, _PROPOSED = range(3)
_MEAN_HITS, _MEAN_EXPECTED, _NUM_FOREIGN = range(3)

NO_PROPOSAL = -2  # a number that no proposal has
_MEMORY = 0.8  # of the moving averages of hits, kept at each step
_FLOOR, _CEILING = 0.1, 2.0  # of what hits make of the estimated survival


class LiveArrays(NamedTuple):
    """State of all rows, see `Texts`, as compiled functions see it.

    Attributes:
        numbers: [rows, 14] int64. Positions in the texts' array: FIRST and END of the text; what is
            before INDEXED is in the local indexes; what is before TOLD is in the history, or never
            will be; what is before HEAD never is. SALT of the row and of its namespace (SPACE);
            MOST nodes that its request wants; FOREIGN: it has a token beyond the vocabulary, so it
            is left alone; CLOSED: its request has ended. Number of the proposal that it was in
            last, its place there, the end of its text then, and nodes that it got.
        averages: [rows, 3] float64: moving averages of accepted nodes per draft (HITS) and of their
            estimate; estimate for what it got last.
        totals: [3] float64: the averages over all; how many were found foreign.
    """

    numbers: np.ndarray
    averages: np.ndarray
    totals: np.ndarray


class Fresh(NamedTuple):
    """New tokens of sequences: see `Live.follow`.

    Attributes:
        num_rows: S, one for each sequence.
        batch: [3 * S + tokens] int64: their rows, most nodes of each one's draft, how many tokens
            each one has got; then these, one sequence after the other.
    """

    num_rows: int
    batch: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """[S]."""
        return self.batch[: self.num_rows]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[S] new tokens of each."""
        return self.batch[2 * self.num_rows : 3 * self.num_rows]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[sum of sizes]."""
        return self.batch[3 * self.num_rows :]


class Live:
    """Rows of live sequences. One thread at a time.

    Args:
        width: tokens of the longest sequence.

    Attributes:
        texts: their tokens.
        arrays: replaced by larger ones by `follow`.
    """

    def __init__(self, width: int) -> None:
        self.texts = Texts(width)
        self.arrays = LiveArrays(
            np.zeros((0, _NUM_NUMBERS), np.int64), np.zeros((0, 3)), np.array([1.0, 1.0, 0.0])
        )
        self._row_of: dict[Sequence, int] = {}
        self._of_request: dict[str, list[Sequence]] = {}
        self._copied: list[int] = []  # tokens of each row's sequence that were taken in
        self._text_of: dict[int, Text] = {}

    @property
    def num_foreign(self) -> int:
        """Sequences left alone for a token beyond the vocabulary."""
        return int(self.arrays.totals[_NUM_FOREIGN])

    @property
    def num_rows(self) -> int:
        """Of sequences that are not forgotten."""
        return len(self._text_of)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are followed."""
        return list(self._row_of)

    def follow(self, sequences: list[Sequence], limits: list[int], learn_from: int | None) -> Fresh:
        """Finds out what sequences have got; those that have no row get one.

        Args:
            limits: [S] most nodes of each one's draft.
            learn_from: first token of an output that is to be indexed, counted from its prompt's
                end; None for the first token of the prompt.
        """
        rows: list[int] = []
        fresh: list[int] = []
        sizes: list[int] = []
        copied, row_of = self._copied, self._row_of
        for sequence in sequences:
            row = row_of.get(sequence)
            if row is None:
                row = self._open(sequence, learn_from)
            tokens = sequence.token_ids
            before, known = copied[row], len(tokens)
            rows.append(row)
            sizes.append(max(known - before, 0))  # a stop string may have taken some back
            if known - before == 1:
                fresh.append(tokens[before])
            else:
                fresh += tokens[before:]
            copied[row] = known
        return Fresh(len(rows), np.array(rows + limits + sizes + fresh, np.int64))

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[6, S] for `Rows`."""
        numbers = self.arrays.numbers[rows]
        return np.stack([*numbers[:, [SALT, SPACE, FIRST, INDEXED, END]].T, rows])

    def close(self, request: Request) -> list[Sequence]:
        """The sequences of an ended request, for `last`."""
        return self._of_request.pop(request.request_id, [])

    def last(self, sequences: list[Sequence]) -> Fresh:
        """The last tokens of sequences, of which no more are followed. Their rows are still to be
        forgotten."""
        fresh = self.follow(sequences, [0] * len(sequences), None)
        for sequence in sequences:
            del self._row_of[sequence]
        return fresh

    def forget(self, row: int) -> None:
        """The row is free for another sequence."""
        self.texts.close(self._text_of.pop(row))

    def _open(self, sequence: Sequence, learn_from: int | None) -> int:
        request = sequence.request
        text = self.texts.open(namespace(request.root_hash))
        row = text.row
        if row >= len(self._copied):
            more = 2 * row + 1 - len(self._copied)
            self._copied += [0] * more
            numbers, averages, totals = self.arrays
            numbers = np.concatenate([numbers, np.zeros((more, _NUM_NUMBERS), np.int64)])
            averages = np.concatenate([averages, np.zeros((more, 3))])
            self.arrays = LiveArrays(numbers, averages, totals)
        begin = text.first
        head = begin + max(sequence.num_prompt_tokens - HEADER, 0)
        indexed = begin if learn_from is None else begin + sequence.num_prompt_tokens + learn_from
        asked = request.params.num_speculative_tokens
        most = MAX_NODES if asked is None else min(asked, MAX_NODES)
        numbers, averages, totals = self.arrays
        numbers[row, :_ASKED] = (
            begin, begin, indexed, head, head, text.salt, text.space, most, 0, 0
        )  # fmt: skip
        numbers[row, _ASKED:] = (-1, 0, 0, 0)
        averages[row] = totals[_MEAN_HITS], totals[_MEAN_EXPECTED], 0.0
        self._copied[row] = 0
        self._text_of[row] = text
        self._row_of[sequence] = row
        self._of_request.setdefault(request.request_id, []).append(sequence)
        return row


@njit(cache=True, nogil=True)
def _take_in(
    tokens: np.ndarray, new: np.ndarray, end: int, ends: np.ndarray, vocabulary: int
) -> bool:
    """Writes new tokens from `end` on, and separators for those at which a text ends. False if one
    is beyond the vocabulary."""
    for index in range(len(new)):
        token = new[index]
        if token >= vocabulary:
            return False
        for last in ends:
            if token == last:
                token = SEPARATOR
        tokens[end + index] = token
    tokens[end + len(new)] = SEPARATOR
    return True


@njit(cache=True, nogil=True)
def catch_up(
    tokens: np.ndarray,
    live: LiveArrays,
    batch: np.ndarray,
    count: int,
    ends: np.ndarray,
    vocabulary: int,
    longest: int,
    asked: int,
    found: Proposals,
    record: np.ndarray,
    where: np.ndarray,
    most: np.ndarray,
    trust: np.ndarray,
) -> None:
    """Takes in new tokens and judges the drafts of proposal `asked` by them.

    Args:
        tokens: of all texts.
        batch, count: of a `Fresh`.
        ends: tokens at which a text ends.
        vocabulary: a sequence with a token of this or above is left alone.
        longest: tokens beyond which nothing is drafted.
        found, record: that proposal, and the record of its kinds.
        where: [6, S] int64, written, for `sources.Rows`.
        most: [S] int32, written: nodes that each draft may have.
        trust: [S] float32, written: what to scale the odds of its estimates by.
    """
    numbers, averages, totals = live
    first = 3 * count
    for i in range(count):
        row, limit, size = batch[i], batch[count + i], batch[2 * count + i]
        number, average = numbers[row], averages[row]
        new = batch[first : first + size]
        first += size
        if number[FOREIGN] == 0 and len(new) > 0:
            if _take_in(tokens, new, number[END], ends, vocabulary):
                number[END] += len(new)
            else:
                tokens[number[END]] = SEPARATOR
                number[FOREIGN] = 1
                totals[_NUM_FOREIGN] += 1
        if number[_ASKED] == asked:
            accepted = judge(
                tokens, number[_ASKED_END], number[END], number[_PLACE], found.tokens,
                found.parents, found.buckets, found.counts, number[_KEPT], record,
            )  # fmt: skip
            if number[_KEPT] > 0:
                average[HITS] += (1 - _MEMORY) * (accepted - average[HITS])
                average[_EXPECTED] += (1 - _MEMORY) * (average[_PROPOSED] - average[_EXPECTED])
                step = (1 - _MEMORY) / 8
                totals[_MEAN_HITS] += step * (accepted - totals[_MEAN_HITS])
                totals[_MEAN_EXPECTED] += step * (average[_PROPOSED] - totals[_MEAN_EXPECTED])
        where[0, i], where[1, i], where[2, i] = number[SALT], number[SPACE], number[FIRST]
        where[3, i], where[4, i], where[5, i] = number[INDEXED], number[END], row
        left = longest - (number[END] - number[FIRST])
        most[i] = max(min(limit, number[MOST], left), 0) if number[FOREIGN] == 0 else 0
        trust[i] = min(max(average[HITS] / max(average[_EXPECTED], 1e-6), _FLOOR), _CEILING)


@njit(cache=True, nogil=True)
def hand_over(
    live: LiveArrays,
    rows: np.ndarray,
    asked: int,
    found: Proposals,
    kept: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> None:
    """Notes the drafts of proposal `asked` and writes their nodes one after the other.

    Args:
        kept: [S] first nodes of each draft that are verified.
        tokens, parents: [sum of kept] int32, written.
    """
    numbers, averages, _ = live
    at = 0
    for i in range(len(rows)):
        number = numbers[rows[i]]
        expected = 0.0
        for node in range(kept[i]):
            tokens[at], parents[at] = found.tokens[i, node], found.parents[i, node]
            expected += found.path_probs[i, node]
            at += 1
        averages[rows[i], _PROPOSED] = expected
        number[_ASKED], number[_PLACE] = asked, i
        number[_ASKED_END], number[_KEPT] = number[END], kept[i]
