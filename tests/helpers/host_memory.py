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
        timed_out = bool(step.kv_loads) and self.tier.pass_flags(step.kv_loads)
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
    host_blocks: list[int]
    after_step: int
    lookup_keys: tuple[bytes, ...] = ()
    begun: bool = False
    aborted: bool = False
    fails: bool = False
    seen: np.ndarray | None = None  # of a store: what it read at first


# large: the whole of `HostTier`, and what tests set
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
    num_host_blocks: int = 40
    fail: float = 0.0
    dawdle: float = 0.5
    time_out: float = 0.0
    min_uses: int = 1
    num_loads: int = 0
    num_stored: int = 0
    num_failed: int = 0
    uses: dict[bytes, int] = field(default_factory=dict)
    evicted: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.runner.tier = self
        self.held: dict[bytes, tuple[bytes, np.ndarray]] = {}  # lookup_key to block_hash, content
        self.pinned: dict[bytes, int] = {}
        self.loads: dict[int, _Copy] = {}
        self.stores: dict[int, tuple[_Copy, list[EvictionCandidate]]] = {}
        self.launched = 0
        self.last_id = 0
        self.over = TierEvents()

    def match(self, parent: bytes, contents: Iterable[bytes]) -> HostHit:
        lookup_keys, block_hashes = [], []
        for content in contents:
            entry = self.held.get(parent + content)
            if entry is None:
                break
            lookup_keys.append(parent + content)
            parent = entry[0]
            block_hashes.append(parent)
        for lookup_key in lookup_keys:
            self.pinned[lookup_key] = self.pinned.get(lookup_key, 0) + 1
        return HostHit(tuple(range(len(block_hashes))), tuple(lookup_keys), tuple(block_hashes))

    def release(self, hit: HostHit) -> None:
        for lookup_key in hit.lookup_keys:
            self.pinned[lookup_key] -= 1
            assert self.pinned[lookup_key] >= 0

    def worth_loading(self, hit: HostHit, start: int, rest: int) -> int:
        assert rest >= 1
        return self.random.choice([len(hit.host_blocks)] * 3 + [0, len(hit.host_blocks) // 2])

    def load(
        self, hit: HostHit, blocks: Sequence[int], after_step: int, compute: float | None
    ) -> int:
        assert len(hit.host_blocks) == len(blocks) > 0 and (compute is None or compute >= 0.0)
        assert after_step <= self.launched, "a load that waits for a step that is not launched"
        self.last_id += 1
        self.num_loads += 1
        fails = self.random.random() < self.fail
        copy = _Copy(list(blocks), [], after_step, hit.lookup_keys, fails=fails)
        self.loads[self.last_id] = copy
        self._begin(copy)
        return self.last_id

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

    def pass_flags(self, transfer_ids: Iterable[int]) -> bool:
        if self.random.random() < self.time_out:
            return True
        for transfer_id in transfer_ids:
            if transfer_id in self.loads:
                self._end_load(transfer_id)
        return False

    def _end_load(self, transfer_id: int) -> None:
        copy = self.loads.pop(transfer_id)
        assert copy.begun, "a gate that waits for a step behind it"
        if copy.fails or (copy.aborted and self.random.random() < 0.5):
            self.num_failed += 1
            self.over.failed.append(transfer_id)
        else:
            for block, lookup_key in zip(copy.blocks, copy.lookup_keys):
                self.runner.memory[block] = self.held[lookup_key][1]
            self.over.loaded.append(transfer_id)
        self.release(HostHit((), copy.lookup_keys, ()))

    def abort(self, transfer_id: int) -> None:
        if transfer_id in self.loads:
            self.loads[transfer_id].aborted = True

    def store(self, candidates: Sequence[EvictionCandidate]) -> tuple[int, int]:
        count = self.random.randint(0, len(candidates))
        if not count:
            return 0, 0
        taken = list(candidates[:count])
        self.last_id += 1
        blocks = [candidate.block for candidate in taken]
        copy = _Copy(blocks, [], 0, seen=self.runner.memory[blocks].copy())
        self.stores[self.last_id] = copy, taken
        return count, self.last_id

    def _end_store(self, transfer_id: int) -> None:
        copy, candidates = self.stores.pop(transfer_id)
        now = self.runner.memory[copy.blocks]
        assert copy.seen is not None and (now == copy.seen).all(), "written while it was stored"
        if self.random.random() >= self.fail:
            for candidate, content in zip(candidates, now):
                assert (
                    candidate.lookup_key not in self.held
                    or (self.held[candidate.lookup_key][1] == content).all()
                )
                self.held[candidate.lookup_key] = candidate.block_hash, content.copy()
                self.num_stored += 1
            free = [s for s in self.held if not self.pinned.get(s)]
            while len(self.held) > self.num_host_blocks and free:
                lookup_key = free.pop(0)
                self.evicted.append((lookup_key, self.held.pop(lookup_key)[0]))
        else:
            self.evicted += [
                (candidate.lookup_key, candidate.block_hash) for candidate in candidates
            ]
        self.over.stored.append(transfer_id)

    def holds(self, lookup_key: bytes) -> bool:
        on_its_way = (v.lookup_key for _, candidates in self.stores.values() for v in candidates)
        return lookup_key in self.held or lookup_key in set(on_its_way)

    def wants(self, block_hash: bytes) -> bool:
        return self.uses.get(block_hash, 0) >= self.min_uses

    def add_use_counts(self, uses: Mapping[bytes, int]) -> None:
        for block_hash, times in uses.items():
            self.uses[block_hash] = self.uses.get(block_hash, 0) + times

    def device_evicted(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        pass

    def take_host_evicted(self) -> list[tuple[bytes, bytes]]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        return (
            self.random.choice([0.0, 1e-9, 1.0])
            if any(t in self.loads for t in transfer_ids)
            else 0.0
        )

    def seconds_ahead(self, transfer_ids: Iterable[int]) -> float:
        return self.random.choice([0.0, 1.0]) if any(t in self.loads for t in transfer_ids) else 0.0

    def poll(self, over: Iterable[int] = ()) -> TierEvents:
        assert not set(over) & self.loads.keys()
        for transfer_id in list(self.loads):
            if self.loads[transfer_id].begun and self.random.random() >= self.dawdle:
                self._end_load(transfer_id)
        for transfer_id in list(self.stores):
            if self.random.random() >= self.dawdle:
                self._end_store(transfer_id)
        events, self.over = self.over, TierEvents()
        return events

    def wait(self, seconds: float) -> None:
        assert 0.0 < seconds <= 1e-3

    def clear(self) -> None:
        self.evicted += [
            (s, block_hash) for s, (block_hash, _) in self.held.items() if not self.pinned.get(s)
        ]
        self.held = {s: e for s, e in self.held.items() if self.pinned.get(s)}

    def metrics(self) -> dict[str, float]:
        return {"kv_offload_loads": self.num_loads}

    def shut_down(self) -> None:
        pass
