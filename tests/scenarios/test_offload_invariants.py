"""What must hold at every moment of every copy: drafts never wait for copies, a load that several
sequences wait for survives the end of any of them, a block is counted once."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from hetero_llm.core.draft_tree import DraftTree, chain
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.kv_cache.block_transfers import BlockTransfers, OffloadLimits
from tests.helpers import offload_traffic as traffic
from tests.helpers.drafters import Guesser
from tests.helpers.harness import VOCAB, expected_output
from tests.scenarios.test_offload_engine import (
    BLOCK,
    LAYERS,
    LONGEST,
    MODES,
    Served,
    build,
    request_of,
)


class Sure(Guesser):
    """Drafts the next two tokens in every step, always rightly."""

    def _tree(self, coming: list[int], limit: int) -> DraftTree:
        return chain(np.array(coming[: min(limit, 2)], np.int32))


ALL_LEAVE = OffloadLimits(8, cached=0)
PREFIX = 10 * BLOCK


def job(name: str, prompt: list[int], tokens: int = 1) -> traffic.Job:
    return traffic.Job(name, prompt, replace(traffic.GREEDY, max_tokens=tokens), 0)


def store(served: Served, seed: int) -> list[int]:
    """A prefix of ten blocks that host memory alone holds."""
    head = np.random.default_rng(seed).integers(1, VOCAB, PREFIX).tolist()
    traffic.serve(served.engine, [job("first", [*head, 1])], make=request_of)
    traffic.rest(served.engine)
    served.runner.memory[:] = -1  # a load may go to the very blocks that held it
    return head


def stop_time(served: Served) -> None:
    """No copy advances any more, and no sequence joins a step before its load has ended."""
    served.runner.time_stands_still = True
    served.copier.still = True
    traffic.tier_of(served.engine).seconds_left = lambda transfer_ids: 1.0


def run_to_end(served: Served, jobs: list[traffic.Job], seen: dict[str, list[int]]) -> None:
    """Their tokens are those that the stand-in for a model gives by itself."""
    while served.engine.has_unfinished:
        for output in served.engine.step():
            seen[output.request_id] = list(output.outputs[0].token_ids)
        served.engine.scheduler.check_integrity()
    for one in jobs:
        assert seen[one.name] == expected_output(one.prompt, one.params)
    traffic.check_over(served.engine)


@MODES
def test_drafts_do_not_wait_for_copies(asynchronous: bool) -> None:
    """While a load and a store stand still, every step drafts for the running sequence. Only the
    step that the loaded sequence joins waits for the load, and that step has no drafts."""
    talking, short = job("talking", [5, 6, 7], 90), job("short", list(range(1, 1 + 4 * BLOCK)))
    future = expected_output(talking.prompt, replace(talking.params, max_tokens=100))
    drafter = Sure({("talking", 0): future}, VOCAB)
    served = build(1, asynchronous, limits=ALL_LEAVE)
    head = store(served, 1)
    served.engine.scheduler.drafter = drafter
    stop_time(served)
    steps: list[SchedulerOutput] = []
    launch = served.runner.launch

    def note(step: SchedulerOutput) -> int:
        steps.append(step)
        return launch(step)

    served.runner.launch = note  # type: ignore[method-assign]
    again = job("again", [*head, 9, 9])
    seen: dict[str, list[int]] = {}
    for one in (talking, short, again):
        served.engine.add_request(request_of(one))
    for _ in range(8):
        for output in served.engine.step():
            seen[output.request_id] = list(output.outputs[0].token_ids)
    assert served.copier.open_transfers(True) and served.copier.open_transfers(False)
    assert all(step.drafts is not None and not step.kv_loads for step in steps[1:])
    assert len(steps) >= 8
    before = len(steps)
    served.copier.still = False
    traffic.join_at_once(served.engine)
    run_to_end(served, [talking, short, again], seen)
    (joined,) = [step for step in steps if step.kv_loads]
    assert joined.drafts is None and len(joined.request_slots) == 2
    assert any(step.drafts is not None for step in steps[before + 2 :])


SHARERS = range(3)
ABORTED = [which for count in (1, 2, 3) for which in combinations(SHARERS, count)]


@pytest.mark.parametrize("landed", range(LAYERS + 1))
@pytest.mark.parametrize("aborted", ABORTED, ids=str)
def test_readers_of_a_load_are_aborted_at_any_layer(aborted: tuple[int, ...], landed: int) -> None:
    """The other readers get their tokens, and no request ever finds a block of which layers are
    missing."""
    served = build(landed, False, limits=ALL_LEAVE)
    head = store(served, landed)
    jobs = [job(str(n), [*head, n + 1, n + 2], 3) for n in SHARERS]
    stop_time(served)
    assert isinstance(served.blocks.transfers, BlockTransfers)
    served.blocks.transfers.limits = OffloadLimits(8)  # from now on the device keeps what it has
    for one in jobs:
        served.engine.add_request(request_of(one))
    assert served.engine.step() == []
    (transfer_id,) = served.copier.open_transfers(True)
    while landed and not served.copier.landed(transfer_id, landed - 1):
        assert served.copier.advance(True)
    for number in aborted:
        served.engine.abort(str(number))
        served.engine.scheduler.check_integrity()
    served.copier.still = False
    traffic.join_at_once(served.engine)
    late = job("late", [*head, 40, 41], 3)
    served.engine.add_request(request_of(late))
    run_to_end(served, [*(jobs[n] for n in SHARERS if n not in aborted), late], {})
    assert not served.runner.num_wrong
    metrics = served.engine.metrics()
    alone = len(aborted) == len(SHARERS)
    assert metrics["kv_offload_aborted_loads"] == (alone and landed < LAYERS)


@pytest.mark.parametrize("landed", range(LAYERS))
def test_a_load_with_readers_fails_at_any_layer(landed: int) -> None:
    """All readers compute the prefix, and none loads again."""
    served = build(landed, False, limits=ALL_LEAVE)
    head = store(served, landed)
    jobs = [job(str(n), [*head, n + 1, n + 2], 3) for n in SHARERS]
    stop_time(served)
    for one in jobs:
        served.engine.add_request(request_of(one))
    assert served.engine.step() == []
    (transfer_id,) = served.copier.open_transfers(True)
    served.copier.fail(transfer_id, landed * PREFIX // BLOCK + 3)
    served.copier.still = False
    traffic.join_at_once(served.engine)
    run_to_end(served, jobs, {})
    metrics = served.engine.metrics()
    assert (metrics["kv_offload_failed_loads"], metrics["kv_offload_loads"]) == (1, 0)


@MODES
def test_blocks_count_once(asynchronous: bool) -> None:
    """However often a sequence is preempted or its load fails, it counts as many blocks as its
    tokens fill; one more may have been allocated for a token to come."""
    preempted = failed = 0.0
    for seed in range(4):
        served = build(seed, asynchronous, limits=ALL_LEAVE)
        traffic.join_at_once(served.engine)
        traffic.spoil(served.engine, seed, 0.5)
        jobs = [
            replace(one, abort=None) for one in traffic.traffic(seed, longest=LONGEST, vocab=VOCAB)
        ]
        traffic.serve(served.engine, jobs, make=request_of)
        least = [-(-(len(one.prompt) + one.params.max_tokens - 1) // BLOCK) for one in jobs]
        assert sum(least) <= served.blocks.hits.total <= sum(least) + len(jobs)
        metrics = served.engine.metrics()
        preempted += metrics["num_preemptions"]
        failed += metrics["kv_offload_failed_loads"]
    assert preempted > 0 and failed > 0
