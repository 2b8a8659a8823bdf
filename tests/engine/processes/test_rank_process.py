"""A rank's loop makes the calls that the engine announces, in their order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero_llm.bridge.ipc.broadcast import ChannelClosedError
from hetero_llm.core.errors import RankDeadError
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.distributed.step_channel import StepReader, StepWriter
from hetero_llm.distributed.step_codec import (
    FINISH_MESSAGE,
    StepMessage,
    moves_to_bytes,
    promotions_to_bytes,
    step_to_bytes,
    transfer_to_bytes,
    value_to_bytes,
)
from hetero_llm.engine.processes.rank_process import RankLoop
from hetero_llm.lora.rank_adapters import NoRankAdapters

NO_COPIES = np.zeros((2, 0), np.int32)


def step(number: int) -> SchedulerOutput:
    one = np.array([number], np.int32)
    return SchedulerOutput(one, one, one, one, one, (), (), np.zeros((3, 0), np.int32), NO_COPIES)


class Runner:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def launch(self, step: SchedulerOutput) -> int:
        self.calls.append(f"launch {step.token_ids[0]}")
        return int(step.token_ids[0])

    def set_open_matcher(self, open_matcher: Any) -> None:
        raise AssertionError

    def finish(self, pending: int) -> ModelRunnerOutput:
        self.calls.append(f"finish {pending}")
        return ModelRunnerOutput([], None, {}, {})


class Compiler:
    def __init__(self) -> None:
        self.prepared: list[Grammar] = []

    def prepare(self, grammar: Grammar) -> None:
        self.prepared.append(grammar)


class Adapters:
    """Notes calls among those of the runner."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def begin(self, step: SchedulerOutput) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def open(self, request: LoRARequest) -> None:
        self.calls.append(f"open {request.lora_name}")

    def forget(self, name: str) -> None:
        self.calls.append(f"forget {name}")


def never() -> None:
    raise AssertionError("there is room")


@pytest.fixture
def writer() -> Iterator[StepWriter]:
    made = StepWriter(2)
    yield made
    made.close()


def test_calls_in_the_order_of_the_engine(writer: StepWriter) -> None:
    """With two steps in flight, as on a GPU."""
    reader = StepReader(str(os.dup(writer.channel.fd)), 1)
    runner, compiler = Runner(), Compiler()
    loop = RankLoop(reader, runner, compiler, NoRankAdapters(), lambda: False)  # type: ignore[arg-type]
    loop.run_once(0)  # nothing has come
    writer.write(step_to_bytes(step(1)), never)
    writer.write(step_to_bytes(step(2)), never)
    writer.write(FINISH_MESSAGE, never)
    writer.write(value_to_bytes(StepMessage.GRAMMAR, Grammar("text")), never)
    writer.write(step_to_bytes(step(3)), never)
    writer.write(FINISH_MESSAGE, never)
    writer.write(FINISH_MESSAGE, never)
    writer.end()
    loop.run()
    assert runner.calls == [
        "launch 1", "launch 2", "finish 1", "launch 3", "finish 2", "finish 3",
    ]  # fmt: skip
    while not compiler.prepared:  # in a thread of its own
        pass
    assert compiler.prepared == [Grammar("text")]
    with pytest.raises(ChannelClosedError):
        loop.run_once(0)
    reader.close()


def test_adapters_are_read_before_their_step_and_kept_until_it_has_ended(
    writer: StepWriter,
) -> None:
    reader = StepReader(str(os.dup(writer.channel.fd)), 1)
    runner = Runner()
    loop = RankLoop(reader, runner, None, Adapters(runner.calls), lambda: False)  # type: ignore[arg-type]
    opened = LoRARequest("one", 1, "/folder")
    writer.write(value_to_bytes(StepMessage.ADAPTER, opened), never)
    writer.write(step_to_bytes(step(1)), never)
    writer.write(FINISH_MESSAGE, never)
    writer.write(value_to_bytes(StepMessage.FORGET_ADAPTER, "one"), never)
    writer.end()
    loop.run()
    assert runner.calls == ["open one", "begin", "launch 1", "finish 1", "end", "forget one"]
    reader.close()


