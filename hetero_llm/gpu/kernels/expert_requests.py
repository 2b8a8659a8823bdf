"""Experts that the GPU does not hold: a layer asks CPU threads for them, and adds their answer.

- `post` maps each token's experts through the bank's table, counts them, and writes the tokens that
  need an expert on the host to the mailbox (`bridge.expert_mailbox`); then it releases the
  exchange's number. Without such a token it leaves the number as it is.
- `wait_add` adds up the outputs of the experts in the bank, waits for the answer if the layer has
  asked, adds its rows and rounds once. It is the last kernel of the layer's experts.

The number of the exchange is in device memory, so captured steps need no arguments: a graph may be
replayed as it is. Other kernels of the step run between the two, while the CPU computes.

Order of memory: the rows in the mailbox, a barrier of the program (and, with several programs, an
atomic of acquire and release in device memory), then a release of the number to the whole system,
which the CPU reads as an acquire. Each number of an answer comes with the exchange's number in the
same 8 bytes, and `wait_add` reads it until it does: nothing needs to order the answer.

References `post_reference`, `wait_add_reference`; timed by `bench.engine.hybrid_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import (
    COMING,
    LAYER,
    LINKED,
    NO_PART,
    ON_DEVICE,
    ORDERS,
    SEQUENCE,
    STOPPED,
    TOKENS,
    WHOLE,
    WORDS,
    ExpertMailbox,
    LinkPart,
    ordered_inputs,
)
from hetero_llm.gpu.kernels.launch import INTERPRETED, pdl_options, wait_and_release

ON_HOST = -1
"""In the bank's table, and in `Places.slots`: CPU threads compute this expert."""

NOWHERE = -2
"""In `Places.slots`: a padding token's, which no one computes."""

STATE_WORDS = 8
"""int32 words on the device that all exchanges of a mailbox share."""

NUMBER, ASKED, ARRIVED, GAVE_UP = range(4)
"""Words of the state: number of the last exchange; 1 if the layer has asked; programs of `post`
that have ended, and in the upper half those of them with a request; 1 once an answer has not come,
after which no layer asks any more."""

MOST_LOOKS = 10 << 20
"""About ten seconds, if reading a word of host memory takes 1 us."""

_MOST_POSTING = 16
_MOST_ADDING = 128
_TILE = 1024

