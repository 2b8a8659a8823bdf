"""Decode speed of the native CPU executor alone and beside processes that keep all cores busy.

Both are measured in turn, in one process, since other load comes and goes: compare rows of one run.
`cores`: CPU time of the engine's process by wall time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.common import Rows, bench_parser, numbers, report
from hetero_llm import LLM, SamplingParams

_LOOP = "print(flush=True)\nwhile True: pass"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that never wait, all of which have begun."""
    command = [sys.executable, "-c", _LOOP]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


def measure(llm: LLM, tokens: int) -> tuple[float, float]:
    """Tokens a second and CPU seconds a second of one request."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin, used = time.perf_counter(), sum(os.times()[:2])
    llm.generate("def f(", params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return tokens / seconds, (sum(os.times()[:2]) - used) / seconds


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--neighbours", type=numbers, default=[0, 4], help="numbers of processes")
    parser.add_argument("--tokens", type=int, default=24, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in options.neighbours}
    with LLM(options.model) as llm:
        measure(llm, options.tokens)
        for _ in range(options.rounds):
            for count in options.neighbours:
                with busy_processes(count):
                    found[count].append(measure(llm, options.tokens))
        backend = llm.backend
    rows: Rows = [
        {
            "neighbours": count,
            "tokens/s": statistics.median(rate for rate, _ in of_count),
            "cores": statistics.median(cores for _, cores in of_count),
        }
        for count, of_count in found.items()
    ]
    report("neighbours", {"model": options.model, "backend": backend}, rows, options.out)


if __name__ == "__main__":
    main()
