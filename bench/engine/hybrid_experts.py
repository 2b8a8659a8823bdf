"""Milliseconds a step of a mixture that the GPU does not hold, against what memory allows.

    python -m bench.engine.hybrid_experts [--layers 24] [--resident 0.48] [--batches 1,8]
        [--traces zipf,recency,uniform] [--seconds 4] [--hand-over] [--out FILE]

The shape is Qwen3-235B-A22B's (hidden 4096, 128 experts of 1536, 8 a token, attention of 64 heads
with 4 KV heads of 128) with fp8 weights in blocks, reduced to `--layers` of its 94 layers, so that
host memory holds all of them; `--resident` is the share of experts in the bank, by default that of
the whole model on an H200. Weights are random. A step is, for each layer, a product with as many
bytes as the attention's matrices have in bf16, then post, resident experts, wait_add; it is one
captured graph. Norms, attention over keys, head and sampling are left out. Routes come from the
traces of `bench.engine.expert_placement` (rows of a batch follow traces of their own, shifted), and
the bank begins with the experts in demand in the trace's first half, as a profile would have it;
steps run through the second half.

Table 1, for each trace and batch:

- `ms`: median of a step with promotions of up to 2 GB/s, `fixed_ms`: without;
- `hit`: share of pairs that the bank computes; `miss_mb`: bytes of different experts a step that
  the threads read;
- `model_ms`: for each layer, the attention's bytes at the GPU's rate, then the longer one of the
  host's bytes at the read rate of all threads and the bank's bytes at the GPU's rate; `of_model`:
  model_ms / ms;
- `linked`: what the GPU computes of the missed experts, reading it over the link while the threads
  compute the rest: the last inner rows of each, or a share of them whole; as the engine chooses it,
  or, if it chooses nothing (`pays` is False), the part that is fastest with random routes;
  `linked_ms` with it and `alone_ms` without, from the same graphs in turns, experts fixed;
  `link_gain`: alone_ms / linked_ms; `linked_over_link`: link_ms / linked_ms;
- `link_ms`: what streaming the same missed experts takes at least: their bytes at the link's rate,
  in place of the host's; `over_link`: link_ms / ms.

Table 2, the hand-over: percentiles of the us of an exchange whose experts have next to no weights,
8 of them in a graph, less `resident_us`, that of a graph of the same layers without a request. The
process's other threads keep off the team's cores, and the team is woken ahead of each graph, as in
the engine. `team_us`: from the number seen by the team to the end of its last barrier, median over
graphs, and `team_us_of_slow` their mean in the slowest 1% of the graphs: what of p99 is the CPU's.
`post_us`: what `post` takes longer if it asks; `read_us`: what `wait_add` takes longer if it finds
an answer that is complete. The rest of an exchange is the number's way to the team, and the wait
for a look that finds the answer. `--hand-over` measures nothing else.

Table 3, 8 layers whose experts are all in the bank over the same without a bank: `bank_ms` (post
and wait_add, nothing asked), `plain_ms` (align and combine), `ratio`. No engine has such a bank:
where all experts fit, `plan_experts` makes none, and the layers are the plain ones.

Table 4, how much a batch can gain: `bound`, tokens/s of the largest batch over those of one
sequence by `model_ms`, and `gain`, as measured.

Table 5, what the engine measures at start to choose `linked`: ms of a layer, with `random` routes
and, for the parts that save 3% then, with routes that miss one expert a token (`one_miss`).

Rates of the same run: plain reads by the threads, page-locked memory to the GPU, copies on the GPU
(bytes read plus written).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.common import Rows, bench_parser, names_of, numbers, print_table, report
from bench.cpu_limits import ReadProbe
from bench.engine.expert_placement import SETUPS, TRACES, make_trace
from bench.gpu_timing import call_us, capture, copy_bandwidth, event_ms, link_rate
from hetero_llm.bridge.expert_mailbox import (
    COMING,
    NO_PART,
    WHOLES,
    ExpertMailbox,
    LinkPart,
    open_mailbox,
)
from hetero_llm.bridge.host_experts import HostExperts, HostLayer, HostMatrices
from hetero_llm.cpu import native
from hetero_llm.cpu.expert_team import ExpertTeam
from hetero_llm.engine.builders.build_experts import join_experts, link_parts
from hetero_llm.engine.builders.expert_store import ExpertMemory
from hetero_llm.expert_offload.placement import ExpertPlacement, PromotionBudget
from hetero_llm.expert_offload.step_costs import choose_linked, paying_parts
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import FixedPlacement, Placement
from hetero_llm.gpu.hybrid_experts import HybridExperts
from hetero_llm.gpu.kernels.expert_requests import NUMBER, Places, wait_add
from hetero_llm.gpu.kernels.linked_experts import MOST_TOKENS
from hetero_llm.gpu.kernels.quantized_experts import quantized_experts
from hetero_llm.gpu.kernels.skinny_gemm import linear
from hetero_llm.models.experts import Experts
from hetero_llm.utils.affinity import ThreadsElsewhere
from hetero_llm.utils.topology import compute_cpus

BF16 = torch.bfloat16
HIDDEN, INNER, EXPERTS, K = 4096, 1536, 128, 8
ATTENTION = (64 + 2 * 4) * 128 + 64 * 128  # rows of HIDDEN numbers in all of its matrices
BLOCK = 128
_PATTERN = 1 << 26
_RATE = 2e9
_EXCHANGES, _REPLAYS, _RUNS = 8, 1000, 3
_RESIDENT_LAYERS = 8
_TURNS = 4


def fp8_layers(count: int, inner: int, hidden: int, memory: Any) -> HostExperts:
    """Random fp8 experts in blocks, in `memory`."""
    pattern = (torch.randn(_PATTERN) * 0.5).to(torch.float8_e4m3fn).view(torch.uint8)

    def matrices(rows: int, columns: int) -> HostMatrices:
        data = memory((EXPERTS, rows, columns), torch.float8_e4m3fn)
        flat = data.view(torch.uint8).view(-1)
        for begin in range(0, len(flat), _PATTERN):
            part = flat[begin : begin + _PATTERN]
            part.copy_(pattern[: len(part)])
        scale = memory((EXPERTS, rows // BLOCK, columns // BLOCK), torch.float32)
        scale.fill_(2 * columns**-0.5)
        return HostMatrices("fp8", data, scale, group=BLOCK, scale_rows=BLOCK)

    layers = (HostLayer(matrices(2 * inner, hidden), matrices(hidden, inner)) for _ in range(count))
    return HostExperts(tuple(layers), "silu")


def modules_of(count: int) -> list[Experts]:
    with torch.device("meta"):
        return [Experts(1, 1, 1, "silu") for _ in range(count)]


@dataclass
class Machine:
    """Rates, GB/s, and what computes.

    Attributes:
        dram: plain reads by the threads. link: page-locked memory to the GPU. gpu: device memory.
    """

    library: Any
    cpus: tuple[int, ...]
    dram: float = 0.0
    link: float = 0.0
    gpu: float = 0.0

    @classmethod
    def find(cls) -> Machine:
        """Without rates."""
        library = native.load()
        assert library is not None, "the library could not be built"
        cpus = compute_cpus(reserve=0)
        return cls(library, cpus[1:] or cpus)

    def team(self, host: HostExperts, box: ExpertMailbox) -> ExpertTeam:
        return ExpertTeam(host, box, self.library, threads=len(self.cpus), cpus=self.cpus)


def measure_machine() -> Machine:
    machine = Machine.find()
    with ReadProbe(1 << 30, len(machine.cpus)) as probe:
        dram = probe.gigabytes_per_s(3)
    return dataclasses.replace(
        machine, dram=dram, link=link_rate() / 1e9, gpu=copy_bandwidth() * 1e3
    )


class Routes:
    """Experts of each layer in each step, on the device; a counter there names the step.

    Args:
        trace: [steps, layers, k] int, experts of a layer.
        batch: rows, each of which is `steps / batch` steps ahead of the one before.
    """

    def __init__(self, trace: np.ndarray, batch: int) -> None:
        steps = len(trace) // batch
        rows = [trace[row * steps : (row + 1) * steps] for row in range(batch)]
        self.ids = np.stack(rows, axis=2).astype(np.int32)  # [steps, layers, batch, k]
        self.steps = steps
        self._ids = torch.from_numpy(self.ids).cuda()
        self._step = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.weights = torch.full((batch, K), 1 / K, device="cuda")

    def next(self) -> Tensor:
        """[layers, batch, k] of the step; counts on."""
        ids = self._ids.index_select(0, self._step)[0]
        self._step.add_(1).remainder_(self.steps)
        return ids

    def start_at(self, step: int) -> None:
        self._step.fill_(step)


@dataclass
class Stack:
    """Layers in host memory, a bank, and the attention's products.

    Attributes:
        attention: [layers, ATTENTION, HIDDEN] in bf16.
    """

    host: HostExperts
    bank: ExpertBank
    attention: Tensor
    machine: Machine

    def step(self, modules: list[Experts], routes: Routes, x: Tensor) -> None:
        ids = routes.next()
        for layer, module in enumerate(modules):
            linear(x, self.attention[layer], None)
            module(x, ids[layer], routes.weights)

    def model_ms(self, missed: np.ndarray, resident: np.ndarray, rate: float) -> float:
        """See the module.

        Args:
            missed, resident: [steps, layers] different experts on the host, and in the bank.
            rate: at which the host's experts come, GB/s.
        """
        each = self.host.expert_bytes / 1e6
        waits = np.maximum(missed * each / rate, resident * each / self.machine.gpu)
        attention = self.attention[0].nbytes / 1e6 / self.machine.gpu
        return float((waits + attention).sum(1).mean())


def different(ids: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """[steps, layers] different experts on the host and in the bank, and the share of pairs in it.

    Args:
        ids: [steps, layers, batch, k].
        table: [layers, experts].
    """
    steps, layers = ids.shape[:2]
    used = np.zeros((steps, layers, EXPERTS), bool)
    at = np.arange(steps)[:, None, None], np.arange(layers)[None, :, None]
    used[(*at, ids.reshape(steps, layers, -1))] = True
    inside = table >= 0
    hits = inside[np.arange(layers)[None, :, None], ids.reshape(steps, layers, -1)].mean()
    return (used & ~inside).sum(2), (used & inside).sum(2), float(hits)


def run_steps(
    experts: HybridExperts, graph: torch.cuda.CUDAGraph, batch: int, count: int, seconds: float
) -> list[float]:
    """Milliseconds of up to `count` steps, for `seconds` at most."""
    times: list[float] = []
    rows = np.ones(batch, np.int32)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    end_at = time.monotonic() + seconds
    while len(times) < count and time.monotonic() < end_at:
        experts.before_launch(rows, link_is_busy=False)
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        experts.finished()
        times.append(events[0].elapsed_time(events[1]))
    return times


def measure_trace(stack: Stack, name: str, batch: int, seconds: float) -> dict[str, Any]:
    setup, host, machine = SETUPS[0], stack.host, stack.machine
    layers = host.num_layers
    trace = make_trace(name, setup, layers=layers, steps=1600, seed=batch).ids
    local = trace - np.arange(layers, dtype=np.int32)[:, None] * EXPERTS
    routes = Routes(local, batch)
    half = routes.steps // 2
    row: dict[str, Any] = {"trace": name, "batch": batch}
    table = placement_of(stack, routes.ids[:half], moves=False).table.copy()
    stack.bank.place(table)
    for kind in ("fixed", "moving"):
        # The same content, by the same observations.
        placement = placement_of(stack, routes.ids[:half], moves=kind == "moving")
        box = open_mailbox(max(8, batch), HIDDEN, K, BF16, pin=True, order="bytes")
        team = machine.team(host, box)
        modules = modules_of(layers)
        experts = join_experts(stack.bank, placement, box, modules, wake=team.wake, on_stream=True)
        x = torch.randn(batch, HIDDEN, device="cuda").to(BF16)
        graph = capture(partial(stack.step, modules, routes, x))
        routes.start_at(half)
        stack.bank.hits.zero_()
        times = run_steps(experts, graph, batch, routes.steps - half, seconds)
        torch.cuda.synchronize()
        row["ms" if kind == "moving" else "fixed_ms"] = statistics.median(times)
        if kind == "fixed":
            ran = routes.ids[half : half + len(times)]
            missed, resident, hit = different(ran, table)
            row["hit"] = hit
            row["miss_mb"] = float(missed.sum(1).mean()) * host.expert_bytes / 1e6
            row["model_ms"] = stack.model_ms(missed, resident, machine.dram)
            row["link_ms"] = stack.model_ms(missed, resident, machine.link)
            row["of_model"] = row["model_ms"] / row["fixed_ms"]
            row["over_link"] = row["link_ms"] / row["fixed_ms"]
            row["steps"] = len(times)
            if batch <= MOST_TOKENS:
                step = partial(stack.step, modules, routes, x)
                row |= third_lane(experts, routes, step, seconds)
                row["linked_over_link"] = row["link_ms"] / row["linked_ms"]
        else:
            row["promoted"] = experts.moves.num_promoted
            row["late_ms"] = statistics.median(times[len(times) // 2 :])
        team.stop()
        del graph, experts, team
    return row


def third_lane(
    experts: HybridExperts, routes: Routes, step: Callable[[], None], seconds: float
) -> dict[str, Any]:
    """See the module; `experts` is left as it was."""
    batch, inner = routes.ids.shape[2], experts.bank.host.inner
    found = experts.measure_linked([batch], link_parts(inner), paying_parts)[batch]
    random = found.random
    linked = choose_linked(random, found.one_miss, NO_PART)
    row: dict[str, Any] = {"pays": linked != NO_PART}
    row["start_ms"] = [
        {"linked": name_of(part)}
        | {
            name: 1e3 * times[part] if part in times else None
            for name, times in (("random", random), ("one_miss", found.one_miss))
        }
        for part in random
    ]
    if linked == NO_PART:
        linked = min((part for part in random if part != NO_PART), key=random.__getitem__)
    graphs = []
    for some in (NO_PART, linked):
        experts.use_link({batch: some})
        graphs.append(capture(step))
    experts.use_link({})
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for graph, own in zip(graphs, times, strict=True):
            routes.start_at(routes.steps // 2)
            count = routes.steps - routes.steps // 2
            own += run_steps(experts, graph, batch, count, seconds / _TURNS)
    torch.cuda.synchronize()
    alone, with_link = (statistics.median(own) for own in times)
    gain = {"alone_ms": alone, "linked_ms": with_link, "link_gain": alone / with_link}
    return row | {"linked": name_of(linked)} | gain


def name_of(part: LinkPart) -> str:
    if part.rows:
        return f"{part.rows} rows"
    return f"{part.whole / WHOLES:.2f} whole" if part.whole else "none"


def placement_of(stack: Stack, seen: np.ndarray, *, moves: bool) -> Placement:
    """The experts in demand in `seen`, [steps, layers, batch, k]."""
    host = stack.host
    budget = PromotionBudget(bytes_per_s=_RATE if moves else 0.0, expert_bytes=host.expert_bytes)
    placement = ExpertPlacement(
        host.num_layers, host.num_experts, stack.bank.num_slots, budget=budget
    )
    at = np.broadcast_to(np.arange(host.num_layers)[None, :, None, None], seen.shape)
    for begin in range(0, len(seen), 32):
        counts = np.zeros(placement.table.shape, np.int32)
        part = seen[begin : begin + 32]
        np.add.at(counts, (at[begin : begin + 32], part), 1)
        placement.observe(counts, steps=len(part), seconds=0.0)
    placement.fill()
    return placement if moves else FixedPlacement(placement.table)


@dataclass
class Exchanges:
    """Layers whose experts have next to no weights: a layer of them is a hand-over."""

    layers: HostExperts
    bank: ExpertBank
    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def make(cls) -> Exchanges:
        layers = fp8_layers(_EXCHANGES, BLOCK, BLOCK, ExpertMemory())
        device = torch.device("cuda")
        bank = ExpertBank(layers, EXPERTS * _EXCHANGES, staging=EXPERTS, device=device)
        x = torch.randn(1, BLOCK, device=device).to(BF16)
        ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
        return cls(layers, bank, x, ids, torch.ones(1, 1, device=device))

    def join(self, table: np.ndarray, wake: Callable[[], None]) -> HybridExperts:
        """With a mailbox of its own, and modules that nothing else uses."""
        self.bank.place(table)
        box = open_mailbox(8, BLOCK, 1, BF16, pin=True, order="bytes")
        modules = modules_of(_EXCHANGES)
        return join_experts(
            self.bank, FixedPlacement(table), box, modules, wake=wake, on_stream=True
        )

    def start(self, experts: HybridExperts) -> Places:
        return experts.start(0, self.x, self.ids, self.weights).places

    def compute(self, experts: HybridExperts) -> None:
        for layer in range(_EXCHANGES):
            started = experts.start(layer, self.x, self.ids, self.weights)
            experts.finish(layer, self.x, self.weights, started)


def hand_over(machine: Machine) -> Rows:
    """See the module: percentiles of exchanges, and what their parts take."""
    own = Exchanges.make()
    full = np.arange(EXPERTS * _EXCHANGES, dtype=np.int32).reshape(_EXCHANGES, EXPERTS)
    times, busy = {}, np.zeros(0)
    for name, table in (("asks", np.full_like(full, -1)), ("resident", full)):
        experts = own.join(table, lambda: None)
        team = machine.team(own.layers, experts.exchange.mailbox)
        graph = capture(partial(own.compute, experts))
        elsewhere = ThreadsElsewhere(machine.cpus)
        found, seen = [], []
        for _ in range(_REPLAYS):
            team.wake()  # as the engine does ahead of a step
            before = team.stats().busy_s
            found.append(event_ms(graph.replay, replays=1))
            seen.append(team.stats().busy_s - before)
        elsewhere.restore()
        times[name] = np.array(found[20:]) * 1e3 / _EXCHANGES
        if name == "asks":
            busy = np.array(seen[20:]) * 1e6 / _EXCHANGES
        torch.cuda.synchronize()
        experts.finished()
        team.stop()
    asks, less = times["asks"], float(np.median(times["resident"]))
    slow = asks >= np.percentile(asks, 99)
    row: dict[str, Any] = {
        f"hand_over_us_p{share}": float(np.percentile(asks, share)) - less
        for share in (10, 50, 90, 99, 100)
    }
    row |= {"resident_us": less, "team_us": float(np.median(busy))}
    row["team_us_of_slow"] = float(busy[slow].mean())
    return [row | parts_of_hand_over(own, full)]


def parts_of_hand_over(own: Exchanges, full: np.ndarray) -> dict[str, float]:
    """Microseconds that `post` takes longer if it asks, and `wait_add` if the answer is there."""
    found = {}
    for name, table in (("asks", np.full_like(full, -1)), ("resident", full)):
        experts = own.join(table, lambda: None)
        exchange, box = experts.exchange, experts.exchange.mailbox
        places = own.start(experts)  # no thread answers it
        number = int(exchange.state[NUMBER])
        box.numbers.fill_(number)
        box.answer[COMING] = number
        parts = torch.zeros(1, BLOCK, dtype=torch.float32, device="cuda")
        read = partial(
            wait_add, parts, own.weights, places, dtype=BF16, exchange=exchange
        )  # fmt: skip
        read_us = call_us(read, _EXCHANGES)
        experts.finished()  # every answer was there
        found[name] = call_us(partial(own.start, experts), _EXCHANGES), read_us
    posts, reads = (asks - less for asks, less in zip(*found.values(), strict=True))
    return {"post_us": posts, "read_us": reads}


def all_resident(stack: Stack, batch: int) -> dict[str, Any]:
    """See the module; the bank is a part of the stack's, and the plain layers read its memory."""
    bank, count = stack.bank, _RESIDENT_LAYERS
    table = np.full(tuple(bank.table.shape), -1, np.int32)
    table[:count] = np.arange(count * EXPERTS).reshape(count, EXPERTS)
    bank.place(table)
    box = open_mailbox(max(8, batch), HIDDEN, K, BF16, pin=True, order="bytes")
    modules = modules_of(stack.host.num_layers)
    join_experts(bank, FixedPlacement(table), box, modules, wake=lambda: None, on_stream=True)
    x = torch.randn(batch, HIDDEN, device="cuda").to(BF16)
    ids = torch.stack(
        [
            torch.rand(batch, EXPERTS, device="cuda").topk(K, dim=1).indices.to(torch.int32)
            for _ in range(count)
        ]
    )
    weights = torch.full((batch, K), 1 / K, device="cuda")
    first, second = bank.gate_up.weights, bank.down.weights

    def with_bank() -> None:
        for layer in range(count):
            linear(x, stack.attention[layer], None)
            modules[layer](x, ids[layer], weights)

    plain_parts = [
        (part_of(first, layer, 2 * INNER), part_of(second, layer, HIDDEN)) for layer in range(count)
    ]

    def without() -> None:
        for layer, (gate_up, down) in enumerate(plain_parts):
            linear(x, stack.attention[layer], None)
            quantized_experts(x, ids[layer], weights, gate_up, down, activation="silu")

    ours, plain = capture(with_bank), capture(without)
    pairs = [(event_ms(ours.replay), event_ms(plain.replay)) for _ in range(15)]
    bank_ms, plain_ms = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {"batch": batch, "bank_ms": bank_ms, "plain_ms": plain_ms, "ratio": bank_ms / plain_ms}


