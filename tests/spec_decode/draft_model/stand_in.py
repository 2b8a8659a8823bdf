"""Stands in for the draft worker's process: python stand_in.py MANNER SETTINGS

It says hello for a vocabulary of `VOCAB` tokens and behaves as MANNER says. It loads no torch, so
it is there soon, and ends when the process does that started it.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from hetero_llm.bridge.ipc.messages import (
    Hello,
    MessageKind,
    Messages,
    Outbox,
    Refusal,
    put_heartbeat,
    put_hello,
    put_refused,
)
from hetero_llm.bridge.ipc.rings import Consumer, Producer, attach_ring

VOCAB = 50
MANNERS = ("good", "other vocabulary", "no hello", "deaf", "stubborn", "nonsense", "failing")
LAST_WORDS = "ModelLoadError: /no/such: it is a test"


def answer(outbox: Outbox, messages: Messages) -> bool:
    """Answer every COMMIT with a refusal. Returns whether there was a STOP."""
    for header in messages.headers[messages.headers["kind"] == MessageKind.COMMIT]:
        put_refused(outbox, int(header["slot"]), int(header["generation"]), Refusal.NO_ROOM)
    return bool((messages.headers["kind"] == MessageKind.STOP).any())


def rave(outbox: Outbox, rng: np.random.Generator) -> None:
    """Send messages of any kind and content, hellos of other models among them."""
    kinds = [*MessageKind, 99]
    for _ in range(int(rng.integers(30))):
        body = rng.integers(-(2**31), 2**31, int(rng.integers(20)), np.int32)
        slot, generation, base, depth, value = rng.integers(0, 2**32, 5).tolist()
        kind = kinds[int(rng.integers(len(kinds)))]
        outbox.append(
            kind, body, slot=slot, generation=generation, base_length=base, depth=depth,
            value=value,
        )  # fmt: skip
    put_hello(outbox, Hello(VOCAB + 1))


def main() -> None:
    manner, settings = sys.argv[1], json.loads(sys.argv[2])
    assert manner in MANNERS
    print(f"a worker of the {manner} kind", file=sys.stderr, flush=True)
    if manner == "failing":
        print(LAST_WORDS, file=sys.stderr)
        sys.exit(2)
    rng, outbox, beats = np.random.default_rng(0), Outbox(), 0
    requests, answers = attach_ring(settings["requests"]), attach_ring(settings["answers"])
    with requests, answers, Consumer(requests) as inbox, Producer(answers) as producer:
        if manner != "no hello":
            put_hello(outbox, Hello(VOCAB + (manner == "other vocabulary")))
        while os.getppid() == settings["parent"]:
            if manner == "deaf":
                time.sleep(0.02)
            elif answer(outbox, inbox.pop(20_000).messages) and manner != "stubborn":
                return
            if manner != "no hello":
                beats += 1
                put_heartbeat(outbox, beats)
            if manner == "nonsense":
                rave(outbox, rng)
            producer.push(outbox)


if __name__ == "__main__":
    main()
