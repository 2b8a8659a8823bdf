"""The proposer: messages to the worker, drafts that belong to the present sequence, waits,
restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hetero_llm.bridge.ipc.messages import MessageKind, Outbox, Refusal
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.cpu.draft_worker.kv_layout import no_tree_nodes
from hetero_llm.spec_decode.draft_model.proposer import (
    NUM_EXTENDED_LEAVES,
    DraftModelProposer,
    WaitWorth,
    open_leaves,
)
from hetero_llm.spec_decode.proposals import Proposals
from tests.cpu.draft_worker.test_worker import greedy
from tests.spec_decode.draft_model.local_worker import LocalWorker, Setting, as_any, load_model

VOCAB, POSITIONS, SLOTS = 203, 96, 4
SETTING = Setting(slots=SLOTS, max_model_len=POSITIONS, window=POSITIONS)
STEP = 1.0  # seconds of a step of the target: there is time to wait for everything


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.7,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("draft")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> DraftModel:
    torch.set_num_threads(1)
    return load_model(folder, SETTING)


@pytest.fixture(scope="module")
def reference(folder: Path) -> DraftModel:
    """The same model, which no worker has."""
    return load_model(folder, SETTING)


class Texts:
    """A proposer with a worker in this process, and sequences as the engine has them."""

    def __init__(
        self, worker: LocalWorker, clock: Callable[[], float] = perf_counter, **settings: Any
    ) -> None:
        given = {
            "model": "x", "revision": None, "num_tokens": 4, "max_model_len": None, "threads": 1,
            "weight_dtype": "auto", "overlap": "auto", "timeout": None, "optional": False,
        }  # fmt: skip
        self.worker = worker
        self.proposer = DraftModelProposer(
            as_any(worker), DraftModelConfig(**given | settings), slots=SLOTS, vocab_size=VOCAB,
            max_positions=POSITIONS, clock=clock,
        )  # fmt: skip
        self.sequences: dict[int, Any] = {}

    def text(self, row: int) -> list[int]:
        return self.sequences[row].token_ids

    def open(self, row: int, text: list[int], temperature: float = 0.0) -> None:
        request = SimpleNamespace(seed=5, params=SimpleNamespace(temperature=temperature))
        self.sequences[row] = SimpleNamespace(token_ids=list(text), index=0, request=request)
        self.send_tokens({row: text})

    def commit(self, new: dict[int, list[int]]) -> None:
        for row, tokens in new.items():
            self.sequences[row].token_ids += tokens
        self.send_tokens(new)

    def send_tokens(self, new: dict[int, list[int]]) -> None:
        fresh = [token for tokens in new.values() for token in tokens]
        sizes = [len(tokens) for tokens in new.values()]
        self.proposer.commit(
            np.array(list(new), np.int64), fresh, sizes, [self.sequences[row] for row in new]
        )

    def propose(self, rows: list[int], most: int = 63) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of each row's draft, after a commit of nothing, as the engine does."""
        self.send_tokens({row: [] for row in rows})
        found = Proposals.empty(len(rows))
        found.counts[:] = 0
        limits = np.full(len(rows), most, np.int32)
        self.proposer.propose(np.array(rows, np.int64), limits, STEP, found, 0.0, may_wait=True)
        own = self.proposer.drafts
        drafts = []
        for index in range(len(rows)):
            count = int(own.counts[index])
            survival = own.path_probs[index, :count]
            assert count <= most and (np.diff(survival) <= 1e-6).all() and (survival <= 1).all()
            tokens, parents = own.tokens[index, :count], own.parents[index, :count]
            assert (parents < np.arange(count)).all()
            drafts.append((tokens.tolist(), parents.tolist()))
        return drafts

    def run_deferred(self, count: int = 1) -> None:
        for _ in range(count):
            self.proposer.run_deferred()

    def metric(self, name: str) -> float:
        return self.proposer.metrics()[name]


