"""A step as bytes: its arrays as they are, behind one row of numbers.

    words  what
    8      kind, sequences S, input tokens T, table writes K, block copies M, draft nodes N or -1,
           bytes of the extras, 0
    4 S    request slots, computed, scheduled and sampled tokens
    T      input tokens
    3 K    block-table writes
    2 M    block copies
    S 2N   drafts: nodes of each sequence, token ids, parents; only where N >= 0
           the extras, padded to whole words

A load or store of KV (`TransferOrder`) is such a row, too: kind, blocks N; then in eight bytes each
transfer id, step, seconds, N host blocks and N blocks of the device. Moves of KV are kind, moves M,
and then in eight bytes each M KV slots to read and M to write. Promotions of experts are kind,
promotions P, and then P rows of five numbers.

A step of a batch that only decodes has no extras: nothing of it is looked at one by one. What else
a step may have, admitted sequences above all, is in the extras in a plain form (`value_codec`).
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.images import PromptImage, PromptImages
from hetero_llm.core.lora import AdapterLoad, AdapterRef, LoRARequest
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.core.step import AdmittedSequence, PromptLogprobSpan, SchedulerOutput
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.distributed.value_codec import ValueCodec


class StepMessage(IntEnum):
    """What the engine's process lets the ranks do."""

    LAUNCH = 1
    """Launch the step that follows."""
    FINISH = 2
    """Finish the oldest launched step."""
    GRAMMAR = 3
    """Compile the `Grammar` that follows: a sequence may begin with it soon."""
    ADAPTER = 4
    """Read the adapter of the `LoRARequest` that follows: a step may load it soon."""
    FORGET_ADAPTER = 5
    """Forget the name of an adapter that follows."""
    LOAD_BLOCKS = 6
    """Begin the load of KV that follows."""
    STORE_BLOCKS = 7
    """Begin the store of KV that follows."""
    ABORT_LOAD = 8
    """Abort the load of the `TransferOrder` that follows, which has no blocks."""
    MOVE_KV = 9
    """Move the KV of tokens, in the stages before the last one."""
    PROMOTE = 10
    """Promote the experts that follow to the GPU's bank."""


_LAUNCH = int(StepMessage.LAUNCH)
_HEAD = struct.Struct("<8i")
_HEAD_WORDS = 8
_PROMOTION_WORDS = 5
_TRANSFER = struct.Struct("<qqd")
_FORM = ValueCodec(
    AdmittedSequence, SamplingParams, RequestOutputKind, Grammar, PromptLogprobSpan, AdapterLoad,
    AdapterRef, LoRARequest, PromptImages, PromptImage,
)  # fmt: skip

FINISH_MESSAGE = _HEAD.pack(StepMessage.FINISH, *[0] * 7)


