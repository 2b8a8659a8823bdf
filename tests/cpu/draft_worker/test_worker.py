"""The draft worker's loop with both ends of its rings in this process: drafts, commits, refusals,
and messages that are lost, duplicate or garbage."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hetero_llm.bridge.ipc.messages import (
    EXTERNAL_NODE,
    NODE_WORDS,
    OPENING,
    MessageKind,
    Messages,
    OpenRequest,
    Refusal,
    Stamps,
    put_close,
    put_commits,
    put_external_nodes,
    put_open,
    put_stop,
)
from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.cpu.draft_worker.kv_layout import no_tree_nodes
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings
from tests.spec_decode.draft_model.local_worker import Bed, Setting, load_model

VOCAB, POSITIONS, SLOTS = 203, 160, 4
SETTING = Setting(slots=SLOTS, max_model_len=POSITIONS)
Make = Callable[..., Bed]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
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
    torch.set_num_threads(1)
    return load_model(Path(folder), SETTING)


@pytest.fixture
def make(model: DraftModel) -> Iterator[Make]:
    beds = []

    def bed_of(setting: Setting = SETTING, parent: int = 0) -> Bed:
        beds.append(Bed(model, setting, parent=parent))
        return beds[-1]

    yield bed_of
    for bed in beds:
        bed.close()


@pytest.fixture
def bed(make: Make) -> Bed:
    return make()


def text_of(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length, np.int32)


def open_text(bed: Bed, slot: int, text: np.ndarray, generation: int = 1, **more: float) -> None:
    put_open(bed.outbox, OpenRequest(slot, generation, text, **more))  # type: ignore[arg-type]
    bed.send()


def commit(bed: Bed, slot: int, base: int, tokens: list[int], generation: int = 1) -> None:
    stamps = Stamps(*(np.array([value]) for value in (slot, generation, base)))
    put_commits(bed.outbox, stamps, np.array([len(tokens)]), np.array(tokens, np.int32))


def refusals(messages: Messages) -> list[tuple[int, int, int]]:
    """Slot, generation and reason of each."""
    headers = messages.headers[messages.headers["kind"] == MessageKind.REFUSED]
    return [tuple(int(h[name]) for name in ("slot", "generation", "value")) for h in headers]


class Sent:
    """Trees as the messages tell them: by slot and generation, tokens of every node's path."""

    def __init__(self) -> None:
        self.ids: dict[tuple[int, int], list[int]] = {}
        self.paths: dict[tuple[int, int], dict[int, tuple[int, tuple[int, ...]]]] = {}

    def receive(self, bed: Bed) -> Messages:
        """Takes in what there is, and checks its form; returns all of it."""
        heard = bed.receive()
        nodes = heard.only(heard.headers["kind"] == MessageKind.NODES)
        counts, rest = np.divmod(nodes.headers["words"], NODE_WORDS)
        assert not rest.any()
        rows = nodes.words.reshape(-1, NODE_WORDS).tolist()
        whose = np.repeat(nodes.headers[["slot", "generation"]], counts).tolist()
        for (slot, generation), (id_, parent, token, _) in zip(whose, rows, strict=True):
            paths = self.paths.setdefault((slot, generation), {})
            ids = self.ids.setdefault((slot, generation), [])
            assert id_ > (ids[-1] if ids else 0)
            ids.append(id_)
            base, path = paths[parent] if parent > 0 else (-parent, ())
            paths[id_] = base, (*path, token)
        return heard

    def continuations(
        self, slot: int, text: list[int], generation: int = 1
    ) -> set[tuple[int, ...]]:
        """Paths from the end of a text on, of nodes whose path begins as it ends."""
        found = set()
        for base, path in self.paths.get((slot, generation), {}).values():
            known = len(text) - base
            if 0 <= known < len(path) and list(path[:known]) == text[base:]:
                found.add(path[known:])
        return found


