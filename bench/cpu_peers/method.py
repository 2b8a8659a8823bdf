"""How every engine is measured on a CPU. Needs the standard library and psutil only.

Prefill: 512 / (time of a prompt of 512 tokens with one new token). Decode: batch * 128 / (T(129 new
tokens) - T(1)) behind prompts of 32. Greedy, no early end, every prompt sent once. Medians.
Start-up: from the start of the process to the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# (prompts, new tokens per prompt): returns when all of them are there.
Generate = Callable[[list[list[int]], int], None]

WORK = ("prefill", "decode1", "decode8")
LONG_PROMPT, SHORT_PROMPT, NEW_TOKENS = 512, 32, 128
FOREIGN_CORES = 0.08
"""What other processes may use during a repetition: one spinning stranger slows barriers a lot."""

_FIRST_PLAIN_ID, _SPARE_IDS = 300, 16
_LONG_S, _SHORT_S = 0.5, 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every runner."""
    parser.add_argument("model", help="folder or file in the engine's own format")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--work", type=work_list, default=list(WORK), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--patience", type=float, default=60.0, help="s to wait for a quiet machine"
    )


def work_list(text: str) -> list[str]:
    """ "prefill,decode1" -> its parts, in the order of `WORK`."""
    words = text.split(",")
    wrong = [word for word in words if word not in WORK]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r}: one of {', '.join(WORK)}")
    return [word for word in WORK if word in words]


class QuietClock:
    """Times calls; a repetition that other processes disturbed is made again.

    Args:
        patience_s: wall time for waiting and further attempts, over the clock's life. When it is
            spent, disturbed repetitions count and are reported.
        busy: seconds of CPU time that the machine has spent so far; own: that this process has.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        busy: Callable[[], float] | None = None,
        own: Callable[[], float] | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._busy = busy or _machine_seconds
        self._own = own or _own_seconds
        self.clean = self.disturbed = 0
        self.worst_foreign = 0.0

    def seconds(self, call: Callable[[], None], least_s: float) -> float:
        """Seconds per call, over as many calls as take `least_s`."""
        quietest: tuple[float, float] | None = None
        while True:
            elapsed, foreign = self._repetition(call, least_s)
            if foreign <= FOREIGN_CORES:
                self.clean += 1
                return elapsed
            if quietest is None or foreign < quietest[0]:
                quietest = (foreign, elapsed)
            if self._patience_s <= 0:
                self.disturbed += 1
                self.worst_foreign = max(self.worst_foreign, quietest[0])
                return quietest[1]
            begin = time.perf_counter()
            self._wait_for_quiet()
            # The repetition to come is paid for in advance.
            self._patience_s -= time.perf_counter() - begin + least_s

    def _repetition(self, call: Callable[[], None], least_s: float) -> tuple[float, float]:
        busy, own, begin, calls = self._busy(), self._own(), time.perf_counter(), 0
        while True:
            call()
            calls += 1
            elapsed = time.perf_counter() - begin
            if elapsed >= least_s:
                break
        foreign = (self._busy() - busy) - (self._own() - own)
        return elapsed / calls, foreign / elapsed

    def _wait_for_quiet(self) -> None:
        deadline = time.perf_counter() + min(self._patience_s, 10.0)
        while time.perf_counter() < deadline:
            busy = self._busy()
            time.sleep(0.5)
            if self._busy() - busy < FOREIGN_CORES / 2:
                return


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    # Guests' time is part of user and nice; time stolen by the host is not this machine's.
    idle = times.idle + times.iowait + times.steal + times.guest + times.guest_nice
    return sum(times) - idle


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def since_start_s() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


class Prompts:
    """Random prompts, no two alike, so that no cache has seen any."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._first = min(_FIRST_PLAIN_ID, vocab_size // 2)
        self._last = vocab_size - _SPARE_IDS

    def draw(self, count: int, length: int) -> list[list[int]]:
        """`count` lists of `length` token ids."""
        draw = self._random.randrange
        return [[draw(self._first, self._last) for _ in range(length)] for _ in range(count)]


def measure(
    generate: Generate,
    vocab_size: int,
    *,
    work: list[str],
    repeats: int,
    clock: QuietClock,
) -> dict[str, Any]:
    """Figures of one loaded engine: tokens per second, with the slowest and fastest repetition.

    Called right after loading; the first token ends the start-up.
    """
    prompts = Prompts(vocab_size)

    def timed(count: int, length: int, new_tokens: int, least_s: float) -> float:
        return clock.seconds(lambda: generate(prompts.draw(count, length), new_tokens), least_s)

    generate(prompts.draw(1, SHORT_PROMPT), 1)
    result: dict[str, Any] = {"startup_s": round(since_start_s(), 2)}
    for name in work:
        if name == "prefill":
            generate(prompts.draw(1, LONG_PROMPT), 1)
            rates = [LONG_PROMPT / timed(1, LONG_PROMPT, 1, _LONG_S) for _ in range(repeats)]
        else:
            batch = int(name.removeprefix("decode"))
            generate(prompts.draw(batch, SHORT_PROMPT), 16)
            first = statistics.median(
                timed(batch, SHORT_PROMPT, 1, _SHORT_S) for _ in range(repeats)
            )
            rates = []
            for _ in range(repeats):
                whole = timed(batch, SHORT_PROMPT, 1 + NEW_TOKENS, _LONG_S)
                rates.append(batch * NEW_TOKENS / (whole - first))
        result[f"{name}_tok_s"] = statistics.median(rates)
        result[f"{name}_range"] = [min(rates), max(rates)]
    result["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result["clean"], result["disturbed"] = clock.clean, clock.disturbed
    result["worst_foreign_cores"] = round(clock.worst_foreign, 2)
    return result


def report(engine: str, generate: Generate, vocab_size: int, args: argparse.Namespace) -> None:
    """Measures what the arguments ask for; the last line on stdout is the result as JSON."""
    clock = QuietClock(args.patience)
    figures = measure(generate, vocab_size, work=args.work, repeats=args.repeats, clock=clock)
    print(json.dumps({"engine": engine, **figures}), flush=True)
