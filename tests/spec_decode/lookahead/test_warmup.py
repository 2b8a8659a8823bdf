"""Warm-up files: what is learned, what is left out and reported; serving goes on meanwhile."""

from __future__ import annotations

import errno
import gc
import io
import json
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.errors import SnapshotError
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead import warmup
from hetero_llm.spec_decode.lookahead.snapshot import write_snapshot
from hetero_llm.spec_decode.lookahead.store import Store
from hetero_llm.spec_decode.lookahead.warmup import Warmup, WarmupRecord, read_records
from tests.spec_decode.lookahead.global_cache_cases import (
    OTHER_ROOT,
    OTHER_SPACE,
    SPACE,
    TOKENIZER,
    as_tokens,
    chain_of,
    make_drafter,
    make_place,
)

PHRASE = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
GOOD = {"prompt": [5, 6, 7, 8], "output": PHRASE}


def write(folder: Path, content: Any) -> str:
    path = folder / "warm.json"
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def warmed(path: str, **options: Any) -> tuple[HybridDrafter, Warmup]:
    """A drafter after the whole file was read."""
    drafter = make_drafter(options.pop("capacity", 4096))
    options = {"namespace": SPACE, "ignore_prompt": False, **options}
    place = replace(
        make_place(drafter.global_cache.capacity), voc_size=options.pop("voc_size", 1000)
    )
    warm = Warmup(drafter.global_cache, path, place, **options)
    warm.join()
    assert warm.is_finished
    return drafter, warm


# -- what is learned ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        json.dumps([GOOD]),
        json.dumps([GOOD], indent=2),
        json.dumps(GOOD),
        json.dumps(GOOD) + "\r\n\r\n" + json.dumps({"prompt": [], "output": [1]}) + "\n",
        "\ufeff" + json.dumps([GOOD, GOOD]),
    ],
    ids=["list", "indented", "one line", "lines", "byte order mark"],
)
def test_prompts_and_outputs_are_learned(tmp_path: Path, content: str) -> None:
    drafter, warm = warmed(write(tmp_path, content))
    assert (warm.num_left_out, warm.problem) == (0, None)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    assert chain_of(drafter, [9, 5, 6]) == [7, 8, *PHRASE[:5]]
    assert chain_of(drafter, [9, 40, 41], OTHER_ROOT) == [], "it belongs to no cache_salt"


def test_prompts_may_be_left_out_but_for_their_ends(tmp_path: Path) -> None:
    drafter, warm = warmed(write(tmp_path, [GOOD]), ignore_prompt=True)
    assert chain_of(drafter, [9, 5]) == []
    assert chain_of(drafter, [7, 8]) == PHRASE[:7]
    assert warm.num_tokens == 13


def test_ends_part_texts(tmp_path: Path) -> None:
    parted = {"prompt": [], "output": [60, 61, 62, 63, 64, 65, 2, 66, 67]}
    drafter, _ = warmed(write(tmp_path, [parted]))
    assert chain_of(drafter, [60, 61]) == [62, 63, 64, 65]


def test_it_outlives_what_is_learned_later(tmp_path: Path) -> None:
    drafter, _ = warmed(write(tmp_path, [GOOD]), capacity=100)
    for tick in range(20):
        drafter.global_cache.add(as_tokens([*range(100, 140)]), 0, SPACE, tick)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]


def test_documents_larger_than_a_batch(tmp_path: Path) -> None:
    short = [{"prompt": [], "output": [100 + i, 200 + i, 300, 301]} for i in range(5)]
    drafter, warm = warmed(write(tmp_path, [short[0], GOOD, *short]), batch_tokens=8)
    assert (warm.num_records, warm.num_tokens) == (7, 38)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    assert drafter.global_cache.num_documents == 7


def test_a_snapshot(tmp_path: Path) -> None:
    """Of a history with all three generations, and of several namespaces."""
    source, path = make_drafter(60).global_cache, str(tmp_path / "a")
    static = source.new_static()
    static.add(as_tokens(PHRASE), 0, SPACE, 0)
    source.use(static)
    source.add(as_tokens([*range(60, 80)]), 0, SPACE, 5)
    source.add(as_tokens([*range(90, 110)]), 0, OTHER_SPACE, 6)
    source.add(as_tokens([106, 107, 108, 109, 1]), 4, OTHER_SPACE, 7)
    write_snapshot(path, source.content(), TOKENIZER)
    drafter, warm = warmed(path)
    assert (warm.num_records, warm.num_left_out, warm.num_tokens) == (4, 0, 51)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    assert chain_of(drafter, [9, 60, 61]) == [*range(62, 69)]
    assert chain_of(drafter, [9, 90, 91]) == []
    assert chain_of(drafter, [9, 90, 91], OTHER_ROOT) == [*range(92, 99)]


