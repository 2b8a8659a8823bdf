"""Memory that somebody else wrote to: nothing damaged is ever delivered, and the ring goes on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.ipc.messages import Outbox
from hetero_llm.bridge.ipc.rings import RingStatus
from hetero_llm.utils.native_build import find_compiler
from tests.bridge.ipc.tools import (
    HEAD,
    SLOT_BYTES,
    SLOTS_AT,
    TAIL,
    Ends,
    both_ends,
    numbers_of,
    put_numbered,
    slots_of,
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SLOTS = 16
BYTES = SLOTS_AT + SLOTS * SLOT_BYTES
NEAR_THE_END = 2**32 - 40

flips = st.lists(
    st.tuples(st.integers(HEAD, BYTES - 1), st.integers(1, 255)), min_size=1, max_size=20
)
slot_flips = st.lists(
    st.tuples(st.integers(SLOTS_AT, BYTES - 1), st.integers(1, 255)), min_size=1, max_size=3
)


class Model:
    """Which messages are where, and which of them were written to."""

    def __init__(self, start: int) -> None:
        self.position = start
        self.places: dict[int, set[int]] = {}  # of messages in the ring: slots, modulo their number
        self.touched: set[int] = set()
        self.outside: list[tuple[int, int]] = []

    def pushed(self, count: int) -> None:
        for number, size in self.outside[:count]:
            self.places[number] = {(self.position + i) % SLOTS for i in range(size)}
            self.position += size
        del self.outside[:count]

    def written(self, offset: int) -> None:
        slot = (offset - SLOTS_AT) // SLOT_BYTES
        self.touched |= {number for number, places in self.places.items() if slot in places}


@settings(max_examples=200, deadline=None)
@given(
    start=st.sampled_from([0, NEAR_THE_END]),
    steps=st.lists(
        st.one_of(
            st.none(), st.lists(st.integers(0, 60), min_size=1, max_size=6), flips, slot_flips
        ),
        min_size=1,
        max_size=50,
    ),
)
def test_only_what_was_pushed_comes_out_and_all_that_was_not_touched(
    start: int, steps: list[list[int] | list[tuple[int, int]] | None]
) -> None:
    """A step pops, pushes messages of these lengths, or flips bits of these bytes."""
    outbox, model, made, popped = Outbox(), Model(start), 0, []

    def push(ends: Ends) -> None:
        waiting = len(outbox)
        ends.producer.push(outbox)
        model.pushed(waiting - len(outbox))

    def pop(ends: Ends) -> None:
        numbers = numbers_of(ends.consumer.pop().messages)
        popped.extend(numbers)
        for number in [number for number in model.places if numbers and number <= numbers[-1]]:
            del model.places[number]

    with both_ends(SLOTS, start=start) as ends:
        for step in steps:
            if step is None:
                pop(ends)
            elif isinstance(step[0], int):
                for length in step:
                    put_numbered(outbox, made, length)
                    model.outside.append((made, slots_of(length)))
                    made += 1
                push(ends)
            else:
                for offset, bits in step:
                    ends.memory[offset] ^= bits
                    model.written(offset)
        # A push and a pop put the positions right, a second push finds the room.
        for _ in range(made + 2):
            push(ends)
            pop(ends)
        assert len(outbox) == 0
        assert popped == sorted(set(popped))
        assert set(range(made)) - set(popped) <= model.touched
        lost = made - len(popped)
        counters = ends.consumer.counters()
        assert (lost > 0) <= (counters.corrupt_slots > 0)
        assert counters.messages == len(popped)
        put_numbered(outbox, made, 30)
        assert ends.producer.push(outbox) == RingStatus.OK
        status, messages = ends.consumer.pop()
        assert status == RingStatus.OK and numbers_of(messages) == [made]


@pytest.mark.parametrize("byte", range(SLOT_BYTES))
def test_every_bit_of_a_slot_counts(byte: int) -> None:
    outbox = Outbox()
    with both_ends(SLOTS) as ends:
        for number in range(3):
            put_numbered(outbox, number, 5)
        ends.producer.push(outbox)
        ends.memory[SLOTS_AT + SLOT_BYTES + byte] ^= 1 << (byte % 8)
        status, messages = ends.consumer.pop()
        assert status == RingStatus.CORRUPT and numbers_of(messages) == [0, 2]
        assert ends.consumer.counters().corrupt_slots == 1
        assert ends.consumer.pop().status == RingStatus.EMPTY


@pytest.mark.parametrize("damaged", range(5))
def test_a_message_with_one_damaged_slot_is_lost_whole(damaged: int) -> None:
    outbox = Outbox()
    with both_ends(SLOTS, start=NEAR_THE_END) as ends:
        first = NEAR_THE_END % SLOTS
        for number, length in enumerate((3, 5 + 4 * 13, 20)):
            put_numbered(outbox, number, length)
        ends.producer.push(outbox)
        slot = (first + 1 + damaged) % SLOTS
        ends.memory[SLOTS_AT + slot * SLOT_BYTES + 30] ^= 4
        status, messages = ends.consumer.pop()
        assert status == RingStatus.CORRUPT and numbers_of(messages) == [0, 2]
        counters = ends.consumer.counters()
        assert (counters.corrupt_slots, counters.dropped_slots) == (1, 4)


def slots_in(ends: Ends) -> np.ndarray:
    return ends.memory[SLOTS_AT:].reshape(-1, SLOT_BYTES)


def test_a_slot_of_an_earlier_lap_is_stale() -> None:
    """A whole lap is put back over the newer one: its slots are sound but for their place."""
    outbox = Outbox()
    with both_ends(SLOTS) as ends:
        for lap in range(2):
            for number in range(SLOTS):
                put_numbered(outbox, lap * SLOTS + number, 4)
            assert ends.producer.push(outbox) == RingStatus.OK
            if lap == 0:
                earlier = slots_in(ends).copy()
                assert len(ends.consumer.pop().messages) == SLOTS
        slots_in(ends)[:] = earlier
        status, messages = ends.consumer.pop()
        assert status == RingStatus.CORRUPT and len(messages) == 0
        assert ends.consumer.counters().corrupt_slots == SLOTS


def test_a_repeated_slot_is_not_delivered_twice() -> None:
    outbox = Outbox()
    with both_ends(SLOTS) as ends:
        for number in range(4):
            put_numbered(outbox, number, 4)
        ends.producer.push(outbox)
        slots_in(ends)[2] = slots_in(ends)[1]
        status, messages = ends.consumer.pop()
        assert status == RingStatus.CORRUPT and numbers_of(messages) == [0, 1, 3]


def test_a_torn_slot_is_not_delivered() -> None:
    """Half of what was there before, half of what was to be written."""
    outbox = Outbox()
    with both_ends(SLOTS) as ends:
        before = slots_in(ends)[0].copy()
        put_numbered(outbox, 0, 4)
        ends.producer.push(outbox)
        slots_in(ends)[0, 32:] = before[32:]
        assert ends.consumer.pop().status == RingStatus.CORRUPT


def test_another_rings_slots_are_not_taken_for_ours() -> None:
    outbox = Outbox()
    with both_ends(SLOTS) as ends, both_ends(SLOTS) as other:
        for pair in (ends, other):
            put_numbered(outbox, 5, 4)
            pair.producer.push(outbox)
        slots_in(ends)[0] = slots_in(other)[0]
        assert ends.consumer.pop().status == RingStatus.CORRUPT
        assert numbers_of(other.consumer.pop().messages) == [5]


def test_an_old_head_repeats_nothing_and_the_next_push_mends_it() -> None:
    outbox = Outbox()
    with both_ends(SLOTS) as ends:
        heads = []
        for number in range(3):
            put_numbered(outbox, number, 4)
            ends.producer.push(outbox)
            heads.append(ends.memory[HEAD : HEAD + 8].copy())
        assert numbers_of(ends.consumer.pop().messages) == [0, 1, 2]
        ends.memory[HEAD : HEAD + 8] = heads[0]
        for _ in range(3):
            assert ends.consumer.pop().status == RingStatus.EMPTY
        assert ends.consumer.counters().bad_positions == 1
        put_numbered(outbox, 3, 4)
        ends.producer.push(outbox)
        assert numbers_of(ends.consumer.pop().messages) == [3]


def test_an_old_tail_makes_no_room() -> None:
    outbox = Outbox()
    with both_ends(8) as ends:
        before = ends.memory[TAIL : TAIL + 8].copy()
        for lap in range(3):
            for number in range(8):
                put_numbered(outbox, 8 * lap + number, 1)
            assert ends.producer.push(outbox) == RingStatus.OK
            if lap == 2:
                break
            assert len(ends.consumer.pop().messages) == 8
        ends.memory[TAIL : TAIL + 8] = before
        put_numbered(outbox, 24, 1)
        assert ends.producer.push(outbox) == RingStatus.FULL
        assert ends.producer.counters().bad_positions == 1
        assert numbers_of(ends.consumer.pop().messages) == list(range(16, 24))
        assert ends.producer.push(outbox) == RingStatus.OK


def test_a_ring_of_nothing_but_noise_recovers() -> None:
    rng = np.random.default_rng(1)
    outbox = Outbox()
    with both_ends(SLOTS) as ends:
        for number in range(200):
            put_numbered(outbox, number, 40)
            ends.producer.push(outbox)
            ends.memory[HEAD:] = rng.integers(0, 256, BYTES - HEAD, np.uint8)
            status, messages = ends.consumer.pop()
            assert len(messages) == 0 and status in (RingStatus.EMPTY, RingStatus.CORRUPT)
        ends.producer.push(outbox)
        ends.consumer.pop()
        outbox.clear()
        put_numbered(outbox, 999, 40)
        assert ends.producer.push(outbox) == RingStatus.OK
        assert numbers_of(ends.consumer.pop().messages) == [999]
