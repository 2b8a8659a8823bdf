"""Milliseconds of one decode step of a draft model through the executor.

Rotation, paged cache and greedy sampling are included; each step's tokens go into the next, and the
context keeps its length. `batch`: every token belongs to a sequence of its own. `branches`: all
tokens extend one sequence, as branches of a draft tree do. The table compares, at as many threads:
PyTorch eager on the same module (`F.linear` on plain weights), our torch path (prepacked weights,
compiled attention), and a plain read of as many bytes as the step's weights have. Both torch paths
run branches as a chunk, which is as much work. Medians.

With `--candidates K` also the same step when it returns the K likeliest tokens of each position and
their log-probabilities, with `--noisy` among scores with noise, in turns with the greedy one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.common import Rows, bench_parser, numbers, report, say, settings_of
from bench.cpu_limits import ReadProbe
from bench.shapes import CPU_SHAPES, INT4_BYTES, step_bytes, write_config
from hetero_llm.cpu import native
from hetero_llm.cpu.executor import (
    CANDIDATES,
    GREEDY,
    MOST_CANDIDATES,
    Candidates,
    Executor,
    StepInput,
    StepSamples,
)
from hetero_llm.cpu.fused import speed_up
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.scored_attention import Scoring
from hetero_llm.utils.topology import compute_cpus

BLOCK = 16
KINDS = ("batch", "branches")
FORMATS = {"bf16": 2.0, "int8": 1.0, "int4": INT4_BYTES}
"""Weight formats of the executor, and bytes of a weight."""

_WARM_UP, _WARM_UP_S = 50, 0.5
_LEAST_STEPS, _LONGEST_S = 10, 1.5
_MAX_ROWS = 64  # of one tree
_NOISY_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Work:
    """`rows` tokens that see `context` tokens each, themselves included."""

    kind: str
    rows: int
    context: int

    @property
    def sequences(self) -> int:
        return self.rows if self.kind == "batch" else 1

    @property
    def starts(self) -> np.ndarray:
        """[sequences] tokens in the cache before the step."""
        return np.full(self.sequences, self.context - 1, np.int32)

    @property
    def counts(self) -> np.ndarray:
        """[sequences] tokens of the step."""
        return np.full(self.sequences, self.rows // self.sequences, np.int32)


def block_tables(work: Work, num_blocks: int) -> np.ndarray:
    """[sequences, columns] int32: distinct blocks in random order."""
    columns = -(-(work.context + work.rows) // BLOCK)
    blocks = np.random.default_rng(0).permutation(num_blocks)[: work.sequences * columns]
    return blocks.reshape(work.sequences, columns).astype(np.int32)


def blocks_for(rows: list[int], context: int) -> int:
    """Blocks that the largest of the works needs."""
    return max(rows) * -(-(context + max(rows)) // BLOCK)


def token_places(work: Work) -> list[np.ndarray]:
    """Per sequence, the places of its rows in its context: they follow the cached tokens."""
    return [start + np.arange(count) for start, count in zip(work.starts, work.counts, strict=True)]


def slot_mapping(work: Work, tables: np.ndarray) -> np.ndarray:
    """[rows] int32 KV slot of each row."""
    slots = [
        table[place // BLOCK] * BLOCK + place % BLOCK
        for table, place in zip(tables, token_places(work), strict=True)
    ]
    return np.concatenate(slots).astype(np.int32)


def random_model(config: ModelConfig) -> CausalLM:
    """Seeded random bf16 weights."""
    return load_model(
        Path("."), config, dtype=torch.bfloat16, device="cpu", show_progress=False,
        load_format="dummy",
    )  # fmt: skip


def make_cache(config: ModelConfig, num_blocks: int) -> PagedKVCache:
    """A cache in bf16, every block of which holds the same random numbers."""
    shape = KVCacheShape(
        config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, torch.bfloat16
    )
    cache = PagedKVCache(shape, num_blocks, torch.device("cpu"))
    cache.data[0].normal_(generator=torch.Generator().manual_seed(0))
    cache.data[1:] = cache.data[0]
    return cache


def make_executor(
    config: ModelConfig, cache: PagedKVCache, weight_format: str, threads: int
) -> Executor:
    """A new executor of `random_model`; pinned if this process has as many cores."""
    library = native.load()
    assert library is not None, "no compiled library"
    cpus = compute_cpus(reserve=0)
    return Executor(
        random_model(config), config, cache, library=library, threads=threads,
        cpus=cpus[:threads] if len(cpus) >= threads else None, weight_format=weight_format,
        isa=native.isa_level(),
    )  # fmt: skip


def step_arrays(work: Work, tables: np.ndarray) -> tuple[StepInput, StepSamples]:
    """The executor's view of the work: branches are children of the last cached token."""
    rows, is_tree = work.rows, work.kind == "branches"
    assert rows <= _MAX_ROWS or not is_tree, f"a tree has at most {_MAX_ROWS} rows"
    own_bits = np.arange(rows, dtype=np.uint64) * np.uint64(is_tree)
    step = StepInput(
        token_ids=np.arange(1, rows + 1, dtype=np.int32),
        positions=np.full(rows, work.context - 1, np.int32),
        slot_mapping=slot_mapping(work, tables),
        request_slots=np.arange(work.sequences, dtype=np.int32),
        num_computed_tokens=work.starts,
        num_scheduled_tokens=work.counts,
        bases=work.starts,
        is_tree=np.full(work.sequences, is_tree, np.uint8),
        ancestors=np.uint64(1) << own_bits,
        block_tables=tables,
    )
    return step, StepSamples.plain(np.arange(rows), GREEDY)


