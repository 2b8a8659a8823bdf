"""A step comes out of its bytes as it went in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.core.grammar import Grammar
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.prompt_adapter import VirtualPrompt
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.distributed.step_codec import (
    FINISH_MESSAGE,
    StepMessage,
    message_kind,
    moves_from_words,
    moves_to_bytes,
    promotions_from_words,
    promotions_to_bytes,
    step_from_words,
    step_to_bytes,
    transfer_from_words,
    transfer_to_bytes,
    value_from_words,
    value_to_bytes,
)
from tests.distributed.steps import GRAMMARS, assert_same, steps

NONE = np.zeros(0, np.int32)
EMPTY = SchedulerOutput(
    NONE, NONE, NONE, NONE, NONE, (), (), np.zeros((3, 0), np.int32), np.zeros((2, 0), np.int32)
)
SEQUENCE = AdmittedSequence(0, (1, 2), 2, SamplingParams(), 5, 0)


def words_of(message: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(message), np.int32)


@given(steps())
def test_round_trip(step: SchedulerOutput) -> None:
    words = words_of(step_to_bytes(step))
    assert message_kind(words) == StepMessage.LAUNCH
    read = step_from_words(words)
    assert_same(step, read)
    assert read.token_ids.flags.writeable, "torch takes no arrays that are read only"
    assert step_to_bytes(read) == words.tobytes()


def test_a_batch_that_only_decodes_is_nothing_but_its_arrays() -> None:
    count = 64
    column = np.arange(count, dtype=np.int32)
    step = replace(
        EMPTY, request_slots=column, num_computed_tokens=column, num_scheduled_tokens=column,
        num_samples=column, token_ids=column,
    )  # fmt: skip
    assert len(step_to_bytes(step)) == 4 * (8 + 5 * count)


def test_a_constraint_is_sent_as_its_grammar() -> None:
    params = SamplingParams(structured_outputs={"json": {"type": "object"}}, top_k=7)
    state = replace(SEQUENCE, params=params, grammar=Grammar("text"))
    (read,) = step_from_words(words_of(step_to_bytes(replace(EMPTY, admitted=(state,))))).admitted
    assert read.grammar == state.grammar
    assert read.params.structured_outputs is None and read.params.top_k == 7
    assert params.structured_outputs is not None, "the scheduler's own is left alone"


def test_functions_are_not_sent() -> None:
    functions = replace(SEQUENCE, params=SamplingParams(logits_processors=[lambda _, x: x]))
    with pytest.raises(TypeError, match="^logits_processors of a sequence"):
        step_to_bytes(replace(EMPTY, admitted=(functions,)))


def test_embeddings_of_a_prompt_adapter() -> None:
    virtual = VirtualPrompt(np.arange(12, dtype=np.float32).reshape(3, 4), "hash")
    state = replace(SEQUENCE, images=virtual.as_images(), num_virtual_tokens=3)
    (read,) = step_from_words(words_of(step_to_bytes(replace(EMPTY, admitted=(state,))))).admitted
    assert read.images is not None and read.images.key == "hash"
    (found,), (sent,) = read.images.items, virtual.as_images().items
    assert (found.start, found.count, found.grid) == (sent.start, sent.count, sent.grid)
    np.testing.assert_array_equal(found.arrays["embeddings"], virtual.embeddings, strict=True)


def test_arrays_of_another_type_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="not int32"):
        step_to_bytes(replace(EMPTY, token_ids=np.zeros(3, np.int64)))


@given(GRAMMARS)
def test_messages_with_one_value(grammar: Grammar) -> None:
    for kind, value in (
        (StepMessage.GRAMMAR, grammar),
        (StepMessage.ADAPTER, LoRARequest("name", 1, "/folder", base_model_name="base")),
        (StepMessage.FORGET_ADAPTER, "name"),
    ):
        words = words_of(value_to_bytes(kind, value))
        assert message_kind(words) == kind
        assert value_from_words(words) == value


def test_the_message_that_finishes_a_step() -> None:
    assert message_kind(words_of(FINISH_MESSAGE)) == StepMessage.FINISH


BLOCKS = st.lists(st.tuples(*[st.integers(0, 2**40)] * 2), max_size=5)


@given(
    st.sampled_from([StepMessage.LOAD_BLOCKS, StepMessage.STORE_BLOCKS, StepMessage.ABORT_LOAD]),
    BLOCKS, st.integers(1, 2**62), st.integers(0, 2**62), st.none() | st.floats(0, 10),
)  # fmt: skip
def test_orders_of_copies(
    kind: StepMessage,
    pairs: list[tuple[int, int]],
    transfer_id: int,
    after_step: int,
    compute: float | None,
) -> None:
    host_blocks, blocks = np.array(pairs, np.int64).reshape(-1, 2).T
    order = TransferOrder(transfer_id, host_blocks, blocks, after_step, compute)
    words = words_of(transfer_to_bytes(kind, order))
    assert message_kind(words) == kind
    read = transfer_from_words(words)
    np.testing.assert_array_equal(read.host_blocks, host_blocks)
    np.testing.assert_array_equal(read.blocks, blocks)
    assert read.host_blocks.dtype == read.blocks.dtype == np.int64
    assert (read.transfer_id, read.after_step) == (transfer_id, after_step)
    assert read.compute == compute


def test_moves_of_kv() -> None:
    moves = np.array([[7, 1 << 40, 9], [1, 2, 3]], np.int64)
    words = np.frombuffer(moves_to_bytes(moves), np.int32)
    assert message_kind(words) == StepMessage.MOVE_KV
    assert np.array_equal(moves_from_words(words), moves)


def test_promotions_of_experts() -> None:
    for rows in (np.zeros((0, 5), np.int32), np.arange(-1, 14, dtype=np.int32).reshape(3, 5)):
        words = np.frombuffer(promotions_to_bytes(rows), np.int32)
        assert message_kind(words) == StepMessage.PROMOTE
        read = promotions_from_words(words)
        assert np.array_equal(read, rows) and read.base is not words
