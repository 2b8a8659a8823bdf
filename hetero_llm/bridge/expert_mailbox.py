"""The mailbox through which a step on the device asks CPU threads for the outputs of experts.

One mailbox serves one device and one team of threads. A layer's exchange has four moments, and the
next layer's begins after the last of them, so one mailbox is enough:

1. A kernel writes the tokens that need an expert on the host: their rows of `x`, and `ids` and
   `weights`. Then it writes the other words, and last, as a release to the whole system, SEQUENCE.
2. The team, which polls SEQUENCE, computes for each of these tokens the sum of weight * output over
   its experts on the host, without the device's part (`LinkPart`), and writes it to the token's row
   of `y`.
3. When that is done, or soon will be, it writes SEQUENCE's value to COMING; when the threads no
   longer use the mailbox, to ANSWERED.
4. A kernel, which polls COMING and then the rows of `y`, adds each sum that bears the number.

The layers of a step without such a token exchange nothing: SEQUENCE stays as it was, and no
kernel waits. Sequence numbers count exchanges from 1 on and wrap as int32; the team takes old
numbers out of `y` at its first exchange and after every 2^30, so that none comes round again. A
team that ends or fails writes STOPPED first, and a kernel that waits for an answer gives up.

Order of memory. An aligned load or store of 8 bytes is atomic between CPU and device in page-locked
memory (CUDA C++ Programming Guide, "Atomicity" of scoped operations; Intel SDM 3A, 9.1.1), so a sum
never comes without its number, whatever the order in which words become visible: no word of `y`
needs a fence. All reads of `x` and of the request precede the stores of `y` in the team (barriers
between threads, x86 on one), and a device that has seen all of a token's numbers is the only one
that writes the next request, so it may write over both.

All memory is page-locked; kernels read and write it where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

WORDS = 16
"""int32 words of `request` and of `answer`: a cache line each."""

SEQUENCE, LAYER, TOKENS, LINKED, WHOLE = 0, 1, 2, 3, 4
"""Words of `request`: the exchange's number; its layer, counted over the layers that have experts;
tokens of the step, rows of `ids` that the team has to look at; and `LinkPart.rows` and `whole`:
what the device computes itself of the experts that `ids` names."""

LINKED_UNIT, WHOLES = 128, 256
"""See `LinkPart`."""

COMING, STOPPED, ANSWERED = 0, 1, 2
"""Words of `answer`: the last exchange whose `y` is or soon will be complete; not zero: no answer
will come; the last exchange that has ended."""

ON_DEVICE = -1
"""In `ids`: this choice of the token is not the team's."""

ROW_UNIT = 128
"""Rows of `x` are as wide as a multiple of it, zeros behind the token's columns."""

Order = Literal["natural", "bytes", "nibbles"]
"""How a row of `x` is ordered: as the token's; or as the CPU's dot products unpack weights of 8
bits (each 64 columns) or 4 bits (each 128): see `Layout` of csrc/experts/matrix.h."""

ORDERS: tuple[Order, ...] = get_args(Order)
"""As kernels and the team number them."""


@dataclass(frozen=True, slots=True)
class LinkPart:
    """What the device computes of the experts that a request names: some inner rows of each, or
    some experts, or nothing. Both sides know it from the request alone.

    Attributes:
        rows: the last inner rows of every expert; those of the team are then a multiple of
            `LINKED_UNIT`.
        whole: `WHOLES`-ths of the different experts, rounded down to whole ones, those of the
            highest numbers. Not with `rows`.
    """

    rows: int = 0
    whole: int = 0


NO_PART = LinkPart()


