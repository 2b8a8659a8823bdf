"""Copies stored tensors into a model, in pieces, with a few threads that read larger ones ahead.

A piece whose target is in host memory, contiguous and of the stored type is read directly into it;
every other piece is read into a staging buffer. For a target in host memory the reading thread
converts it from there. For a GPU the buffers are pinned, the calling thread starts the copies,
which overlap the next reads, and the device converts types. The number of bytes that are read but
not yet copied is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hetero_llm.models.weight_files import StoredTensor, WeightFile
from hetero_llm.utils.gc_control import usual_wakeups

_THREADS = 8
_MIB = 1 << 20
_MOST_AHEAD, _LEAST_AHEAD = 128 * _MIB, 8 * _MIB
_SHARE_AHEAD = 20  # at most a 20th of the weights, so that small models load in little memory
_PIECES_AHEAD = 16
_HANDED = 32 << 10  # bytes, which a thread reads in less time than it takes to hand them over
SMALL_ROW = 4 << 10
"""Bytes: parts of rows below a page are not read one by one, since disks and the kernel read pages:
what lies between them is read, too."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a stored tensor's bytes, or equal parts of several of its rows.

    Attributes:
        offset: Of its first byte, from the tensor's first byte.
        target: The elements' destination in the same order: any floating type, strides and device.
        dtype: The parameter's; the elements must be finite numbers in it.
        then: Called by the calling thread when the target holds the piece.
        pitch: Bytes in the file from the start of a row of the target to that of the next one; 0:
            the rows follow one another.
    """

    file: WeightFile
    tensor: StoredTensor
    offset: int
    target: Tensor
    dtype: torch.dtype
    then: Callable[[], None] | None = None
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        """As stored."""
        assert self.tensor.dtype is not None
        return self.target.numel() * self.tensor.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether bytes can be read directly into the target."""
        target = self.target
        run = target.dim() == 1 and target.stride(0) == 1
        return run and target.dtype == self.tensor.dtype and target.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Limits of reading ahead.

    Attributes:
        bytes: Read but not yet copied.
        piece_bytes: Of a piece; more if a row of a strided target is larger.
        handed_bytes: Of the smallest piece that is handed to a thread; the calling thread reads
            those below.
    """

    bytes: int
    piece_bytes: int
    handed_bytes: int = 0

    @staticmethod
    def of(total: int) -> ReadAhead:
        """For `total` bytes of weights."""
        ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, total // _SHARE_AHEAD))
        return ReadAhead(ahead, ahead // _PIECES_AHEAD, _HANDED)


def pieces_of(
    file: WeightFile, tensor: StoredTensor, target: Tensor, *, dtype: torch.dtype, piece_bytes: int
) -> Iterator[Piece]:
    """Cuts a tensor of the target's shape. A strided target is cut between its rows only, so that
    a piece may be larger than `piece_bytes`. `dtype`: see `Piece`."""
    assert tensor.dtype is not None
    if target.numel() == 0:
        return
    if target.is_contiguous():
        target = target.view(-1)
    row_bytes = target[0].numel() * tensor.dtype.itemsize
    rows = max(1, piece_bytes // row_bytes)
    for first in range(0, len(target), rows):
        yield Piece(file, tensor, first * row_bytes, target[first : first + rows], dtype)


def pieces_of_slice(
    file: WeightFile,
    tensor: StoredTensor,
    target: Tensor,
    *,
    dim: int,
    runs: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    piece_bytes: int,
) -> Iterator[Piece]:
    """The same for the indices in `runs`, (first, count) each and rising, of one of the tensor's
    dims; the target has these alone. Of other dims than the first, each row's part is read by
    itself, but for those below `SMALL_ROW` bytes."""
    assert tensor.dtype is not None
    inner = math.prod(tensor.shape[dim + 1 :]) * tensor.dtype.itemsize
    pitch, at = tensor.shape[dim] * inner, 0
    for first, count in runs:
        part, at = target.narrow(dim, at, count), at + count
        if dim == 0:
            for piece in pieces_of(file, tensor, part, dtype=dtype, piece_bytes=piece_bytes):
                yield replace(piece, offset=piece.offset + first * inner)
            continue
        part = part.flatten(0, dim - 1)
        step = max(1, piece_bytes // (count * inner))
        for row in range(0, len(part), step):
            rows = part[row : row + step]
            yield Piece(file, tensor, row * pitch + first * inner, rows, dtype, pitch=pitch)


def copy_pieces(
    pieces: Iterable[Piece], ahead: ReadAhead, copied: Callable[[Piece], None]
) -> list[str]:
    """Fills the targets; copies to a GPU may still run on the device's current stream.

    Args:
        pieces: Grouped by file. Taken one at a time, so that their targets are created no earlier
            than needed.
        copied: Called by the calling thread after each piece, in order.

    Returns:
        The names of tensors that hold NaN, or numbers that are infinite in their parameter's type.

    Raises:
        ModelLoadError: A piece cannot be read; of several, the first one in order.
    """
    staging = _Staging(ahead.piece_bytes, _PIECES_AHEAD)
    waiting: deque[tuple[Piece, Tensor | None, Future[bool]]] = deque()
    reading: list[WeightFile] = []
    not_finite: dict[str, None] = {}
    held = 0

    def finish() -> int:
        piece, buffer, done = waiting.popleft()
        if not done.result():
            not_finite[piece.tensor.name] = None
        if buffer is not None:
            event = _start_copy(piece, buffer) if piece.target.is_cuda else None
            staging.give_back(buffer, event)
        if piece.then is not None:
            piece.then()
        copied(piece)
        while reading[0] is not piece.file:
            reading.pop(0).close()
        return piece.nbytes

    with _one_thread_each():
        pool = ThreadPoolExecutor(_THREADS, "weights", initializer=usual_wakeups)
        try:
            for piece in pieces:
                while waiting and (
                    held + piece.nbytes > ahead.bytes or len(waiting) + 1 >= _PIECES_AHEAD
                ):
                    held -= finish()
                if not reading or reading[-1] is not piece.file:
                    piece.file.open()
                    reading.append(piece.file)
                buffer = None
                if not piece.is_direct:
                    buffer = staging.take(piece.nbytes, piece.target.is_cuda)
                if piece.nbytes < ahead.handed_bytes:
                    done = _fetched(piece, buffer)
                else:
                    done = pool.submit(_fetch, piece, buffer)
                waiting.append((piece, buffer, done))
                held += piece.nbytes
            while waiting:
                finish()
        finally:
            # Running reads end after at most one piece: Ctrl-C waits no longer than that.
            pool.shutdown(wait=True, cancel_futures=True)
            for file in reading:
                file.close()
    return list(not_finite)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limits torch to one thread: each reading thread would start a team of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fetched(piece: Piece, buffer: Tensor | None) -> Future[bool]:
    """`_fetch` at once; an error comes when it is the piece's turn."""
    done: Future[bool] = Future()
    try:
        done.set_result(_fetch(piece, buffer))
    except Exception as error:
        done.set_exception(error)
    return done


