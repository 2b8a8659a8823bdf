"""Snapshots: what is loaded drafts as what was saved, and damage of any kind is refused."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.errors import SnapshotError
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead import snapshot
from hetero_llm.spec_decode.lookahead.global_cache import (
    CacheContent,
    Generation,
    GenerationContent,
    GlobalCache,
)
from hetero_llm.spec_decode.lookahead.snapshot import (
    Header,
    read_header,
    read_snapshot,
    write_snapshot,
)
from hetero_llm.spec_decode.lookahead.store import Store
from tests.spec_decode.lookahead.global_cache_cases import (
    OTHER_ROOT,
    OTHER_SPACE,
    ROOT,
    SPACE,
    TOKENIZER,
    as_tokens,
    chain_of,
    draft_of,
    make_drafter,
    make_history,
    make_place,
)

PHRASE = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]


def filled() -> HybridDrafter:
    """With documents in all three generations, of two namespaces."""
    drafter = make_drafter(60)
    history = drafter.global_cache
    static = history.new_static()
    static.add(as_tokens(PHRASE), 0, SPACE, 0)
    history.use(static)
    history.add(as_tokens([*range(60, 80)]), 0, SPACE, 3)
    history.add(as_tokens([*range(90, 110)]), 0, OTHER_SPACE, 5)
    history.add(as_tokens([105, 106, 107, 108, 109, 1, 3]), 5, OTHER_SPACE, 8)
    return drafter


def saved(folder: Path, history: GlobalCache | None = None) -> str:
    path = str(folder / "cache.snapshot")
    write_snapshot(path, (history or filled().global_cache).content(), TOKENIZER)
    return path


def refusal(path: str, **changes: Any) -> str:
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(path, make_place(**{"capacity": 60, **changes}))
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return caught.value.reason


def contents(parts: CacheContent) -> list[list[Any]]:
    return [[p.text.tolist(), p.documents.tolist()] for p in (parts.static, parts.old, parts.young)]


# -- what is loaded is what was saved -----------------------------------------------------------

_documents = st.lists(
    st.tuples(
        st.lists(st.integers(3, 9), min_size=1, max_size=30),
        st.integers(0, 3),
        st.sampled_from([SPACE, OTHER_SPACE]),
        st.integers(0, 2),
        st.booleans(),
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([{"cache_mode": 0}, {"cache_mode": 0, "top_k": 3}, {"cache_mode": 1}]),
    _documents,
    st.sampled_from([64, 256, 4096]),
    st.sampled_from([2, 16]),
    st.lists(st.lists(st.integers(3, 9), min_size=2, max_size=8), min_size=1, max_size=8),
)
def test_the_same_is_drafted_as_before(
    mode: dict[str, int],
    documents: list[Any],
    capacity: int,
    cell: int,
    contexts: list[list[int]],
) -> None:
    first, second = (make_drafter(capacity, cell_max_size=cell, **mode) for _ in range(2))
    static, tick = first.global_cache.new_static(), 0
    for tokens, told, space, later, is_static in documents:
        tick += later
        told = min(told, len(tokens))
        if is_static and static.end + len(tokens) < capacity:
            static.add(as_tokens(tokens), told, space, 0)
        else:
            first.global_cache.add(as_tokens(tokens), told, space, tick)
    first.global_cache.use(static)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a")
        write_snapshot(path, first.global_cache.content(), TOKENIZER)
        Store(second.global_cache, make_place(capacity)).load(path)
    assert contents(second.global_cache.content()) == contents(first.global_cache.content())
    for context in contexts:
        for root in (ROOT, OTHER_ROOT):
            assert draft_of(second, context, root) == draft_of(first, context, root)
    # What is learned afterwards is newer than all that was loaded.
    for drafter, now in ((first, tick + 1), (second, 0)):
        drafter.global_cache.add(as_tokens([3, 4, 5, 3, 4, 6]), 0, SPACE, now)
    for context in contexts:
        assert draft_of(second, context) == draft_of(first, context)


@pytest.mark.parametrize("mode", [0, 1])
def test_documents_as_long_as_several_slices(tmp_path: Path, mode: int) -> None:
    first, second = (make_drafter(1 << 16, cache_mode=mode) for _ in range(2))
    rng = np.random.default_rng(0)
    first.global_cache.add(rng.integers(3, 40, 20_000).astype(np.int32), 0, SPACE, 0)
    write_snapshot(str(tmp_path / "a"), first.global_cache.content(), TOKENIZER)
    Store(second.global_cache, make_place(1 << 16)).load(str(tmp_path / "a"))
    drafts = [draft_of(first, context) for context in rng.integers(3, 40, (50, 3)).tolist()]
    rng = np.random.default_rng(0)
    rng.integers(3, 40, 20_000)
    assert drafts == [draft_of(second, c) for c in rng.integers(3, 40, (50, 3)).tolist()]
    assert sum(len(tokens) for tokens, _ in drafts) > 50


@pytest.mark.parametrize("mode", [0, 1])
def test_documents_learned_together_or_one_by_one(mode: int) -> None:
    rng = np.random.default_rng(0)
    documents = [
        (rng.integers(3, 12, int(size)).astype(np.int32), int(told), SPACE)
        for size, told in zip(rng.integers(1, 60, 40), rng.integers(0, 2, 40))
    ]
    one, other = (make_drafter(cache_mode=mode) for _ in range(2))
    for drafter, together in ((one, True), (other, False)):
        static = drafter.global_cache.new_static()
        if together:
            static.add_many(documents, 0)
        else:
            for tokens, told, space in documents:
                static.add(tokens, told, space, 0)
        drafter.global_cache.use(static)
    assert contents(one.global_cache.content()) == contents(other.global_cache.content())
    for context in rng.integers(3, 12, (50, 3)).tolist():
        assert draft_of(one, context) == draft_of(other, context)


def test_a_header_tells_without_the_rest(tmp_path: Path) -> None:
    header = read_header(saved(tmp_path))
    assert header == Header(TOKENIZER, static=11, old=21, young=29, num_documents=4)
    assert (header.num_tokens, header.needed) == (61, 58)


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat(saved(tmp_path)).st_mode) == 0o600


def test_an_empty_history(tmp_path: Path) -> None:
    path = saved(tmp_path, make_history(0))
    history = filled().global_cache
    Store(history, make_place(60)).load(path)
    assert history.num_tokens == history.num_documents == 0


# -- damage -------------------------------------------------------------------------------------


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Or changes nothing, as a space between two words of the header does not."""
    path = saved(tmp_path)
    good = Path(path).read_bytes()
    before = contents(read_snapshot(path)[1])
    unnoticed = 0
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x80 if place % 3 else 1
        Path(path).write_bytes(bad)
        try:
            header, parts = read_snapshot(path, make_place(60))
        except SnapshotError:
            continue
        unnoticed += 1
        assert contents(parts) == before and header.tokenizer == TOKENIZER
    assert unnoticed < 20


