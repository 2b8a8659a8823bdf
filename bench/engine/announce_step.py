"""Time in which the engine announces a decode step to its ranks, and in which a rank has read it.

The writer encodes the step's arrays and writes them to the channel; the readers, one process each,
spin. `announce`: of `step_to_bytes` and `StepWriter.write`, which the engine pays, 0.5 ms after the
step before, while its process works. `each`: the same over the readers. `hot`: of one step right
after another. `read`: until a rank has the step in its hands, measured there from the moment when
the writer began (both clocks are CLOCK_MONOTONIC). With fewer cores than processes the readers'
times are those of the operating system's scheduler.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from bench.common import bench_parser, numbers, report
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.distributed.step_channel import StepReader, StepWriter
from hetero_llm.distributed.step_codec import step_from_words, step_to_bytes

_STEPS, _WARM_UP = 2000, 200
_PAUSE_SECONDS = 0.0005  # between two steps: readers wait, as they do for a device
_SPIN_US = 2000


def decode_step(batch: int) -> SchedulerOutput:
    """A step in which each of `batch` sequences decodes one token; every 16th gets a block."""
    column = np.arange(batch, dtype=np.int32)
    ones = np.ones(batch, np.int32)
    writes = np.zeros((3, batch // 16), np.int32)
    return SchedulerOutput(
        column, column, ones, column, ones, (), (), writes, np.zeros((2, 1), np.int32)
    )


def read_steps(handle: str, rank: int, count: int) -> None:
    """What a reader process runs: prints the median of its times in us."""
    reader = StepReader(handle, rank)
    reader.set_spin(_SPIN_US)
    print("up", flush=True)
    times = []
    for number in range(count):
        words = None
        while words is None:
            words = reader.read(1_000_000)
        now = time.monotonic_ns()
        step = step_from_words(words)
        begun = (int(step.block_copies[0, 0]) << 31) + int(step.block_copies[1, 0])
        if number >= count // 2 + _WARM_UP:  # those that come one by one
            times.append(now - begun)
    print(np.median(times) / 1e3, flush=True)


def measure(batch: int, readers: int) -> dict[str, float]:
    writer = StepWriter(readers + 1)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--reader", str(rank),
             "--handle", writer.channel.handle],
            pass_fds=[writer.channel.fd], stdout=subprocess.PIPE, text=True,
        )
        for rank in range(1, readers + 1)
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
    step = decode_step(batch)
    stamp = step.block_copies
    spaced, close = [], []
    for times, pause in ((close, 0.0), (spaced, _PAUSE_SECONDS)):
        for _ in range(_STEPS):
            until = time.perf_counter() + pause
            while time.perf_counter() < until:
                pass
            begun = time.monotonic_ns()
            stamp[0, 0], stamp[1, 0] = begun >> 31, begun & 0x7FFFFFFF
            begin = time.perf_counter()
            writer.write(step_to_bytes(step), lambda: None)
            times.append(time.perf_counter() - begin)
    reads = [float(child.communicate()[0]) for child in children]
    writer.close()
    announce, hot = (float(np.median(times[_WARM_UP:])) * 1e6 for times in (spaced, close))
    return {
        "announce_us": announce, "each_us": announce / readers, "hot_us": hot,
        "read_us": max(reads),
    }  # fmt: skip


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--batches", type=numbers, default=[1, 64, 256])
    parser.add_argument("--readers", type=numbers, default=[1, 3, 7])
    parser.add_argument("--reader", type=int, help="for the processes that the bench starts")
    parser.add_argument("--handle")
    options = parser.parse_args()
    if options.reader is not None:
        read_steps(options.handle, options.reader, 2 * _STEPS)
        return
    rows = [
        {"batch": batch, "readers": readers, **measure(batch, readers)}
        for readers in options.readers
        for batch in options.batches
    ]
    report("announce_step", {}, rows, options.out)


if __name__ == "__main__":
    main()