def _fetch(piece: Piece, buffer: Tensor | None) -> bool:
    """Reads a piece, and copies it to its target if that is in host memory. Returns whether all
    numbers are finite: checking them while they are in the core's cache costs half of a copy."""
    out = piece.target.detach().view(torch.uint8) if buffer is None else buffer[: piece.nbytes]
    if piece.pitch:
        _read_rows(piece, out.numpy())
    else:
        piece.file.read(piece.tensor, piece.offset, out.numpy())
    assert piece.tensor.dtype is not None
    stored = out.view(piece.tensor.dtype)
    if buffer is not None and not piece.target.is_cuda:
        piece.target.copy_(stored.view(piece.target.shape))
    return _is_finite(stored, piece.dtype)


def _read_rows(piece: Piece, out: np.ndarray) -> None:
    """Reads the parts of rows of a piece with a pitch, one behind the other."""
    rows = len(piece.target)
    width = piece.nbytes // rows
    parts = out.reshape(rows, width)
    if width >= SMALL_ROW:
        for row in range(rows):
            piece.file.read(piece.tensor, piece.offset + row * piece.pitch, parts[row])
        return
    span = np.empty((rows - 1) * piece.pitch + width, np.uint8)
    piece.file.read(piece.tensor, piece.offset, span)
    np.copyto(parts, np.lib.stride_tricks.as_strided(span, (rows, width), (piece.pitch, 1)))


def _is_finite(stored: Tensor, dtype: torch.dtype) -> bool:
    """Whether all are finite numbers in `dtype`."""
    if not stored.dtype.is_floating_point:
        return True
    if stored.dtype.itemsize == 1:  # e4m3fn has no infinities, and two codes of NaN
        return not bool((stored.view(torch.uint8) & 0x7F == 0x7F).any())
    low, high = torch.aminmax(stored)  # passes NaN on
    return all(math.isfinite(extreme.to(dtype).item()) for extreme in (low, high))


def _start_copy(piece: Piece, buffer: Tensor) -> torch.cuda.Event:
    """Copies from a pinned buffer to the GPU; the event tells when the buffer is free again."""
    target = piece.target
    assert piece.tensor.dtype is not None
    staged = buffer[: piece.nbytes].view(piece.tensor.dtype).view(target.shape)
    if staged.dtype != target.dtype or not target.is_contiguous():
        staged = staged.to(target.device, non_blocking=True)  # the device converts, not the host
    target.copy_(staged, non_blocking=True)
    return torch.cuda.current_stream(target.device).record_event()


class _Staging:
    """At most `most` buffers of `size` bytes for each of pageable and pinned memory. Only the
    calling thread uses it."""

    def __init__(self, size: int, most: int) -> None:
        self._size, self._most = size, most
        self._made = {False: 0, True: 0}
        self._free: dict[bool, deque[tuple[Tensor, torch.cuda.Event | None]]]
        self._free = {False: deque(), True: deque()}

    def take(self, nbytes: int, pinned: bool) -> Tensor:
        """A free buffer; waits for the oldest copy if `most` buffers exist and none is free."""
        if nbytes > self._size:
            return self._make(nbytes, pinned)
        free = self._free[pinned]
        while free:
            buffer, copied = free[0]
            if copied is not None and not copied.query():
                if self._made[pinned] < self._most:
                    break
                copied.synchronize()
            free.popleft()
            return buffer
        self._made[pinned] += 1
        return self._make(self._size, pinned)

    def give_back(self, buffer: Tensor, copied: torch.cuda.Event | None) -> None:
        """`copied`: the event after which the buffer may be written again; None: at once."""
        if buffer.numel() == self._size:
            self._free[copied is not None].append((buffer, copied))
        elif copied is not None:
            copied.synchronize()

    def _make(self, nbytes: int, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
