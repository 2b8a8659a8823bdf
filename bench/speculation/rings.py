"""Microseconds from one process to another through a ring, Python's side included.

Two processes, each pinned to a core of its own. The engine's sends a commit of two tokens for each
sequence; the worker's answers with eight nodes of each sequence's tree. A way begins before its
records are put into an outbox. It ends when the worker has its arrays, or when the nodes are in the
engine's tree replica, where the next proposal finds them. `spin`: the reader polls the ring;
`futex`: it sleeps in the kernel and has to be woken. `socket`: the commits' bytes as one datagram
of a socket pair, where the reader sleeps as well. `empty`: how long the engine's look into an empty
ring takes. 50th and 99th percentile.

The clock is CLOCK_MONOTONIC, which both processes share.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Rows, bench_parser, report
from hetero_llm.bridge.ipc.messages import (
    HEADER,
    NODE_WORDS,
    MessageKind,
    Messages,
    Outbox,
    Stamps,
    put_commits,
    put_nodes,
    put_stop,
)
from hetero_llm.bridge.ipc.rings import Consumer, Producer, RingStatus, attach_ring, create_ring
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats
from hetero_llm.spec_decode.draft_model.tree_replica import TreeReplica

NEW_TOKENS, NODES = 2, 8
WARM_UP = 200
PAUSE_US = 300
"""Before each way, so that a reader that should sleep does."""
SPIN_US = {"spin": 1_000_000, "futex": 0}
LONG_US = 60_000_000  # the other process may still be importing
_ROOT = Path(__file__).parents[2]


def stamps_of(batch: int) -> Stamps:
    slots = np.arange(batch, dtype=np.int32)
    return Stamps(slots, slots, slots + 100)


def nodes_of(stamps: Stamps) -> np.ndarray:
    """[batch * NODES, NODE_WORDS]: chains below the texts."""
    nodes = np.zeros((len(stamps.slots), NODES, NODE_WORDS), np.int32)
    nodes[:, :, 0] = np.arange(1, NODES + 1)
    nodes[:, :, 1] = np.arange(NODES)
    nodes[:, 0, 1] = -stamps.base_lengths
    nodes[:, :, 2:] = 7
    return nodes.reshape(-1, NODE_WORDS)


def next_run(consumer: Consumer, kind: MessageKind) -> Messages | None:
    """What comes next, which must be of one kind, and of this one; None for STOP."""
    status, records = consumer.pop(timeout_us=LONG_US)
    assert status == RingStatus.OK, status.name
    ((found, run),) = records.runs()
    assert found in (kind, MessageKind.STOP), found
    return run if found == kind else None


def worker(tickets: list[str], mode: str, batch: int, cpu: int, fd: int) -> None:
    """Answers until STOP; then writes when commits arrived and nodes left, [2, rounds] int64."""
    os.sched_setaffinity(0, {cpu})
    arrived, left = [], []
    outbox, stamps, counts = Outbox(), stamps_of(batch), np.full(batch, NODES, np.int32)
    nodes = nodes_of(stamps)
    inbox = Consumer(attach_ring(tickets[0]), spin_us=SPIN_US[mode])
    back = Producer(attach_ring(tickets[1]))
    while next_run(inbox, MessageKind.COMMIT) is not None:
        arrived.append(time.monotonic_ns())
        pause()
        left.append(time.monotonic_ns())
        put_nodes(outbox, stamps, counts, nodes)
        assert back.push(outbox) == RingStatus.OK
    os.write(fd, np.array([arrived, left], np.int64).tobytes())
    os.close(fd)


def pause() -> None:
    until = time.monotonic_ns() + PAUSE_US * 1000
    while time.monotonic_ns() < until:
        pass


def through_rings(mode: str, batch: int, rounds: int, cpus: tuple[int, int]) -> Rows:
    """A row for each direction."""
    os.sched_setaffinity(0, {cpus[0]})
    there, back = create_ring(), create_ring()
    reading, writing = os.pipe()
    command = [
        sys.executable, "-m", "bench.speculation.rings", "--worker", there.handle, back.handle,
        "--mode", mode, "--batch", str(batch), "--cpu", str(cpus[1]), "--fd", str(writing),
    ]  # fmt: skip
    fds = (there.fd, back.fd, writing)
    process = subprocess.Popen(command, pass_fds=fds, cwd=_ROOT)
    os.close(writing)
    outbox, stamps = Outbox(), stamps_of(batch)
    counts, tokens = np.full(batch, NEW_TOKENS), np.arange(batch * NEW_TOKENS, dtype=np.int32)
    sent, received, looks = [], [], []
    TreeReplica.compile()
    replica = TreeReplica(batch, vocab_size=1000, stats=BucketStats())
    with (
        there,
        back,
        Producer(there) as producer,
        Consumer(back, spin_us=SPIN_US[mode], max_messages=1024, max_words=1 << 16) as consumer,
    ):
        for _ in range(rounds + WARM_UP):
            for stamp in zip(*(column.tolist() for column in stamps), strict=True):
                replica.open(*stamp)
            pause()
            sent.append(time.monotonic_ns())
            put_commits(outbox, stamps, counts, tokens)
            producer.push(outbox)
            records = next_run(consumer, MessageKind.NODES)
            assert records is not None and replica.add(records)
            received.append(time.monotonic_ns())
            begun = time.monotonic_ns()
            consumer.pop()
            looks.append(time.monotonic_ns() - begun)
            assert all(replica.num_nodes(slot) == NODES for slot in range(batch))
        put_stop(outbox)
        producer.push(outbox)
        with os.fdopen(reading, "rb") as file:
            arrived, left = np.frombuffer(file.read(), np.int64).reshape(2, -1)
        assert process.wait(60) == 0
    common = {"batch": batch, "mode": mode}
    return [
        {"way": "commit to worker", **common, **spread(arrived - sent)},
        {"way": "nodes to engine", **common, **spread(received - left)},
        {"way": "empty", **common, **spread(np.array(looks))},
    ]


def spread(nanoseconds: np.ndarray) -> dict[str, float]:
    """Percentiles in microseconds, without the warm-up."""
    p50, p99 = np.percentile(nanoseconds[WARM_UP:], [50, 99]) / 1000
    return {"p50_us": round(float(p50), 2), "p99_us": round(float(p99), 2)}


def socket_worker(cpu: int, fd: int) -> None:
    """Notes when datagrams come, answers each by that time."""
    os.sched_setaffinity(0, {cpu})
    with socket.socket(fileno=fd) as other:
        while message := other.recv(1 << 20):
            np.frombuffer(message, np.int32)
            other.send(time.monotonic_ns().to_bytes(8, "little"))


def through_a_socket(batch: int, rounds: int, cpus: tuple[int, int]) -> dict[str, Any]:
    """As many bytes as the commits have, the baseline."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "bench.speculation.rings", "--socket", "--cpu", str(cpus[1])]
    fds = (other.fileno(),)
    process = subprocess.Popen([*command, "--fd", str(fds[0])], pass_fds=fds, cwd=_ROOT)
    other.close()
    message = np.zeros(batch * (HEADER.itemsize // 4 + NEW_TOKENS), np.int32)
    took = []
    with ours:
        for _ in range(rounds + WARM_UP):
            pause()
            begun = time.monotonic_ns()
            ours.send(message.tobytes())
            took.append(int.from_bytes(ours.recv(8), "little") - begun)
    assert process.wait(60) == 0
    row = {"way": "commit to worker", "batch": batch, "mode": "socket"}
    return {**row, **spread(np.array(took))}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--cpus", type=int, nargs=2, help="default: the first two usable ones")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--socket", action="store_true", help=argparse.SUPPRESS)
    for name in ("--batch", "--cpu", "--fd"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.mode, options.batch, options.cpu, options.fd)
        return
    if options.socket:
        socket_worker(options.cpu, options.fd)
        return
    usable = os.sched_getaffinity(0)
    assert len(usable) > 1, "two cores are needed"
    first, second = options.cpus or sorted(usable)[:2]
    cpus = (first, second)
    rows = []
    for batch in options.batches:
        for mode in SPIN_US:
            rows += through_rings(mode, batch, options.rounds, cpus)
        rows.append(through_a_socket(batch, options.rounds, cpus))
    os.sched_setaffinity(0, usable)  # the environment in the results counts the cores
    about = {"cpus": list(cpus), "rounds": options.rounds}
    about |= {"new_tokens": NEW_TOKENS, "nodes": NODES}
    report("rings", about, rows, options.out)


if __name__ == "__main__":
    main()
