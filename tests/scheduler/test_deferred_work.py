"""Caching of full blocks after the step, and blocks allocated before they are needed."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.harness import expected_output, make_request, make_scheduler
from tests.scheduler.test_draft_admission import GREEDY, ChainDrafter


def test_a_prefix_is_found_whether_or_not_deferred_work_was_done() -> None:
    for deferred in (False, True):
        scheduler, _, runner = make_scheduler(block_size=4, drafter=ChainDrafter(3, 3))
        first = make_request("a", [1, 2, 3], GREEDY)
        scheduler.add_request(first)
        for _ in range(3):
            step = scheduler.schedule()
            scheduler.update(step, runner.run(step))
            if deferred:
                scheduler.run_deferred()
        known = list(first.sequences[0].token_ids)
        assert len(known) == 3 + 1 + 4 + 4
        second = make_request("b", known, replace(GREEDY, max_tokens=2))
        scheduler.add_request(second)
        scheduler.schedule()
        assert second.num_cached_tokens == 8  # the last token has no KV yet
        scheduler.check_integrity()


def test_a_stop_string_drops_tokens_whose_blocks_were_cached() -> None:
    """They stay cached: each block holds KV of exactly the tokens that it is found by."""
    scheduler, blocks, runner = make_scheduler(block_size=4, drafter=ChainDrafter(7, 7))
    request = make_request("a", [1, 2, 3], GREEDY)
    scheduler.add_request(request)
    for _ in range(2):
        step = scheduler.schedule()
        scheduler.update(step, runner.run(step))
    scheduler.run_deferred()
    (sequence,) = request.sequences
    scheduler.stop_sequence(sequence, "x", 7)
    assert sequence.output_ids == expected_output([1, 2, 3], GREEDY)[:4]
    scheduler.check_integrity()
    assert blocks.num_free == blocks.num_blocks


def test_blocks_are_allocated_ahead_only_while_they_are_plenty() -> None:
    for num_blocks in (40, 4):
        scheduler, blocks, runner = make_scheduler(
            num_blocks=num_blocks, block_size=4, drafter=ChainDrafter(7, 7), max_model_len=32
        )
        scheduler.add_request(make_request("a", [1, 2], replace(GREEDY, max_tokens=14)))
        step = scheduler.schedule()
        scheduler.update(step, runner.run(step))
        scheduler.schedule()  # root and nodes: positions 2 to 9
        held = blocks.num_blocks - blocks.num_free
        scheduler.run_deferred()
        assert (blocks.num_blocks - blocks.num_free > held) == (num_blocks == 40)
        if num_blocks == 40:  # no more than the request can ever use: 16 tokens
            assert blocks.num_blocks - blocks.num_free == 4
        scheduler.check_integrity()


def test_a_sequence_without_nodes_has_room_for_a_draft_of_the_next_step() -> None:
    scheduler, blocks, runner = make_scheduler(
        num_blocks=40, block_size=4, drafter=ChainDrafter(0, 0), max_model_len=32
    )
    request = make_request("a", [1, 2, 3], GREEDY)
    scheduler.add_request(request)
    step = scheduler.schedule()
    scheduler.update(step, runner.run(step))
    scheduler.schedule()  # position 3, which is in the prompt's block
    slot = request.sequences[0].request_slot
    assert blocks.num_writable[slot] == 4
    scheduler.run_deferred()
    assert blocks.num_writable[slot] == 20  # positions 3 and 4, and 15 nodes
    scheduler.check_integrity()