def greedy(model: DraftModel, text: list[int], count: int) -> list[int]:
    """The most likely tokens one after the other, by a slot of its own."""
    slot, found = SLOTS - 1, []
    for step in range(count):
        if step == 0:
            model.kv_layout.open(slot, np.array(text, np.int32))
        else:
            model.kv_layout.append(slot, np.array(found[-1:], np.int32))
        while len((prefix := model.kv_layout.plan_prefix(512)).slots):
            assert prefix.slots.tolist() == [slot]
            tokens = model.step(prefix, no_tree_nodes()).tokens
        found.append(int(tokens[0, 0]))
    model.kv_layout.close(slot)
    return found


def has_chain(
    sent: Sent, slot: int, text: list[int], coming: list[int], generation: int = 1
) -> bool:
    return tuple(coming) in sent.continuations(slot, text, generation)


# -- drafting -----------------------------------------------------------------------------------


def test_a_text_from_its_opening_to_its_end(model: DraftModel, bed: Bed) -> None:
    text = text_of(0, 30).tolist()
    coming = greedy(model, text, 9)
    sent = Sent()
    open_text(bed, 2, np.array(text, np.int32))
    bed.turns(20)
    sent.receive(bed)
    assert has_chain(sent, 2, text, coming[:4])
    commit(bed, 2, 30, coming[:3])
    bed.send()
    bed.turns(20)
    sent.receive(bed)
    assert has_chain(sent, 2, text + coming[:3], coming[3:6])
    other = (coming[3] + 1) % VOCAB
    commit(bed, 2, 33, [other])  # maybe not in the tree
    bed.send()
    bed.turns(20)
    sent.receive(bed)
    text = [*text, *coming[:3], other]
    assert has_chain(sent, 2, text, greedy_again(bed, model, 2, text))
    put_close(bed.outbox, 2, 1)
    bed.send()
    bed.turns(5)
    bed.receive()
    bed.turns(5)
    assert len(bed.receive()) == 0


def greedy_again(bed: Bed, model: DraftModel, slot: int, text: list[int]) -> list[int]:
    """`greedy` beside a text that has nothing pending."""
    assert model.kv_layout.pending(slot) == 0
    return greedy(model, text, 3)


def test_prompts_in_pieces_and_several_texts(model: DraftModel, bed: Bed) -> None:
    texts = [text_of(seed, 100 + seed).tolist() for seed in range(3)]
    coming = [greedy(model, text, 3) for text in texts]
    sent = Sent()
    for slot, text in enumerate(texts):
        put_open(bed.outbox, OpenRequest(slot, 5 + slot, np.array(text, np.int32)))
    opened = bed.outbox.messages()
    bed.outbox.clear()
    for kind, run in opened.runs():  # as if a piece were of 7 tokens
        (header,) = run.headers
        whose = {"slot": int(header["slot"]), "generation": int(header["generation"])}
        if kind == MessageKind.OPEN:
            bed.outbox.append(
                MessageKind.OPEN, run.words, base_length=int(header["base_length"]), **whose
            )
            continue
        for start in range(0, len(run.words), 7):
            piece = run.words[start : start + 7]
            bed.outbox.append(MessageKind.PROMPT, piece, base_length=start, **whose)
    bed.send()
    bed.turns(40)
    assert refusals(sent.receive(bed)) == []
    for slot, text in enumerate(texts):
        assert has_chain(sent, slot, text, coming[slot], 5 + slot)


def test_noise_is_that_of_the_draw(model: DraftModel, make: Make) -> None:
    """With a temperature the first choice depends on seed and sample, as the target's draw does."""
    text = text_of(3, 20)
    firsts = set()
    for seed, index in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        bed, sent = make(), Sent()
        open_text(bed, 0, text, temperature=5.0, seed=seed, sample_index=index)
        bed.turns(3)
        sent.receive(bed)
        model.kv_layout.open(1, text, temperature=5.0, seed=seed, sample_index=index)
        first = int(model.step(model.kv_layout.plan_prefix(64), no_tree_nodes()).tokens[0, 0])
        assert (first,) in sent.continuations(0, text.tolist())
        firsts.add(first)
        bed.close()
    assert len(firsts) > 1