def executor_step(executor: Executor, work: Work, num_blocks: int) -> Callable[[], None]:
    """One step through the executor's call from Python."""
    rows, samples = step_arrays(work, block_tables(work, num_blocks))

    def step() -> None:
        rows.token_ids[:] = executor.step(rows, samples)

    return step


@dataclass(frozen=True, slots=True)
class Wanted:
    """Candidates of every row: how many, and the temperature of their noise (0: none)."""

    count: int
    temperature: float


def candidates_step(
    executor: Executor, work: Work, num_blocks: int, wanted: Wanted
) -> Callable[[], None]:
    """One step through prepared arrays, as a draft worker runs it."""
    rows, samples = step_arrays(work, block_tables(work, num_blocks))
    samples.modes[:], samples.temperatures[:] = CANDIDATES, wanted.temperature
    found = Candidates.empty(work.rows, wanted.count)
    prepared = executor.prepare(rows, samples, np.empty(work.rows, np.int64), found)

    def step() -> None:
        executor.run(prepared, work.rows, work.sequences, work.rows)
        rows.token_ids[:] = found.tokens[:, 0]

    return step


def torch_step(
    model: CausalLM, attention: TorchPagedAttention, work: Work, num_blocks: int
) -> Callable[[], None]:
    """One step of the module with attention over the paged cache."""
    tables = block_tables(work, num_blocks)
    positions = np.concatenate(token_places(work))
    blocks = slot_mapping(work, tables) // BLOCK
    tokens = torch.arange(1, work.rows + 1)
    at = torch.from_numpy(positions.astype(np.int64))

    @torch.inference_mode()
    def step() -> None:
        nonlocal tokens
        attend = attention.plan(work.starts, work.counts, tables, positions, blocks)
        tokens = model.logits(model(tokens, at, attend)).argmax(dim=-1)

    return step