# -- what is left out ---------------------------------------------------------------------------

BAD_RECORDS = [
    ([1], 'is not of the form {"prompt": [ids], "output": [ids]}'),
    ({"prompt": []}, "is not of the form"),
    ({**GOOD, "text": "x"}, "is not of the form"),
    ({**GOOD, "output": "abc"}, "'output' must be a list of token ids"),
    ({**GOOD, "output": [1, 2.0]}, "'output' must be a list of token ids"),
    ({**GOOD, "output": [1, True]}, "'output' must be a list of token ids"),
    ({**GOOD, "output": [1, None]}, "'output' must be a list of token ids"),
    ({**GOOD, "output": [1, float("nan")]}, "'output' must be a list of token ids"),
    ({**GOOD, "prompt": [[1]]}, "'prompt' must be a list of token ids"),
    ({**GOOD, "output": [1, 1000]}, "token id 1000 in 'output' is beyond the vocabulary (1000)"),
    ({**GOOD, "prompt": [-1]}, "token id -1 in 'prompt' is beyond the vocabulary (1000)"),
    ({**GOOD, "output": [10**30]}, "is beyond the vocabulary (1000)"),
]


@pytest.mark.parametrize(("record", "reason"), BAD_RECORDS)
@pytest.mark.parametrize("form", ["list", "lines"])
def test_a_wrong_record_is_left_out(
    tmp_path: Path, record: Any, reason: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"prompt": [], "output": [60, 61, 62, 63, 64, 65, 66]}
    lines = [json.dumps(value) for value in (GOOD, record, other, record)]
    text = "\n".join(lines) if form == "lines" else "[" + ",\n".join(lines) + "]"
    path = write(tmp_path, text)
    with caplog.at_level(logging.INFO, logger="hetero_llm"):
        drafter, warm = warmed(path)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    assert chain_of(drafter, [9, 60, 61]) == [62, 63, 64, 65, 66]
    assert (warm.num_records, warm.num_left_out, warm.num_tokens) == (4, 2, 21)
    (line,) = [record.message for record in caplog.records if record.name.startswith("hetero_llm")]
    assert line.startswith(f"warm-up file {path}: line 2: ") and reason in line
    assert line.endswith("(2 of 4 records left out; 21 tokens learned)")