def test_without_growing_ahead_it_stops(make: Make) -> None:
    sizes = []
    for most in (4, 12):
        bed = make(Setting(slots=SLOTS, max_model_len=POSITIONS, ahead=False, most_nodes=most))
        open_text(bed, 0, text_of(0, 20))
        bed.turns(50)
        pool = bed.worker.tree_pool
        sizes.append(pool.num_run(0))
        assert most <= sizes[-1] < most + 64
        commit(bed, 0, 20, [1])
        bed.send()
        bed.turns(50)
        assert pool.num_run(0) >= most  # new tokens, new nodes
        bed.close()
    ahead = make()
    open_text(ahead, 0, text_of(0, 20))
    ahead.turns(50)
    assert ahead.worker.tree_pool.num_run(0) >= max(sizes)


def test_a_full_ring_of_answers_loses_nothing(make: Make) -> None:
    bed = make(Setting(slots=SLOTS, max_model_len=POSITIONS, ring_slots=1024))
    sent, texts = Sent(), [text_of(seed, 40) for seed in range(3)]
    for round_ in range(300):
        for slot, text in enumerate(texts):
            put_open(bed.outbox, OpenRequest(slot, round_ + 1, text))
        bed.send()
        bed.turns(2)
        if bed.worker.num_unsent > 300:
            break
    assert bed.worker.num_unsent > 300
    bed.turns(10)
    while len(sent.receive(bed)):  # checks that no parent is missing
        bed.turns(1)
    assert bed.worker.num_unsent == 0
    assert all(sent.continuations(slot, texts[slot].tolist(), round_ + 1) for slot in range(3))


# -- lost, double, wrong ------------------------------------------------------------------------


def test_lost_messages_are_noticed_and_the_text_may_be_opened_again(
    model: DraftModel, bed: Bed
) -> None:
    text = text_of(7, 60)
    coming = greedy(model, text.tolist(), 2)

    def opening(generation: int) -> None:
        whose = {"slot": 1, "generation": generation}
        header = np.array([(0, 0, 0.0)], OPENING)
        bed.outbox.append(MessageKind.OPEN, header, base_length=60, **whose)

    def piece(generation: int, start: int, end: int) -> None:
        bed.outbox.append(
            MessageKind.PROMPT, text[start:end], slot=1, generation=generation, base_length=start
        )

    lost = (1, Refusal.LOST_MESSAGE)
    opening(1)  # the middle piece is lost
    piece(1, 0, 20)
    piece(1, 40, 60)
    opening(2)  # the last one is
    piece(2, 0, 20)
    commit(bed, 1, 60, [5], generation=2)
    piece(3, 0, 60)  # the opening is
    commit(bed, 1, 60, [5], generation=3)
    opening(4)
    piece(4, 0, 60)
    commit(bed, 1, 61, [5], generation=4)  # a commit is
    opening(5)  # nothing of the prompt came, and a commit of a new text
    commit(bed, 1, 0, [5], generation=5)
    bed.send()
    bed.turns(5)
    assert refusals(bed.receive()) == [(lost[0], generation, lost[1]) for generation in range(1, 6)]
    opening(6)
    piece(6, 0, 60)
    bed.send()
    bed.turns(10)
    sent = Sent()
    assert refusals(sent.receive(bed)) == []
    assert has_chain(sent, 1, text.tolist(), coming, 6)


def test_a_slot_is_there_several_times_in_a_pop(model: DraftModel, bed: Bed) -> None:
    texts = [text_of(seed, 20).tolist() for seed in range(3)]
    coming = [greedy(model, text, 6) for text in texts]
    for slot, text in enumerate(texts):
        put_open(bed.outbox, OpenRequest(slot, 1, np.array(text, np.int32)))
    for at in range(3):
        for slot in (0, 1, 2) if at < 2 else (2, 0):
            commit(bed, slot, 20 + at, coming[slot][at : at + 1])
    bed.send()
    bed.turns(30)
    sent = Sent()
    assert refusals(sent.receive(bed)) == []
    for slot, length in ((0, 3), (1, 2), (2, 3)):
        text = texts[slot] + coming[slot][:length]
        assert has_chain(sent, slot, text, coming[slot][length:5])


