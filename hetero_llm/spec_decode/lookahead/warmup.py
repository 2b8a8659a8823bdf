"""Warm-up: reads a file of token ids into the global cache while requests are served already.

Two kinds of file. TACO-LLM's, JSON: `[{"prompt": [ids], "output": [ids]}, ...]`, for which the same
objects one a line (JSON Lines) will do as well; its texts belong to no cache_salt. Or a snapshot.

A thread of its own builds the static generation and puts it in place when it is whole; until then
drafts come without it. Compiled code holds no lock, and the thread works a fifth of the time, in
short bursts, so that the step loop hardly waits for it. Records that cannot be used are skipped and
counted, and one line of the log names the first reason. Reading is bounded: it ends at 64 MiB plus
32 characters for each token of `cache_size`, at a record of more than 4 MiB, and behind a thousand
records in a row that cannot be used.
"""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections.abc import Iterator
from threading import Event, Thread, current_thread
from time import perf_counter
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import is_snapshot
from hetero_llm.core.errors import SnapshotError
from hetero_llm.spec_decode.lookahead.global_cache import Generation, GlobalCache
from hetero_llm.spec_decode.lookahead.sequence_state import PROMPT_TAIL, with_separators
from hetero_llm.spec_decode.lookahead.snapshot import (
    SnapshotRequirements,
    read_header,
    read_snapshot,
)

logger = logging.getLogger(__name__)

_KEYS = ("prompt", "output")
_CHUNK, _MARGIN = 1 << 20, 1024  # characters, see `read_records`
MOST_RECORD = 4 << 20
"""Characters of a record: parsing one holds up the step loop."""
_LEAST_FILE, _CHARACTERS_OF_A_TOKEN = 64 << 20, 32
MOST_IN_A_ROW = 1000
"""Records that cannot be used, behind which reading ends."""
_BATCH = 4096  # tokens learned at once
_BURST = 2e-4  # seconds of work before a rest
_REST = 4  # times as long: of equal length, rests let steps on two cores take half as long again
_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


class WarmupRecord(NamedTuple):
    """A JSON value of a warm-up file and the line where it begins; or why there is none."""

    line: int
    value: Any
    problem: str | None = None