@pytest.mark.parametrize("verifies", [False, True])
def test_kv_of_accepted_drafts_is_moved_by_stages_that_verify_none(
    writer: StepWriter, verifies: bool
) -> None:
    reader = StepReader(str(os.dup(writer.channel.fd)), 1)
    moved: list[list[int]] = []

    def move(*moves: np.ndarray) -> None:
        moved.extend(one.tolist() for one in moves)

    more = {} if verifies else {"move_kv": move}
    loop = RankLoop(reader, Runner(), None, NoRankAdapters(), lambda: False, **more)  # type: ignore[arg-type]
    writer.write(moves_to_bytes(np.array([[5, 6], [3, 4]])), never)
    loop.run_once(0)
    assert moved == ([] if verifies else [[5, 6], [3, 4]])
    reader.close()


def test_promotions_come_behind_the_step_that_has_chosen_them(writer: StepWriter) -> None:
    reader = StepReader(str(os.dup(writer.channel.fd)), 1)
    runner = Runner()

    def promote(rows: np.ndarray) -> None:
        runner.calls.append(f"promote {rows.tolist()}")

    loop = RankLoop(reader, runner, None, NoRankAdapters(), lambda: False, promote=promote)
    writer.write(step_to_bytes(step(1)), never)
    writer.write(promotions_to_bytes(np.array([[0, 3, 2, 1, 4]], np.int32)), never)
    writer.write(step_to_bytes(step(2)), never)
    for _ in range(3):
        loop.run_once(0)
    assert runner.calls == ["launch 1", "promote [[0, 3, 2, 1, 4]]", "launch 2"]
    reader.close()


def test_a_collective_that_gave_up_ends_the_rank(writer: StepWriter) -> None:
    reader = StepReader(str(os.dup(writer.channel.fd)), 1)
    loop = RankLoop(reader, Runner(), None, NoRankAdapters(), lambda: True)
    writer.write(step_to_bytes(step(1)), never)
    writer.write(FINISH_MESSAGE, never)
    loop.run_once(0)
    with pytest.raises(RankDeadError, match="did not come to it in time"):
        loop.run_once(0)
    reader.close()


class Copies:
    """Notes calls among those of the runner."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.observed = 0

    def load(self, order: TransferOrder) -> None:
        self.calls.append(
            f"load {order.transfer_id} {order.host_blocks} {order.blocks} {order.after_step} "
            f"{order.compute}"
        )

    def store(self, order: TransferOrder) -> None:
        self.calls.append(
            f"store {order.transfer_id} {order.blocks} {order.host_blocks} {order.after_step}"
        )

    def abort(self, transfer_id: int) -> None:
        self.calls.append(f"abort {transfer_id}")

    def step_launched(self) -> None:
        self.calls.append("launched")

    def step_finished(self, *, timed_out: bool) -> None:
        self.calls.append(f"timed out {timed_out}")

    def observe(self) -> None:
        self.observed += 1

    def close(self) -> None:
        self.calls.append("close")


def test_copies_between_the_steps_of_rank_0(writer: StepWriter) -> None:
    reader = StepReader(str(os.dup(writer.channel.fd)), 1)
    runner = Runner()
    copies = Copies(runner.calls)
    loop = RankLoop(reader, runner, None, NoRankAdapters(), lambda: False, copies=copies)  # type: ignore[arg-type]
    host_blocks, blocks = np.array([5, 6]), np.array([1, 2])
    none = np.zeros(0, np.int64)
    loop.run_once(0)
    assert copies.observed == 1, "host memory grows while nothing comes, too"
    for kind, order in (
        (StepMessage.LOAD_BLOCKS, TransferOrder(7, host_blocks, blocks, 0, 0.5)),
        (StepMessage.STORE_BLOCKS, TransferOrder(8, host_blocks, blocks, 0)),
        (StepMessage.ABORT_LOAD, TransferOrder(7, none, none, 0)),
    ):
        writer.write(transfer_to_bytes(kind, order), never)
    writer.write(step_to_bytes(replace(step(1), kv_loads=(7,))), never)
    writer.write(step_to_bytes(step(2)), never)
    writer.write(FINISH_MESSAGE, never)
    writer.write(FINISH_MESSAGE, never)
    writer.end()
    loop.run()
    assert runner.calls == [
        "load 7 [5 6] [1 2] 0 0.5", "store 8 [1 2] [5 6] 0", "abort 7", "launch 1", "launched",
        "launch 2", "launched", "finish 1", "timed out False", "finish 2", "close",
    ]  # fmt: skip
    reader.close()