def part_of(weights: Any, layer: int, rows: int) -> Any:
    """The experts of a layer, a copy, as a matrix of their own."""
    begin, end = layer * EXPERTS * rows, (layer + 1) * EXPERTS * rows
    scale = weights.scale[:, begin // BLOCK : end // BLOCK].contiguous()
    return dataclasses.replace(
        weights, shape=(EXPERTS * rows, weights.shape[1]), data=weights.data[begin:end], scale=scale
    )


def gains_of(table: Rows) -> Rows:
    """See the module."""
    gains = []
    for name in dict.fromkeys(row["trace"] for row in table):
        rows = sorted((r for r in table if r["trace"] == name), key=lambda r: int(r["batch"]))
        few, many = rows[0], rows[-1]
        if few is many:
            continue
        batches = many["batch"] / few["batch"]
        gains.append({
            "trace": name, "batch": many["batch"],
            "bound": batches * few["model_ms"] / many["model_ms"],
            "gain": batches * few["fixed_ms"] / many["fixed_ms"],
        })  # fmt: skip
    return gains


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--resident", type=float, default=0.48)
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="comma-separated")
    parser.add_argument("--traces", type=names_of(TRACES), default=["zipf", "uniform", "recency"])
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps, for each of a line's")
    parser.add_argument("--hand-over", action="store_true", help="table 2 alone, three times")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.hand_over:
        with torch.inference_mode():
            for _ in range(_RUNS):
                print_table(hand_over(Machine.find()))
        return
    machine = measure_machine()
    rates = {"threads": len(machine.cpus), "dram": machine.dram, "link": machine.link,
             "gpu": machine.gpu}  # fmt: skip
    print_table([rates])
    with torch.inference_mode():
        overs = hand_over(machine)
        print_table(overs)
        host = fp8_layers(args.layers, INNER, HIDDEN, ExpertMemory())
        print(f"{args.layers} layers on the host after {time.monotonic() - begin:.0f} s")
        slots = round(args.resident * args.layers * EXPERTS)
        bank = ExpertBank(host, slots, staging=EXPERTS, device=torch.device("cuda"))
        attention = torch.randn(args.layers, ATTENTION, HIDDEN, device="cuda", dtype=BF16)
        stack = Stack(host, bank, attention.mul_(HIDDEN**-0.5), machine)
        resident = []
        if slots >= _RESIDENT_LAYERS * EXPERTS and args.layers >= _RESIDENT_LAYERS:
            resident = [all_resident(stack, batch) for batch in args.batches]
            print_table(resident)
        table = [
            measure_trace(stack, name, batch, args.seconds)
            for name in args.traces
            for batch in args.batches
        ]
    gains = gains_of(table)
    if gains:
        print_table(gains)
    starts = [
        {"trace": row["trace"], "batch": row["batch"], **part}
        for row in table
        for part in row.pop("start_ms", [])
    ]
    if starts:
        print_table(starts)
    about = {"layers": args.layers, "resident": args.resident, "rates": rates}
    about |= {"hand_over": overs, "all_resident": resident, "gains": gains, "start_ms": starts}
    report("hybrid_experts", about, table, args.out)


if __name__ == "__main__":
    main()
