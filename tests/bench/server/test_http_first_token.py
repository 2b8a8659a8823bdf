"""bench/server/http_first_token.py: what is sent, what is counted, and what comes out of it."""

from __future__ import annotations

import pytest

from bench.server.http_first_token import First, Stream, in_turns, summary
from tests.server.fake_engine import CONTEXT, FakeEngine, demo_tokenizer
from tests.server.serving import serving


def test_a_stream_over_one_connection() -> None:
    engine = FakeEngine(demo_tokenizer())
    with serving(engine) as served:
        stream = Stream("127.0.0.1", served.port)
        try:
            for ids in ([5, 6, 7], [8, 9]):
                first = stream.first(ids)
                assert first.total > 0 and first.engine >= 0
            with pytest.raises(RuntimeError, match="no stream: b'HTTP/1.1 400 "):
                stream.first([5] * CONTEXT)
        finally:
            stream.close()
    assert [prompt.token_ids for _, prompt, _ in engine.seen] == [[5, 6, 7], [8, 9]]
    params = engine.seen[0][2]
    assert params.max_tokens == 8 and params.greedy and params.ignore_eos


def test_the_kinds_take_turns() -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def kind(name: str):
        def ask(ids: list[int]) -> First:
            asked.append((name, tuple(ids)))
            return First(float(len(asked)), 0.0)

        return ask

    found = in_turns({"a": kind("a"), "b": kind("b")}, rounds=2, vocab=1000, length=16)
    names = "".join(name for name, _ in asked)
    assert names == "bbaa" + "aabb" + "bbaa" + "aabb" + "bbaa"
    assert len({ids for _, ids in asked}) == len(asked)
    # Three rounds to warm up; of each pair the second one counts.
    assert {name: [one.total for one in firsts] for name, firsts in found.items()} == {
        "a": [14.0, 20.0],
        "b": [16.0, 18.0],
    }


def test_what_http_adds() -> None:
    http = [First(25.0, 22.0), First(26.0, 22.5), First(25.5, 22.0), First(40.0, 23.0)]
    alone = [First(22.5, 21.5), First(22.0, 21.0), First(23.0, 22.5), First(23.5, 22.0)]
    row = summary({"http": http, "offline": alone})
    assert row["http"] == 25.75 and row["offline"] == 22.75 and row["http adds"] == 3.0
    assert (row["http half 1"], row["http half 2"]) == (25.5, 32.75)
    assert row["http engine"] == 22.25 and row["offline engine"] == 21.75
    assert row["adds outside of the engine"] == 3.5 - 1.0