def test_missing_and_additional_bytes_are_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    good = Path(path).read_bytes()
    for size in [*range(0, len(good), 7), len(good) - 1]:
        Path(path).write_bytes(good[:size])
        assert refusal(path)
    Path(path).write_bytes(good + b"\0")
    assert refusal(path).startswith("is damaged: ")


def test_reasons(tmp_path: Path) -> None:
    path = saved(tmp_path)
    good = Path(path).read_bytes()
    assert refusal(path, tokenizer=lambda: "e" * 64) == (
        "is of another tokenizer (ffffffffffff) than the one in use (eeeeeeeeeeee)"
    )
    assert refusal(path, capacity=57) == "needs a cache_size of at least 58; it is 57"
    assert refusal(path, capacity=0).endswith("at least 58; there is no global cache")
    assert refusal(path, voc_size=109) == "holds token id 109, beyond the vocabulary (109)"
    Path(path).write_bytes(good[:-4] + b"\1\0\0\0")
    assert refusal(path) == "is damaged: its checksum is wrong"
    Path(path).write_bytes(good.replace(b'"version":"1"', b'"version":"2"'))
    assert refusal(path) == "has version '2' of the format; this release reads '1'"
    Path(path).write_bytes(b'[{"prompt": [], "output": []}]')
    assert refusal(path).startswith("is no snapshot of the lookahead cache")
    Path(path).unlink()
    assert refusal(path) == "cannot be read: No such file or directory"
    Path(path).mkdir()
    assert refusal(path) == "cannot be read: Is a directory"


def test_a_history_that_becomes_one_generation_needs_room_for_all(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(SnapshotError, match="at least 61; it is 60"):
        read_snapshot(path, make_place(60), as_static=True)


@pytest.mark.parametrize(
    ("text", "documents", "reason"),
    [
        ([-1, 5], [], "a text without documents"),
        ([-1, 5], [[2, 2, 1, 0]], "documents that are not within their text"),
        ([-1, 5], [[1, 0, 1, 0]], "documents that are not within their text"),
        ([-1, 5], [[1, 3, 1, 0]], "documents that are not within their text"),
        ([-1, 5], [[1, 1, 1, 0], [9, 9, 1, 0]], "documents that are not within their text"),
        ([-1, 5], [[1, 1, 1, 0], [-(2**63)] * 2 + [1, 0]], "documents that are not within"),
        ([-1, 5, -1, 6], [[1, 1, 1, 0], [1, 1, 1, 0]], "documents that are not within"),
        ([7, 5], [[1, 1, 1, 0]], "documents that are not parted"),
        ([-1, -2], [[1, 1, 1, 0]], "documents that are not parted"),
        ([-1, 5], [[1, 1, -1, 0]], "documents out of order"),
        ([-1, 5], [[1, 1, 1, -1]], "documents out of order"),
        ([-1, 5], [[1, 1, 1, 2**31]], "documents out of order"),
        ([-1, 5, -1, 6], [[1, 1, 1, 3], [3, 3, 1, 2]], "documents out of order"),
    ],
)
def test_what_compiled_code_could_not_cope_with(
    tmp_path: Path, text: list[int], documents: list[list[int]], reason: str
) -> None:
    """A right checksum does not show who wrote the file."""
    nothing = make_history(0).content().old
    part = GenerationContent(as_tokens(text), np.array(documents, np.int64).reshape(-1, 4))
    write_snapshot(str(tmp_path / "a"), CacheContent(nothing, nothing, part), TOKENIZER)
    assert refusal(str(tmp_path / "a")).startswith(f"is damaged: {reason}")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("old.text"),
        lambda header: header.update(more=header["old.text"]),
        lambda header: header["old.text"].update(dtype="I64"),
        lambda header: header["old.text"].update(shape=[-1]),
        lambda header: header["old.text"].update(shape=[True]),
        lambda header: header["old.documents"].update(shape=[4, 1]),
        lambda header: header.update({"old.text": [1]}),
        lambda header: header["__metadata__"].pop("tokenizer"),
        lambda header: header["__metadata__"].update(format="other"),
        lambda header: header.update(__metadata__=[]),
    ],
)
def test_headers_of_other_files(tmp_path: Path, change: Any) -> None:
    path = saved(tmp_path)
    content = Path(path).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(SnapshotError):
        read_header(path)