@pytest.mark.parametrize(("refused", "why"), [(0, "token"), (1, "base"), (2, "token")])
def test_one_commit_of_several_is_refused(
    model: DraftModel, bed: Bed, refused: int, why: str
) -> None:
    texts = [text_of(seed, 20).tolist() for seed in range(3)]
    coming = [greedy(model, text, 6) for text in texts]
    for slot, text in enumerate(texts):
        put_open(bed.outbox, OpenRequest(slot, 1, np.array(text, np.int32)))
    bed.send()
    bed.turns(5)
    for slot in range(3):
        is_bad = slot == refused
        tokens = [VOCAB, VOCAB] if is_bad and why == "token" else coming[slot][: 1 + slot]
        commit(bed, slot, 19 if is_bad and why == "base" else 20, tokens)
    bed.send()
    bed.turns(30)
    sent = Sent()
    reason = Refusal.BAD_TOKEN if why == "token" else Refusal.LOST_MESSAGE
    assert refusals(sent.receive(bed)) == [(refused, 1, reason)]
    for slot in {0, 1, 2} - {refused}:
        text = texts[slot] + coming[slot][: 1 + slot]
        assert has_chain(sent, slot, text, coming[slot][1 + slot : 5])


def test_a_commit_that_came_twice_is_refused(bed: Bed) -> None:
    open_text(bed, 0, text_of(0, 20))
    commit(bed, 0, 20, [3])
    commit(bed, 0, 20, [3])
    bed.send()
    bed.turns(3)
    assert refusals(bed.receive()) == [(0, 1, Refusal.LOST_MESSAGE)]


@pytest.mark.parametrize("token", [-1, VOCAB, -(2**31), 2**31 - 1])
def test_tokens_that_are_none(bed: Bed, token: int) -> None:
    text = text_of(0, 20)
    bad = text.copy()
    bad[7] = token
    open_text(bed, 0, bad)
    open_text(bed, 1, text, generation=2)
    commit(bed, 1, 20, [4, token], generation=2)
    open_text(bed, 2, text, generation=3)
    commit(bed, 2, 20, [4, 5], generation=3)
    bed.send()
    bed.turns(10)
    sent = Sent()
    refused = refusals(sent.receive(bed))
    assert refused == [(0, 1, Refusal.BAD_TOKEN), (1, 2, Refusal.BAD_TOKEN)]
    assert sent.continuations(2, [*text.tolist(), 4, 5], 3)


def test_too_long(bed: Bed) -> None:
    open_text(bed, 0, text_of(0, POSITIONS + 1))
    open_text(bed, 1, text_of(0, POSITIONS), generation=2)
    commit(bed, 1, POSITIONS, [1], generation=2)
    open_text(bed, 2, text_of(0, POSITIONS - 2), generation=3)
    commit(bed, 2, POSITIONS - 2, [1, 2], generation=3)
    bed.send()
    bed.turns(10)
    assert refusals(bed.receive()) == [(0, 1, Refusal.TOO_LONG), (1, 2, Refusal.TOO_LONG)]


