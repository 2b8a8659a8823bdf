"""Which waiting inputs make a batch."""

from __future__ import annotations

import random

import numpy as np

from hetero_llm.core.pooling import Finish, PoolingInput, PoolingRequest
from hetero_llm.pooling.input_queue import InputQueue, RunningRequest


def queue_of(*lengths: int, key: str = "a") -> InputQueue:
    queue = InputQueue()
    inputs = [PoolingInput(np.zeros(length, np.int32)) for length in lengths]
    queue.add(RunningRequest.of(PoolingRequest(key, inputs, Finish())))
    return queue


def taken(queue: InputQueue, tokens: int, most: int = 256) -> list[int]:
    return [len(one) for one in queue.take_alike(tokens, most)]


def test_a_batch_has_the_oldest_input_and_those_of_like_length() -> None:
    queue = queue_of(100, 5, 90, 400, 110, 6, 380, 95)
    assert taken(queue, 1000) == [100, 90, 110, 95]
    assert taken(queue, 1000) == [5, 6]
    assert taken(queue, 1000) == [400, 380]
    assert taken(queue, 1000) == []


def test_padding_counts_towards_the_budget() -> None:
    queue = queue_of(100, 100, 90, 100)
    assert taken(queue, 300) == [100, 100, 100]
    assert taken(queue, 300) == [90]
    assert taken(queue_of(50, 10, 50), 40) == [50]  # longer than a batch: alone


def test_at_most_so_many_inputs() -> None:
    queue = queue_of(*[8] * 5)
    assert [len(taken(queue, 1000, 2)) for _ in range(4)] == [2, 2, 1, 0]


def test_every_input_leaves_once_and_no_batch_breaks_a_limit() -> None:
    rng = random.Random(3)
    for _ in range(50):
        lengths = [rng.randint(1, 512) for _ in range(rng.randint(1, 60))]
        queue, seen = queue_of(*lengths), []
        while len(queue):
            batch = taken(queue, 1024, 8)
            seen += batch
            assert len(batch) <= 8
            assert len(batch) == 1 or len(batch) * max(batch) <= 1024
            assert max(batch) - min(batch) <= 16 or min(batch) >= 0.8 * max(batch)
        assert sorted(seen) == sorted(lengths)


def test_remove_takes_out_one_request() -> None:
    queue = queue_of(3, 4)
    inputs = [PoolingInput(np.zeros(7, np.int32))]
    other = RunningRequest.of(PoolingRequest("b", inputs, Finish()))
    queue.add(other)
    queue.remove("a")
    first = queue.take_first(10)
    assert [one.key for one in first] == ["b"] and other.scheduled > 0
    queue.put_back(first)
    assert len(queue) == 1
