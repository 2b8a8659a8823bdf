"""Messages through a ring: unchanged, prompts in pieces; malformed nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.ipc.messages import (
    MAX_WORDS,
    NODE_WORDS,
    OPENING,
    PROMPT_CHUNK,
    PROTOCOL,
    Hello,
    MessageKind,
    Messages,
    OpenRequest,
    Outbox,
    Refusal,
    Stamps,
    put_close,
    put_commits,
    put_heartbeat,
    put_hello,
    put_nodes,
    put_open,
    put_refused,
    put_stop,
    read_hello,
)
from hetero_llm.bridge.ipc.rings import Consumer, Producer, RingStatus, create_ring
from hetero_llm.utils.native_build import find_compiler
from tests.bridge.ipc.tools import both_ends

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

VOCAB = 1000
MOST_NODES = MAX_WORDS // NODE_WORDS
INT32 = np.iinfo(np.int32)


def through_a_ring(outbox: Outbox) -> Messages:
    """What comes out of a large ring; the outbox must be empty then."""
    with (
        create_ring(1 << 14) as ring,
        Producer(ring) as producer,
        Consumer(ring, max_words=1 << 18) as consumer,
    ):
        assert producer.push(outbox) == RingStatus.OK
        status, messages = consumer.pop()
        assert status == RingStatus.OK
        copied = messages.copy()
        assert consumer.pop().status == RingStatus.EMPTY
        return copied


def stamps(count: int, *, first: int = 0) -> Stamps:
    slots = np.arange(first, first + count)
    return Stamps(slots, slots + 100, slots * 11)


def assert_stamped(messages: Messages, expected: Stamps) -> None:
    for name, values in (
        ("slot", expected.slots),
        ("generation", expected.generations),
        ("base_length", expected.base_lengths),
    ):
        np.testing.assert_array_equal(messages.headers[name], values)


def test_commits_of_many_requests() -> None:
    counts = np.arange(1, 129) % 7 + 1
    tokens = np.arange(counts.sum(), dtype=np.int32)
    outbox = Outbox()
    put_commits(outbox, stamps(128), counts, tokens)
    ((kind, commits),) = through_a_ring(outbox).runs()
    assert kind == MessageKind.COMMIT and len(commits) == 128
    assert_stamped(commits, stamps(128))
    np.testing.assert_array_equal(commits.headers["words"], counts)
    np.testing.assert_array_equal(commits.words, tokens)


def same(messages: Messages, other: Messages) -> bool:
    return (messages.headers == other.headers).all() and bool((messages.words == other.words).all())


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 5))
def test_messages_put_together_are_those_put_one_by_one(sizes: list[int], before: int) -> None:
    """Whatever lay there before, and however much waits already."""
    together, one_by_one, at_once = Outbox(), Outbox(), Outbox()
    tokens = np.arange(sum(sizes), dtype=np.int32)
    for outbox in (together, one_by_one, at_once):
        for _ in range(30):
            outbox.append(MessageKind.REFUSED, -tokens, slot=9, generation=9, depth=9, value=9)
        outbox.clear()
        for number in range(before):
            put_heartbeat(outbox, number)
    count, end = len(sizes), 0
    whose = stamps(count, first=3)
    put_commits(at_once, whose, np.array(sizes, np.int64), tokens)
    for index, size in enumerate(sizes):
        part = Stamps(*(column[index : index + 1] for column in whose))
        body = tokens[end : end + size]
        end += size
        put_commits(together, part, np.array([size], np.int32), body)
        slot, generation, base = (int(column[0]) for column in part)
        one_by_one.append(
            MessageKind.COMMIT, body, slot=slot, generation=generation, base_length=base
        )
    assert len(at_once) == before + count
    assert same(together.messages(), one_by_one.messages())
    assert same(at_once.messages(), one_by_one.messages())


def test_kinds_come_in_the_order_they_were_put() -> None:
    outbox = Outbox()
    put_close(outbox, 3, 9)
    put_commits(outbox, stamps(2), np.array([1, 9]), np.arange(10, dtype=np.int32))
    put_commits(outbox, stamps(1), np.array([3]), np.array([7, 8, 9], np.int32))
    put_close(outbox, 4, 10)
    put_refused(outbox, 5, 11, Refusal.NO_ROOM)
    put_heartbeat(outbox, 2**32 + 6)
    put_stop(outbox)
    runs = list(through_a_ring(outbox).runs())
    assert [(MessageKind(kind).name, len(messages)) for kind, messages in runs] == [
        ("CLOSE", 1),
        ("COMMIT", 3),
        ("CLOSE", 1),
        ("REFUSED", 1),
        ("HEARTBEAT", 1),
        ("STOP", 1),
    ]
    assert runs[1][1].words.tolist() == [*range(10), 7, 8, 9]
    assert [len(messages.words) for _, messages in runs] == [0, 13, 0, 0, 0, 0]
    refused, beat = runs[3][1].headers[0], runs[4][1].headers[0]
    assert (refused["slot"], refused["generation"], refused["value"]) == (5, 11, Refusal.NO_ROOM)
    assert beat["value"] == 6
    assert list(Messages(runs[0][1].headers[:0], runs[0][1].words).runs()) == []


def test_hello() -> None:
    result = Hello(32000)
    outbox = Outbox()
    put_hello(outbox, Hello(1))
    put_hello(outbox, result)
    messages = through_a_ring(outbox)
    assert read_hello(messages) == result and result.protocol == PROTOCOL
    outbox.append(MessageKind.HELLO, np.zeros(4, np.int32), value=PROTOCOL)
    assert read_hello(through_a_ring(outbox)) is None
    put_hello(outbox, Hello(1, protocol=PROTOCOL + 1))
    assert read_hello(through_a_ring(outbox)) is None


def random_nodes(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(INT32.min, INT32.max, (count, NODE_WORDS), np.int32, endpoint=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20) | st.sampled_from([256, MOST_NODES]), min_size=1, max_size=20),
    st.integers(0, 99),
    st.sampled_from([np.int32, np.int64]),
)
def test_nodes_come_as_they_were_put(sizes: list[int], seed: int, dtype: type) -> None:
    outbox, counts = Outbox(), np.array(sizes, dtype)
    whose = Stamps(*(column.astype(dtype) for column in stamps(len(sizes), first=seed)))
    nodes = random_nodes(seed, sum(sizes))
    put_nodes(outbox, whose, counts, nodes)
    ((kind, messages),) = through_a_ring(outbox).runs()
    assert kind == MessageKind.NODES
    assert_stamped(messages, whose)
    np.testing.assert_array_equal(messages.headers["words"], counts * NODE_WORDS)
    np.testing.assert_array_equal(messages.words.reshape(-1, NODE_WORDS), nodes)
    assert messages.words.flags.carray and messages.headers.flags.carray


def request(slot: int, length: int, *, generation: int = 1) -> OpenRequest:
    prompt = np.random.default_rng(slot).integers(0, VOCAB, length, np.int32)
    return OpenRequest(
        slot, generation, prompt, seed=2**64 - 1 - slot, sample_index=3, temperature=0.7, depth=6
    )


@pytest.mark.parametrize("length", [1, 5, PROMPT_CHUNK, PROMPT_CHUNK + 1, 128 * 1024])
def test_a_prompt_of_any_length_passes_a_small_ring(length: int) -> None:
    """A long sequence is sent in pieces that carry their place; those without room wait."""
    texts = {4: request(4, length), 5: request(5, 3)}
    outbox, rounds = Outbox(), 0
    pieces: dict[int, list[np.ndarray]] = {4: [], 5: []}
    for one in texts.values():
        put_open(outbox, one)
    with both_ends(512) as ends:
        while len(outbox) or rounds == 0:
            assert (ends.producer.push(outbox) == RingStatus.OK) == (len(outbox) == 0)
            rounds += 1
            for kind, run in ends.consumer.pop().messages.copy().runs():
                ends_at = np.cumsum(run.headers["words"]).tolist()
                for header, end in zip(run.headers, ends_at, strict=True):
                    one = texts[int(header["slot"])]
                    body = run.words[end - int(header["words"]) : end]
                    assert header["generation"] == one.generation
                    if kind == MessageKind.OPEN:
                        result = body.view(OPENING).tolist()
                        temperature = float(np.float32(one.temperature))
                        assert result == [(one.seed, one.sample_index, temperature)]
                        assert (header["base_length"], header["depth"]) == (len(one.prompt), 6)
                    else:
                        assert kind == MessageKind.PROMPT and len(body) <= PROMPT_CHUNK
                        assert header["base_length"] == sum(map(len, pieces[one.slot]))
                        pieces[one.slot].append(body)
    assert rounds == 1 or length > PROMPT_CHUNK
    for slot, one in texts.items():
        np.testing.assert_array_equal(np.concatenate(pieces[slot]), one.prompt)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5)), max_size=60))
def test_an_outbox_is_a_queue_of_any_length(steps: list[tuple[int, int]]) -> None:
    """Each step appends a message and drops some of the oldest."""
    outbox, waiting = Outbox(), []
    for number, (length, drop) in enumerate(steps):
        outbox.append(MessageKind.COMMIT, np.full(length, number, np.int32), generation=number)
        waiting.append((number, length))
        dropped = min(drop, len(waiting))
        outbox.drop(dropped)
        del waiting[:dropped]
        assert len(outbox) == len(waiting)
        assert outbox.num_words == sum(length for _, length in waiting)
    messages = outbox.messages()
    assert messages.headers["generation"].tolist() == [number for number, _ in waiting]
    expected = [np.full(length, number, np.int32) for number, length in waiting]
    np.testing.assert_array_equal(
        messages.words, np.concatenate([np.zeros(0, np.int32), *expected])
    )


def test_a_body_beyond_the_longest_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        Outbox().append(MessageKind.COMMIT, np.zeros(MAX_WORDS + 1, np.int32))


@pytest.mark.parametrize(
    ("counts", "words"),
    [([1, 2], 4), ([1, 2], 2), ([-1, 4], 3), ([MAX_WORDS + 1], MAX_WORDS + 1), ([2**31 - 1], 1)],
)
def test_bodies_that_are_not_as_their_counts_say_are_our_own_bug(
    counts: list[int], words: int
) -> None:
    """A push refuses them, with all that was appended since the last one; earlier messages stay."""
    outbox = Outbox()
    with both_ends(1024) as ends:
        put_heartbeat(outbox, 3)
        assert len(outbox.messages()) == 1
        put_heartbeat(outbox, 4)
        put_commits(outbox, stamps(len(counts)), np.array(counts), np.zeros(words, np.int32))
        with pytest.raises(AssertionError, match="as long as their counts say"):
            ends.producer.push(outbox)
        assert ends.consumer.pop().status == RingStatus.EMPTY
        assert outbox.num_words == 0  # the refused bodies are gone
        ends.producer.push(outbox)
        assert ends.consumer.pop().messages.headers["value"].tolist() == [3]


def test_narrow_stamps_are_our_own_bug() -> None:
    outbox = Outbox()
    narrow = Stamps(*(column.astype(np.int16) for column in stamps(2)))
    put_commits(outbox, narrow, np.ones(2, np.int32), np.zeros(2, np.int32))
    with pytest.raises(AssertionError):
        outbox.messages()


@given(
    st.lists(st.sampled_from([np.int32, np.int64]), min_size=4, max_size=4),
    st.lists(st.integers(0, 9), max_size=9),
)
def test_stamps_of_either_width(dtypes: list[type], sizes: list[int]) -> None:
    outbox, whose = Outbox(), stamps(len(sizes), first=5)
    *columns, counts = (
        column.astype(dtype)
        for column, dtype in zip((*whose, np.array(sizes, np.int64)), dtypes, strict=True)
    )
    tokens = np.arange(sum(sizes), dtype=np.int32)
    put_commits(outbox, Stamps(*columns), counts, tokens)
    messages = outbox.messages()
    assert_stamped(messages, whose)
    assert messages.headers["words"].tolist() == sizes
    np.testing.assert_array_equal(messages.words, tokens)


@given(st.lists(st.sampled_from([0, 1, 3, 255, 256, 2**32 - 1]), min_size=1, max_size=6))
def test_the_kind_of_all_messages_is_known_where_a_byte_holds_it(kinds: list[int]) -> None:
    outbox = Outbox()
    for number, kind in enumerate(kinds):
        outbox.append(kind, np.full(number, number, np.int32))  # type: ignore[arg-type]
    messages = through_a_ring(outbox)
    is_one = len(set(kinds)) == 1 and 0 < kinds[0] < 256
    assert messages.kind == (kinds[0] if is_one else None)
    found = [(kind, n) for kind, run in messages.runs() for n in run.headers["words"].tolist()]
    assert found == [(kind, number) for number, kind in enumerate(kinds)]
    assert all(len(run.words) == run.headers["words"].sum() for _, run in messages.runs())
