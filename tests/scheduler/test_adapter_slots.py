"""Slots of adapters: who gets one, who is passed over, and that every step finds its own there."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import NO_ADAPTER, AdapterRef, LoRARequest
from hetero_llm.core.request import FinishReason, Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.scheduler.adapter_slots import AdapterSlots
from hetero_llm.scheduler.scheduler import Scheduler
from tests.helpers.harness import (
    AsyncStepper,
    FakeRunner,
    expected_output,
    make_request,
    make_scheduler,
    run_to_end,
)


def adapter(number: int) -> AdapterRef:
    return AdapterRef(LoRARequest(f"a{number}", number, "/none"), f"hash {number}", 8)


class Memory:
    """Host memory that keeps count. `missing`: numbers of adapters whose files have gone."""

    def __init__(self, missing: frozenset[int] = frozenset()) -> None:
        self.held: Counter[str] = Counter()
        self.missing = missing

    def hold(self, one: AdapterRef) -> None:
        if one.request.lora_int_id in self.missing:
            raise AdapterError("lora_path", one.request.lora_path, "no such folder")
        self.held[one.content_hash] += 1

    def release(self, one: AdapterRef) -> None:
        self.held[one.content_hash] -= 1
        assert self.held[one.content_hash] >= 0


class SlotRunner(FakeRunner):
    """Checks that each sequence of a step finds its own adapter in its slot. A prompt's first token
    is its adapter's number, 0 without one."""

    def __init__(self, runner: FakeRunner, num_slots: int) -> None:
        super().__init__(len(runner.memory), runner.block_size, *runner.tables.shape)
        self.slots = [""] * num_slots
        self.num_slots_used = 0

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for load in step.adapter_loads:
            self.slots[load.slot] = load.adapter.content_hash
        output = super()._run(step)
        used = set()
        for slot in step.request_slots.tolist():
            state = self.states[slot]
            number, place = state.token_ids[0], state.adapter_slot
            if number:
                assert self.slots[place] == adapter(number).content_hash
                used.add(place)
            else:
                assert place == NO_ADAPTER
        self.num_slots_used = max(self.num_slots_used, len(used))
        return output


def setup(
    num_slots: int, patience: int = 32, memory: Memory | None = None, **options: int
) -> tuple[Scheduler, SlotRunner]:
    slots = AdapterSlots(num_slots, memory or Memory(), patience=patience)
    scheduler, _, runner = make_scheduler(adapters=slots, **options)
    return scheduler, SlotRunner(runner, num_slots)


def request_of(name: str, number: int, length: int, params: SamplingParams) -> Request:
    own = adapter(number) if number else None
    return make_request(name, [number, *range(1, length)], params, adapter=own)


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run_step(scheduler: Scheduler, runner: FakeRunner) -> None:
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, runner.run(step))
    scheduler.check_integrity()


def test_adapters_share_a_step_up_to_the_slots() -> None:
    scheduler, runner = setup(2)
    requests = [request_of(str(i), number, 9, GREEDY) for i, number in enumerate([1, 2, 3, 0, 1])]
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    # The third waits for a slot; those behind it do not.
    assert [r.sequences[0].request_slot >= 0 for r in requests] == [True, True, False, True, True]
    run_to_end(scheduler, runner)
    assert runner.num_slots_used == 2
    for request in requests:
        expected = expected_output(request.prompt_token_ids, GREEDY)
        assert request.sequences[0].output_ids == expected


def test_prefixes_are_never_shared_between_adapters() -> None:
    """The same prompt with two adapters and with none; each again finds its own blocks."""
    slots = AdapterSlots(2, Memory())
    scheduler, _, runner = make_scheduler(adapters=slots)
    prompt = list(range(1, 34))

    def run(name: str, own: AdapterRef | None) -> int:
        request = make_request(name, prompt, GREEDY, adapter=own)
        scheduler.add_request(request)
        run_to_end(scheduler, runner)
        return request.num_cached_tokens

    adapters = (None, adapter(1), adapter(2))
    assert [run(f"cold {i}", own) for i, own in enumerate(adapters)] == [0, 0, 0]
    assert [run(f"warm {i}", own) for i, own in enumerate(adapters)] == [32, 32, 32]


@pytest.mark.parametrize(("patience", "served"), [(0, True), (4, True), (10**9, False)])
def test_busy_adapters_do_not_hold_their_slots_for_ever(patience: int, served: bool) -> None:
    """A new request for each of the two resident adapters in every step; a third adapter's request
    comes in between. Only the reserved slot lets it run."""
    scheduler, runner = setup(2, patience, max_num_seqs=32, num_blocks=256)
    late = request_of("late", 3, 5, GREEDY)
    for index in range(60):
        for number in (1, 2):
            scheduler.add_request(request_of(f"{number} {index}", number, 5, GREEDY))
        if index == 10:
            scheduler.add_request(late)
        run_step(scheduler, runner)
    assert late.sequences[0].finished is served
    run_to_end(scheduler, runner)
    assert late.sequences[0].finished


def test_the_reserved_slot_is_the_one_with_the_fewest_sequences() -> None:
    scheduler, runner = setup(2, patience=0, max_num_seqs=16)
    for index, number in enumerate([1, 1, 1, 2]):
        scheduler.add_request(request_of(str(index), number, 5, GREEDY))
    run_step(scheduler, runner)
    later = [request_of(f"later {number}", number, 5, GREEDY) for number in (3, 2, 1, 0)]
    for request in later:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    assert [r.sequences[0].request_slot >= 0 for r in later] == [False, False, True, True]
    run_to_end(scheduler, runner)