class Warmup:
    """Reads a warm-up file into a global cache, from its construction on.

    Args:
        namespace: the salt in the cache of requests without a cache_salt.
        ignore_prompt: learn outputs only.
        batch_tokens: tokens learned at once; a longer document is learned by itself.

    Attributes:
        num_records, num_left_out, num_tokens: so far: records read, those that could not be used,
            and tokens learned. Of a snapshot each document is a record.
        problem: the first reason for leaving something out.
        not_read: why the rest of the file was not read; "" if all was, or was damaged.

    Raises:
        SnapshotError: the file is a snapshot that does not belong here.
    """

    def __init__(
        self,
        cache: GlobalCache,
        path: str,
        requirements: SnapshotRequirements,
        *,
        namespace: int,
        ignore_prompt: bool,
        batch_tokens: int = _BATCH,
    ) -> None:
        self._path = path
        self._batch_tokens = batch_tokens
        self._requirements = requirements
        self._namespace = namespace
        self._ignore_prompt = ignore_prompt
        self._is_snapshot = is_snapshot(path)
        if self._is_snapshot:
            requirements.check(path, read_header(path), as_static=True)
        self.num_records = self.num_left_out = self.num_tokens = 0
        self.problem: str | None = None
        self.not_read = ""
        self._stop = Event()
        self._busy_since = 0.0
        goal = weakref.ref(cache), cache.new_static()
        self._thread = Thread(target=self._run, args=goal, name="hetero-warmup", daemon=True)
        # Neither a closed engine nor the end of the process waits for the rest of the file.
        weakref.finalize(cache, _end, self._stop, self._thread)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits for the end of the file."""
        self._thread.join()

    def stop(self) -> None:
        """Stops reading; the cache stays as it is."""
        _end(self._stop, self._thread)

    # -- in the thread ----------------------------------------------------------------------

    def _run(self, cache: weakref.ref[GlobalCache], static: Generation) -> None:
        begin = self._busy_since = perf_counter()
        try:
            self._learn_snapshot(static) if self._is_snapshot else self._learn_records(static)
        except SnapshotError as error:
            self._leave_out(error.reason)
        except (OSError, MemoryError) as error:
            self._leave_out(f"the rest cannot be read: {error or type(error).__name__}")
        except Exception:
            logger.exception("warm-up file %s: the rest is left out", self._path)
        known = cache()
        if known is None or self._stop.is_set():
            return
        known.use(static)
        counts = self.num_records, self.num_tokens, perf_counter() - begin
        if self.problem is None:
            logger.info("warm-up file %s: %d records, %d tokens in %.1f s", self._path, *counts)
            return
        logger.warning(
            "warm-up file %s: %s (%d of %d records left out; %d tokens learned%s)",
            self._path, self.problem, self.num_left_out, self.num_records, self.num_tokens,
            self.not_read,
        )  # fmt: skip

    def _learn_snapshot(self, static: Generation) -> None:
        _, content = read_snapshot(self._path, self._requirements, as_static=True)
        batch = _Batch(static, self._batch_tokens)
        for part in (content.static, content.old, content.young):
            for tokens, num_known, namespace, _ in part.each():
                self.num_records += 1
                self.num_tokens += len(tokens) - num_known
                batch.add(tokens, num_known, namespace)
                if not self._may_continue():
                    return
        batch.learn()

    def _learn_records(self, static: Generation) -> None:
        batch = _Batch(static, self._batch_tokens)
        most = _LEAST_FILE + _CHARACTERS_OF_A_TOKEN * self._requirements.capacity
        in_a_row = 0
        with open(self._path, encoding="utf-8-sig") as file:
            for line, value, problem in read_records(file, most=most):
                self.num_records += 1
                try:
                    tokens = self._document(value, problem)
                    if batch.end + len(tokens) + 1 > self._requirements.capacity:
                        raise ValueError(f"cache_size ({self._requirements.capacity}) is full")
                except ValueError as error:
                    self._leave_out(f"line {line}: {error}")
                    in_a_row += 1
                    if in_a_row == MOST_IN_A_ROW:
                        reason = f"{in_a_row} records in a row cannot be used"
                        self.not_read = f"; what follows line {line} is not read: {reason}"
                        break
                else:
                    in_a_row = 0
                    self.num_tokens += len(tokens)
                    batch.add(tokens, 0, self._namespace)
                if not self._may_continue():
                    return
        batch.learn()

    def _document(self, value: Any, problem: str | None) -> NDArray[np.int32]:
        """The text of a record; ValueError for one that is none."""
        if problem is not None:
            raise ValueError(problem)
        if not isinstance(value, dict) or sorted(value) != sorted(_KEYS):
            raise ValueError('is not of the form {"prompt": [ids], "output": [ids]}')
        for key in _KEYS:
            ids = value[key]
            if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
                raise ValueError(f"{key!r} must be a list of token ids")
            most = self._requirements.voc_size
            if ids and (min(ids) < 0 or max(ids) >= most):
                wrong = next(token for token in ids if not 0 <= token < most)
                raise ValueError(f"token id {wrong} in {key!r} is beyond the vocabulary ({most})")
        prompt = value["prompt"][-PROMPT_TAIL:] if self._ignore_prompt else value["prompt"]
        return with_separators(
            np.array(prompt + value["output"], np.int32), self._requirements.stop_tokens
        )

    def _leave_out(self, problem: str) -> None:
        self.num_left_out += 1
        if self.problem is None:
            self.problem = problem

    def _may_continue(self) -> bool:
        busy = perf_counter() - self._busy_since
        if busy < _BURST:
            return True
        stopped = self._stop.wait(_REST * busy)
        self._busy_since = perf_counter()
        return not stopped


class _Batch:
    """Documents on their way into a generation, `most` tokens at a time."""

    def __init__(self, generation: Generation, most: int) -> None:
        self._most = most
        self._generation = generation
        self._waiting: list[tuple[NDArray[np.int32], int, int]] = []
        self._size = 0

    @property
    def end(self) -> int:
        """Of the generation's text when it has learned all."""
        return self._generation.end + self._size

    def add(self, tokens: NDArray[np.int32], num_known: int, namespace: int) -> None:
        if len(tokens) >= self._most:
            self.learn()
            self._generation.add(tokens, num_known, namespace, 0)
            return
        self._waiting.append((tokens, num_known, namespace))
        self._size += len(tokens) + 1
        if self._size >= self._most:
            self.learn()

    def learn(self) -> None:
        if self._waiting:
            self._generation.add_many(self._waiting, 0)
        self._waiting, self._size = [], 0