def test_what_is_about_nothing_it_knows(bed: Bed) -> None:
    open_text(bed, 0, text_of(0, 20), generation=2)
    for slot in (SLOTS, 10**6, 2**32 - 1):
        put_open(bed.outbox, OpenRequest(slot, 1, text_of(0, 5)))
        commit(bed, slot, 5, [1])
        put_close(bed.outbox, slot, 1)
    put_close(bed.outbox, 0, 1)  # of the slot's former text
    put_close(bed.outbox, 3, 0xFFFFFFFF)
    bed.send()
    bed.turns(10)
    sent = Sent()
    assert refusals(sent.receive(bed)) == []
    assert sent.continuations(0, text_of(0, 20).tolist(), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -1.0},
        {"sample_index": 2**32 - 1},
        {"temperature": 1e-40},
        {"depth": 2**32 - 1},
        {"seed": 2**64 - 1, "temperature": 3e38},
    ],
)
def test_openings_that_nobody_sends(model: DraftModel, bed: Bed, changes: dict[str, float]) -> None:
    """Whatever becomes of them, other texts are drafted for as ever."""
    text = text_of(1, 20)
    coming = greedy(model, text.tolist(), 3)
    open_text(bed, 0, text, **changes)
    open_text(bed, 1, text, generation=2)
    bed.turns(20)
    sent = Sent()
    assert refusals(sent.receive(bed)) == []
    assert has_chain(sent, 1, text.tolist(), coming, 2)


KINDS = [*MessageKind, 0, 99, 65535]