def median_ms(step: Callable[[], None], steps: int) -> float:
    """Of `steps` steps, each timed, after some that warm up; of fewer if they take too long."""
    begin = time.perf_counter()
    for _ in range(min(_WARM_UP, steps)):
        step()
        if time.perf_counter() - begin > _WARM_UP_S:
            break
    times: list[float] = []
    while len(times) < steps and (len(times) < _LEAST_STEPS or sum(times) < _LONGEST_S):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def medians_in_turns(steps: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Medians in milliseconds over three rounds, so that other work on the machine hits all."""
    rounds = [{name: median_ms(step, count) for name, step in steps.items()} for _ in range(3)]
    return {name: statistics.median(one[name] for one in rounds) for name in steps}


class Bench:
    """A model of random weights with a KV cache, made once for each way of running it."""

    def __init__(self, shape: str, rows: list[int], context: int) -> None:
        self.shape, self.num_blocks = shape, blocks_for(rows, context)
        with tempfile.TemporaryDirectory() as folder:
            self._config: ModelConfig = load_model_config(
                write_config(CPU_SHAPES[shape], Path(folder))
            )
        self._cache = make_cache(self._config, self.num_blocks)
        self._plain, self._fast = random_model(self._config), random_model(self._config)
        speed_up(self._fast)

    def executor(self, weight_format: str, threads: int) -> Executor:
        return make_executor(self._config, self._cache, weight_format, threads)

    def torch_steps(self, work: Work) -> dict[str, Callable[[], None]]:
        """ "eager" and our "torch path"."""
        config, cache = self._config, self._cache
        kernel = native_row_kernel(cache, config.num_heads, Scoring.of(config))
        ways = {"eager_ms": (self._plain, None), "torch_path_ms": (self._fast, kernel)}
        return {
            name: torch_step(
                model,
                TorchPagedAttention(config, cache, row_by_row=False, row_kernel=row_kernel),
                work,
                self.num_blocks,
            )
            for name, (model, row_kernel) in ways.items()
        }


def our_steps(
    executor: Executor, work: Work, num_blocks: int, wanted: Wanted | None
) -> dict[str, Callable[[], None]]:
    """The greedy step, and the one with candidates if any are wanted."""
    ways = {"ours_ms": executor_step(executor, work, num_blocks)}
    if wanted is not None:
        name = "noisy_ms" if wanted.temperature else "candidates_ms"
        ways[name] = candidates_step(executor, work, num_blocks, wanted)
    return ways


def measure(
    bench: Bench,
    works: list[Work],
    formats: list[str],
    *,
    threads: int,
    steps: int,
    wanted: Wanted | None,
) -> Rows:
    """One row per format and work."""
    torch.set_num_threads(threads)
    torch_ms: dict[Work, dict[str, float]] = {}
    for work in works:
        ways = bench.torch_steps(work)
        torch_ms[work] = {name: median_ms(step, steps) for name, step in ways.items()}
    table = []
    for weight_format in formats:
        executor = bench.executor(weight_format, threads)
        size = int(step_bytes(CPU_SHAPES[bench.shape], FORMATS[weight_format]))
        with ReadProbe(size, threads) as probe:
            for work in works:
                before = probe.seconds()
                ways = our_steps(executor, work, bench.num_blocks, wanted)
                ours = medians_in_turns(ways, steps)
                read = (before + probe.seconds()) / 2 * 1e3
                beside = torch_ms[work]
                table.append(
                    {"weights": weight_format, "threads": threads, "kind": work.kind,
                     "rows": work.rows, **ours, "read_ms": read,
                     "ours/read": ours["ours_ms"] / read, **beside,
                     "eager/ours": beside["eager_ms"] / ours["ours_ms"]}
                )  # fmt: skip
                say(table[-1])
        del executor  # frees the cores of its threads for the next one
    return table


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(CPU_SHAPES), default="draft-68m")
    parser.add_argument("--threads", type=numbers, default=[2], help="comma-separated")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="comma-separated")
    parser.add_argument("--context", type=int, default=1280)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--candidates", type=int, metavar="K", help=f"1 to {MOST_CANDIDATES} likeliest tokens"
    )
    parser.add_argument("--noisy", action="store_true", help="candidates at temperature 0.7")
    args = parser.parse_args()
    if args.noisy and args.candidates is None:
        parser.error("--noisy needs --candidates")
    if args.candidates is not None and not 1 <= args.candidates <= MOST_CANDIDATES:
        parser.error(f"--candidates {args.candidates}: must be 1 to {MOST_CANDIDATES}")
    wanted = None
    if args.candidates is not None:
        wanted = Wanted(args.candidates, _NOISY_TEMPERATURE if args.noisy else 0.0)
    works = [
        Work(kind, rows, args.context)
        for rows in args.rows
        for kind in args.kinds
        if rows > 1 or kind == args.kinds[0]  # one row is both
    ]
    bench = Bench(args.shape, args.rows, args.context)
    table = []
    for threads in args.threads:
        table += measure(
            bench, works, args.formats, threads=threads, steps=args.steps, wanted=wanted
        )
    print(f"{args.shape}, context {args.context}, {native.ISA_NAMES[native.isa_level()]}")
    about = settings_of(args, "shape context steps candidates noisy")
    about["isa"] = native.ISA_NAMES[native.isa_level()]
    report(f"draft_step.{args.shape}", about, table, args.out)


if __name__ == "__main__":
    main()