def paths(draft: tuple[list[int], list[int]]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(*draft):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.fixture
def worker(model: DraftModel) -> Iterator[LocalWorker]:
    one = LocalWorker(model, SETTING)
    yield one
    one.close()


@pytest.fixture
def texts(worker: LocalWorker) -> Texts:
    return Texts(worker)


def text_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def wait_for_drafts(texts: Texts, rows: list[int]) -> list[tuple[list[int], list[int]]]:
    for _ in range(20):
        drafts = texts.propose(rows)
        texts.run_deferred()
    return drafts


# -- drafts -------------------------------------------------------------------------------------


def test_drafts_of_what_comes(model: DraftModel, texts: Texts) -> None:
    rows = [0, 2]
    coming = {row: greedy(model, text_of(row, 20), 8) for row in rows}
    for row in rows:
        texts.open(row, text_of(row, 20))
    drafts = wait_for_drafts(texts, rows)
    for row, draft in zip(rows, drafts):
        assert tuple(coming[row][:3]) in paths(draft)
        assert max(map(len, paths(draft))) <= 4  # num_speculative_tokens
    texts.commit({0: coming[0][:3], 2: coming[2][:1]})
    drafts = texts.propose(rows)
    assert tuple(coming[0][3:4]) in paths(drafts[0])  # without a word of the worker's
    assert tuple(coming[2][1:3]) in paths(drafts[1])
    drafts = wait_for_drafts(texts, rows)
    assert tuple(coming[0][3:6]) in paths(drafts[0])
    assert texts.metric("draft_hits") > 10 and texts.metric("draft_worker_up") == 1


def may_follow(reference: DraftModel, text: list[int]) -> set[int]:
    """The most likely tokens behind a text that has not been seen before."""
    reference.kv_layout.open(0, np.array(text, np.int32))
    while len((prefix := reference.kv_layout.plan_prefix(512)).slots):
        tokens = reference.step(prefix, no_tree_nodes()).tokens
    reference.kv_layout.close(0)
    return set(tokens[0].tolist())


def test_a_draft_is_always_of_the_text_as_it_is(
    model: DraftModel, reference: DraftModel, texts: Texts
) -> None:
    """Whatever the worker has not heard yet, each node is one of the most likely tokens behind the
    text and the nodes above it."""
    rng = np.random.default_rng(0)
    for row in range(SLOTS):
        texts.open(row, text_of(row, 12))
    seen = 0
    for step in range(80):
        texts.worker.turns = int(rng.integers(0, 4))
        rows = sorted(rng.choice(SLOTS, int(rng.integers(1, SLOTS)), replace=False).tolist())
        for row, draft in zip(rows, texts.propose(rows)):
            known = paths(draft)
            if not known:
                continue
            seen += 1
            path = list(known)[int(rng.integers(len(known)))]
            for depth, token in enumerate(path):
                assert token in may_follow(reference, [*texts.text(row), *path[:depth]])
            tokens = path if rng.random() < 0.7 else ()
            texts.commit({row: [*tokens, int(rng.integers(VOCAB))]})
        if step % 7 == 0:
            row = int(rng.integers(SLOTS))
            texts.proposer.close([row])
            texts.open(row, text_of(100 + step, int(rng.integers(5, 20))))
        texts.run_deferred()
    assert seen > 40
    texts.worker.turns = 10
    for row in range(SLOTS):  # the worker's texts are the engine's
        texts.propose([row])
        assert model.kv_layout.token_ids(row).tolist() == texts.text(row)


def test_limits(texts: Texts) -> None:
    texts.open(0, text_of(0, 20))
    wait_for_drafts(texts, [0])
    (draft,) = texts.propose([0], 2)
    assert len(draft[0]) == 2
    texts.open(1, text_of(1, POSITIONS - 2))
    texts.open(2, text_of(2, POSITIONS))
    drafts = wait_for_drafts(texts, [1, 2])
    assert {len(path) for path in paths(drafts[0])} <= {1, 2} and drafts[0][0]
    assert drafts[1] == ([], [])
    texts.commit({1: [1, 2]})
    assert texts.propose([1]) == [([], [])]
    texts.commit({1: [3] * 10})  # far beyond
    assert texts.propose([1]) == [([], [])]
    assert wait_for_drafts(texts, [0])[0][0]


def test_rows_beyond_the_slots(texts: Texts) -> None:
    texts.open(SLOTS, text_of(0, 20))
    texts.open(0, text_of(1, 20))
    texts.open(SLOTS + 50, text_of(2, 20))
    drafts = wait_for_drafts(texts, [SLOTS, 0, SLOTS + 50])
    assert drafts[0] == drafts[2] == ([], []) and drafts[1][0]
    texts.commit({SLOTS: [1], 0: [2], SLOTS + 50: [3, 4]})
    texts.proposer.close([SLOTS, SLOTS + 50])
    texts.proposer.close([1, 3])  # never opened
    assert wait_for_drafts(texts, [0])[0][0]


# -- sent again ---------------------------------------------------------------------------------


def test_a_lost_message_costs_some_steps_only(model: DraftModel, texts: Texts) -> None:
    coming = greedy(model, [*text_of(0, 20), 7], 3)
    texts.open(0, text_of(0, 20))
    texts.worker.outbox.clear()
    wait_for_drafts(texts, [0])
    texts.sequences[0].token_ids.append(7)
    push = texts.worker.push
    texts.worker.push = texts.worker.outbox.clear  # type: ignore[method-assign]
    texts.send_tokens({0: [7]})
    texts.worker.push = push  # type: ignore[method-assign]
    texts.commit({0: []})
    drafts = wait_for_drafts(texts, [0])
    texts.commit({0: coming[:1]})  # here the worker notices
    drafts = wait_for_drafts(texts, [0])
    assert tuple(coming[1:3]) in paths(drafts[0])


@pytest.mark.parametrize("reason", [Refusal.TOO_LONG, Refusal.BAD_TOKEN, Refusal.NO_ROOM])
def test_refused_for_good(texts: Texts, reason: Refusal) -> None:
    texts.open(0, text_of(0, 20))
    texts.open(1, text_of(1, 20))
    wait_for_drafts(texts, [0, 1])
    generation = 1  # row 0 was sent first
    bed = texts.worker.bed
    bed.refuse(0, generation, reason)
    bed.refuse(1, 12345, reason)  # of an earlier sequence
    bed.refuse(SLOTS + 7, 1, reason)
    drafts = wait_for_drafts(texts, [0, 1])
    assert drafts[0] == ([], []) and drafts[1][0]
    texts.commit({0: [5]})
    assert wait_for_drafts(texts, [0]) == [([], [])]
    texts.proposer.close([0])
    texts.open(0, text_of(3, 20))
    assert wait_for_drafts(texts, [0])[0][0]


def test_a_worker_that_loses_a_text_over_and_over_is_sent_it_a_few_times(texts: Texts) -> None:
    texts.open(0, text_of(0, 20))
    texts.open(1, text_of(1, 20))
    counters, generation, sent = texts.worker.counters, 1, []
    for _ in range(30):
        texts.worker.bed.refuse(0, generation, Refusal.LOST_MESSAGE)
        drafts = texts.propose([0, 1])
        texts.run_deferred()
        generation = counters.generations  # row 1 is sent once, so the last one is row 0's
        sent.append(generation)
    assert sent[0] == 3 and sent[29] == sent[10] < 12
    assert drafts[0] == ([], []) and drafts[1][0]
    texts.proposer.close([0])
    texts.open(0, text_of(0, 20))
    assert wait_for_drafts(texts, [0])[0][0]  # another sequence may be sent again


def test_the_next_worker_is_sent_what_the_last_one_refused(texts: Texts) -> None:
    texts.open(0, text_of(0, 20))
    texts.worker.bed.refuse(0, 1, Refusal.NO_ROOM)
    assert wait_for_drafts(texts, [0]) == [([], [])]
    texts.worker.crash(looks=3)
    assert wait_for_drafts(texts, [0])[0][0]


def test_a_worker_that_comes_back_is_sent_everything(model: DraftModel, texts: Texts) -> None:
    for row in range(2):
        texts.open(row, text_of(row, 20))
    wait_for_drafts(texts, [0, 1])
    texts.worker.crash(looks=3)
    texts.commit({0: [3, 4], 1: [5]})
    drafts = texts.propose([0, 1])
    texts.run_deferred()
    assert texts.metric("draft_worker_up") == 0
    assert texts.propose([0, 1]) == [([], [])] * 2
    texts.open(2, text_of(2, 20))  # while no worker runs
    texts.proposer.close([1])
    texts.commit({0: [6]})
    assert texts.propose([0, 2]) == [([], [])] * 2
    texts.run_deferred(3)
    drafts = wait_for_drafts(texts, [0, 2])
    assert texts.metric("draft_worker_up") == 1 and texts.metric("draft_restarts") == 1
    for row, draft in zip((0, 2), drafts):
        assert tuple(greedy(model, texts.text(row), 2)) in paths(draft)


def test_crashes_at_every_moment(model: DraftModel, texts: Texts) -> None:
    """No draft of an older life gets through, and in the end drafts are there."""
    rng = np.random.default_rng(1)
    lives = texts.worker.counters
    for row in range(3):
        texts.open(row, text_of(row, 10))
    for _ in range(80):
        calls = [
            lambda: texts.commit({int(rng.integers(3)): [int(rng.integers(VOCAB))]}),
            lambda: texts.propose([0, 1, 2]),
            texts.run_deferred,
            lambda: texts.worker.crash(int(rng.integers(1, 3))),
        ]
        for index in rng.permutation(4).tolist():
            calls[index]()
        if len(texts.text(0)) + len(texts.text(1)) > 120:
            for row in range(3):
                texts.proposer.close([row])
                texts.open(row, text_of(row, 10))
    assert lives.starts > 20
    texts.run_deferred(4)
    drafts = wait_for_drafts(texts, [0, 1, 2])
    for row, draft in enumerate(drafts):
        assert tuple(greedy(model, texts.text(row), 1)) in paths(draft)


def test_garbage_from_the_worker(texts: Texts) -> None:
    rng = np.random.default_rng(0)
    texts.open(0, text_of(0, 20))
    texts.open(1, text_of(1, 20))
    wait_for_drafts(texts, [0, 1])
    outbox = Outbox()
    rejected = texts.metric("draft_rejected_messages")
    kinds = [kind for kind in MessageKind if kind != MessageKind.REFUSED]
    for _ in range(100):
        for _ in range(10):
            words = rng.integers(-3, VOCAB + 3, int(rng.choice([0, 3, 4, 8, 400])), np.int32)
            outbox.append(
                MessageKind(int(rng.choice(kinds))), words,
                slot=int(rng.choice([0, 1, 2, SLOTS, 2**32 - 1])),
                generation=int(rng.integers(0, 5)), value=int(rng.integers(6)),
                base_length=int(rng.choice([0, 19, 20, 21, 2**31, 2**32 - 1])),
            )  # fmt: skip
        texts.worker.bed.worker_end.push(outbox)
        for tokens, parents in texts.propose([0, 1]):
            assert all(0 <= token < VOCAB for token in tokens)
            assert all(-1 <= parent < i for i, parent in enumerate(parents))
        texts.run_deferred()
    assert texts.metric("draft_rejected_messages") > rejected + 100
    texts.proposer.close([0])
    texts.open(0, text_of(3, 20))
    assert wait_for_drafts(texts, [0])[0][0]


# -- waits --------------------------------------------------------------------------------------


def test_nobody_waits_for_one_that_stands_still(worker: LocalWorker) -> None:
    texts = Texts(worker)
    texts.open(0, text_of(0, 20))
    wait_for_drafts(texts, [0])
    worker.stands_still = True
    texts.commit({0: text_of(5, 9)})  # which it has not drafted
    for _ in range(10):
        assert texts.propose([0]) == [([], [])]
    assert 1 <= texts.metric("draft_timeouts") <= 3
    worker.stands_still = False
    wait_for_drafts(texts, [0])
    assert texts.propose([0])[0][0]


def test_enumerate_never_waits(worker: LocalWorker) -> None:
    texts = Texts(worker, overlap="enumerate")
    texts.open(0, text_of(0, 20))
    wait_for_drafts(texts, [0])
    worker.stands_still = True
    for _ in range(10):
        texts.propose([0])
    assert texts.metric("draft_timeouts") == 0 and texts.metric("draft_wait_seconds") == 0


def test_a_wait_ends_in_time(worker: LocalWorker) -> None:
    """Even if the worker sends one useless message after the other."""
    now = [0.0]
    query: list[int] = []

    class Chatterbox(LocalWorker):
        def poll(self, timeout_us: int = 0) -> Any:
            query.append(timeout_us)
            now[0] += 1e-4
            self.bed.refuse(0, 99, Refusal.NO_ROOM)
            return super().poll(timeout_us)

    worker.__class__ = Chatterbox
    texts = Texts(worker, lambda: now[0], timeout=0.005)
    worker.turns = 0
    texts.open(0, text_of(0, 20))
    begin = now[0]
    texts.propose([0])
    assert now[0] - begin <= 0.006
    assert max(query) <= 5001


def test_no_proposal_waits_for_levels_that_no_draft_may_hold(worker: LocalWorker) -> None:
    """All leaves are as deep as a draft may be: a further level would be of no use."""
    texts = Texts(worker, num_tokens=1)
    texts.open(0, text_of(0, 20))
    wait_for_drafts(texts, [0])
    worker.stands_still = True
    before = texts.metric("draft_waits")
    for _ in range(10):
        assert texts.propose([0])[0][0]
    assert texts.metric("draft_waits") == before


def test_leaves_that_a_level_starts_from() -> None:
    #      0        1
    #     / \\     / \\
    #    2   5   3   6
    #    4
    parents = np.array([-1, -1, 0, 1, 2, 0, 1], np.int32)
    survival = np.array([0.5, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05], np.float32)
    leaves = open_leaves
    assert leaves(parents, survival, 7, 9) == pytest.approx(0.25 + 0.2 + 0.1 + 0.05)
    assert leaves(parents, survival, 7, 3) == pytest.approx(0.25 + 0.1 + 0.05)
    assert leaves(parents, survival, 7, 2) == 0.0
    assert leaves(parents, survival, 2, 2) == pytest.approx(0.5 + 0.4)
    assert leaves(parents, survival, 0, 9) == 0.0
    many = np.full(9, -1, np.int32), np.linspace(0.1, 0.02, 9, dtype=np.float32)
    assert leaves(*many, 9, 2) == pytest.approx(many[1][:NUM_EXTENDED_LEAVES].sum())


# -- nodes of other proposers ----------------------------------------------------------------------


def verified(
    nodes: list[tuple[int, int, float]], *, ours: bool = False
) -> tuple[Proposals, np.ndarray]:
    """A proposal of one row with these nodes (token, parent, chance), all verified."""
    found = Proposals.empty(1)
    for place, (token, parent, path_prob) in enumerate(nodes):
        found.tokens[0, place], found.parents[0, place] = token, parent
        found.path_probs[0, place], found.buckets[0, place] = path_prob, -1 if ours else 3
    found.counts[0] = len(nodes)
    return found, np.array([len(nodes)], np.int32)


def test_what_follows_verified_nodes_is_drafted_ahead(model: DraftModel, texts: Texts) -> None:
    text = text_of(7, 20)
    expected = greedy(model, text, 1)[0]
    strange = (expected + 1 + np.arange(2)) % VOCAB  # not what the model would say
    after = greedy(model, [*text, *strange.tolist()], 2)
    texts.open(0, text)
    wait_for_drafts(texts, [0])
    found, kept = verified([(int(strange[0]), -1, 0.95), (int(strange[1]), 0, 0.9)])
    texts.proposer.add_external_nodes(np.array([0]), found, kept)
    texts.run_deferred(8)
    texts.commit({0: strange.tolist()})
    (draft,) = texts.propose([0])
    assert tuple(after[:1]) in paths(draft)  # there at once, though the text left the model's tree


def test_only_what_the_worker_cannot_know_is_sent(texts: Texts) -> None:
    texts.open(0, text_of(7, 20))
    texts.run_deferred()
    outbox = texts.worker.outbox

    def commits(nodes: list[tuple[int, int, float]], *, ours: bool = False, row: int = 0) -> int:
        texts.proposer.add_external_nodes(np.array([row]), *verified(nodes, ours=ours))
        words = outbox.num_words
        outbox.clear()
        return words // 3

    assert commits([(1, -1, 0.9), (2, 0, 0.5)]) == 2
    assert commits([(1, -1, 0.9), (2, 0, 0.5)], ours=True) == 0
    assert commits([(1, -1, 0.9), (2, 0, 0.01), (3, 1, 0.0)]) == 1  # hopeless ones are left out
    assert commits([(1, -1, 0.0)]) == 0
    assert commits([(1, -1, 0.9)], row=1) == 0  # a text that is not open
    assert commits([(1, -1, 0.9)], row=SLOTS) == 0


def test_a_worker_that_has_not_seen_the_prompt_is_not_waited_for(worker: LocalWorker) -> None:
    texts = Texts(worker)
    worker.stands_still = True
    texts.open(0, text_of(0, 20))
    assert texts.propose([0]) == [([], [])]
    assert texts.metric("draft_waits") == 0


def test_waits_that_bring_nothing_become_rare() -> None:
    worth = WaitWorth()
    waits = 0
    for _ in range(2000):
        if worth.pays(1.0, 1.0, 4e-3):
            waits += 1
            worth.observe(1.0, 0.02, 1e-3)
    assert 20 < waits < 60, "now and then, to learn"
    for _ in range(200):
        if worth.pays(1.0, 1.0, 4e-3):
            worth.observe(1.0, 1.0, 1e-3)
    assert not worth.pays(0.1, 1.0, 4e-3)