# -- writing ------------------------------------------------------------------------------------


def refuses_to_write(path: str) -> str:
    with pytest.raises(SnapshotError) as caught:
        write_snapshot(path, filled().global_cache.content(), TOKENIZER)
    return caught.value.reason


class _Full(io.BytesIO):
    def write(self, content: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    before = Path(path).read_bytes()

    def full(handle: Any, mode: str) -> Any:
        os.close(handle)
        return _Full()

    monkeypatch.setattr(snapshot, "open", full, raising=False)
    assert refuses_to_write(path) == "cannot be written: No space left on device"
    monkeypatch.undo()
    assert Path(path).read_bytes() == before and os.listdir(tmp_path) == ["cache.snapshot"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_device_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"

    def opened(**place: str) -> tuple[int, str]:
        temporary.touch()
        return os.open("/dev/full", os.O_WRONLY), str(temporary)

    monkeypatch.setattr("tempfile.mkstemp", opened)
    reason = refuses_to_write(str(tmp_path / "cache.snapshot"))
    assert reason == "cannot be written: No space left on device"
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_snapshot(str(tmp_path / "a"), filled().global_cache.content(), TOKENIZER)
    assert os.listdir(tmp_path) == []


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    assert refuses_to_write(str(tmp_path / "gone" / "a")) == (
        "cannot be written: No such file or directory"
    )
    assert refuses_to_write(str(tmp_path)) == "is not a regular file"
    if os.path.exists("/dev/null"):
        assert refuses_to_write("/dev/null") == "is not a regular file"


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cache.snapshot")
    write_snapshot(str(link), filled().global_cache.content(), TOKENIZER)
    assert link.is_symlink() and read_header(str(tmp_path / "cache.snapshot"))


# -- a store ------------------------------------------------------------------------------------


def test_a_refused_snapshot_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drafter = saved(tmp_path), filled()
    history = drafter.global_cache
    before = contents(history.content())
    for place in (make_place(60, voc_size=50), make_place(60, tokenizer=lambda: "x")):
        with pytest.raises(SnapshotError):
            Store(history, place).load(path)
    add = Generation.add

    def without_memory(generation: Generation, tokens: Any, *rest: Any) -> None:
        if len(generation.text) and generation.end > 20:
            raise MemoryError
        add(generation, tokens, *rest)

    monkeypatch.setattr(Generation, "add", without_memory)
    with pytest.raises(SnapshotError, match="not enough memory"):
        Store(history, make_place(60)).load(path)
    assert contents(history.content()) == before
    assert chain_of(drafter, [7, 40, 41]) == PHRASE[2:9]


def test_ends_of_this_model_part_a_loaded_text(tmp_path: Path) -> None:
    drafter = filled()
    Store(drafter.global_cache, replace(make_place(60), stop_tokens=(2, 46))).load(saved(tmp_path))
    assert chain_of(drafter, [7, 40, 41]) == [42, 43, 44, 45]


def test_a_smaller_cache_that_has_room(tmp_path: Path) -> None:
    drafter = make_drafter(58)
    Store(drafter.global_cache, make_place(58)).load(saved(tmp_path))
    assert chain_of(drafter, [1, 60, 61]) == [*range(62, 69)]
    drafter.global_cache.add(as_tokens([*range(200, 220)]), 0, SPACE, 0)
    assert chain_of(drafter, [1, 60, 61]) == [], "the older generation has gone"
    assert chain_of(drafter, [1, 105, 106], OTHER_ROOT) == [107, 108, 109, 1, 3]
    assert chain_of(drafter, [1, 40, 41]) == PHRASE[2:9], "the static one stays"
