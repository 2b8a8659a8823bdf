"""What the lookahead cache remembers of live sequences, in arrays that compiled code works on.

A step's bookkeeping is two compiled calls, however many sequences there are: `catch_up` takes in
their new tokens and judges their last drafts by them, `hand_over` notes what they got this time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.core.draft import MAX_NODES
from hetero_llm.core.request import Request, Sequence
from hetero_llm.cpu.lookahead.calibration import judge
from hetero_llm.cpu.lookahead.texts import HEADER, SEPARATOR, Text, Texts, namespace

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


class FoundArrays(NamedTuple):
    """Drafts: see `Proposals`."""

    tokens: np.ndarray
    parents: np.ndarray
    survival: np.ndarray
    kind: np.ndarray
    counts: np.ndarray


class Live:
    """Rows of live sequences. One thread at a time.

    Args:
        width: tokens of the longest sequence.
        ends: tokens at which a text ends.
        vocabulary: a sequence with a token of this or above is left alone.
        longest: tokens beyond which nothing is drafted.

    Attributes:
        texts: their tokens.
        arrays: replaced by larger ones by `follow`.
    """

    def __init__(self, width: int, ends: tuple[int, ...], vocabulary: int, longest: int) -> None:
        self.texts = Texts(width)
        self.arrays = LiveArrays(
            np.zeros((0, _NUM_NUMBERS), np.int64), np.zeros((0, 3)), np.array([1.0, 1.0, 0.0])
        )
        self._ends = np.array(ends, np.int32)
        self._vocabulary = vocabulary
        self._longest = longest
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

    def follow(
        self, sequences: list[Sequence], learn_from: int | None
    ) -> tuple[NDArray[np.int64], list[int], list[int]]:
        """Rows of sequences, which get one if they have none, and their new tokens.

        Args:
            learn_from: first token of an output that is to be indexed, counted from its prompt's
                end; None for the first token of the prompt.

        Returns:
            rows [S]; the new tokens of all, one after the other; how many each has.
        """
        rows: list[int] = []
        fresh: list[int] = []
        sizes: list[int] = []
        copied = self._copied
        for sequence in sequences:
            row = self._row_of.get(sequence)
            if row is None:
                row = self._open(sequence, learn_from)
            tokens = sequence.token_ids
            before = copied[row]
            size = len(tokens) - before
            rows.append(row)
            sizes.append(size)
            if size == 1:
                fresh.append(tokens[before])
            else:
                fresh += tokens[before:]
            copied[row] = before + size
        return np.array(rows, np.int64), fresh, sizes

    def catch_up(
        self,
        followed: tuple[NDArray[np.int64], list[int], list[int]],
        limits: list[int],
        asked: int,
        found: FoundArrays,
        record: NDArray[np.float32],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Takes in what `follow` returned and judges the drafts of proposal `asked` by it.

        Args:
            limits: [S] most nodes of each draft.
            found, record: that proposal, and the record of its kinds.

        Returns:
            where: [6, S] for `Rows`. most: [S] nodes that each draft may have. trust: [S] what to
            scale its estimates by.
        """
        rows, fresh, sizes = followed
        where = np.empty((6, len(rows)), np.int64)
        most = np.array(limits, np.int32)
        trust = np.empty(len(rows), np.float32)
        _catch_up(
            self.texts.tokens, self.arrays, rows, np.array(fresh, np.int32),
            np.array(sizes, np.int64), self._ends, self._vocabulary, self._longest, asked, found,
            record, where, most, trust,
        )  # fmt: skip
        return where, most, trust

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[6, S] for `Rows`."""
        numbers = self.arrays.numbers[rows]
        return np.stack([*numbers[:, [SALT, SPACE, FIRST, INDEXED, END]].T, rows])

    def close(self, request: Request, found: FoundArrays, record: NDArray[np.float32]) -> list[int]:
        """Takes in the last tokens of an ended request; returns its rows, still to be forgotten."""
        sequences = self._of_request.pop(request.request_id, [])
        if not sequences:
            return []
        followed = self.follow(sequences, None)
        self.catch_up(followed, [0] * len(sequences), NO_PROPOSAL, found, record)
        for sequence in sequences:
            del self._row_of[sequence]
        self.arrays.numbers[followed[0], CLOSED] = 1
        return followed[0].tolist()

    def forget(self, row: int) -> None:
        """The row is free for another sequence."""
        self.texts.close(self._text_of.pop(row))

    def _open(self, sequence: Sequence, learn_from: int | None) -> int:
        request = sequence.request
        text = self.texts.open(namespace(request.root))
        row = text.row
        if row >= len(self._copied):
            more = 2 * row + 1 - len(self._copied)
            self._copied += [0] * more
            numbers, averages, totals = self.arrays
            numbers = np.concatenate([numbers, np.zeros((more, _NUM_NUMBERS), np.int64)])
            averages = np.concatenate([averages, np.zeros((more, 3))])
            self.arrays = LiveArrays(numbers, averages, totals)
        begin = text.first
        head = begin + max(sequence.num_prompt - HEADER, 0)
        indexed = begin if learn_from is None else begin + sequence.num_prompt + learn_from
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
                token = np.int32(SEPARATOR)
        tokens[end + index] = token
    tokens[end + len(new)] = SEPARATOR
    return True


@njit(cache=True, nogil=True)
def _catch_up(
    tokens: np.ndarray,
    live: LiveArrays,
    rows: np.ndarray,
    fresh: np.ndarray,
    sizes: np.ndarray,
    ends: np.ndarray,
    vocabulary: int,
    longest: int,
    asked: int,
    found: FoundArrays,
    record: np.ndarray,
    where: np.ndarray,
    most: np.ndarray,
    trust: np.ndarray,
) -> None:
    """See `Live.catch_up`; writes `where`, `most` and `trust`."""
    numbers, averages, totals = live
    first = 0
    for i in range(len(rows)):
        row = rows[i]
        number, average = numbers[row], averages[row]
        new = fresh[first : first + sizes[i]]
        first += sizes[i]
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
                found.parents, found.kind, found.counts, number[_KEPT], record,
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
        most[i] = max(min(most[i], number[MOST], left), 0) if number[FOREIGN] == 0 else 0
        trust[i] = min(max(average[HITS] / max(average[_EXPECTED], 1e-6), _FLOOR), _CEILING)


@njit(cache=True, nogil=True)
def hand_over(
    live: LiveArrays,
    rows: np.ndarray,
    asked: int,
    found: FoundArrays,
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
            expected += found.survival[i, node]
            at += 1
        averages[rows[i], _PROPOSED] = expected
        number[_ASKED], number[_PLACE] = asked, i
        number[_ASKED_END], number[_KEPT] = number[END], kept[i]
