"""Steps through the channel, to several ranks."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.grammar import Grammar
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.distributed.step_channel import StepReader, StepWriter
from hetero_llm.distributed.step_codec import (
    FINISH_MESSAGE,
    StepMessage,
    message_kind,
    step_from_words,
    step_to_bytes,
    value_from_words,
    value_to_bytes,
)
from tests.distributed.steps import assert_same, steps


def never() -> None:
    raise AssertionError("there is room")


@settings(max_examples=20)
@given(st.lists(steps(), max_size=4))
def test_all_ranks_read_the_same_calls(made: list[SchedulerOutput]) -> None:
    writer = StepWriter(3)
    handles = [str(os.dup(writer.channel.fd)) for _ in range(2)]
    readers = [StepReader(handle, rank) for rank, handle in enumerate(handles, 1)]
    for step in made:
        writer.write(step_to_bytes(step), never)
        writer.write(FINISH_MESSAGE, never)
    writer.write(value_to_bytes(StepMessage.GRAMMAR, Grammar("text")), never)
    for reader in readers:
        for step in made:
            words = reader.read(0)
            assert words is not None
            assert_same(step_from_words(words), step)
            words = reader.read(0)
            assert words is not None and message_kind(words) == StepMessage.FINISH
        words = reader.read(0)
        assert words is not None and value_from_words(words) == Grammar("text")
        assert reader.read(0) is None
        reader.close()
    writer.close()