def step_to_bytes(step: SchedulerOutput) -> bytes:
    """The message LAUNCH of a step. Its arrays are int32.

    Raises:
        TypeError: a sequence has logits processors, which stay in their process.
        AssertionError: an array is of another type.
    """
    drafts = step.drafts
    count, num_tokens = len(step.request_slots), len(step.token_ids)
    num_writes, num_copies = step.block_table_writes.shape[1], step.block_copies.shape[1]
    extras = b""
    if step.admitted or step.prompt_logprob_spans or step.kv_loads or step.adapter_loads:
        extras = _extras(step)
    nodes = -1 if drafts is None else len(drafts.token_ids)
    head = _HEAD.pack(_LAUNCH, count, num_tokens, num_writes, num_copies, nodes, len(extras), 0)
    arrays: list[Any] = [
        head, step.request_slots, step.num_computed_tokens, step.num_scheduled_tokens,
        step.num_samples, step.token_ids,
    ]  # fmt: skip
    if num_writes:
        arrays.append(step.block_table_writes)
    if num_copies:
        arrays.append(step.block_copies)
    words = _HEAD_WORDS + 4 * count + num_tokens + 3 * num_writes + 2 * num_copies
    if drafts is not None:
        arrays += (drafts.counts, drafts.token_ids, drafts.parents)
        words += count + 2 * nodes
    if extras:
        arrays += (extras, bytes(-len(extras) % 4))
        words += -(-len(extras) // 4)
    try:
        message = b"".join(arrays)
    except (BufferError, TypeError):  # a view whose rows do not follow each other
        together: list[Any] = [
            np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one for one in arrays
        ]
        message = b"".join(together)
    assert len(message) == 4 * words, "an array of a step is not int32, or of another length"
    return message


def step_from_words(words: np.ndarray) -> SchedulerOutput:
    """The step of a message LAUNCH.

    Args:
        words: [words] int32, the whole message; the step's arrays are views of it.
    """
    kind, count, num_tokens, num_writes, num_copies, nodes, num_extras, _ = words[
        :_HEAD_WORDS
    ].tolist()
    assert kind == StepMessage.LAUNCH
    at = _HEAD_WORDS

    def take(size: int) -> np.ndarray:
        nonlocal at
        at += size
        return words[at - size : at]

    slots, computed, scheduled, samples = take(count), take(count), take(count), take(count)
    token_ids = take(num_tokens)
    writes = take(3 * num_writes).reshape(3, num_writes)
    copies = take(2 * num_copies).reshape(2, num_copies)
    drafts = None
    if nodes >= 0:
        drafts = DraftBatch(take(count), take(nodes), take(nodes))
    spans, admitted, loads, adapter_loads = (), (), (), ()
    if num_extras:
        extras = words[at:].tobytes()[:num_extras]
        spans, admitted, loads, adapter_loads = _FORM.read(extras)
    return SchedulerOutput(
        request_slots=slots,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        token_ids=token_ids,
        num_samples=samples,
        prompt_logprob_spans=spans,
        admitted=admitted,
        block_table_writes=writes,
        block_copies=copies,
        drafts=drafts,
        kv_loads=loads,
        adapter_loads=adapter_loads,
    )


def value_to_bytes(kind: StepMessage, value: Grammar | LoRARequest | str) -> bytes:
    """A message with one value: GRAMMAR, ADAPTER or FORGET_ADAPTER."""
    data = _FORM.write(value)
    return _HEAD.pack(kind, 0, 0, 0, 0, -1, len(data), 0) + data + bytes(-len(data) % 4)


def value_from_words(words: np.ndarray) -> Any:
    """The value of such a message, given as in `step_from_words`."""
    return _FORM.read(words[_HEAD_WORDS:].tobytes()[: int(words[6])])


def transfer_to_bytes(kind: StepMessage, order: TransferOrder) -> bytes:
    """The message LOAD_BLOCKS, STORE_BLOCKS or ABORT_LOAD of an order."""
    count = len(order.blocks)
    assert count == len(order.host_blocks)
    seconds = math.nan if order.compute is None else order.compute
    head = _HEAD.pack(kind, count, 0, 0, 0, -1, 0, 0)
    numbers = _TRANSFER.pack(order.transfer_id, order.after_step, seconds)
    blocks = np.concatenate((order.host_blocks, order.blocks)).astype(np.int64, copy=False)
    return b"".join((head, numbers, blocks.tobytes()))


def transfer_from_words(words: np.ndarray) -> TransferOrder:
    """The order of such a message, given as in `step_from_words`."""
    count = int(words[1])
    data = words[_HEAD_WORDS:].tobytes()
    transfer_id, after_step, seconds = _TRANSFER.unpack_from(data)
    blocks = np.frombuffer(data, np.int64, 2 * count, _TRANSFER.size)
    compute = None if math.isnan(seconds) else seconds
    return TransferOrder(transfer_id, blocks[:count], blocks[count:], after_step, compute)


def moves_to_bytes(moves: NDArray[np.int64]) -> bytes:
    """The message MOVE_KV. `moves`: [2, M] KV slots to read and to write."""
    return _HEAD.pack(StepMessage.MOVE_KV, moves.shape[1], 0, 0, 0, -1, 0, 0) + moves.tobytes()


def moves_from_words(words: np.ndarray) -> NDArray[np.int64]:
    """The moves of such a message, given as in `step_from_words`."""
    count = int(words[1])
    data = words[_HEAD_WORDS:].tobytes()
    return np.frombuffer(data, np.int64, 2 * count).reshape(2, count)


def promotions_to_bytes(rows: NDArray[np.int32]) -> bytes:
    """The message PROMOTE. `rows`: [P, 5], see `core.promotion.promotions_to_rows`."""
    assert rows.dtype == np.int32 and rows.shape[1] == _PROMOTION_WORDS
    return _HEAD.pack(StepMessage.PROMOTE, len(rows), 0, 0, 0, -1, 0, 0) + rows.tobytes()


def promotions_from_words(words: np.ndarray) -> NDArray[np.int32]:
    """The rows of such a message, given as in `step_from_words`; a copy."""
    count = int(words[1])
    rows = words[_HEAD_WORDS : _HEAD_WORDS + _PROMOTION_WORDS * count]
    return rows.reshape(count, _PROMOTION_WORDS).copy()


def message_kind(words: np.ndarray) -> int:
    """One of `StepMessage`."""
    return int(words[0])


def _extras(step: SchedulerOutput) -> bytes:
    admitted = tuple(_sendable(state) for state in step.admitted)
    parts: tuple[Any, ...] = (
        step.prompt_logprob_spans, admitted, step.kv_loads, step.adapter_loads
    )  # fmt: skip
    return _FORM.write(parts)


def _sendable(state: AdmittedSequence) -> AdmittedSequence:
    """The sequence without what only the engine's process reads: of a constraint the runners follow
    the grammar."""
    params = state.params
    if params.logits_processors:
        raise TypeError("logits_processors of a sequence are not sent to other ranks")
    if params.structured_outputs is None and params.guided_decoding is None:
        return state
    params = params.clone()
    params.structured_outputs = params.guided_decoding = None
    return replace(state, params=params)
