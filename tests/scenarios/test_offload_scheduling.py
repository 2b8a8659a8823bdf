"""Scheduler and block manager with host memory behind the prefix cache, without a device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.core.step_times import StepTimes
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.text.stop_strings import holds_stop
from hetero_llm.kv_cache.block_manager import BlockManager, LoadParts
from hetero_llm.kv_cache.block_transfers import BlockTransfers, OffloadLimits
from hetero_llm.kv_cache.hit_log import hit_line
from hetero_llm.kv_cache.host_tier import HostHit
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.scheduler.kv_loads import KVLoadQueue
from hetero_llm.scheduler.scheduler import Scheduler
from tests.helpers.harness import expected_output, make_request
from tests.helpers.host_memory import FakeTier, LoadingRunner
from tests.helpers.traffic import TRAFFIC, LetterTokenizer, Served, run_all, serve, serve_on

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def make_served(
    asynchronous: bool,
    *,
    num_blocks: int = 24,
    block_size: int = 4,
    max_num_seqs: int = 6,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 72,
    seed: int = 0,
    cached: int | None = None,
    write_through: bool = False,
    load_parts: LoadParts | None = None,
    **tier_args: Any,
) -> tuple[Served, FakeTier]:
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, True, block_size)
    runner = LoadingRunner(num_blocks, block_size, max_num_seqs, -(-max_model_len // block_size))
    tier = FakeTier(runner, seed, **tier_args)
    limits = OffloadLimits(num_blocks, cached, write_through)
    prefix = PrefixCache()
    transfers = BlockTransfers(tier, prefix, limits, num_blocks)
    blocks = BlockManager(num_blocks, block_size, prefix, transfers, load_parts=load_parts)
    tokenizer: Any = LetterTokenizer()
    loads = KVLoadQueue(blocks, transfers, 4, StepTimes())
    scheduler = Scheduler(config, blocks, partial(holds_stop, tokenizer), loads=loads)
    outputs = OutputProcessor(tokenizer, scheduler.stop_sequence)
    inputs: Any = None
    engine = Engine(inputs, scheduler, runner, outputs, asynchronous=asynchronous)
    return Served(engine, scheduler, blocks, runner), tier


def settle(served: Served) -> None:
    """Polls until no copy is under way."""
    for _ in range(1000):
        if not served.engine.poll_host_memory():
            return
    raise AssertionError("copies do not end")


@settings(max_examples=15, deadline=None)
@given(
    TRAFFIC, st.booleans(), st.integers(0, 2**16), st.sampled_from([0.0, 0.3]), st.booleans(),
    st.sampled_from([None, 0, 4]), st.sampled_from([14, 20, 40]), st.sampled_from([0.0, 0.2]),
    st.booleans(),
)  # fmt: skip
def test_host_memory_changes_no_output(
    traffic: list[tuple],
    asynchronous: bool,
    seed: int,
    fail: float,
    write_through: bool,
    cached: int | None,
    num_blocks: int,
    time_out: float,
    in_parts: bool,
) -> None:
    """In whatever order loads and stores end or fail: the same tokens, and no block is lost. The
    prompts come twice, so that the second ones find what the first ones left."""
    traffic = traffic + [(*entry[:4], entry[4] + 40, entry[5]) for entry in traffic]
    limits: dict[str, Any] = {"num_blocks": num_blocks, "max_num_seqs": 6}
    plain, counters, _ = serve(traffic, False, **limits)
    served, tier = make_served(
        asynchronous, **limits, seed=seed, fail=fail, write_through=write_through, cached=cached,
        time_out=time_out,
        load_parts=LoadParts(min_blocks=2, first=2, growth=1) if in_parts else None,
    )  # fmt: skip
    with_host, with_counters, _ = serve_on(served, traffic, settle=partial(settle, served))
    assert with_host.keys() == plain.keys()
    for name, outputs in plain.items():
        if outputs[0][3] != "abort":  # what is visible when it is aborted depends on the steps
            assert with_host[name] == outputs
    settle(served)
    assert not any(tier.pinned.values()), "a host block stays pinned"
    assert not tier.loads and not tier.stores


def prompts(count: int, length: int = 161) -> list[list[int]]:
    return [[(7 * p + i * i + i * p) % 50 for i in range(length)] for p in range(count)]


def run_one(served: Served, name: str, prompt: list[int]) -> list[int]:
    out = run_all(served, [make_request(name, prompt, ONE, 200)])[name].outputs[0].token_ids
    settle(served)
    return list(out)


def golden(**tier_args: Any) -> tuple[Served, FakeTier, list[list[int]]]:
    served, tier = make_served(
        False, num_blocks=100, block_size=16, max_model_len=200, max_num_batched_tokens=200,
        num_host_blocks=200, **tier_args,
    )  # fmt: skip
    return served, tier, prompts(11)


def test_the_manuals_example() -> None:
    served, tier, texts = golden(seed=1)
    tier.worth_loading = lambda hit, start, rest: len(hit.host_blocks)  # type: ignore[method-assign]
    for number, prompt in enumerate([*texts, texts[0]]):
        assert run_one(served, str(number), prompt) == expected_output(prompt, ONE)
    assert hit_line(served.blocks.hits) == (
        "[HIT CNT] total: 132, gpu: 0 (0.00%) cpu: 10 (7.58%) not hit: 122 (92.42%)"
    )
    assert tier.num_loads == 1


def test_without_uses_enough_nothing_is_stored() -> None:
    served, tier, texts = golden(seed=1, min_uses=2)
    for number, prompt in enumerate(texts[:10]):
        run_one(served, str(number), prompt)
    assert tier.num_stored == 0
    run_one(served, "again", texts[9])
    run_one(served, "more", texts[10])
    for number, prompt in enumerate(texts[:5]):  # evict it
        run_one(served, f"once more {number}", prompt)
    assert tier.num_stored >= 10


def test_the_limit_empties_the_devices_cache() -> None:
    served, tier, texts = golden(seed=2, cached=0)
    tier.worth_loading = lambda hit, start, rest: len(hit.host_blocks)  # type: ignore[method-assign]
    for number, prompt in enumerate([texts[0], texts[0], texts[0]]):
        run_one(served, str(number), prompt)
    hits = served.blocks.hits
    assert (hits.gpu, hits.cpu, hits.total) == (0, 20, 33)


def test_requests_with_one_prefix_share_one_load() -> None:
    served, tier, texts = golden(seed=3, cached=0, dawdle=0.9)
    tier.worth_loading = lambda hit, start, rest: len(hit.host_blocks)  # type: ignore[method-assign]
    run_one(served, "first", texts[0])
    many = [make_request(str(i), [*texts[0][:160], i], ONE, 200) for i in range(5)]
    outputs = run_all(served, many)
    assert tier.num_loads == 1
    for request in many:
        expected = expected_output(request.prompt_token_ids, ONE)
        assert list(outputs[request.request_id].outputs[0].token_ids) == expected


def worth(served: Served, tier: FakeTier, blocks: list[int]) -> list[str]:
    """Returns a list that collects what the block manager asks of the tier and which steps run, in
    order. A hit is worth loading if `blocks` has its number of blocks."""
    asked: list[str] = []
    match, load, launch = tier.match, tier.load, served.runner.launch

    def note_match(parent: bytes, contents: Iterable[bytes]) -> HostHit:
        hit = match(parent, contents)
        asked.append(f"found {len(hit.host_blocks)}")
        return hit

    def note_load(hit: HostHit, *rest: Any) -> int:
        asked.append(f"load {len(hit.host_blocks)}")
        return load(hit, *rest)

    def note_launch(step: SchedulerOutput) -> Any:
        asked.append(f"step of {len(step.request_slots)}")
        return launch(step)

    tier.match, tier.load = note_match, note_load  # type: ignore[method-assign]
    served.runner.launch = note_launch  # type: ignore[method-assign]
    tier.worth_loading = (  # type: ignore[method-assign]
        lambda hit, start, rest: len(hit.host_blocks) if len(hit.host_blocks) in blocks else 0
    )
    return asked


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([2, 4, 4], ["found 2", "load 2", "found 4", "load 4", "found 4", "load 4"]),
        ([2, 0, 8], ["found 2", "load 2", "found 4", "found 4", "load 8"]),
        ([0, 0, 10], ["found 2", "found 4", "found 4", "load 10"]),
        ([2], ["found 2", "load 2", "found 4", "found 4"]),
        ([], ["found 2", "found 4", "found 4"]),
    ],
)
def test_the_first_part_of_a_long_prefix_is_loaded_while_the_rest_is_looked_up(
    blocks: list[int], expected: list[str]
) -> None:
    parts = LoadParts(min_blocks=10, first=5, growth=2)
    served, tier, texts = golden(seed=3, cached=0, load_parts=parts)
    tier.dawdle = 0.0
    run_one(served, "first", texts[0])
    asked = worth(served, tier, blocks)
    assert run_one(served, "again", texts[0]) == expected_output(texts[0], ONE)
    assert [words for words in asked if not words.startswith("step")] == expected
    assert not any(tier.pinned.values())


def test_nobodys_step_waits_until_a_prefix_is_looked_up() -> None:
    """With a step in flight the next one is launched first."""
    served, tier = make_served(
        True, num_blocks=100, block_size=16, max_model_len=200, max_num_batched_tokens=200,
        num_host_blocks=200, seed=6, cached=0, dawdle=0.0,
    )  # fmt: skip
    first, other = prompts(2)
    run_one(served, "first", first)
    asked = worth(served, tier, [10])
    many = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    served.engine.add_request(make_request("other", other, many, 200))
    served.engine.step()
    assert asked == ["found 0", "step of 1", "step of 1"]
    asked.clear()
    served.engine.add_request(make_request("again", first, ONE, 200))
    tokens: dict[str, list[int]] = {}
    while served.engine.has_unfinished:
        for out in served.engine.step():
            tokens[out.request_id] = list(out.outputs[0].token_ids)
    assert asked[:3] == ["step of 1", "found 10", "load 10"] and "step of 2" in asked
    assert tokens["again"] == expected_output(first, ONE)
    assert tokens["other"] == expected_output(other, many)


@pytest.mark.parametrize("pays", [[2, 4], [4], []], ids=["all", "the rest", "nothing"])
def test_the_rest_of_a_long_prefix_is_looked_up_beside_the_next_step(
    pays: list[int],
) -> None:
    """A block that is loaded, or found not to be worth it, counts once. The sequence runs after all
    parts were looked up."""
    served, tier = make_served(
        True, num_blocks=100, block_size=16, max_model_len=200, max_num_batched_tokens=200,
        num_host_blocks=200, seed=6, cached=0, dawdle=0.0,
        load_parts=LoadParts(min_blocks=10, first=5, growth=2),
    )  # fmt: skip
    first, other = prompts(2)
    run_one(served, "first", first)
    many = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    served.engine.add_request(make_request("other", other, many, 200))
    served.engine.step()
    asked = worth(served, tier, pays)
    before = served.engine.metrics()
    served.engine.add_request(make_request("again", first, ONE, 200))
    tokens: dict[str, list[int]] = {}
    while served.engine.has_unfinished:
        for out in served.engine.step():
            tokens[out.request_id] = list(out.outputs[0].token_ids)
    asked = asked[asked.index("found 2") :]
    if pays == [2, 4]:
        beside = ["found 2", "load 2", "found 4", "load 4"], ["found 4", "load 4"]
        assert asked[:7] == [*beside[0], "step of 1", *beside[1]]
    grown = {
        name: value - before[name]
        for name, value in served.engine.metrics().items()
        if name.startswith("external_prefix_cache")
    }
    loaded = sum(int(words.split()[1]) for words in asked if words.startswith("load"))
    assert grown["external_prefix_cache_hits"] == 16 * loaded
    assert grown["external_prefix_cache_queries"] == len(first)
    assert tokens["again"] == expected_output(first, ONE)
    assert tokens["other"] == expected_output(other, many)
    assert not any(tier.pinned.values())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("loading_pays", [True, False])
def test_a_preempted_sequence_comes_back_from_host_memory(
    asynchronous: bool, loading_pays: bool
) -> None:
    """If that is faster than computing it anew. Two grow to 18 blocks each, of 24 in all."""
    served, tier = make_served(asynchronous, max_num_seqs=2, seed=5, cached=0)
    tier.worth_loading = (  # type: ignore[method-assign]
        lambda hit, start, rest: len(hit.host_blocks) if loading_pays else 0
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = prompts(2, 32)
    outputs = run_all(
        served, [make_request(str(i), text, params, 72) for i, text in enumerate(texts)]
    )
    for i, text in enumerate(texts):
        assert list(outputs[str(i)].outputs[0].token_ids) == expected_output(text, params)
    assert served.scheduler.stats.num_preemptions > 0
    assert (tier.num_loads > 0) == loading_pays


def test_a_failed_load_is_computed_and_not_tried_again() -> None:
    served, tier, texts = golden(seed=4, cached=0)
    tier.worth_loading = lambda hit, start, rest: len(hit.host_blocks)  # type: ignore[method-assign]
    run_one(served, "first", texts[0])
    tier.fail = 1.0
    assert run_one(served, "second", texts[0]) == expected_output(texts[0], ONE)
    assert tier.num_loads == tier.num_failed == 1
    assert served.blocks.hits.total == 22, "blocks count once, however often they are computed"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_in_the_middle_of_a_load(asynchronous: bool) -> None:
    served, tier = make_served(
        asynchronous, num_blocks=100, block_size=16, max_model_len=200, seed=5, cached=0,
        max_num_batched_tokens=200, num_host_blocks=200, dawdle=1.0,
    )  # fmt: skip
    tier.worth_loading = lambda hit, start, rest: len(hit.host_blocks)  # type: ignore[method-assign]
    tier.dawdle = 0.0
    (prompt,) = prompts(1)
    run_one(served, "first", prompt)
    tier.dawdle = 1.0
    tier.seconds_left = lambda transfer_ids: 1.0  # type: ignore[method-assign]
    served.engine.add_request(make_request("second", prompt, ONE, 200))
    assert served.engine.step() == [] and tier.num_loads == 1
    assert served.scheduler.num_waiting == 1
    (load,) = tier.loads.values()
    served.engine.abort("second")
    served.scheduler.check_integrity()
    assert served.blocks.num_free == 100 - len(load.blocks), "a copy to them is under way"
    tier.dawdle = 0.0
    settle(served)
    assert served.blocks.num_free == 100
