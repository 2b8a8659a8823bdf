"""Collectives of the ranks of one host over memory that their GPUs all map, in steps that are
captured in CUDA graphs and in those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_llm.gpu.kernels.collectives import (
    CONTROL_WORDS,
    GAVE_UP,
    LOOKS,
    NOT_YET_BITS,
    TILE_BYTES,
    Norm,
    Patience,
    ReceiveBuffer,
    gather_columns,
    gathered_rows,
    sum_rows,
    two_shot_elements,
    two_shot_sum,
)
from hetero_llm.gpu.kernels.norm import MAX_NORM_SIZE
from hetero_llm.gpu.peer_memory import (
    Maker,
    PeerMemory,
    RankExchange,
    close_peer_memory,
    make_peer_memory,
)
from hetero_llm.models.collectives import Rank

START_SECONDS = 120.0
"""How long a launch waits for its peers while an engine starts: they may be compiling kernels."""

SERVING_SECONDS = 120.0
"""The same once the engine serves: a step of a new kind compiles kernels on one rank while another
one has them. The death of a rank is noticed by the engine, which calls `abort`."""

_LOOK_SECONDS = 0.7e-6  # of one read of the own memory (a guess; tests/two_gpus measures it)
_MOST_LOOKS = 2**31 - 1

# What a launch moves at most; more takes several. With two ranks one shot sends what two shots
# would and fuses the norm, so it serves all sizes. With more it sends (size - 1) / 2 * size / (size
# - 1) = size / 2 times as much, which is slower than a second hop of about 2 us from here on.
# Numbers rather than measurements: every rank has to choose alike.
_ONE_SHOT_BYTES_OF_TWO = 16 << 20
_ONE_SHOT_BYTES = 2 << 20  # over the number of ranks
_TWO_SHOT_BYTES = 16 << 20
GATHERED_BYTES, GATHERED_BYTES_OF_ROWS = 4 << 20, 16 << 20
"""Of a rank's columns, most that a launch gathers: of the logits of few tokens, and of the keys and
values of many."""

_FEW_ROWS = 64  # one program each


@dataclass(frozen=True)
class _Sizes:
    """Pieces of each receive buffer, and the bytes that all of them take."""

    row_bytes: int
    rows: int
    groups: int
    tiles: int

    @staticmethod
    def of(size: int, row_bytes: int, gathered_bytes: int) -> _Sizes:
        row_bytes = -(-row_bytes // 128) * 128
        one_shot = _ONE_SHOT_BYTES_OF_TWO if size == 2 else _ONE_SHOT_BYTES // size
        return _Sizes(
            row_bytes,
            max(one_shot // row_bytes, 1),
            max(_TWO_SHOT_BYTES // (TILE_BYTES * size), 1),
            gathered_bytes // TILE_BYTES,
        )

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """Pieces and bytes of a piece: rows, parts, sums, columns."""
        groups = (self.groups, TILE_BYTES)
        return (self.rows, self.row_bytes), groups, groups, (self.tiles, TILE_BYTES)

    def num_bytes(self, size: int) -> int:
        return sum(ReceiveBuffer.num_bytes(size, *buffer) for buffer in self.buffers())


class PeerCollectives:
    """`models.collectives.Collectives` by kernels that write into the peers' memory.

    All ranks call the same methods in the same order, on one stream at a time, captured or not.

    Args:
        memory: At least `_Sizes.num_bytes`, all `NOT_YET_BITS`.
        row_bytes: Of the rows that are summed most: the hidden size in the model's type.
        gathered_bytes: Of a rank's columns, most that a launch gathers.

    Attributes:
        rank: Of this process.
        in_graphs: Its launches may be captured in CUDA graphs.
    """

    in_graphs = True

    def __init__(
        self,
        memory: PeerMemory,
        exchange: RankExchange,
        device: torch.device,
        *,
        row_bytes: int,
        gathered_bytes: int = GATHERED_BYTES,
    ) -> None:
        self.rank = Rank(exchange.rank, exchange.size)
        self._memory, self._exchange = memory, exchange
        sizes = _Sizes.of(self.rank.size, row_bytes, gathered_bytes)
        buffers, first = [], 0
        for pieces, piece_bytes in sizes.buffers():
            end = first + ReceiveBuffer.num_bytes(self.rank.size, pieces, piece_bytes) // 2
            parts = tuple(tensor[first:end] for tensor in memory.tensors)
            turns = torch.zeros(pieces, dtype=torch.int32, device=device)
            buffers.append(ReceiveBuffer(parts, turns, self.rank.index, piece_bytes))
            first = end
        self._rows, self._parts, self._sums, self._columns = buffers
        self._patience = Patience(
            torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Of its own: what runs on the others waits for peers.
        self._abort_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.set_patience(START_SECONDS)

    def set_patience(self, seconds: float) -> None:
        """How long launches wait for their peers from now on, captured ones included."""
        self._patience.control[LOOKS] = min(int(seconds / _LOOK_SECONDS), _MOST_LOOKS)

    def abort(self) -> None:
        """Ends launches that wait for peers, captured ones included; any thread may call it."""
        self._patience.errors[0] = 1
        word = self._patience.control[GAVE_UP : GAVE_UP + 1]
        if self._abort_stream is None:
            word.copy_(self._one)
            return
        with torch.cuda.stream(self._abort_stream):
            word.copy_(self._one, non_blocking=True)

    @property
    def gave_up(self) -> bool:
        """Whether a launch that has ended did not get what it waited for. Results since then are
        garbage, and this object is of no use any more. Reads host memory and waits for nothing."""
        return bool(self._patience.errors[0])

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives`. Any shape; float32, bfloat16 or float16."""
        x = x.contiguous()
        if x.numel() == 0:
            return x
        width = x.shape[-1] if x.dim() else 1
        rows = x.view(-1, width)
        wide = len(rows) <= _FEW_ROWS or 2 * width * x.itemsize >= self._rows.piece_bytes
        if wide and len(rows) <= self._rows.num_pieces and self._in_one_shot(rows):
            return sum_rows(rows, self._rows, self._patience)[0].view(x.shape)
        out = torch.empty_like(x)
        elements = two_shot_elements(self._parts, x.dtype)
        for part, of_out in zip(
            x.flatten().split(elements), out.flatten().split(elements), strict=True
        ):
            two_shot_sum(part, of_out, self._parts, self._sums, patience=self._patience)
        return out

    def gather_columns(self, x: Tensor) -> Tensor:
        """See `Collectives`. float32, bfloat16 or float16."""
        x = x.contiguous()
        rows, n = x.shape
        out = x.new_empty(rows, n * self.rank.size)
        if x.numel() == 0:
            return out
        most = gathered_rows(self._columns, n, x.dtype)
        assert most > 0, f"{n} columns are more than a rank can gather"
        for part, of_out in zip(x.split(most), out.split(most), strict=True):
            gather_columns(part, of_out, self._columns, patience=self._patience)
        return out

    def norms(self, x: Tensor) -> bool:
        """Whether `sum_norm` serves these rows."""
        return x.dim() == 2 and x.is_contiguous() and self._in_one_shot(x)

    def sum_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, gemma: bool
    ) -> tuple[Tensor, Tensor]:
        """The RMS norm of the sum over all ranks plus `residual`, and what was normed: an `AddNorm`
        behind an `all_reduce`, with the same bits.

        Args:
            x: [T, size] that `norms` serves.
            residual: As x, overwritten; None: the sum itself is normed.
            gemma: As `kernels.norm.add_gemma_rms_norm`.
        """
        norm, most = Norm(weight, eps, gemma), self._rows.num_pieces
        if residual is None:
            parts = [
                sum_rows(part, self._rows, self._patience, norm=norm) for part in x.split(most)
            ]
            outs, totals = zip(*parts, strict=True)
            return (*parts[0],) if len(parts) == 1 else (torch.cat(outs), torch.cat(totals))
        out = torch.empty_like(x)
        for part, added, of_out in zip(
            x.split(most), residual.split(most), out.split(most), strict=True
        ):
            sum_rows(part, self._rows, self._patience, norm=norm, residual=added, out=of_out)
        return out, residual

    def check_integrity(self) -> None:
        """Asserts that nothing is left in the own receive buffers. Between steps that all ranks
        have ended."""
        for buffer in (self._rows, self._parts, self._sums, self._columns):
            left = (buffer.memories[self.rank.index] != NOT_YET_BITS).sum()
            assert left == 0, f"{left} elements were sent and not taken"

    def _in_one_shot(self, rows: Tensor) -> bool:
        """Whether one shot serves [rows, width], in several launches with two ranks."""
        width = rows.shape[1]
        fits = width * rows.itemsize <= self._rows.piece_bytes and width <= MAX_NORM_SIZE
        few = rows.nbytes <= self._rows.num_pieces * self._rows.piece_bytes
        return fits and (few or self.rank.size == 2)

    def close(self) -> None:
        """Waits for the device and for all ranks that live, and gives the memory back. Graphs that
        captured a collective must not be replayed any more."""
        close_peer_memory(self._memory, self._exchange)


def open_peer_collectives(
    row_bytes: int,
    device: torch.device,
    exchange: RankExchange,
    *,
    gathered_bytes: int = GATHERED_BYTES,
    makers: Sequence[tuple[str, Maker]] | None = None,
) -> PeerCollectives:
    """Maps memory on all ranks and makes their collectives. All ranks call it.

    Args:
        row_bytes, gathered_bytes: As `PeerCollectives`.
        device: Of this rank, the current CUDA device.
        makers: As `make_peer_memory`.

    Raises:
        PeersUnreachable: On all ranks; other collectives have to serve.
    """
    num_bytes = _Sizes.of(exchange.size, row_bytes, gathered_bytes).num_bytes(exchange.size)
    memory = make_peer_memory(num_bytes, device, exchange, fill=NOT_YET_BITS, makers=makers)
    collectives = PeerCollectives(
        memory, exchange, device, row_bytes=row_bytes, gathered_bytes=gathered_bytes
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    exchange.gather(None)  # no rank sends before all are ready
    return collectives