def _end(stop: Event, thread: Thread) -> None:
    stop.set()
    if thread is not current_thread() and thread.is_alive():
        thread.join()


def read_records(
    file: TextIO, *, most: int = _LEAST_FILE, chunk: int = _CHUNK, margin: int = _MARGIN
) -> Iterator[WarmupRecord]:
    """The values of a JSON list, or of each line if it begins otherwise; of a file of at most
    `most` characters.

    A line that is no JSON is a record with a problem. So is the last one where a list, or a file,
    cannot be read on.
    """
    source = _Source(file, most, chunk, margin)
    try:
        yield from _of_list(source) if source.peek() == "[" else _of_lines(source)
    except RecursionError:
        yield WarmupRecord(source.line, None, "is nested too deeply; the rest cannot be read")
    except json.JSONDecodeError as error:
        yield WarmupRecord(source.line, None, f"{error.msg}; the rest cannot be read")
    except UnicodeDecodeError as error:
        yield WarmupRecord(
            source.line, None, f"is not UTF-8 ({error.reason}); the rest cannot be read"
        )
    except (OSError, ValueError) as error:
        yield WarmupRecord(source.line, None, f"{error}; the rest cannot be read")


def _of_list(source: _Source) -> Iterator[WarmupRecord]:
    source.skip(1)
    following = source.peek()
    if following == "]":
        source.skip(1)
    while following != "]":
        source.peek()
        yield WarmupRecord(source.line, source.value())
        following = source.peek()
        if not following:
            raise ValueError("the list does not end")
        if following not in ",]":
            raise ValueError("',' or ']' is missing")
        source.skip(1)
    if source.peek():
        raise ValueError("something follows the list")


def _of_lines(source: _Source) -> Iterator[WarmupRecord]:
    while source.peek():
        line = source.line
        text = source.rest_of_line()
        try:
            record = WarmupRecord(line, json.loads(text))
        except json.JSONDecodeError as error:
            record = WarmupRecord(line, None, error.msg)
        except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
            record = WarmupRecord(line, None, str(error))
        yield record


class _Source:
    """A file's characters, read in chunks, up to `most`.

    Methods raise ValueError where the file, a value, a line, or white space is too long.

    Attributes:
        line: of the next character.
    """

    def __init__(self, file: TextIO, most: int, chunk: int, margin: int) -> None:
        self._file, self._chunk, self._margin = file, chunk, margin
        self._most = self._left = most
        self._text = ""
        self._at = 0
        self.line = 1

    def skip(self, count: int) -> None:
        end = self._at + count
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def peek(self) -> str:
        """Skips white space and returns the next character; "" at the end."""
        skipped = 0
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            skipped += space.end() - self._at
            self.skip(space.end() - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            _check_length(skipped)
            if not self._read_on():
                return ""

    def value(self) -> Any:
        """The JSON value that begins here; ValueError or RecursionError if there is none."""
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self._text) - self._margin or error.msg.startswith(
                    "Unterminated"
                )
                if cut:
                    _check_length(len(self._text) - self._at)
                    if self._read_on():
                        continue
                self.skip(error.pos - self._at)
                raise
            self.skip(end - self._at)
            return value

    def rest_of_line(self) -> str:
        begin = 0
        while (end := self._text.find("\n", self._at + begin)) < 0:
            begin = len(self._text) - self._at
            _check_length(begin)
            if not self._read_on():
                end = len(self._text)
                break
        line = self._text[self._at : end]
        self.skip(len(line))
        return line

    def _read_on(self) -> bool:
        """Appends at least as much as is left, so that a long value is not parsed too often."""
        rest = self._text[self._at :]
        more = self._file.read(min(max(self._chunk, len(rest)), self._left + 1))
        if len(more) > self._left:
            raise ValueError(f"the file is longer than {self._most} characters")
        self._left -= len(more)
        self._text, self._at = rest + more, 0
        return bool(more)


def _check_length(characters: int) -> None:
    if characters > MOST_RECORD:
        raise ValueError(f"a record is longer than {MOST_RECORD} characters")
