"""The other process of test_rings_processes.py: `python -m tests.bridge.ipc.peer ROLE SEED
HANDLE...`."""

from __future__ import annotations

import random
import sys
import time

from hetero_llm.bridge.ipc.messages import MessageKind, Outbox
from hetero_llm.bridge.ipc.rings import Consumer, Producer, RingStatus, attach_ring
from tests.bridge.ipc.tools import numbers_of, put_numbered

LONGEST_BODY = 150


def length_of(number: int) -> int:
    """Of the body of a numbered message: short ones are the most common."""
    return random.Random(number).choice([0, 2, 4, 7, 21, LONGEST_BODY])


def dawdle(rng: random.Random) -> None:
    """Sometimes nothing, sometimes a while: so that each side is met full, empty and asleep."""
    choice = rng.random()
    if choice < 0.1:
        time.sleep(rng.random() * 2e-3)
    elif choice < 0.3:
        for _ in range(rng.randrange(2000)):
            pass


def produce(rng: random.Random, handle: str, count: int | None = None) -> None:
    """Numbered messages, `count` of them or for ever."""
    outbox, made = Outbox(), 0
    with attach_ring(handle) as ring, Producer(ring) as producer:
        while made != count or len(outbox):
            for _ in range(rng.randrange(6)):
                if made != count and len(outbox) < 100:
                    put_numbered(outbox, made, length_of(made))
                    made += 1
            producer.push(outbox)
            dawdle(rng)


def consume(rng: random.Random, handle: str, count: int | None = None) -> None:
    """Takes numbered messages, in order; ends after `count`."""
    expected = 0
    spin_us = rng.choice([0, 20])
    with attach_ring(handle) as ring, Consumer(ring, spin_us=spin_us) as consumer:
        while expected != count:
            status, messages = consumer.pop(timeout_us=rng.choice([0, 100, 100_000]))
            assert status != RingStatus.CORRUPT
            numbers = numbers_of(messages)
            assert numbers == list(range(expected, expected + len(numbers)))
            expected += len(numbers)
            dawdle(rng)


def echo(rng: random.Random, handles: list[str]) -> None:
    """Sends back what it gets, until STOP."""
    outbox = Outbox()
    rings = [attach_ring(handle) for handle in handles]
    with Consumer(rings[0], spin_us=rng.choice([0, 20])) as consumer, Producer(rings[1]) as back:
        while True:
            messages = consumer.pop(timeout_us=1_000_000).messages
            if MessageKind.STOP in messages.headers["kind"]:
                return
            for number in numbers_of(messages):
                put_numbered(outbox, number, length_of(number))
            while back.push(outbox) == RingStatus.FULL:
                dawdle(rng)


def main() -> None:
    role, seed, *rest = sys.argv[1:]
    rng = random.Random(int(seed))
    if role == "echo":
        echo(rng, rest)
        return
    count = int(rest[1]) if len(rest) > 1 else None
    {"produce": produce, "consume": consume}[role](rng, rest[0], count)


if __name__ == "__main__":
    main()
