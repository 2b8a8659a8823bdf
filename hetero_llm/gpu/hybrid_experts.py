"""A mixture of which the GPU's bank holds some experts and host memory the others.

Layers call `start` and `function` of their `HybridLayer`. A step of at most `most_rows` tokens asks
CPU threads for the outputs of experts on the host (`kernels.expert_requests`); where the link is a
third lane (`use_link`), the GPU computes a part of these experts meanwhile, reading them over the
link (`kernels.linked_experts`). A longer step copies its layers' experts to the GPU, a layer ahead
(`expert_streams`), and leaves those of few tokens to the threads. The runner calls `before_launch`,
`begin` and `finished`. Counters of the tokens that chose each expert lead to promotions between
steps (`expert_moves`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import NO_PART, LinkPart
from hetero_llm.core.null_objects import do_nothing
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import ExpertMoves
from hetero_llm.gpu.expert_streams import ExpertStreams, Split
from hetero_llm.gpu.kernels.expert_requests import (
    ON_HOST,
    Exchange,
    Places,
    post,
    rows_of_mail,
    wait_add,
)
from hetero_llm.gpu.kernels.experts import bank_experts
from hetero_llm.gpu.kernels.linked_experts import MOST_TOKENS, linked_experts
from hetero_llm.gpu.kernels.quantized_experts import quantized_bank_experts
from hetero_llm.models.config import Gate
from hetero_llm.models.experts import Experts

Routes = tuple[Tensor, Tensor, Tensor]
"""x, ids and weights of tokens."""
Timer = Callable[[Callable[[], None], Callable[[], None]], float]
"""Seconds of a run; called with it, and with what wakes the threads ahead of it."""
Agree = Callable[[float], float]
"""The seconds on which all ranks agree, given those that this one has measured."""

_READINGS = 4
"""Readings of the counters that may be under way at once."""
_PROMPT_BYTES = 1 << 30
"""What promotions may copy at once after a long prompt: some 20 ms of a link, beside the steps."""
_NO_LIMIT = 1 << 30
_TIMED = 3
_TIMED_EXCHANGES, _TIMED_MISSES = 8, 32
"""Of a captured step for measurements, at least: together they read more than a processor caches,
also where each token misses only one expert."""


class NoHybridExperts:
    """All experts are on the GPU.

    Attributes:
        most_rows: see `HybridExperts`.
    """

    most_rows = _NO_LIMIT
    before_launch = begin = finished = staticmethod(do_nothing)


@dataclass(frozen=True, slots=True)
class HitCounts:
    """What was counted between two readings.

    Attributes:
        counts: [layers, experts] int32 tokens.
        steps: in which they were counted.
        prompt_tokens: of the one step, if it was a long one; else 0.
    """

    counts: np.ndarray
    steps: int
    prompt_tokens: int


class HitReader:
    """Reads the bank's counters and sets them to zero, while steps run.

    Args:
        hits: [layers, experts] int32 on the device.
    """

    def __init__(self, hits: Tensor) -> None:
        on_gpu = hits.device.type == "cuda"
        self._hits = hits
        places = torch.zeros(_READINGS, *hits.shape, dtype=torch.int32, pin_memory=on_gpu)
        events = [torch.cuda.Event() if on_gpu else None for _ in range(_READINGS)]
        self._free = list(zip(places, events, strict=True))
        self._running: list[tuple[Tensor, torch.cuda.Event | None, int, int]] = []

    def start(self, steps: int, prompt_tokens: int) -> bool:
        """Reads behind the steps launched so far. Returns False if too many readings run.

        Args:
            steps, prompt_tokens: see `HitCounts`.
        """
        if not self._free:
            return False
        place, event = self._free.pop()
        place.copy_(self._hits, non_blocking=True)
        self._hits.zero_()
        if event is not None:
            event.record()
        self._running.append((place, event, steps, prompt_tokens))
        return True

    def take(self) -> list[HitCounts]:
        """Those readings that have ended since the last call."""
        found = []
        while self._running:
            place, event, steps, prompt_tokens = self._running[0]
            if event is not None and not event.query():
                break
            self._running.pop(0)
            found.append(HitCounts(place.numpy().copy(), steps, prompt_tokens))
            self._free.append((place, event))
        return found


@dataclass(frozen=True, slots=True)
class Started:
    """What a layer hands from `start` to `finish`.

    Attributes:
        ids: of the tokens.
        table: [experts] int32 on the device: the slots of the layer's experts.
        exchange: None: no expert is left to the threads.
        streamed: whether experts visit the staging slots.
    """

    places: Places
    ids: Tensor
    table: Tensor
    exchange: Exchange | None
    streamed: bool


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """What `HybridExperts.measure_most_rows` has measured.

    Attributes:
        link: seconds of bringing the host's experts of a layer to the GPU.
        threads: seconds of the threads for them, by number of tokens.
        slowdown: how many times as long the threads need while the link reads host memory, too.
    """

    link: float
    threads: dict[int, float]
    slowdown: float


@dataclass(frozen=True, slots=True)
class LinkedTimes:
    """What `HybridExperts.measure_linked` has measured for one number of tokens: seconds of a
    layer's exchange, by what the GPU computes of missed experts.

    Attributes:
        random: of tokens that choose any experts.
        one_miss: of tokens that miss one expert each, for `NO_PART` and the parts that pay with
            random routes; empty: there are none, or the bank is.
    """

    random: dict[LinkPart, float]
    one_miss: dict[LinkPart, float]


def own(seconds: float) -> float:
    """The `Agree` of one rank."""
    return seconds


def draw_experts(table: Tensor, rows: int, k: int, *, one_miss: bool = False) -> Tensor:
    """Experts of tokens that choose at random.

    Args:
        table: [experts] int32 of the layer: slots, or `ON_HOST`.
        rows: tokens.
        k: experts of each, all different.
        one_miss: one of them is on the host and the others are in the bank, as far as the table
            allows; else they may be anywhere.

    Returns:
        [rows, k] int32 on the table's device.
    """
    likely = torch.rand(rows, len(table), device=table.device)
    if one_miss:
        on_host = table == ON_HOST
        missed = torch.where(on_host, likely, -1.0).argmax(1, keepdim=True)
        likely = (likely + (~on_host).float()).scatter(1, missed, 3.0)
    return likely.topk(k, dim=1).indices.to(torch.int32).contiguous()


def seconds_captured(run: Callable[[], None], wake: Callable[[], None]) -> float:
    """The least seconds of a few replays of what `run` launches, on a CUDA device.

    Args:
        wake: called ahead of each replay.
    """
    wake()
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()

    def replay() -> None:
        wake()
        graph.replay()

    return _seconds(replay)


def _seconds(run: Callable[[], None]) -> float:
    """The least of a few runs, the device's work included."""
    times = []
    for _ in range(_TIMED + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


# large: layers, the runner and what is measured at start use the same parts.
class HybridExperts:
    """See the module. One thread launches, finishes and reads.

    Args:
        bank: filled.
        exchange: with a team of threads that answers.
        moves: owns the bank's table.
        streams: None: no step may have more than `most_rows` tokens.
        activation: of the experts' gates.
        most_rows: tokens of a step that asks the CPU; the mailbox has room for as many.
        wake: called when a step is about to ask.
        clock: seconds.

    Attributes:
        most_rows: may be lowered before steps are captured; `measure_most_rows`.
        bank, exchange, moves, activation, wake: see Args.
        measured: of `measure_most_rows`; None before.
        agree: about what is measured; set before, where there are other ranks.
        errors: [ranks] int32: not 0 of a rank whose threads have not answered; of this one alone
            unless it is set.
    """

    def __init__(
        self,
        bank: ExpertBank,
        exchange: Exchange,
        moves: ExpertMoves,
        streams: ExpertStreams | None,
        *,
        activation: Gate,
        most_rows: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert len(exchange.mailbox.ids) >= most_rows
        self.bank = bank
        self.moves = moves
        self.most_rows = most_rows
        self.exchange = exchange
        self.measured: LaneTimes | None = None
        self._streams = streams
        self.agree: Agree = own
        self.errors = exchange.errors.numpy()
        self._hits = HitReader(bank.hits)
        self.wake = wake
        self._clock = clock
        self._observed = clock()
        self._steps = 0  # since the counters were read
        self._prompt_tokens = 0  # of the last step, if it was a long one
        self._kv_slots: Tensor | None = None
        self.activation: Gate = activation
        self._linked: tuple[tuple[int, Exchange], ...] = ()  # by most tokens, ascending
        multiply = quantized_bank_experts if bank.is_quantized else bank_experts
        self._multiply = partial(
            multiply,
            gate_up=bank.gate_up.weights,  # type: ignore[arg-type]
            down=bank.down.weights,  # type: ignore[arg-type]
            activation=activation,
            biases=bank.biases,
        )

    def join(self, modules: Sequence[Experts]) -> None:
        """Lets layers compute with the bank; `modules`: in the order of the host's layers."""
        assert len(modules) == self.bank.host.num_layers
        for index, module in enumerate(modules):
            layer = HybridLayer(self, index)
            module.start, module.function = layer.start, layer.function

    # -- the runner's side ----------------------------------------------------------------------

    def before_launch(self, num_scheduled_tokens: np.ndarray, *, link_is_busy: bool) -> None:
        """Called ahead of each step.

        Args:
            num_scheduled_tokens: [S] of the step's sequences.
            link_is_busy: it waits for loads from host memory: nothing else is copied.
        """
        self.wake()
        readings = self._hits.take()
        for reading in readings:
            self._observe(reading)
        num_tokens = int(num_scheduled_tokens.sum())
        is_long = num_tokens > self.most_rows
        if is_long or self._prompt_tokens or self._steps >= self.moves.placement.interval:
            # The counts of a long step are read alone.
            if self._steps and self._hits.start(self._steps, self._prompt_tokens):
                self._steps = 0
            self._prompt_tokens = num_tokens if is_long else 0
        self._steps += 1
        self.moves.before_launch(link_is_busy=link_is_busy, chooses=bool(readings))

    def _observe(self, reading: HitCounts) -> None:
        placement = self.moves.placement
        if reading.prompt_tokens and reading.steps == 1:
            placement.observe_prompt(
                reading.counts, tokens=reading.prompt_tokens, grant_bytes=_PROMPT_BYTES
            )
            return
        now = self._clock()
        placement.observe(reading.counts, steps=reading.steps, seconds=now - self._observed)
        self._observed = now

    def begin(self, kv_slots: Tensor) -> None:
        """Called before a step's model is computed, or captured.

        Args:
            kv_slots: [T] int32 on the device, negative for padding tokens.
        """
        self._kv_slots = kv_slots

    def finished(self) -> None:
        """Called when a step has finished, in the order of their launches.

        Raises:
            RuntimeError: the threads have not answered in time, or have stopped.
        """
        self.moves.finished()
        if self.errors.any():
            of_rank = f" of rank {int(self.errors.argmax())}" if len(self.errors) > 1 else ""
            raise RuntimeError(
                f"the CPU threads that compute experts{of_rank} have stopped, or did not answer a "
                "step in time: its tokens are wrong"
            )

    # -- the layers' side -----------------------------------------------------------------------

    def start(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Started:
        """Finds the experts of a layer's tokens, and asks for those on the host.

        Args:
            x, ids, weights: see `Experts.forward`; contiguous, T > 0.
        """
        rows = len(x)
        kv_slots = self._kv_slots
        if kv_slots is not None and len(kv_slots) != rows:
            kv_slots = None  # the last layer has sampled tokens only, none of them padding
        streams = rows > self.most_rows
        exchange: Exchange | None = self.exchange
        if streams:
            table, exchange = self._enter(layer, ids, kv_slots)
        else:
            table = self.bank.table[layer]
            exchange = self._exchange_for(rows)
        places = post(
            *(x, ids, weights),
            table=table,
            hits=self.bank.hits[layer],
            layer=layer,
            exchange=exchange,
            kv_slots=kv_slots,
        )
        return Started(places, ids, table, exchange, streams)

    def _enter(
        self, layer: int, ids: Tensor, kv_slots: Tensor | None
    ) -> tuple[Tensor, Exchange | None]:
        """Shares a layer's experts between link and threads: its table, and the exchange."""
        assert self._streams is not None, len(ids)
        counts = None
        if self._streams.wants_counts:
            # The host waits for the router. The device waits for copies here, not for the host.
            real = torch.ones_like(ids) if kv_slots is None else (kv_slots >= 0).unsqueeze(1)
            found = torch.zeros(self.bank.host.num_experts, dtype=torch.int64, device=ids.device)
            found.scatter_add_(0, ids.flatten().long(), real.expand_as(ids).flatten().long())
            counts = found.cpu().numpy()
        entered = self._streams.enter(layer, counts, ids.numel())
        if not entered.asks:
            return entered.table, None
        self.wake()
        rows = rows_of_mail(ids, entered.table, kv_slots)
        return entered.table, dataclasses.replace(self.exchange, rows=rows)

    def finish(self, layer: int, x: Tensor, weights: Tensor, started: Started) -> Tensor:
        """The sum of all experts' outputs: [T, hidden]."""
        places, exchange = started.places, started.exchange
        parts = self._multiply(x, places, weights, table=started.table)
        linked = None
        if exchange is not None and exchange.part != NO_PART:
            linked = linked_experts(
                *(x, started.ids, weights, places.slots, self.bank.host.layers[layer]),
                part=exchange.part,
                activation=self.activation,
                places=self.bank.layer_places(layer),
            )
        total = wait_add(
            parts, weights, places, dtype=x.dtype, exchange=exchange, linked=linked
        )  # fmt: skip
        if started.streamed and self._streams is not None:
            self._streams.leave(layer)
        return total

    # -- the link as a third lane ---------------------------------------------------------------

    def use_link(self, parts: Mapping[int, LinkPart]) -> None:
        """From now on the GPU computes a part of the experts that small steps miss. Called before
        steps are captured.

        Args:
            parts: most tokens of a step, `linked_experts.MOST_TOKENS` at most -> what the GPU
                computes of the experts on the host. Steps of more tokens than any: nothing.
        """
        assert all(0 < rows <= min(MOST_TOKENS, self.most_rows) for rows in parts)
        self._linked = tuple(
            (rows, dataclasses.replace(self.exchange, part=parts[rows])) for rows in sorted(parts)
        )

    def link_part(self, rows: int) -> LinkPart:
        """The part of missed experts that the GPU computes in a step of `rows` tokens."""
        return self._exchange_for(rows).part

    def _exchange_for(self, rows: int) -> Exchange:
        return next((each for most, each in self._linked if rows <= most), self.exchange)

    # -- measuring ------------------------------------------------------------------------------

    @torch.inference_mode()
    def measure_most_rows(self, candidates: Sequence[int]) -> LaneTimes:
        """Sets `most_rows` to the largest number of tokens for which CPU threads compute a layer's
        experts on the host in less time than the link needs to bring them. On a CUDA device, before
        the first step.

        Args:
            candidates: ascending, none above what `most_rows` is now.
        """
        assert self._streams is not None and candidates[-1] <= self.most_rows
        bank, device = self.bank, self.bank.device
        layer = int((self.moves.placement.table < 0).sum(1).argmax())
        limit, self.most_rows = self.most_rows, _NO_LIMIT
        self.begin(torch.zeros(0, dtype=torch.int32, device=device))

        def ask(rows: int) -> Callable[[], None]:
            self.wake()
            return partial(self._run_alone, [(layer, self._routes(layer, rows))])

        link = self.agree(_seconds(partial(self._streams.copy_alone, layer)))
        threads: dict[int, float] = {}
        most = candidates[0]
        for rows in candidates:
            threads[rows] = self.agree(_seconds(ask(rows)))
            if threads[rows] > link:
                break
            most = rows
        slowdown = self.agree(self._time_beside(layer, ask(most))) / threads[most]
        self.most_rows = min(most, limit)
        bank.hits.zero_()
        self.measured = LaneTimes(link, threads, slowdown)
        return self.measured

    def _routes(self, layer: int, rows: int, *, one_miss: bool = False) -> Routes:
        """Of tokens of a layer; see `draw_experts`."""
        box, device = self.exchange.mailbox, self.bank.device
        k = box.ids.shape[1]
        x = torch.randn(rows, self.bank.host.hidden, dtype=box.x.dtype, device=device)
        ids = draw_experts(self.bank.table[layer], rows, k, one_miss=one_miss)
        return x, ids, torch.full((rows, k), 1 / k, device=device)

    def _run_alone(self, exchanges: Sequence[tuple[int, Routes]]) -> None:
        """Layers and their tokens, one after the other."""
        for layer, (x, ids, weights) in exchanges:
            self.finish(layer, x, weights, self.start(layer, x, ids, weights))

    @torch.inference_mode()
    def measure_linked(
        self,
        sizes: Sequence[int],
        candidates: Sequence[LinkPart],
        paying: Callable[[Mapping[LinkPart, float], LinkPart], Sequence[LinkPart]],
        *,
        timer: Timer = seconds_captured,
    ) -> dict[int, LinkedTimes]:
        """Times a layer's exchange by tokens and by what the GPU computes of missed experts. Before
        the first step; `use_link` is not in effect afterwards.

        Args:
            sizes: tokens, ascending; see `use_link`.
            candidates: parts to be tried, `NO_PART` among them.
            paying: chooses by the times of random routes, and `NO_PART`, the parts whose times with
                one miss a token are wanted, too.
            timer: the default one needs a CUDA device.
        """
        self.begin(torch.zeros(0, dtype=torch.int32, device=self.bank.device))
        has_bank = bool((self.moves.placement.table >= 0).any())
        found: dict[int, LinkedTimes] = {}
        for rows in sizes:
            random = self._time_parts(rows, candidates, timer)
            parts = paying(random, NO_PART) if has_bank else ()
            one_miss: dict[LinkPart, float] = {}
            if parts:
                one_miss = self._time_parts(rows, (NO_PART, *parts), timer, one_miss=True)
            found[rows] = LinkedTimes(random, one_miss)
        self.use_link({})
        self.bank.hits.zero_()
        return found

    def _time_parts(
        self, rows: int, parts: Sequence[LinkPart], timer: Timer, *, one_miss: bool = False
    ) -> dict[LinkPart, float]:
        """Seconds of an exchange by parts, of the same tokens."""
        layers, count = self.bank.host.num_layers, _TIMED_EXCHANGES
        if one_miss:
            count = max(count, -(-_TIMED_MISSES // rows))
        order = [i % layers for i in range(count)]
        exchanges = [(layer, self._routes(layer, rows, one_miss=one_miss)) for layer in order]
        found = {}
        for part in parts:
            self.use_link({rows: part})
            seconds = timer(partial(self._run_alone, exchanges), self.wake) / count
            found[part] = self.agree(seconds)
        return found

    def _time_beside(self, layer: int, run: Callable[[], None]) -> float:
        """The least seconds of a few runs while the link reads host memory, too."""
        assert self._streams is not None
        times = []
        for _ in range(_TIMED):
            self._streams.begin_alone(layer)
            begin = time.perf_counter()
            run()
            torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        return min(times)

    def share_long_steps(self, split: Split) -> None:
        """From now on the threads compute experts of few tokens of long steps."""
        assert self._streams is not None
        self._streams.split = split


class HybridLayer:
    """`start` and `function` of one layer's `Experts`."""

    def __init__(self, hybrid: HybridExperts, layer: int) -> None:
        self._hybrid = hybrid
        self._layer = layer
        self._started: Started | None = None

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """See `models.experts.StartExperts`."""
        self._started = None
        if len(x):
            self._started = self._hybrid.start(self._layer, x, ids, weights)

    def function(self, x: Tensor, ids: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        """See `models.experts.ExpertsFunction`; its two matrices are those of the bank."""
        if not len(x):
            return torch.empty_like(x)
        assert self._started is not None
        return self._hybrid.finish(self._layer, x, weights, self._started)