def put_garbage(bed: Bed, rng: random.Random) -> None:
    """A message of any kind, about slots and texts that there are or nearly."""
    slot = rng.choice([*range(SLOTS + 1), 2**32 - 1])
    lengths = [0, 1, 5, 20, 21, 22, POSITIONS, POSITIONS + 1, 2**31, 2**32 - 1]
    small = rng.random() < 0.7
    words = [rng.randrange(VOCAB) if small else rng.randrange(-(2**31), 2**31)
             for _ in range(rng.choice([0, 1, 2, 4, 5, 20, 21, 500]))]  # fmt: skip
    bed.outbox.append(
        rng.choice(KINDS), np.array(words, np.int32), slot=slot,
        generation=rng.choice([0, 1, 2, 3, 2**32 - 1]), base_length=rng.choice(lengths),
        depth=rng.choice([0, 1, 7, 2**32 - 1]), value=rng.randrange(2**32),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_garbage_never_ends_it(model: DraftModel, bed: Bed, seed: int) -> None:
    """Records of any content between those of texts, and any bytes in its ring. Afterwards a text
    is drafted for as by a model that never saw any of it."""
    rng = random.Random(seed)
    text = text_of(seed, 20)
    for round_ in range(60):
        slot = rng.randrange(SLOTS)
        if rng.random() < 0.5:
            open_text(bed, slot, text, generation=rng.choice([1, 2, 3]))
            commit(bed, slot, 20, [rng.randrange(VOCAB)], generation=rng.choice([1, 2, 3]))
        for _ in range(rng.randrange(12)):
            put_garbage(bed, rng)
        bed.outbox.drop(int(rng.random() < 0.3 and len(bed.outbox) > 0))
        while any(bed.outbox.messages().headers["kind"] == MessageKind.STOP):
            bed.outbox.clear()  # that one would end it
        bed.send()
        if rng.random() < 0.3:
            memory = np.frombuffer(bed.rings[0].memory, np.uint8)
            start = rng.randrange(1024, len(memory))
            size = rng.choice([1, 64, 5000])
            memory[start : start + size] = rng.randrange(256)
            del memory
        assert bed.turns(rng.randrange(1, 4)), round_
        bed.receive()
    bed.turns(60)
    for slot in range(SLOTS):
        open_text(bed, slot, text, generation=50 + slot)
        put_close(bed.outbox, slot, 50 + slot)
    bed.send()
    bed.turns(10)
    bed.receive()
    coming = greedy(model, text.tolist(), 4)
    sent = Sent()
    for attempt in range(100, 130):  # damaged slots may still lie ahead
        open_text(bed, 0, text, generation=attempt)
        bed.turns(20)
        sent.receive(bed)
        if has_chain(sent, 0, text.tolist(), coming, attempt):
            break
    else:
        raise AssertionError("it drafts no more")


# -- life and end -------------------------------------------------------------------------------


def beats(bed: Bed) -> list[int]:
    headers = bed.answers.pop().messages.headers
    return headers[headers["kind"] == MessageKind.HEARTBEAT]["value"].tolist()


def test_heartbeats(make: Make) -> None:
    bed = make(Setting(slots=SLOTS, max_model_len=POSITIONS, ring_slots=1024))
    bed.turns(3)
    assert beats(bed) == [1]
    bed.now = 0.06
    bed.turns(3)
    assert beats(bed) == [2]
    for _ in range(5000):  # an idle engine
        bed.now += 0.06
        bed.turns(1)
    assert bed.worker.num_unsent <= 1
    assert len(beats(bed)) > 900
    bed.turns(2)
    assert len(beats(bed)) >= 1


def test_stop(bed: Bed) -> None:
    open_text(bed, 0, text_of(0, 20))
    assert bed.turns(3)
    put_stop(bed.outbox)
    bed.send()
    bed.worker.run()
    assert not bed.worker.run_once(0)


def test_stop_behind_much_else(bed: Bed) -> None:
    for slot in range(SLOTS):
        put_open(bed.outbox, OpenRequest(slot, 1, text_of(slot, 20)))
    for number in range(1000):
        commit(bed, number % SLOTS, 20 + number // SLOTS, [1])
    put_stop(bed.outbox)
    bed.send()
    bed.worker.run()


def test_it_ends_with_the_engine(make: Make) -> None:
    """Whose process is another one than its parent now: init, or whoever adopts."""
    bed = make(parent=os.getpid())
    assert not bed.worker.run_once(0)
    bed = make(parent=os.getpid())
    open_text(bed, 0, text_of(0, 20))
    bed.worker.run()  # not before its trees are as large as they may be
    assert bed.worker.tree_pool.num_run(0) > 0
    bed = make(parent=os.getppid())
    assert bed.turns(3)


def test_settings_come_through_the_command_line() -> None:
    settings = WorkerSettings(
        folder="/a b/ü\"'$", load_format="dummy", dtype="bfloat16", weight_format="int8", slots=7,
        max_model_len=99, window=32, max_depth=5, threads=2, cpus=(3, 8), ahead=False,
        most_nodes=17, requests="3:64:ab", answers="4:64:cd", parent=77,
    )  # fmt: skip
    assert WorkerSettings.from_json(settings.to_json()) == settings


def add_external_nodes(
    bed: Bed, slot: int, base: int, nodes: list[tuple[int, int, float]], at: int = 1
) -> None:
    stamps = Stamps(*(np.array([value]) for value in (slot, at, base)))
    put_external_nodes(bed.outbox, stamps, np.array([len(nodes)]), np.array(nodes, EXTERNAL_NODE))
    bed.send()


def test_external_nodes(model: DraftModel, bed: Bed) -> None:
    text = text_of(3, 12)
    open_text(bed, 0, text)
    assert bed.turns(3)
    other = (greedy(model, text.tolist(), 1)[0] + 1) % VOCAB
    add_external_nodes(bed, 0, 11, [(other, -1, 0.9)])  # of an earlier text
    add_external_nodes(bed, 0, 12, [(other, -1, 0.9)], at=2)  # of another request
    add_external_nodes(bed, 1, 12, [(other, -1, 0.9)])  # of nobody
    add_external_nodes(bed, SLOTS, 12, [(other, -1, 0.9)])
    add_external_nodes(bed, 0, 12, [(VOCAB, -1, 0.9), (other, 5, 0.9), (other, -1, float("nan"))])
    bed.outbox.append(
        MessageKind.EXTERNAL_NODES, np.zeros(4, np.int32), slot=0, generation=1, base_length=12
    )
    bed.send()
    sent = Sent()
    assert bed.turns(6)
    sent.receive(bed)
    assert (other,) not in sent.continuations(0, text.tolist())
    # Of another text, whose window is not full yet.
    open_text(bed, 2, text, generation=5)
    assert bed.turns(1)
    add_external_nodes(bed, 2, 12, [(other, -1, 0.9)], at=5)
    assert bed.turns(3)
    sent.receive(bed)
    after = greedy(model, [*text.tolist(), other], 1)
    assert (other, *after) in sent.continuations(2, text.tolist(), 5)
