"""Host memory behind the fake runner's: what a tier may do at any time, done at the worst one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit, TierEvents
from tests.helpers.harness import FakeRunner

POISON = -7


class LoadingRunner(FakeRunner):
    """A fake runner that waits for loads as a device does, and runs on poison where one failed."""

    tier: FakeTier

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.num_finished = 0
        self.blind: set[int] = set()  # slots that saw poison: what they draw means nothing

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.blind -= {state.request_slot for state in step.admitted}
        timed_out = bool(step.kv_loads) and self.tier.pass_gates(step.kv_loads)
        slots, columns, blocks = step.block_table_writes
        tables = self.tables.copy()
        tables[slots, columns] = blocks
        memory = self.memory.copy()
        for source, destination in step.block_copies.T:
            memory[destination] = memory[source]
        for slot, start in zip(step.request_slots.tolist(), step.num_computed_tokens.tolist()):
            places = np.arange(start)
            read = memory[tables[slot, places // self.block_size], places % self.block_size]
            if (read == POISON).any():
                assert step.kv_loads or slot in self.blind, "a step read KV that had not come"
                self.blind.add(slot)
        seeing = np.array([slot not in self.blind for slot in step.request_slots.tolist()], bool)
        output = super()._run(step if seeing.all() else _only(step, seeing))
        self.num_finished += 1
        self.tier.step_finished()
        if not seeing.all():
            output = _spliced(output, step, seeing)
        return dataclasses.replace(output, kv_loads_timed_out=timed_out)


def _only(step: SchedulerOutput, seeing: np.ndarray) -> SchedulerOutput:
    assert step.drafts is None
    rows = np.repeat(seeing, step.num_scheduled_tokens)
    return dataclasses.replace(
        step,
        request_slots=step.request_slots[seeing],
        num_computed_tokens=step.num_computed_tokens[seeing],
        num_scheduled_tokens=step.num_scheduled_tokens[seeing],
        token_ids=step.token_ids[rows],
        num_samples=step.num_samples[seeing],
    )


def _spliced(
    output: ModelRunnerOutput, step: SchedulerOutput, seeing: np.ndarray
) -> ModelRunnerOutput:
    """With tokens out of thin air for those that saw poison."""
    tokens, logprobs = iter(output.token_ids), iter(output.logprobs or ())
    all_tokens: list[int] = []
    all_logprobs = []
    for sees, samples in zip(seeing.tolist(), step.num_samples.tolist()):
        for _ in range(samples):
            all_tokens.append(next(tokens) if sees else 1)
            all_logprobs.append(next(logprobs) if sees else None)
    return dataclasses.replace(output, token_ids=all_tokens, logprobs=all_logprobs)


@dataclass
class _Copy:
    blocks: list[int]
    slots: list[int]
    after_step: int
    sources: tuple[bytes, ...] = ()
    begun: bool = False
    aborted: bool = False
    fails: bool = False
    seen: np.ndarray | None = None  # of a store: what it read at first


@dataclass
class FakeTier:
    """`kv_cache.host_tier.HostTier` over a dictionary.

    A load overwrites its blocks as soon as it may and fills them as late as it may; a store reads
    its blocks when it begins and once more at its end, and they must not have changed.

    Args:
        fail: share of loads and stores that fail. dawdle: chance that a copy is not over at a poll.
        time_out: share of gated steps that go on without their loads.
    """

    runner: LoadingRunner
    seed: int
    num_slots: int = 40
    fail: float = 0.0
    dawdle: float = 0.5
    time_out: float = 0.0
    min_uses: int = 1
    num_loads: int = 0
    num_stored: int = 0
    num_failed: int = 0
    uses: dict[bytes, int] = field(default_factory=dict)
    lost: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.runner.tier = self
        self.held: dict[bytes, tuple[bytes, np.ndarray]] = {}  # source to key, content
        self.pinned: dict[bytes, int] = {}
        self.loads: dict[int, _Copy] = {}
        self.stores: dict[int, tuple[_Copy, list[EvictionCandidate]]] = {}
        self.launched = 0
        self.tickets = 0
        self.over = TierEvents()

    def match(self, parent: bytes, contents: Iterable[bytes]) -> HostHit:
        sources, keys = [], []
        for content in contents:
            entry = self.held.get(parent + content)
            if entry is None:
                break
            sources.append(parent + content)
            parent = entry[0]
            keys.append(parent)
        for source in sources:
            self.pinned[source] = self.pinned.get(source, 0) + 1
        return HostHit(tuple(range(len(keys))), tuple(sources), tuple(keys))

    def release(self, hit: HostHit) -> None:
        for source in hit.sources:
            self.pinned[source] -= 1
            assert self.pinned[source] >= 0

    def worth_loading(self, hit: HostHit, start: int, rest: int) -> int:
        assert rest >= 1
        return self.random.choice([len(hit.slots)] * 3 + [0, len(hit.slots) // 2])

    def load(
        self, hit: HostHit, blocks: Sequence[int], after_step: int, compute: float | None
    ) -> int:
        assert len(hit.slots) == len(blocks) > 0 and (compute is None or compute >= 0.0)
        assert after_step <= self.launched, "a load that waits for a step that is not launched"
        self.tickets += 1
        self.num_loads += 1
        fails = self.random.random() < self.fail
        copy = _Copy(list(blocks), [], after_step, hit.sources, fails=fails)
        self.loads[self.tickets] = copy
        self._begin(copy)
        return self.tickets

    def _begin(self, copy: _Copy) -> None:
        """The earliest moment allowed."""
        if not copy.begun and copy.after_step <= self.runner.num_finished:
            copy.begun = True
            self.runner.memory[copy.blocks] = POISON

    def step_finished(self) -> None:
        for copy in self.loads.values():
            self._begin(copy)

    def step_launched(self, number: int) -> None:
        assert number == self.launched + 1
        self.launched = number

    def pass_gates(self, tickets: Iterable[int]) -> bool:
        if self.random.random() < self.time_out:
            return True
        for ticket in tickets:
            if ticket in self.loads:
                self._end_load(ticket)
        return False

    def _end_load(self, ticket: int) -> None:
        copy = self.loads.pop(ticket)
        assert copy.begun, "a gate that waits for a step behind it"
        if copy.fails or (copy.aborted and self.random.random() < 0.5):
            self.num_failed += 1
            self.over.failed.append(ticket)
        else:
            for block, source in zip(copy.blocks, copy.sources):
                self.runner.memory[block] = self.held[source][1]
            self.over.loaded.append(ticket)
        self.release(HostHit((), copy.sources, ()))

    def abort(self, ticket: int) -> None:
        if ticket in self.loads:
            self.loads[ticket].aborted = True

    def store(self, victims: Sequence[EvictionCandidate]) -> tuple[int, int]:
        count = self.random.randint(0, len(victims))
        if not count:
            return 0, 0
        taken = list(victims[:count])
        self.tickets += 1
        blocks = [victim.block for victim in taken]
        copy = _Copy(blocks, [], 0, seen=self.runner.memory[blocks].copy())
        self.stores[self.tickets] = copy, taken
        return count, self.tickets

    def _end_store(self, ticket: int) -> None:
        copy, victims = self.stores.pop(ticket)
        now = self.runner.memory[copy.blocks]
        assert copy.seen is not None and (now == copy.seen).all(), "written while it was stored"
        if self.random.random() >= self.fail:
            for victim, content in zip(victims, now):
                assert (
                    victim.source not in self.held or (self.held[victim.source][1] == content).all()
                )
                self.held[victim.source] = victim.key, content.copy()
                self.num_stored += 1
            free = [s for s in self.held if not self.pinned.get(s)]
            while len(self.held) > self.num_slots and free:
                source = free.pop(0)
                self.lost.append((source, self.held.pop(source)[0]))
        else:
            self.lost += [(victim.source, victim.key) for victim in victims]
        self.over.stored.append(ticket)

    def holds(self, source: bytes) -> bool:
        on_its_way = (v.source for _, victims in self.stores.values() for v in victims)
        return source in self.held or source in set(on_its_way)

    def wants(self, key: bytes) -> bool:
        return self.uses.get(key, 0) >= self.min_uses

    def note_use(self, uses: Mapping[bytes, int]) -> None:
        for key, times in uses.items():
            self.uses[key] = self.uses.get(key, 0) + times

    def left(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        pass

    def take_lost(self) -> list[tuple[bytes, bytes]]:
        lost, self.lost = self.lost, []
        return lost

    def seconds_left(self, tickets: Iterable[int]) -> float:
        return (
            self.random.choice([0.0, 1e-9, 1.0]) if any(t in self.loads for t in tickets) else 0.0
        )

    def seconds_ahead(self, tickets: Iterable[int]) -> float:
        return self.random.choice([0.0, 1.0]) if any(t in self.loads for t in tickets) else 0.0

    def poll(self, over: Iterable[int] = ()) -> TierEvents:
        assert not set(over) & self.loads.keys()
        for ticket in list(self.loads):
            if self.loads[ticket].begun and self.random.random() >= self.dawdle:
                self._end_load(ticket)
        for ticket in list(self.stores):
            if self.random.random() >= self.dawdle:
                self._end_store(ticket)
        events, self.over = self.over, TierEvents()
        return events

    def wait(self, seconds: float) -> None:
        assert 0.0 < seconds <= 1e-3

    def clear(self) -> None:
        self.lost += [(s, key) for s, (key, _) in self.held.items() if not self.pinned.get(s)]
        self.held = {s: e for s, e in self.held.items() if self.pinned.get(s)}

    def metrics(self) -> dict[str, float]:
        return {"kv_offload_loads": self.num_loads}

    def shut_down(self) -> None:
        pass