_NUMBER, _ASKED, _ARRIVED, _GAVE_UP = (tl.constexpr(i) for i in range(4))
_SEQUENCE, _LAYER, _TOKENS, _LINKED, _WHOLE = (
    tl.constexpr(i) for i in (SEQUENCE, LAYER, TOKENS, LINKED, WHOLE)
)
_COMING, _STOPPED = tl.constexpr(COMING), tl.constexpr(STOPPED)
assert (COMING, STOPPED) == (0, 1)  # the two halves of one read
_ON_DEVICE, _ON_HOST, _NOWHERE = (tl.constexpr(i) for i in (ON_DEVICE, ON_HOST, NOWHERE))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One mailbox as kernels use it.

    Attributes:
        state: [STATE_WORDS] int32 on the device, zeros at first.
        errors: [1] int32 in page-locked memory: 1 once an answer has not come. The host may read it
            once an event recorded behind the step has happened.
        most_looks: readings until a layer gives up.
        rows: of a long step, `rows_of_mail`: only the tokens that ask have a row of the mailbox.
            None: each token has its own.
        part: of the experts on the host that the device computes itself (`linked_experts`).
    """

    mailbox: ExpertMailbox
    state: Tensor
    errors: Tensor
    most_looks: int = MOST_LOOKS
    rows: Tensor | None = None
    part: LinkPart = NO_PART


@dataclass(frozen=True, slots=True)
class Places:
    """Where the experts of each token are.

    Attributes:
        experts: [T, k] int32 experts of the layer, -1 where the bank has none to compute.
        slots: [T, k] int32 slots of the bank, `ON_HOST` or `NOWHERE`.
    """

    experts: Tensor
    slots: Tensor


@triton.jit
def _release(pointer, value, RELEASE: tl.constexpr):
    """Writes a word; whatever this program's threads wrote before their last barrier is visible to
    any thread of the system that reads it as an acquire. A fence and a relaxed store are a release;
    `st.release` would fence once more, which takes a trip over the link."""
    if RELEASE:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred one;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 one, thread, 0;
                @one fence.acq_rel.sys;
                @one st.relaxed.sys.global.b32 [$1], $2;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [pointer.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, value)


@triton.jit
def _look(words, ON_GPU: tl.constexpr):
    """COMING and, in the upper half, STOPPED, which lie side by side: one trip over the link."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "ld.relaxed.sys.global.b64 $0, [$1];",
            "=l,l",
            [words.to(tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        coming = tl.load(words + _COMING, volatile=True).to(tl.int64) & 0xFFFFFFFF
        return coming | (tl.load(words + _STOPPED, volatile=True).to(tl.int64) << 32)


@triton.jit
def _pause(SLEEP: tl.constexpr):
    if SLEEP:
        tl.inline_asm_elementwise(
            "nanosleep.u32 40; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _column_at(place, ORDER: tl.constexpr):
    """As `columns_in` of the mailbox."""
    inside = ((place >> 3) & 3) * 16 + ((place >> 5) & 1) * 8 + (place & 7)
    if ORDER == 1:
        return (place & ~63) + inside
    elif ORDER == 2:
        return (place & ~127) + 2 * inside + ((place >> 6) & 1)
    else:
        return place


# large: its arguments are half of it.
@triton.jit(do_not_specialize=["num_rows", "layer", "linked", "whole"])
def post_kernel(
    x,  # [num_rows, hidden], x_stride apart
    ids,  # [num_rows, K] int
    weights,  # [num_rows, K] float32
    kv_slots,  # [num_rows] int32, negative for padding; None
    table,  # [experts] int32 of the layer
    hits,  # [experts] int32 of the layer
    experts_out,  # see Places
    slots_out,
    state,
    request,  # see ExpertMailbox
    mail_ids,
    mail_weights,
    mail_x,
    mail_rows,  # [num_rows + 1] int32, see `post`; None
    num_rows,
    hidden,
    width,  # of the mailbox's rows, at least `hidden`
    x_stride,
    layer,
    linked,
    whole,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ORDER: tl.constexpr,  # of the mailbox's rows, see ORDERS
    ASK: tl.constexpr,  # False: there is no mailbox, and no expert on the host
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows with a fixed stride; grid (PROGRAMS)."""
    wait_and_release(PDL)
    lanes = tl.arange(0, K_LANES)
    places = tl.arange(0, TILE)
    requests = tl.program_id(0) * 0
    for row in tl.range(tl.program_id(0), num_rows, PROGRAMS, num_stages=1):
        there = lanes < K
        if kv_slots is not None:
            there = there & (tl.load(kv_slots + row) >= 0)
        place = row * K + lanes
        expert = tl.load(ids + place, mask=there, other=0).to(tl.int32)
        slot = tl.load(table + expert, mask=there, other=_NOWHERE).to(tl.int32)
        tl.atomic_add(hits + expert, 1, mask=there, sem="relaxed")
        tl.store(slots_out + place, slot, mask=lanes < K)
        tl.store(experts_out + place, tl.where(slot >= 0, expert, -1), mask=lanes < K)
        if ASK:
            on_host = slot == _ON_HOST
            asked = tl.max(on_host.to(tl.int32), 0)
            line = row
            if mail_rows is not None:
                line = tl.load(mail_rows + row)
            mail = line * K + lanes
            written = (lanes < K) & (line >= 0)
            tl.store(mail_ids + mail, tl.where(on_host, expert, _ON_DEVICE), mask=written)
            if asked != 0:
                share = tl.load(weights + place, mask=there, other=0.0)
                tl.store(mail_weights + mail, share, mask=there)
                source = x + tl.cast(row, tl.int64) * x_stride
                target = mail_x + tl.cast(line, tl.int64) * width
                # What is gathered is in the device's memory; stores to the host's are in a row.
                for start in tl.range(0, width, TILE, num_stages=1):
                    column = _column_at(start + places, ORDER)
                    part = tl.load(source + column, mask=column < hidden, other=0.0)
                    tl.store(target + start + places, part, mask=start + places < width)
            requests += asked
    if ASK:
        last = tl.program_id(0) == 0
        tl.debug_barrier()  # all threads of the program have written their rows
        if PROGRAMS > 1:
            mine = 1 + (tl.minimum(requests, 1) << 16)
            before = tl.atomic_add(state + _ARRIVED, mine, sem="acq_rel")
            last = (before & 0xFFFF) == PROGRAMS - 1
            requests = (before + mine) >> 16
        if last:
            asks = (requests > 0) & (tl.load(state + _GAVE_UP) == 0)
            tl.store(state + _ARRIVED, 0)
            tl.store(state + _ASKED, asks.to(tl.int32))
            if asks:
                number = tl.load(state + _NUMBER) + 1
                tl.debug_barrier()  # all threads have read it
                tl.store(state + _NUMBER, number)
                tl.store(request + _LAYER, layer)
                tokens = num_rows
                if mail_rows is not None:
                    tokens = tl.load(mail_rows + num_rows)
                tl.store(request + _TOKENS, tokens)
                tl.store(request + _LINKED, linked)
                tl.store(request + _WHOLE, whole)
                tl.debug_barrier()
                _release(request + _SEQUENCE, number, ON_GPU)


@triton.jit
def _wait_for_answer(words, number, looks, most_looks, ON_GPU: tl.constexpr):
    """Whether the answer to exchange `number` was announced before the readings came to
    `most_looks`; `looks`: how many are counted already. Numbers wrap, so their difference decides.
    Threads of a program read for themselves, and may find different ends."""
    found = _look(words, ON_GPU)
    behind = found.to(tl.int32) - number
    while (behind < 0) & (looks < most_looks):
        looks = tl.where((found >> 32) != 0, most_looks, looks + 1)
        _pause(ON_GPU)
        found = _look(words, ON_GPU)
        behind = found.to(tl.int32) - number
    return behind >= 0


@triton.jit
def _count_others(words, number, wanted):
    """How many of the wanted 8-byte words bear another exchange's number; all threads agree."""
    return tl.sum((wanted & ((words >> 32).to(tl.int32) != number)).to(tl.int32), 0)


@triton.jit
def _read_sums(source, number, wanted, most_looks, ON_GPU: tl.constexpr):
    """Reads 8-byte words until all that are wanted bear the number, or `most_looks` times more.
    Returns them, and how many do not."""
    found = tl.load(source, mask=wanted, other=0, volatile=True)
    missing = _count_others(found, number, wanted)
    tries = 0
    while (missing != 0) & (tries < most_looks):
        _pause(ON_GPU)
        # All again: masks of single words would take twice as many reads over the link.
        found = tl.load(source, mask=wanted, other=0, volatile=True)
        missing = _count_others(found, number, wanted)
        tries += 1
    return found, missing


@triton.jit(do_not_specialize=["num_rows", "most_looks"])
def wait_add_kernel(
    parts,  # [SPLIT_K, num_rows * K, n]; SUMMED [num_rows, n] float32
    shares,  # [num_rows, K] float32
    slots,  # [num_rows, K] int32, see Places
    linked,  # [num_rows, n] float32; None
    answers,  # [num_rows, n] int64, `y` of the mailbox
    mail_rows,  # see `post_kernel`
    words,  # `answer` of the mailbox
    state,
    errors,
    y,  # [num_rows, n]
    num_rows,
    n,
    most_looks,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SUMMED: tl.constexpr,
    ASK: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of rows with a fixed stride; grid (PROGRAMS)."""
    wait_and_release(PDL)
    tiles = tl.cdiv(n, TILE)
    lanes = tl.arange(0, K_LANES)
    open_ = tl.program_id(0) * 0  # 1: the answer is there; -1: it will not come
    if ASK:
        number = tl.load(state + _NUMBER)
        has_asked = tl.load(state + _ASKED)
        looks = tl.load(state + _GAVE_UP) * most_looks  # this layer, or one before it, gave up
    for index in tl.range(tl.program_id(0), num_rows * tiles, PROGRAMS, num_stages=1):
        row = tl.cast(index // tiles, tl.int64)
        columns = (index % tiles) * TILE + tl.arange(0, TILE)
        inside = columns < n
        if SUMMED:
            total = tl.load(parts + row * n + columns, mask=inside, other=0.0)
        else:
            total = tl.zeros((TILE,), tl.float32)
            for j in tl.static_range(K):
                # Of pairs that the bank has not computed, the products are undefined.
                there = inside & (tl.load(slots + row * K + j) >= 0)
                place = (row * K + j) * n + columns
                part = tl.load(parts + place, mask=there, other=0.0)
                for split in tl.static_range(1, SPLIT_K):
                    offset = split * num_rows * K * n
                    part += tl.load(parts + offset + place, mask=there, other=0.0)
                part = part.to(y.dtype.element_ty).to(tl.float32)
                total += part * tl.load(shares + row * K + j)
        if ASK:
            own = tl.load(slots + row * K + lanes, mask=lanes < K, other=_NOWHERE)
            asked = (tl.max((own == _ON_HOST).to(tl.int32), 0) != 0) & (has_asked != 0)
            if asked & (open_ == 0):
                came = _wait_for_answer(words, number, looks, most_looks, ON_GPU)
                open_ = tl.where(came, 1, -1)
            # All threads of the program agree from here on.
            lost = tl.max(tl.where(inside & asked & (open_ < 0), 1, 0), 0)
            line = row
            if mail_rows is not None:
                line = tl.cast(tl.load(mail_rows + row), tl.int64)
            source = answers + line * n + columns
            wanted = inside & asked & (lost == 0)
            found, missing = _read_sums(source, number, wanted, most_looks, ON_GPU)
            if (lost != 0) | (missing != 0):
                open_ = -1
                tl.store(state + _GAVE_UP, 1)
                tl.store(errors, 1)
            answered = wanted & (missing == 0)
            if linked is not None:
                total += tl.load(linked + row * n + columns, mask=answered, other=0.0)
            answer = found.to(tl.int32).to(tl.float32, bitcast=True)
            total += tl.where(answered, answer, 0.0)
        tl.store(y + row * n + columns, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def write_table_kernel(table, changes, count, MOST: tl.constexpr, PDL: tl.constexpr):
    """One program. changes: [2, MOST] places in the table, then values; in host memory."""
    wait_and_release(PDL)
    lanes = tl.arange(0, MOST)
    there = lanes < count
    place = tl.load(changes + lanes, mask=there, other=0, volatile=True)
    value = tl.load(changes + MOST + lanes, mask=there, other=0, volatile=True)
    tl.store(table + place, value, mask=there)


def write_table(table: Tensor, changes: Tensor, count: int) -> None:
    """Changes entries of the bank's table, behind the steps launched before.

    Args:
        table: [layers, experts] int32 on the device, contiguous.
        changes: [2 * M] int32 in page-locked memory, M a power of two: places in the flat table, no
            two the same, and from M on their values. It stays as it is until the kernel has ended.
        count: of changes, at most M.
    """
    most = changes.numel() // 2
    assert table.dtype == changes.dtype == torch.int32 and table.is_contiguous()
    assert 0 <= count <= most == triton.next_power_of_2(most)
    write_table_kernel[(1,)](
        table, changes, count, MOST=most, num_warps=2, **pdl_options(table.device)
    )


def rows_of_mail(ids: Tensor, table: Tensor, kv_slots: Tensor | None) -> Tensor:
    """Which row of the mailbox each token of a long step has that asks for an expert on the host.

    Args:
        ids, table, kv_slots: see `post`.

    Returns:
        [T + 1] int32: rows in the tokens' order, -1 of a token that does not ask; last, how many
        ask.
    """
    asks = (table[ids.long()] == ON_HOST).any(1)
    if kv_slots is not None:
        asks &= kv_slots >= 0
    counted = asks.cumsum(0, dtype=torch.int32)
    return torch.cat((torch.where(asks, counted - 1, -1).to(torch.int32), counted[-1:]))


def post(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    table: Tensor,
    hits: Tensor,
    layer: int,
    exchange: Exchange | None,
    kv_slots: Tensor | None = None,
) -> Places:
    """Finds each token's experts, counts them, and asks for those on the host.

    Args:
        x: [T, hidden], rows contiguous.
        ids: [T, k] int, contiguous, experts of the layer.
        weights: [T, k] float32, contiguous.
        table: [experts] int32, contiguous: the slot of each expert of the layer, or `ON_HOST`.
        hits: [experts] int32, contiguous, counted up.
        layer: for the mailbox.
        exchange: with a mailbox for all tokens, or for those that ask; None: no expert of the table
            is `ON_HOST`.
        kv_slots: [T] int32, negative for padding tokens, which have no experts; None: all are real.
    """
    (rows, k), hidden = ids.shape, x.shape[1]
    assert ids.is_contiguous() and weights.is_contiguous() and x.stride(1) == 1
    assert table.dtype == hits.dtype == torch.int32 and table.shape == hits.shape
    assert table.is_contiguous() and hits.is_contiguous() and weights.dtype == torch.float32
    assert kv_slots is None or (len(kv_slots) == rows and kv_slots.is_contiguous())
    places = Places(*(torch.empty(rows, k, dtype=torch.int32, device=x.device) for _ in "ab"))
    if exchange is None:
        mail: tuple[Tensor | None, ...] = (None,) * 6
        width, order = hidden, ORDERS[0]
    else:
        box, mail_rows = exchange.mailbox, exchange.rows
        assert mail_rows is not None or len(box.ids) >= rows
        assert mail_rows is None or (mail_rows.numel() == rows + 1 and mail_rows.is_contiguous())
        assert box.ids.shape[1] == k and box.y.shape[1] == hidden
        assert box.x.dtype == x.dtype and exchange.state.numel() == STATE_WORDS
        assert box.request.numel() == WORDS
        mail = (exchange.state, box.request, box.ids, box.weights, box.x, mail_rows)
        width, order = box.x.shape[1], box.order
    programs = min(rows, _MOST_POSTING)
    post_kernel[(programs,)](
        x,
        ids,
        weights,
        kv_slots,
        table,
        hits,
        places.experts,
        places.slots,
        *mail,
        rows,
        hidden,
        width,
        x.stride(0),
        layer,
        0 if exchange is None else exchange.part.rows,
        0 if exchange is None else exchange.part.whole,
        K=k,
        K_LANES=triton.next_power_of_2(k),
        TILE=min(2 * _TILE, triton.next_power_of_2(width)),
        PROGRAMS=programs,
        ORDER=ORDERS.index(order),
        ASK=exchange is not None,
        ON_GPU=not INTERPRETED,
        num_warps=4,
        **pdl_options(x.device),
    )
    return places


def wait_add(
    parts: Tensor,
    weights: Tensor,
    places: Places,
    *,
    dtype: torch.dtype,
    exchange: Exchange | None,
    linked: Tensor | None = None,
) -> Tensor:
    """The weighted sums of the bank's experts, and of the host's if the layer has asked.

    Args:
        parts: [T * k, n] outputs of the pairs; or [split_k, T * k, n] to be added up and rounded
            first; or [T, n] float32: their weighted sums. Undefined where a pair has no slot.
        weights: [T, k] float32, contiguous.
        places: of `post`.
        dtype: of the result.
        exchange: that of `post`.
        linked: [T, n] float32, contiguous: the part of the host's experts that is not the threads',
            where a token has asked; None: there is none.

    Returns:
        [T, n] in `dtype`. If the answer does not come, `exchange.errors` is set and rows lack it.
    """
    (rows, k), n = weights.shape, parts.shape[-1]
    assert parts.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
    assert linked is None or (linked.shape == (rows, n) and linked.is_contiguous())
    assert linked is None or linked.dtype == torch.float32
    summed = _are_summed(parts, rows, k, dtype)
    y = torch.empty((rows, n), dtype=dtype, device=parts.device)
    tile = min(_TILE, triton.next_power_of_2(n))
    programs = min(rows * triton.cdiv(n, tile), _MOST_ADDING)
    looks = 0
    mail: tuple[Tensor | None, ...] = (None,) * 5
    if exchange is not None:
        box, looks = exchange.mailbox, exchange.most_looks
        mail = (box.y.view(torch.int64), exchange.rows, box.answer, exchange.state, exchange.errors)
    wait_add_kernel[(programs,)](
        parts,
        weights,
        places.slots,
        linked,
        *mail,
        y,
        rows,
        n,
        looks,
        K=k,
        K_LANES=triton.next_power_of_2(k),
        SPLIT_K=1 if summed else parts.numel() // (rows * k * n),
        TILE=tile,
        PROGRAMS=programs,
        SUMMED=summed,
        ASK=exchange is not None,
        ON_GPU=not INTERPRETED,
        num_warps=4,
        **pdl_options(parts.device),
    )
    return y


def _are_summed(parts: Tensor, rows: int, k: int, dtype: torch.dtype) -> bool:
    """Whether `parts` are weighted sums already; see `wait_add`. With one expert a token and a
    float32 result they are not: the kernels of one row, which sum, serve 16 bits."""
    sums = parts.dim() == 2 and len(parts) == rows and parts.dtype == torch.float32
    return sums and (k > 1 or dtype != torch.float32)


def post_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    table: Tensor,
    hits: Tensor,
    layer: int,
    exchange: Exchange | None,
    kv_slots: Tensor | None = None,
) -> Places:
    """`post` in plain torch."""
    slots = table[ids.long()]
    real = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    if kv_slots is not None:
        real = kv_slots >= 0
    slots = torch.where(real.unsqueeze(1), slots, NOWHERE)
    hits += torch.bincount(ids[real].flatten(), minlength=len(hits)).to(hits.dtype)
    on_host = slots == ON_HOST
    if exchange is not None:
        box, state, rows = exchange.mailbox, exchange.state, len(ids)
        asked = on_host.any(1).cpu()
        lines = torch.arange(rows)
        if exchange.rows is not None:
            lines, rows = exchange.rows[:-1].long().cpu(), int(exchange.rows[-1])
        kept = lines >= 0
        box.ids[lines[kept]] = torch.where(on_host, ids, ON_DEVICE).to(torch.int32).cpu()[kept]
        box.weights[lines[asked]] = weights.to(box.weights.device)[asked]
        box.x[lines[asked]] = ordered_inputs(box, x.to(box.x.device))[asked]
        state[ASKED] = int(bool(asked.any()) and not bool(state[GAVE_UP]))
        if state[ASKED]:
            state[NUMBER] += 1
            box.request[LAYER], box.request[TOKENS] = layer, rows
            box.request[LINKED], box.request[WHOLE] = exchange.part.rows, exchange.part.whole
            box.request[SEQUENCE] = int(state[NUMBER])
    experts = torch.where(slots >= 0, ids, -1).to(torch.int32)
    return Places(experts, slots.to(torch.int32))


def wait_add_reference(
    parts: Tensor,
    weights: Tensor,
    places: Places,
    *,
    dtype: torch.dtype,
    exchange: Exchange | None,
    linked: Tensor | None = None,
) -> Tensor:
    """`wait_add` in plain torch, reading from the host."""
    (rows, k), n = weights.shape, parts.shape[-1]
    if _are_summed(parts, rows, k, dtype):
        total = parts.clone()
    else:
        each = parts.float().view(-1, rows, k, n).sum(0).to(dtype).float()
        each = torch.where((places.slots >= 0).unsqueeze(2), each, 0.0)
        total = (each * weights.unsqueeze(2)).sum(1)
    if exchange is not None and bool(exchange.state[ASKED]):
        box, state = exchange.mailbox, exchange.state
        looks = exchange.most_looks if state[GAVE_UP] else 0
        asked = (places.slots == ON_HOST).any(1, keepdim=True)
        lines = torch.arange(rows) if exchange.rows is None else exchange.rows[:-1].cpu()
        own = lines[asked.flatten().cpu()].long()
        number = int(state[NUMBER])

        def is_there() -> bool:
            numbers = box.numbers[own]
            return int(box.answer[COMING]) == number and bool((numbers == number).all())

        while not is_there() and looks < exchange.most_looks:
            looks = exchange.most_looks if box.answer[STOPPED] else looks + 1
        if looks >= exchange.most_looks and not is_there():
            state[GAVE_UP] = 1
            exchange.errors[0] = 1
        else:
            if linked is not None:
                total = total + torch.where(asked, linked, 0.0)
            answers = box.sums[lines.long()]
            total = total + torch.where(asked, answers.to(total.device), 0.0)
    return total.to(dtype)