FIRST = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("content", "records", "left_out", "problem"),
    [
        (f"[{FIRST},\n{FIRST[:20]}", 2, 1, "line 2: Expecting"),
        (f"[{FIRST},\n", 2, 1, "line 2: Expecting value; the rest cannot be read"),
        (f"[{FIRST}\n\n", 2, 1, "line 3: the list does not end; the rest cannot be read"),
        (f"[{FIRST}\n{FIRST}]", 2, 1, "line 2: ',' or ']' is missing; the rest cannot be read"),
        (f"[{FIRST}],", 2, 1, "line 1: something follows the list; the rest cannot be read"),
        (f"[{FIRST}, {{'a'", 2, 1, "line 1: Expecting property name"),
        (f"[{FIRST},\n" + "[" * 100_000, 2, 1, "line 2: is nested too deeply; the rest"),
        (f"[{FIRST},\n[1{'0' * 5000}]]", 2, 1, "line 2: Exceeds the limit"),
        (f'[{FIRST},\n{{"prompt": "\udcff'.encode(errors="surrogateescape"), 1, 1, "line 1: is no"),
        (f"{FIRST}\n{FIRST[:20]}\n{FIRST}", 3, 1, "line 2: Expecting"),
        (f"{FIRST}\n" + "[" * 100_000 + f"\n{FIRST}", 3, 1, "line 2: maximum recursion"),
        (f"{FIRST}\n[1{'0' * 5000}]\n{FIRST}", 3, 1, "line 2: Exceeds the limit"),
        ("[]", 0, 0, None),
        ("[ ]\n", 0, 0, None),
        ("[]]", 1, 1, "line 1: something follows the list"),
        ("[", 1, 1, "line 1: Expecting value; the rest cannot be read"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_read_as_far_as_it_goes(
    tmp_path: Path, content: Any, records: int, left_out: int, problem: str | None
) -> None:
    drafter, warm = warmed(write(tmp_path, content))
    assert (warm.num_records, warm.num_left_out) == (records, left_out)
    assert (warm.problem or "None").startswith(str(problem))
    learned = PHRASE[2:9] if records > left_out else []
    assert chain_of(drafter, [9, 40, 41]) == learned


def test_what_is_too_much_is_left_out(tmp_path: Path) -> None:
    large = {"prompt": [], "output": [*range(60, 80)]}
    drafter, warm = warmed(write(tmp_path, [GOOD, large, large, GOOD]), capacity=35)
    assert warm.problem == "line 1: cache_size (35) is full"
    assert (warm.num_left_out, drafter.global_cache.num_tokens) == (2, 30)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]


def test_reading_ends_after_a_thousand_records_in_vain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of a million texts beside a small cache, or of numbers that are no tokens."""
    large = {"prompt": [], "output": [*range(60, 80)]}
    path = write(tmp_path, "\n".join([FIRST] + [json.dumps(large)] * 3000))
    drafter, warm = warmed(path, capacity=20)
    assert (warm.num_records, warm.num_left_out) == (1001, 1000)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    (line,) = [record.message for record in caplog.records if record.name.startswith("hetero_llm")]
    assert "line 2: cache_size (20) is full (1000 of 1001 records left out" in line
    assert line.endswith(
        "; what follows line 1001 is not read: 1000 records in a row cannot be used)"
    )
    absurd = json.dumps({"prompt": [10**40], "output": [-1]})
    path = write(tmp_path, "\n".join(([absurd] * 999 + [FIRST]) * 2))
    drafter, warm = warmed(path)
    assert (warm.num_records, warm.num_left_out, warm.not_read) == (2000, 1998, "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f"[{FIRST},\n" + '{"prompt": [' + "1," * 2000 + "1]}]", "a record is longer than 1000"),
        (f"{FIRST}\n" + '{"prompt": [' + "1," * 2000 + "1]}\n", "a record is longer than 1000"),
        (f"[{FIRST},\n" + " " * 5000 + "1]", "a record is longer than 1000"),
        (f"[{FIRST},\n" + f"{FIRST}," * 200, "the file is longer than 9000 characters"),
    ],
)
def test_what_is_too_long_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch, content: str, reason: str
) -> None:
    monkeypatch.setattr(warmup, "MOST_RECORD", 1000)
    file = io.StringIO(content + "x" * 10**6)
    *good, last = read_records(file, most=9000, chunk=100)
    assert good[0].value == GOOD and last.problem is not None
    assert last.problem.startswith(reason) and last.problem.endswith("; the rest cannot be read")
    assert file.tell() < 10_000


class _Failing(io.StringIO):
    def read(self, size: int | None = -1) -> str:
        text = super().read(size)
        if not text:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return text


def test_a_disk_error_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, [GOOD])
    monkeypatch.setattr(
        warmup, "open", lambda *_, **__: _Failing(f"[{FIRST},\n{FIRST},"), raising=False
    )
    drafter, warm = warmed(path)
    assert warm.problem is not None and warm.problem.endswith(
        "Input/output error; the rest cannot be read"
    )
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    assert len(caplog.records) == 1


def test_a_file_that_goes_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [GOOD])

    def gone(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(warmup, "open", gone, raising=False)
    drafter, warm = warmed(path)
    assert warm.problem is not None and "No such file or directory" in warm.problem
    assert drafter.global_cache.num_tokens == 0


def test_a_damaged_snapshot_is_not_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, source = str(tmp_path / "a"), make_drafter().global_cache
    source.add(as_tokens(PHRASE), 0, SPACE, 0)
    write_snapshot(path, source.content(), TOKENIZER)
    good = Path(path).read_bytes()
    for bad, reason in (
        (good[:-1] + b"\1", "is damaged: its checksum is wrong"),
        (good[:-1], "is damaged: "),
    ):
        caplog.clear()
        Path(path).write_bytes(bad)
        drafter, warm = warmed(path)
        assert warm.problem is not None and warm.problem.startswith(reason)
        assert drafter.global_cache.num_tokens == 0
        assert len(caplog.records) == 1 and path in caplog.records[0].message
    Path(path).write_bytes(good)
    drafter, warm = warmed(path, voc_size=45)
    assert warm.problem == "holds token id 49, beyond the vocabulary (45)"


def test_a_snapshot_of_others_is_refused_at_once(tmp_path: Path) -> None:
    path, source = str(tmp_path / "a"), make_drafter(60).global_cache
    source.add(as_tokens(PHRASE), 0, SPACE, 0)
    write_snapshot(path, source.content(), "e" * 64)
    with pytest.raises(SnapshotError, match="is of another tokenizer"):
        warmed(path)
    write_snapshot(path, source.content(), TOKENIZER)
    with pytest.raises(SnapshotError, match="needs a cache_size of at least 11; it is 10"):
        warmed(path, capacity=10)


# -- while requests are served ------------------------------------------------------------------


def test_drafts_are_those_without_or_those_with_the_file(tmp_path: Path) -> None:
    noise = [
        {"prompt": [], "output": [200 + i % 700, 201 + i % 600, 202 + i % 500, 203, 204]}
        for i in range(3000)
    ]
    path = write(tmp_path, [GOOD, *noise])
    drafter = make_drafter(1 << 16)
    warm = Warmup(
        drafter.global_cache, path, make_place(1 << 16), namespace=SPACE, ignore_prompt=False
    )
    while not warm.is_finished:
        assert chain_of(drafter, [9, 40, 41]) in ([], PHRASE[2:9])
        drafter.global_cache.add(as_tokens([7, 8, 9]), 0, SPACE, 0)
    assert chain_of(drafter, [9, 40, 41]) == PHRASE[2:9]
    assert warm.num_records == 3001 and warm.problem is None


def _endless(_: Any, **__: Any) -> Iterator[WarmupRecord]:
    while True:
        yield WarmupRecord(1, GOOD)


def read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends neither with the file nor once the cache is full."""
    monkeypatch.setattr(warmup, "read_records", _endless)
    monkeypatch.setattr(warmup, "MOST_IN_A_ROW", 10**12)


def test_a_load_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_for_ever(monkeypatch)
    drafter, path = make_drafter(), str(tmp_path / "a")
    store = Store(drafter.global_cache, make_place())
    store.warm_up(write(tmp_path, [GOOD]), namespace=SPACE, ignore_prompt=False)
    assert store.metrics()["lookahead_warmup_is_over"] == 0
    store.save(path)
    store.load(path)
    assert store.metrics()["lookahead_warmup_is_over"] == 1
    assert drafter.global_cache.num_tokens == 0


def test_a_save_before_its_end_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_for_ever(monkeypatch)
    store = Store(make_drafter().global_cache, make_place())
    store.warm_up(write(tmp_path, [GOOD]), namespace=SPACE, ignore_prompt=False)
    store.save(str(tmp_path / "a"))
    assert "saved without the warm-up file" in caplog.text


def test_it_ends_with_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_for_ever(monkeypatch)
    drafter = make_drafter()
    history = weakref.ref(drafter.global_cache)
    path, place = write(tmp_path, [GOOD]), make_place()
    warm = Warmup(drafter.global_cache, path, place, namespace=SPACE, ignore_prompt=False)
    del drafter
    gc.collect()
    assert history() is None and warm.is_finished


def test_our_own_mistakes_do_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(_: Any, **__: Any) -> Iterator[WarmupRecord]:
        yield WarmupRecord(1, GOOD)
        raise ZeroDivisionError

    monkeypatch.setattr(warmup, "read_records", wrong)
    drafter, _ = warmed(write(tmp_path, [GOOD]))
    assert "the rest is left out" in caplog.text and "ZeroDivisionError" in caplog.text
    assert chain_of(drafter, [9, 40, 41]) in ([], PHRASE[2:9])


# -- reading ------------------------------------------------------------------------------------

_values = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.lists(st.integers(-5, 10**6), max_size=5) | st.text(max_size=8) | st.none(),
        max_size=2,
    ),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(_values, st.sampled_from([1, 3, 16, 1 << 20]), st.sampled_from([0, 4, 1024]), st.booleans())
def test_records_do_not_depend_on_the_chunks(
    values: list[Any], chunk: int, margin: int, indented: bool
) -> None:
    text = json.dumps(values, indent=1 if indented else None, ensure_ascii=False)
    read = partial(read_records, chunk=chunk, margin=max(margin, 16))
    records = list(read(io.StringIO(text)))
    assert [(value, problem) for _, value, problem in records] == [(v, None) for v in values]
    lines = "\n".join(json.dumps(value) for value in values)
    assert list(read(io.StringIO(lines))) == [
        WarmupRecord(line, value) for line, value in enumerate(values, 1)
    ]
    if indented and values:
        rows = text.split("\n")
        assert all(rows[line - 1].startswith(" {") for line, _, _ in records)