def test_a_request_that_has_begun_is_not_kept_from_its_own_slot() -> None:
    """A preempted beam goes on though its adapter's slot is reserved for another: its siblings
    hold the slot, and wait for it."""
    scheduler, runner = setup(
        1, patience=0, max_num_seqs=4, num_blocks=16, block_size=4, max_model_len=64
    )
    beams = SamplingParams(
        use_beam_search=True, best_of=3, temperature=0, max_tokens=16, ignore_eos=True
    )
    for index, number in enumerate([1, 2, 1, 2]):
        scheduler.add_request(request_of(str(index), number, 9, beams))
    run_to_end(scheduler, runner)


def test_an_aborted_request_leaves_its_slot() -> None:
    scheduler, runner = setup(1)
    scheduler.add_request(request_of("one", 1, 5, GREEDY))
    run_step(scheduler, runner)
    scheduler.add_request(request_of("two", 2, 5, GREEDY))
    scheduler.add_request(request_of("gone", 3, 5, GREEDY))
    run_step(scheduler, runner)
    scheduler.abort("gone")
    scheduler.abort("one")
    run_step(scheduler, runner)
    assert runner.slots == [adapter(2).content_hash]
    run_to_end(scheduler, runner)


def test_an_adapter_whose_files_have_gone_fails_its_requests_alone() -> None:
    memory = Memory(frozenset({2}))
    scheduler, runner = setup(2, memory=memory)
    requests = [request_of(str(i), number, 5, GREEDY) for i, number in enumerate([2, 1, 2])]
    for request in requests:
        scheduler.add_request(request)
    step = scheduler.schedule()
    assert step is not None
    touched = scheduler.update(step, runner.run(step))
    scheduler.check_integrity()
    failed = [requests[0], requests[2]]
    assert [s.request for s in touched[:2]] == failed
    assert all(r.sequences[0].finish_reason is FinishReason.ERROR for r in failed)
    assert all("no such folder" in (r.error or "") for r in failed)
    run_to_end(scheduler, runner)
    assert requests[1].sequences[0].output_ids == expected_output(
        requests[1].prompt_token_ids, GREEDY
    )


def test_failures_with_nothing_else_to_run() -> None:
    scheduler, _ = setup(1, memory=Memory(frozenset({1})))
    request = request_of("one", 1, 5, GREEDY)
    scheduler.add_request(request)
    assert scheduler.schedule() is None
    assert [s.request for s in scheduler.take_failed()] == [request]
    assert scheduler.num_unfinished == 0
    assert not scheduler.take_failed()


_PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.5, n=2, max_tokens=4, ignore_eos=True),
    SamplingParams(use_beam_search=True, best_of=2, temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12),
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(3, 30), st.integers(0, len(_PARAMS) - 1), st.booleans()
        ),
        max_size=14,
    ),
    num_slots=st.integers(1, 3),
    patience=st.integers(0, 3),
    num_blocks=st.integers(16, 40),
    ahead=st.booleans(),
)
def test_random_traffic(
    arrivals: list[tuple[int, int, int, bool]],
    num_slots: int,
    patience: int,
    num_blocks: int,
    ahead: bool,
) -> None:
    """Every request ends with its own tokens, through chunks, preemptions, forks and aborts; every
    step finds its adapters in their slots; host memory holds what slots hold."""
    memory = Memory()
    scheduler, runner = setup(
        num_slots, patience, memory, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16,
        max_model_len=64,
    )  # fmt: skip
    stepper = AsyncStepper(scheduler, runner)

    def step() -> bool:
        if ahead:
            return stepper.step()
        made = scheduler.schedule()
        if made is not None:
            scheduler.update(made, runner.run(made))
            scheduler.check_integrity()
        return made is not None

    kept: list[Request] = []
    for index, (number, length, which, aborted) in enumerate(arrivals):
        request = request_of(str(index), number, length, _PARAMS[which])
        scheduler.add_request(request)
        step()
        if aborted and index % 3 == 0:
            scheduler.abort(request.request_id)
        else:
            kept.append(request)
    for _ in range(3000):
        if not step():
            break
    assert scheduler.num_unfinished == 0
    assert sum(count > 0 for count in memory.held.values()) <= num_slots
    for request in kept:
        if not request.params.use_beam_search:
            for sequence in request.sequences:
                expected = expected_output(request.prompt_token_ids, request.params, sequence.index)
                assert sequence.output_ids == expected


class CountedHash(str):
    """A content hash that counts how often tables of contents are asked for one."""

    asked = 0

    def __hash__(self) -> int:
        CountedHash.asked += 1
        return str.__hash__(self)

    __eq__ = str.__eq__


def test_a_pass_over_many_that_wait_looks_at_each_once() -> None:
    """Not at all before it: with a thousand adapters a pass would take longer than a step."""

    def asked(waiting: int) -> int:
        slots = AdapterSlots(1, Memory(), patience=1)
        refs = [
            AdapterRef(LoRARequest(f"a{n}", n, "/none"), CountedHash(n), 8)
            for n in range(1, waiting + 2)
        ]
        slots.begin_pass()
        assert slots.acquire(refs[0]) == 0
        for _ in range(3):
            CountedHash.asked = 0
            slots.begin_pass()
            for ref in refs[1:]:
                assert slots.acquire(ref) is None
            slots.end_pass(complete=True)
        return CountedHash.asked

    assert 0 < asked(400) < 2.5 * asked(200)


def test_a_slot_that_is_given_back_within_a_pass_can_be_taken() -> None:
    slots = AdapterSlots(1, Memory())
    slots.begin_pass()
    assert slots.acquire(adapter(1)) == 0
    assert slots.acquire(adapter(2)) is None
    slots.release(adapter(1))
    assert slots.acquire(adapter(3)) == 0
