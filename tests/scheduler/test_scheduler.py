"""Scheduler and block manager without torch: limits, sharing, preemption, random traffic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.errors import ConfigError, PromptError, SamplingError
from hetero_llm.core.request import FinishReason, Request
from hetero_llm.core.sampling_params import SamplingParams
from tests.helpers.drafters import Siblings
from tests.helpers.harness import (
    EOS,
    VOCAB,
    AsyncStepper,
    StagesStepper,
    expected_output,
    make_request,
    make_scheduler,
    run_to_end,
)

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def test_one_request_gets_the_models_tokens() -> None:
    scheduler, blocks, runner = make_scheduler()
    request = make_request("a", list(range(1, 20)), GREEDY)
    scheduler.add_request(request)
    run_to_end(scheduler, runner)
    (sequence,) = request.sequences
    assert sequence.output_ids == expected_output(request.prompt_token_ids, GREEDY)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert blocks.num_free == blocks.num_blocks
    assert scheduler.stats.generation_tokens == 10
    assert scheduler.stats.prompt_tokens == 19


def test_chunks_respect_the_token_budget() -> None:
    scheduler, _, runner = make_scheduler(max_num_batched_tokens=12)
    for i in range(3):
        scheduler.add_request(make_request(str(i), [i + 1] * 50, GREEDY))
    run_to_end(scheduler, runner)
    assert runner.max_step_tokens == 12


def test_decodes_go_on_beside_a_long_prompt() -> None:
    scheduler, _, runner = make_scheduler(max_num_batched_tokens=8)
    short = make_request("short", [1, 2], GREEDY)
    scheduler.add_request(short)
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    scheduler.add_request(make_request("long", list(range(1, 41)), GREEDY))
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    assert step.num_scheduled_tokens.tolist() == [1, 7]
    assert step.num_samples.tolist() == [1, 0]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step() -> None:
    scheduler, _, runner = make_scheduler(
        chunked=False, max_num_batched_tokens=64, max_model_len=64
    )
    for i in range(2):
        scheduler.add_request(make_request(str(i), [i + 1] * 40, GREEDY, 64))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens.tolist() == [40]
    scheduler.update(step, runner.run(step))
    assert scheduler.schedule().num_scheduled_tokens.tolist() == [1, 40]


def test_contradicting_limits_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=64"):
        make_scheduler(max_num_seqs=64, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=32"):
        make_scheduler(chunked=False)


def test_prefix_hit_skips_full_blocks_only() -> None:
    scheduler, _, runner = make_scheduler()
    prompt = list(range(1, 30))
    for name in ("cold", "warm"):
        request = make_request(name, prompt, GREEDY)
        scheduler.add_request(request)
        run_to_end(scheduler, runner)
        assert request.sequences[0].output_ids == expected_output(prompt, GREEDY)
    assert request.num_cached_tokens == 24
    assert scheduler.stats.prefix_cache_hits == 24


def test_a_prompt_of_whole_blocks_still_computes_its_last_token() -> None:
    scheduler, _, runner = make_scheduler()
    for name in ("cold", "warm"):
        request = make_request(name, [3] * 32, GREEDY)
        scheduler.add_request(request)
        run_to_end(scheduler, runner)
    assert request.num_cached_tokens == 31


def test_samples_share_the_prompt_and_copy_on_write() -> None:
    scheduler, blocks, runner = make_scheduler()
    params = SamplingParams(n=4, max_tokens=20, ignore_eos=True)
    request = make_request("a", list(range(1, 22)), params)
    scheduler.add_request(request)
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    assert blocks.num_blocks - blocks.num_free == 3  # the prompt's blocks, once
    step = scheduler.schedule()
    assert step.block_copies.shape[1] == 3  # all but one writer of the shared last block
    scheduler.update(step, runner.run(step))
    run_to_end(scheduler, runner)
    for index, sequence in enumerate(request.sequences):
        assert sequence.output_ids == expected_output(request.prompt_token_ids, params, index)
    assert blocks.num_free == blocks.num_blocks


def test_preemption_recomputes_and_everyone_ends() -> None:
    scheduler, blocks, runner = make_scheduler(num_blocks=16, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [make_request(str(i), [i + 1] * 9, params) for i in range(6)]
    for request in requests:
        scheduler.add_request(request)
    run_to_end(scheduler, runner)
    assert scheduler.stats.num_preemptions > 0
    for request in requests:
        assert request.sequences[0].output_ids == expected_output(request.prompt_token_ids, params)
    assert blocks.num_free == 16


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding"])
def test_abort_at_any_time_frees_everything(when: str) -> None:
    scheduler, blocks, runner = make_scheduler(max_num_batched_tokens=8)
    request = make_request("a", list(range(1, 17)), SamplingParams(n=3, max_tokens=20))
    scheduler.add_request(request)
    for _ in range({"queued": 0, "prefilling": 1, "decoding": 3}[when]):
        scheduler.update(step := scheduler.schedule(), runner.run(step))
    assert scheduler.abort("a") is request
    assert all(s.finish_reason is FinishReason.ABORT for s in request.sequences)
    assert scheduler.abort("a") is None
    assert scheduler.schedule() is None
    assert blocks.num_free == blocks.num_blocks
    scheduler.check_integrity()


def test_an_abort_between_launch_and_finish_drops_the_result() -> None:
    scheduler, blocks, runner = make_scheduler()
    scheduler.add_request(make_request("a", [1, 2, 3], GREEDY))
    other = make_request("b", [4, 5, 6], GREEDY)
    scheduler.add_request(other)
    step = scheduler.schedule()
    output = runner.run(step)
    scheduler.abort("a")
    scheduler.update(step, output)
    run_to_end(scheduler, runner)
    assert other.sequences[0].output_ids == expected_output([4, 5, 6], GREEDY)
    assert blocks.num_free == blocks.num_blocks


def test_what_can_never_run_is_refused() -> None:
    scheduler, _, _ = make_scheduler(num_blocks=16, max_num_seqs=4)
    with pytest.raises(SamplingError, match="n=5"):
        scheduler.check_request(make_request("a", [1], SamplingParams(n=5)))
    beams = SamplingParams(use_beam_search=True, best_of=3, temperature=0, max_tokens=100)
    with pytest.raises(PromptError, match="KV blocks"):
        scheduler.check_request(make_request("a", [1], beams))


def test_stop_token_and_eos_are_told_apart() -> None:
    for stop, reason in (((), None), ((7,), 7)):
        params = SamplingParams(temperature=0, max_tokens=100, stop_token_ids=stop)
        for first in range(1, VOCAB):
            scheduler, _, runner = make_scheduler()
            request = make_request("a", [first], params)
            scheduler.add_request(request)
            run_to_end(scheduler, runner)
            (sequence,) = request.sequences
            last = sequence.token_ids[-1]
            if sequence.finish_reason is FinishReason.STOP:
                assert sequence.stop_reason == (None if last == EOS else reason)
            assert sequence.output_ids == expected_output([first], params)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt length
        st.integers(1, 3),  # distinct prompt kind: equal kinds share prefixes
        st.sampled_from(["greedy", "n2", "n3", "beam2", "beam3"]),
        st.integers(1, 25),  # max_tokens
        st.integers(0, 12),  # arrives after this many steps
        st.one_of(st.none(), st.integers(0, 12)),  # aborted this many steps later
    ),
    min_size=1,
    max_size=10,
)


def _params(kind: str, max_tokens: int) -> SamplingParams:
    width = int(kind[-1]) if kind[-1].isdigit() else 1
    if kind.startswith("beam"):
        return SamplingParams(
            use_beam_search=True, best_of=width, temperature=0, max_tokens=max_tokens
        )
    return SamplingParams(n=width, max_tokens=max_tokens)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    traffic=REQUESTS,
    num_blocks=st.integers(18, 40),
    budget=st.integers(6, 40),
    prefix_caching=st.booleans(),
    kind=st.sampled_from(("synchronous", "asynchronous", 2, 3)),
)
def test_random_traffic_leaks_nothing(
    traffic: list, num_blocks: int, budget: int, prefix_caching: bool, kind: str | int
) -> None:
    """`kind`: number of stages, or how one stage is stepped."""
    num_stages = kind if isinstance(kind, int) else 1
    scheduler, blocks, runner = make_scheduler(
        num_stages=num_stages,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_model_len=72,
        prefix_caching=prefix_caching,
    )
    arrivals: dict[int, list] = {}
    aborts: dict[int, list[str]] = {}
    requests = []
    for number, (length, first, sampling, max_tokens, at, abort_after) in enumerate(traffic):
        prompt = [(first * 5 + i * i) % VOCAB for i in range(length)]
        request = make_request(str(number), prompt, _params(sampling, max_tokens), 72)
        try:
            scheduler.check_request(request)
        except PromptError:
            continue
        requests.append((request, abort_after))
        arrivals.setdefault(at, []).append(request)
        if abort_after is not None:
            aborts.setdefault(at + abort_after, []).append(request.request_id)
    stepper = (StagesStepper if num_stages > 1 else AsyncStepper)(scheduler, runner)
    for now in range(4000):
        for request in arrivals.pop(now, ()):
            scheduler.add_request(request)
        for request_id in aborts.pop(now, ()):
            scheduler.abort(request_id)
        if kind != "synchronous":
            stepped = stepper.step()
        else:
            step = scheduler.schedule()
            stepped = step is not None
            if step is not None:
                scheduler.update(step, runner.run(step))
        scheduler.check_integrity()
        if not stepped and scheduler.num_unfinished == 0 and not arrivals:
            break
    assert scheduler.num_unfinished == 0
    assert blocks.num_free == blocks.num_blocks
    assert runner.max_step_tokens <= budget
    if not any(request.params.use_beam_search for request, _ in requests):
        generated = sum(len(s.output_ids) for r, _ in requests for s in r.sequences)
        assert scheduler.stats.generation_tokens == generated
    for request, abort_after in requests:
        assert all(s.finished for s in request.sequences)
        if abort_after is None and not request.params.use_beam_search:
            for s in request.sequences:
                expected = expected_output(request.prompt_token_ids, request.params, s.index)
                assert s.output_ids == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    traffic=REQUESTS,
    num_blocks=st.integers(18, 40),
    budget=st.integers(8, 80),
    num_stages=st.sampled_from((2, 3)),
    seed=st.integers(0, 99),
)
def test_stages_verify_drafts(
    traffic: list, num_blocks: int, budget: int, num_stages: int, seed: int
) -> None:
    """The first stage, which runs ahead and gets moves alone, has the KV of all tokens."""
    record: dict[tuple[str, int], list[int]] = {}
    scheduler, blocks, runner = make_scheduler(
        num_stages=num_stages, num_blocks=num_blocks, block_size=4, max_num_seqs=6,
        max_num_batched_tokens=budget, max_model_len=72, drafter=Siblings(record, VOCAB, seed=seed),
    )  # fmt: skip
    arrivals: dict[int, list[Request]] = {}
    aborts: dict[int, list[str]] = {}
    whole = []
    for number, (length, first, sampling, max_tokens, at, abort_after) in enumerate(traffic):
        prompt = [(first * 5 + i * i) % VOCAB for i in range(length)]
        params = _params(sampling, max_tokens)
        request = make_request(str(number), prompt, params, 72)
        arrivals.setdefault(at, []).append(request)
        if abort_after is not None:
            aborts.setdefault(at + abort_after, []).append(request.request_id)
        if params.use_beam_search:
            continue
        for index in range(params.width):
            record[str(number), index] = expected_output(prompt, params, index)
        if abort_after is None:
            whole.append(request)
    stepper = StagesStepper(scheduler, runner)
    for now in range(4000):
        for request in arrivals.pop(now, ()):
            scheduler.add_request(request)
        for request_id in aborts.pop(now, ()):
            scheduler.abort(request_id)
        stepped = stepper.step()
        scheduler.check_integrity()
        if not stepped and not scheduler.num_unfinished and not arrivals:
            break
    assert not scheduler.num_unfinished and blocks.num_free == blocks.num_blocks
    assert stepper.first.num_moved <= runner.num_moved
    for request in whole:
        for sequence in request.sequences:
            assert sequence.output_ids == record[request.request_id, sequence.index]


class TestStages:
    """Sequences of different steps in flight are different ones, and all get their turn."""

    def test_decoding_sequences_are_shared_out_evenly(self) -> None:
        scheduler, _, runner = make_scheduler(num_stages=2)
        for number in range(5):
            request = make_request(str(number), [number + 1, 2], _params("greedy", 12))
            scheduler.add_request(request)
        stepper = StagesStepper(scheduler, runner)
        assert stepper.step(), "all prompts"
        sizes = []
        for _ in range(6):
            stepper.step()
            sizes += [len(step.request_slots) for step, _ in stepper.steps]
            assert all(token >= 0 for step, _ in stepper.steps for token in step.token_ids)
        assert set(sizes) == {2, 3} and stepper.most == 2
        while stepper.step():
            pass
        assert scheduler.stats.num_steps_ahead >= scheduler.stats.num_steps // 2

    @pytest.mark.parametrize("num_stages", [2, 3])
    def test_chunks_of_one_prompt_run_behind_each_other(self, num_stages: int) -> None:
        """Two stages have one ready that none works on yet."""
        scheduler, _, runner = make_scheduler(
            num_stages=num_stages, max_num_batched_tokens=8, max_num_seqs=4
        )
        request = make_request("a", list(range(1, 25)), _params("greedy", 3))
        scheduler.add_request(request)
        stepper = StagesStepper(scheduler, runner)
        assert stepper.step()
        assert [step.num_computed_tokens.tolist() for step, _ in stepper.steps] == [[8], [16]]
        assert stepper.step() and stepper.step()
        assert len(stepper.steps) == 0, "the second token needs the first"
        while stepper.step():
            pass
        expected = expected_output(request.prompt_token_ids, request.params)
        assert request.sequences[0].output_ids == expected

    def test_no_sequence_starves_though_steps_run_one_by_one(self) -> None:
        """As where blocks run out, so that no step is made ahead."""
        scheduler, _, runner = make_scheduler(num_stages=3)
        requests = [make_request(str(i), [i + 1], _params("greedy", 20)) for i in range(6)]
        for request in requests:
            scheduler.add_request(request)
        for _ in range(10):
            step = scheduler.schedule()
            scheduler.update(step, runner.run(step))
        assert [len(request.sequences[0].output_ids) for request in requests] == [4] * 6

    def test_requests_that_look_back_run_beside_others(self) -> None:
        scheduler, _, runner = make_scheduler(num_stages=2)
        penalty = SamplingParams(presence_penalty=1.0, max_tokens=5, ignore_eos=True)
        for number, params in enumerate((penalty, _params("greedy", 5))):
            scheduler.add_request(make_request(str(number), [number + 1], params))
        stepper = StagesStepper(scheduler, runner)
        assert stepper.step()
        stepper.step()
        assert stepper.most == 2
        while stepper.step():
            pass
        assert scheduler.num_unfinished == 0