@dataclass(frozen=True, slots=True)
class ExpertMailbox:
    """See the module.

    Attributes:
        request: [WORDS] int32, written by the device.
        answer: [WORDS] int32, written by the team.
        ids: [max_tokens, k] int32 experts of a layer, or `ON_DEVICE`. A token whose choices are
            all `ON_DEVICE` has undefined rows of `weights`, `x` and `y`.
        weights: [max_tokens, k] float32.
        x: [max_tokens, hidden rounded up to `ROW_UNIT`] in the model's dtype: inputs of experts.
        y: [max_tokens, hidden, 2] int32, written by the team: a float32's bits, and SEQUENCE's
            value of the exchange that it answers. Both are written and read at once, as 8 bytes.
        order: of the rows of `x`.
    """

    request: torch.Tensor
    answer: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    order: Order

    @property
    def sums(self) -> torch.Tensor:
        """[max_tokens, hidden] float32: of `y`, without the numbers; a view."""
        import torch

        return self.y.view(torch.float32)[..., 0]

    @property
    def numbers(self) -> torch.Tensor:
        """[max_tokens, hidden] int32: of `y`; a view."""
        return self.y[..., 1]


def order_for(kind: str, dtype: torch.dtype) -> Order:
    """The order of inputs in which the CPU multiplies without a copy of them.

    Args:
        kind: of the weights that meet the inputs.
        dtype: of the inputs.
    """
    import torch

    if dtype != torch.bfloat16:
        return "natural"
    orders: dict[str, Order] = dict.fromkeys(("int8", "fp8"), "bytes")
    orders |= dict.fromkeys(("int4", "fp4"), "nibbles")
    return orders.get(kind, "natural")


def columns_in(order: Order, width: int) -> torch.Tensor:
    """[width] int64: the token's column that each place of a row of `x` has."""
    import torch

    places = torch.arange(width)
    if order == "bytes":
        inside = (places >> 3 & 3) * 16 + (places >> 5 & 1) * 8 + (places & 7)
        return places // 64 * 64 + inside
    if order == "nibbles":
        byte = (places >> 3 & 3) * 16 + (places >> 5 & 1) * 8 + (places & 7)
        return places // 128 * 128 + 2 * byte + (places >> 6 & 1)
    return places


def ordered_inputs(mailbox: ExpertMailbox, x: torch.Tensor) -> torch.Tensor:
    """[N, width] rows for the mailbox's `x` of tokens [N, hidden]."""
    width = mailbox.x.shape[1]
    wide = x.new_zeros(len(x), width)
    wide[:, : x.shape[1]] = x
    return wide[:, columns_in(mailbox.order, width)]


def inputs_of(mailbox: ExpertMailbox) -> torch.Tensor:
    """[max_tokens, hidden]: a copy of the tokens in `x`."""
    wide = mailbox.x.new_zeros(mailbox.x.shape)
    wide[:, columns_in(mailbox.order, wide.shape[1])] = mailbox.x
    return wide[:, : mailbox.y.shape[1]]


def open_mailbox(
    max_tokens: int,
    hidden: int,
    experts_per_token: int,
    dtype: torch.dtype,
    *,
    pin: bool,
    order: Order = "natural",
) -> ExpertMailbox:
    """An empty mailbox.

    Args:
        max_tokens: of a step that may ask.
        hidden: elements of a row.
        dtype: of `x`.
        pin: page-locked memory; False: for tests in Triton's interpreter.
        order: of the rows of `x`; `order_for` has the one that saves the team a copy.
    """
    import torch

    def empty(*shape: int, of: torch.dtype) -> torch.Tensor:
        # Torch's blocks of page-locked memory are aligned to pages, so no two share a cache line.
        return torch.zeros(shape, dtype=of, pin_memory=pin)

    return ExpertMailbox(
        request=empty(WORDS, of=torch.int32),
        answer=empty(WORDS, of=torch.int32),
        ids=empty(max_tokens, experts_per_token, of=torch.int32),
        weights=empty(max_tokens, experts_per_token, of=torch.float32),
        x=empty(max_tokens, -(-hidden // ROW_UNIT) * ROW_UNIT, of=dtype),
        y=empty(max_tokens, hidden, 2, of=torch.int32),
        order=order,
    )
