"""What tests of rings share: numbered messages, and a ring with both ends in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hetero_llm.bridge.ipc.messages import MessageKind, Messages, Outbox
from hetero_llm.bridge.ipc.rings import Consumer, Producer, Ring, create_ring

SLOTS_AT = 1024
SLOT_BYTES = 64
FIRST_WORDS, SLOT_WORDS = 6, 13
HEAD, TAIL, ASLEEP = 128, 256, 384
"""Offsets in a ring's memory, see csrc/ring.cpp."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of a ring."""

    ring: Ring
    producer: Producer
    consumer: Consumer

    @property
    def memory(self) -> np.ndarray:
        """The ring's bytes."""
        return np.frombuffer(self.ring.memory, np.uint8)


@contextmanager
def both_ends(
    slots: int = 64,
    *,
    start: int = 0,
    max_messages: int = 256,
    spin_us: int = 0,
    max_views: int = 4096,
) -> Iterator[Ends]:
    with (
        create_ring(slots, start=start) as ring,
        Producer(ring) as producer,
        Consumer(ring, max_messages=max_messages, spin_us=spin_us, max_views=max_views) as consumer,
    ):
        yield Ends(ring, producer, consumer)


def slots_of(words: int) -> int:
    """Slots of a message with so long a body."""
    return 1 + max(0, -(-(words - FIRST_WORDS) // SLOT_WORDS))


def body_of(number: int, words: int) -> np.ndarray:
    """A body whose words all depend on its message's number."""
    return (np.arange(words, dtype=np.uint32) * 2654435761 + number).view(np.int32)


def kind_of(number: int) -> MessageKind:
    """To a ring they are all the same."""
    return MessageKind.NODES if number % 2 else MessageKind.COMMIT


def put_numbered(outbox: Outbox, number: int, words: int) -> None:
    """A message that `numbers_of` recognises."""
    whose = {"slot": number % 7, "generation": number, "base_length": words}
    body, value = body_of(number, words), number ^ 0xFFFF
    outbox.append(kind_of(number), body, **whose, depth=3, value=value)


def numbers_of(messages: Messages) -> list[int]:
    """The messages' numbers; each must be exactly as it was put."""
    numbers, end = [], 0
    for header in messages.headers:
        number, words = int(header["generation"]), int(header["words"])
        assert header.tolist() == (
            *(kind_of(number), number % 7, number, words),
            *(words, 3, number ^ 0xFFFF),
        )
        np.testing.assert_array_equal(messages.words[end : end + words], body_of(number, words))
        numbers.append(number)
        end += words
    assert end == len(messages.words)
    return numbers
