"""Records through a ring: as they were put, in pieces where long, and drafts that are checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.prompts import Prompts, RefusedRequest
from hetero_llm.bridge.records import (
    AS_COMMITTED,
    MAX_WORDS,
    NODE,
    OUTCOME,
    PROMPT_CHUNK,
    PROTOCOL,
    Hello,
    Kind,
    OpenRequest,
    Outbox,
    Records,
    Refusal,
    Stamps,
    put_beat,
    put_close,
    put_commits,
    put_drafts,
    put_hello,
    put_open,
    put_refused,
    put_requests,
    put_stop,
    read_drafts,
    read_hello,
    read_outcomes,
)
from hetero_llm.bridge.rings import Consumer, Producer, RingStatus, create_ring
from hetero_llm.core.draft import MAX_NODES, DraftTree
from hetero_llm.core.native_build import find_compiler
from tests.bridge.tools import both_ends

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

VOCAB = 1000


def through_a_ring(outbox: Outbox, *, vocab_size: int = VOCAB) -> Records:
    """What comes out of a large ring; the outbox must be empty then."""
    with (
        create_ring(1 << 14) as ring,
        Producer(ring) as producer,
        Consumer(ring, max_words=1 << 18, vocab_size=vocab_size) as consumer,
    ):
        assert producer.push(outbox) == RingStatus.OK
        status, records = consumer.pop()
        assert status == RingStatus.OK and consumer.pop().status == RingStatus.EMPTY
        return records


def stamps(count: int, *, first: int = 0) -> Stamps:
    slots = np.arange(first, first + count)
    return Stamps(slots, slots + 100, slots * 11)


def assert_stamped(records: Records, expected: Stamps) -> None:
    for name, values in (
        ("slot", expected.slots),
        ("generation", expected.generations),
        ("base_length", expected.base_lengths),
    ):
        np.testing.assert_array_equal(records.headers[name], values)


def test_commits_of_many_requests() -> None:
    counts = np.arange(1, 129) % 7 + 1
    tokens = np.arange(counts.sum(), dtype=np.int32)
    outbox = Outbox()
    put_commits(outbox, stamps(128), counts, tokens)
    ((kind, commits),) = through_a_ring(outbox).runs()
    assert kind == Kind.COMMIT and len(commits) == 128
    assert_stamped(commits, stamps(128))
    np.testing.assert_array_equal(commits.headers["words"], counts)
    np.testing.assert_array_equal(commits.words, tokens)


def test_requests_with_and_without_outcomes() -> None:
    outbox = Outbox()
    rounds, depths, most = np.array([4, 5, 6]), np.array([7, 8, 9]), np.array([16, 32, 63])
    counts = np.array([2, 0, 1])
    outcomes = np.array([(0, 5), (1, 6), (2, 7)], OUTCOME)
    put_requests(
        outbox, stamps(3), rounds, depths=depths, max_nodes=most, counts=counts, outcomes=outcomes
    )
    put_requests(outbox, stamps(3), rounds + 1, depths=depths, max_nodes=most)
    ((kind, records),) = through_a_ring(outbox).runs()
    assert kind == Kind.REQUEST
    found, read = read_outcomes(records)
    assert found.tolist() == [2, 0, 1, 0, 0, 0] and read.tolist() == outcomes.tolist()
    assert records.headers["round"].tolist() == [4, 5, 6, 5, 6, 7]
    assert records.headers["depth"].tolist() == [7, 8, 9] * 2
    assert records.headers["value"].tolist() == [16, 32, 63] * 2


def test_kinds_come_in_the_order_they_were_put() -> None:
    outbox = Outbox()
    put_close(outbox, 3, 9)
    put_commits(outbox, stamps(2), np.array([1, 9]), np.arange(10, dtype=np.int32))
    put_commits(outbox, stamps(1), np.array([3]), np.array([7, 8, 9], np.int32))
    put_close(outbox, 4, 10)
    put_refused(outbox, 5, 11, Refusal.NO_ROOM)
    put_beat(outbox, 2**32 + 6)
    put_stop(outbox)
    runs = list(through_a_ring(outbox).runs())
    assert [(Kind(kind).name, len(records)) for kind, records in runs] == [
        ("CLOSE", 1),
        ("COMMIT", 3),
        ("CLOSE", 1),
        ("REFUSED", 1),
        ("BEAT", 1),
        ("STOP", 1),
    ]
    assert runs[1][1].words.tolist() == [*range(10), 7, 8, 9]
    assert [len(records.words) for _, records in runs] == [0, 13, 0, 0, 0, 0]
    refused, beat = runs[3][1].headers[0], runs[4][1].headers[0]
    assert (refused["slot"], refused["generation"], refused["value"]) == (5, 11, Refusal.NO_ROOM)
    assert beat["value"] == 6
    assert list(Records(runs[0][1].headers[:0], runs[0][1].words).runs()) == []


def test_hello() -> None:
    told = Hello(32000, 2048, 128, tokenizer=2**64 - 3)
    outbox = Outbox()
    put_hello(outbox, Hello(1, 2, 3))
    put_hello(outbox, told)
    records = through_a_ring(outbox)
    assert read_hello(records) == told and told.protocol == PROTOCOL
    outbox.append(Kind.HELLO, np.zeros(4, np.int32), value=PROTOCOL + 1)
    assert read_hello(through_a_ring(outbox)) is None


def random_nodes(rng: np.random.Generator, count: int) -> np.ndarray:
    nodes = np.zeros(count, NODE)
    nodes["token"] = rng.integers(0, VOCAB, count)
    nodes["parent"] = [rng.integers(-1, i) if i else -1 for i in range(count)]
    nodes["log_prob"] = -rng.random(count)
    return nodes


def test_drafts_of_many_requests() -> None:
    rng = np.random.default_rng(3)
    counts = rng.integers(0, MAX_NODES + 1, 128)
    nodes = np.concatenate([random_nodes(rng, count) for count in counts])
    outbox = Outbox()
    put_drafts(
        outbox, stamps(128), np.arange(128), counts=counts, nodes=nodes, outcomes=np.arange(128) % 3
    )
    put_drafts(outbox, stamps(1), np.array([1]), counts=np.array([0]), nodes=nodes[:0])
    ((kind, records),) = through_a_ring(outbox).runs()
    drafts = read_drafts(records)
    assert kind == Kind.DRAFT and drafts.num_bad == 0
    np.testing.assert_array_equal(drafts.counts, [*counts, 0])
    np.testing.assert_array_equal(drafts.nodes, nodes)
    np.testing.assert_array_equal(drafts.headers["round"], [*range(128), 1])
    np.testing.assert_array_equal(drafts.headers["value"], [*(np.arange(128) % 3), AS_COMMITTED])


def is_sound(body: np.ndarray) -> bool:
    """The twin of the check in C++, on top of what a `DraftTree` asserts."""
    if body.nbytes % NODE.itemsize or body.nbytes // NODE.itemsize > MAX_NODES:
        return False
    nodes = body.view(NODE)
    try:
        DraftTree(nodes["token"].astype(np.int32), nodes["parent"].astype(np.int32))
    except AssertionError:
        return False
    log_probs = nodes["log_prob"]
    good = np.isfinite(log_probs) & (log_probs <= 1e-3) & (log_probs >= -3e38)
    return bool((good & (nodes["token"] >= 0) & (nodes["token"] < VOCAB)).all())


ODD_VALUES = st.sampled_from(
    [("token", VOCAB), ("token", VOCAB - 1), ("token", -1), ("token", 2**31 - 1), ("token", 0)]
    + [("parent", value) for value in (-2, -1, 0, 5, 62, 63, 32767, -32768)]
    + [("log_prob", value) for value in (np.nan, np.inf, -np.inf, 0.5, 1e-4, 0.0, -1e30)]
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, MAX_NODES + 2),
            st.none() | st.tuples(ODD_VALUES, st.integers(0, 70)),
            st.sampled_from([0, 0, 0, 1, 2]),
        ),
        max_size=8,
    ),
    st.integers(0, 9),
)
def test_unsound_drafts_are_left_out_and_counted(
    drawn: list[tuple[int, tuple[tuple[str, float], int] | None, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    outbox, bodies = Outbox(), []
    for index, (count, odd, missing) in enumerate(drawn):
        nodes = random_nodes(rng, count)
        if odd is not None and count:
            (name, value), place = odd
            nodes[name][place % count] = value
        body = nodes.view(np.int32)
        bodies.append(body[: len(body) - missing] if len(body) else body)
        outbox.append(Kind.DRAFT, bodies[-1], slot=index)
    if not bodies:
        put_beat(outbox, 1)
    ((kind, records),) = through_a_ring(outbox).runs()
    if kind != Kind.DRAFT:
        return
    drafts = read_drafts(records)
    expected = [index for index, body in enumerate(bodies) if is_sound(body)]
    assert drafts.headers["slot"].tolist() == expected
    assert drafts.num_bad == len(bodies) - len(expected)
    good = [bodies[index].view(NODE) for index in expected]
    assert drafts.counts.tolist() == [len(nodes) for nodes in good]
    assert drafts.nodes.tobytes() == b"".join(nodes.tobytes() for nodes in good)


def test_drafts_that_nobody_checked_are_not_sound() -> None:
    """Whatever their sender says of them."""
    outbox = Outbox()
    put_drafts(outbox, stamps(1), np.array([1]), counts=np.array([1]), nodes=np.zeros(1, NODE))
    outbox._headers["flags"] = 1
    drafts = read_drafts(through_a_ring(outbox, vocab_size=0))
    assert drafts.num_bad == 1 and len(drafts.nodes) == len(drafts.counts) == 0


def request(slot: int, length: int, *, generation: int = 1) -> OpenRequest:
    prompt = np.random.default_rng(slot).integers(0, VOCAB, length, np.int32)
    return OpenRequest(
        slot, generation, prompt, seed=2**64 - 1 - slot, sample_index=3, temperature=0.7, depth=6
    )


def assert_same(opened: OpenRequest | RefusedRequest, expected: OpenRequest) -> None:
    assert isinstance(opened, OpenRequest)
    for name in ("slot", "generation", "seed", "sample_index", "depth"):
        assert getattr(opened, name) == getattr(expected, name)
    assert opened.temperature == np.float32(expected.temperature)
    np.testing.assert_array_equal(opened.prompt, expected.prompt)


@pytest.mark.parametrize("length", [1, 5, PROMPT_CHUNK, PROMPT_CHUNK + 1, 128 * 1024])
def test_a_prompt_of_any_length_passes_a_small_ring(length: int) -> None:
    """Other requests go on meanwhile; what has no room waits."""
    expected = [request(4, length), request(5, 3)]
    outbox, prompts, opened = Outbox(), Prompts(128 * 1024), []
    for one in expected:
        put_open(outbox, one)
    with both_ends(512) as ends:
        rounds = 0
        while len(outbox) or rounds == 0:
            assert (ends.producer.push(outbox) == RingStatus.OK) == (len(outbox) == 0)
            opened += prompts.take(ends.consumer.pop().records)
            rounds += 1
        assert rounds == 1 or length > PROMPT_CHUNK
    assert len(opened) == 2 and len(prompts) == 0
    for one, wanted in zip(opened, expected):
        assert_same(one, wanted)


def pieces(length: int) -> Records:
    outbox = Outbox()
    put_open(outbox, request(2, length))
    return outbox.records()


@pytest.mark.parametrize("lost", range(5))
def test_a_lost_piece_refuses_the_request_once(lost: int) -> None:
    """Record 0 is its OPEN."""
    records = pieces(4 * PROMPT_CHUNK)
    kept = records.only(np.arange(5) != lost)
    prompts = Prompts(10**6)
    refused = prompts.take(kept)
    if lost == 4:
        assert refused == [] and len(prompts) == 1  # more may come
        again = pieces(3)
        (opened,) = prompts.take(again)  # or the slot's next request
        assert_same(opened, request(2, 3))
    else:
        assert refused == [RefusedRequest(2, 1, Refusal.LOST_RECORD)]
        assert len(prompts) == 0 and prompts.num_dropped == 3 - max(lost, 1) + (lost == 0)


def test_a_repeated_piece_refuses_the_request() -> None:
    records = pieces(3 * PROMPT_CHUNK)
    prompts = Prompts(10**6)
    assert prompts.take(records.only(np.arange(4) < 3)) == []
    refused = prompts.take(records.only(np.arange(4) == 2))
    assert refused == [RefusedRequest(2, 1, Refusal.LOST_RECORD)]


def test_more_tokens_than_announced_refuse_the_request() -> None:
    records = pieces(10)
    records.headers["base_length"][0] = 9
    assert Prompts(100).take(records) == [RefusedRequest(2, 1, Refusal.LOST_RECORD)]


def test_a_prompt_beyond_the_context_is_refused_before_memory_is_taken() -> None:
    records = pieces(2 * PROMPT_CHUNK)
    records.headers["base_length"][0] = 2**32 - 1
    prompts = Prompts(10**6)
    assert prompts.take(records.only(np.arange(3) < 1)) == [RefusedRequest(2, 1, Refusal.TOO_LONG)]
    assert len(prompts) == 0


def test_a_closed_request_is_forgotten_but_not_the_slots_next_one() -> None:
    prompts = Prompts(10**6)
    records = pieces(2 * PROMPT_CHUNK)
    assert prompts.take(records.only(np.arange(3) < 2)) == []
    outbox = Outbox()
    put_close(outbox, 2, 77)  # of another generation
    assert prompts.take(outbox.records()) == [] and len(prompts) == 1
    put_close(outbox, 2, 1)
    assert prompts.take(outbox.records()) == [] and len(prompts) == 0
    assert prompts.take(records.only(np.arange(3) == 2)) == [] and prompts.num_dropped == 1


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5)), max_size=60))
def test_an_outbox_is_a_queue_of_any_length(steps: list[tuple[int, int]]) -> None:
    """Each step appends a record and drops some of the oldest."""
    outbox, waiting = Outbox(), []
    for number, (length, drop) in enumerate(steps):
        outbox.append(Kind.COMMIT, np.full(length, number, np.int32), generation=number)
        waiting.append((number, length))
        dropped = min(drop, len(waiting))
        outbox.drop(dropped)
        del waiting[:dropped]
        assert len(outbox) == len(waiting)
        assert outbox.num_words == sum(length for _, length in waiting)
    records = outbox.records()
    assert records.headers["generation"].tolist() == [number for number, _ in waiting]
    expected = [np.full(length, number, np.int32) for number, length in waiting]
    np.testing.assert_array_equal(records.words, np.concatenate([np.zeros(0, np.int32), *expected]))


def test_a_body_beyond_the_longest_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        Outbox().append(Kind.COMMIT, np.zeros(MAX_WORDS + 1, np.int32))
