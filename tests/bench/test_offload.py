"""bench/offload.py and its parts: what they compute, and that a wrong tier is no result."""

from __future__ import annotations

import argparse
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import offload, offload_plot, offload_trace, offload_ttft
from bench.offload_engines import (
    BLOCK,
    Engines,
    Ids,
    SeenStep,
    Settings,
    StepWatch,
    Tally,
    WrongTier,
    plain_intervals,
    summary,
    tally_of,
)

FULL = {
    "prefix_blocks_gpu": 0.0, "prefix_blocks_cpu": 0.0, "prefix_blocks_total": 0.0,
    "prefix_cache_hits": 0.0, "kv_offload_bytes_h2d": 0.0, "kv_offload_bytes_d2h": 0.0,
    "kv_offload_failed_loads": 0.0, "kv_offload_dropped_stores": 0.0,
}  # fmt: skip


def tally(**grown: int) -> Tally:
    after = FULL | {
        {"cpu": "prefix_blocks_cpu", "gpu": "prefix_blocks_gpu", "h2d": "kv_offload_bytes_h2d",
         "failed": "kv_offload_failed_loads",
         "cached": "prefix_cache_hits"}[name]: value for name, value in grown.items()
    }  # fmt: skip
    return tally_of(FULL, after, offload=True)


def test_a_hit_in_host_memory_is_every_block_once() -> None:
    tally(cpu=4, h2d=400).expect_host(4, 4, 100)
    for wrong in (
        tally(cpu=3, h2d=300),
        tally(cpu=4, h2d=500),
        tally(cpu=4, h2d=400, gpu=1),
        tally(cpu=4, h2d=400, failed=1),
    ):
        with pytest.raises(WrongTier):
            wrong.expect_host(4, 4, 100)


def test_other_tiers() -> None:
    tally(cached=64).expect_device(64)
    tally().expect_nothing()
    with pytest.raises(WrongTier):
        tally(cached=64, cpu=1).expect_device(64)
    for wrong in (tally(cached=16), tally(cpu=1), tally(h2d=1)):
        with pytest.raises(WrongTier):
            wrong.expect_nothing()


def test_an_engine_with_offload_has_to_count() -> None:
    assert tally_of({}, {"prefix_cache_hits": 5}, offload=False).cached_tokens == 5
    with pytest.raises(WrongTier, match="kv_offload_bytes_h2d"):
        tally_of({}, {"prefix_cache_hits": 5}, offload=True)


def test_prompts_are_distinct_and_the_same_again() -> None:
    settings = Settings("tiny", seed=4)
    drawn = [tuple(settings.ids("ttft").draw(40)), tuple(settings.ids("busy").draw(40))]
    assert len(set(drawn)) == 2 and drawn[0] == tuple(settings.ids("ttft").draw(40))
    assert tuple(Settings("tiny", seed=5).ids("ttft").draw(40)) != drawn[0]
    assert min(min(p) for p in drawn) >= 3 and max(max(p) for p in drawn) < 512


def test_goals() -> None:
    assert offload_ttft.goal_ms(38.6, 39.4) == pytest.approx(39.4 + 38.6 / 32 + 3)
    assert offload_ttft.goal_ms(77, 10) == pytest.approx(77 + 10 / 32 + 3)
    assert summary([1.0, 2.0, 30.0], "ms") == {
        "ms_p50": 2.0, "ms_p99": pytest.approx(float(np.percentile([1, 2, 30], 99))),
    }  # fmt: skip
    loaded = {"blocking": [20.0, 22.0], "not_lazy": [10.0, 10.0], "lazy": [11.0, 11.0]}
    row = offload_ttft.row_of((4096, 0), 9.7, 6.0, 100.0, loaded)
    assert (row["suffix"], row["goal"], row["vllm"]) == ("resent", 13.0, 19.1)
    assert row["lazy/not_lazy"] == pytest.approx(1.1)
    row = offload_ttft.row_of((4096, 256), 9.7, 6.0, 100.0, loaded)
    assert row["goal"] == row["bound"] == pytest.approx(9.7 + 6 / 32 + 3)
    assert row["lazy/blocking"] == pytest.approx(11 / 21) and row["vllm"] == "-"


def test_steps_of_decoding_rows_alone() -> None:
    steps = [
        SeenStep(1.0, False, False),
        SeenStep(1.5, False, False),
        SeenStep(9.0, True, False),
        SeenStep(9.25, False, False),
        SeenStep(20.0, False, True),
    ]
    assert plain_intervals(steps) == [0.5, 0.25]


def test_a_watch_passes_everything_on() -> None:
    class Runner:
        kind = "fake"

        def launch(self, step: Any) -> str:
            return f"launched {step.name}"

        def finish(self, pending: str) -> str:
            return f"finished {pending}"

    def step(chunks: bool, loads: tuple[int, ...]) -> Any:
        return SimpleNamespace(name="s", has_chunks=chunks, kv_loads=loads)

    watch = StepWatch(Runner())
    assert watch.kind == "fake"
    assert watch.finish(watch.launch(step(False, ()))) == "finished launched s"
    watch.begin()
    for one in (step(False, ()), step(True, ()), step(False, (1,))):
        watch.finish(watch.launch(one))
    assert watch.num_plain == 1
    assert [(s.has_chunks, s.has_loads) for s in watch.end()] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip


def test_a_trace_is_three_times_the_cache() -> None:
    tokens = 4 * offload_trace.conversation_tokens()
    talks = offload_trace.plan_trace(tokens, Ids(500, 0))
    assert len(talks) == 12
    assert all(len(t.messages) == offload_trace.TURNS - 1 for t in talks)
    assert len({tuple(t.text) for t in talks}) == 12


class FakeEngine:
    """Answers every request after two steps."""

    def __init__(self) -> None:
        self.active: deque[list[Any]] = deque()
        self.prompts: list[list[int]] = []
        self.most = 0

    def add_request(self, request: Any) -> None:
        self.active.append([2, request])
        self.prompts.append(list(request.prompt))
        self.most = max(self.most, len(self.active))

    def step(self) -> list[Any]:
        done = []
        for entry in list(self.active):
            entry[0] -= 1
            if not entry[0]:
                self.active.remove(entry)
                entry[1].metrics.first_token_time = 1e9
                done.append(
                    SimpleNamespace(
                        finished=True, request_id=entry[1].request_id,
                        outputs=[SimpleNamespace(token_ids=[7, 8])],
                    )
                )  # fmt: skip
        return done


def test_every_turn_is_the_text_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, names = FakeEngine(), iter(range(100))

    def request(prompt: list[int], tokens: int) -> Any:
        metrics = SimpleNamespace(first_token_time=None)
        return SimpleNamespace(request_id=str(next(names)), prompt=prompt, metrics=metrics)

    found = Tally(0, 0, 0, 48, 0, 0, 0, 0)
    served: Any = SimpleNamespace(
        engine=engine, request=request, counters=dict, since=lambda before: found
    )
    monkeypatch.setattr(offload_trace, "ANSWER", 2)
    monkeypatch.setattr(offload_trace, "AT_ONCE", 3)
    talks = [offload_trace.Conversation([i] * 30, deque([[50 + i] * 5])) for i in range(4)]
    row = offload_trace.run_trace(served, talks)
    assert row["requests"] == 8 and engine.most == 3
    assert sorted(engine.prompts) == sorted(
        [[i] * 30 for i in range(4)] + [[i] * 30 + [7, 8] + [50 + i] * 5 for i in range(4)]
    )
    blocks = 4 * 2 + 4 * 3  # of 31 and of 38 tokens
    assert row["gpu"] == pytest.approx(48 / BLOCK / blocks)
    assert row["hits"].startswith(f"[HIT CNT] total: {blocks}, gpu: 3 (15.00%) cpu: 0 (0.00%)")


def arguments(tmp_path: Path, parts: str, budget: float = 1e9) -> argparse.Namespace:
    return argparse.Namespace(parts=offload.part_list(parts), budget=budget, out=str(tmp_path))


def test_parts_are_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[set[str]] = []

    class NoEngines(Engines):
        def close(self, *, but: Any = frozenset()) -> None:
            closed.append(set(but))

    def measure(engines: Engines, settings: Settings) -> dict[str, Any]:
        return {"rows": [{"ms": 1.0}]}

    def wrong(engines: Engines, settings: Settings) -> dict[str, Any]:
        raise WrongTier("of the GPU")

    parts = {
        "pool": offload._part(wrong, 10),
        "ttft": offload._part(measure, 10, "off", "lazy"),
        "busy": offload._part(measure, 10, "lazy"),
        "trace": offload._part(measure, 1000, "off"),
    }
    monkeypatch.setattr(offload, "PARTS", parts)
    settings = Settings("tiny")
    args = arguments(tmp_path, "trace,busy,pool,ttft", budget=500)
    assert offload.run_parts(NoEngines(settings), settings, args) == ["pool", "trace"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["offload.busy.json", "offload.ttft.json"]
    written = json.loads((tmp_path / "offload.ttft.json").read_text())
    assert written["part"] == "ttft" and written["rows"] == [{"ms": 1.0}] and written["commit"]
    out, err = capsys.readouterr()
    assert "== trace: left out" in out and "WrongTier: of the GPU" in err
    assert closed == [{"off", "lazy"}, set(), {"off", "lazy"}, {"off", "lazy"}, {"off"}]
    assert offload.expected_seconds("ttft", {"off"}) == 10 + offload.START_SECONDS


def test_an_unknown_part() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'tftt': one of pool, ttft"):
        offload.part_list("tftt")


def test_memory_is_touched() -> None:
    assert offload_trace.touch(1 << 20) > 0


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    loaded = {"blocking": [20.0], "not_lazy": [10.0], "lazy": [11.0]}
    rows = [
        offload_ttft.row_of((prefix, suffix), 9.0, 6.0, 100.0, loaded)
        for prefix in (16384, 4096)
        for suffix in (256, 0)
    ]
    results = {"rows": rows, "model": "a model", "gpu": "a GPU"}
    curves = offload_plot.curves(results)
    assert curves["lazy_p50"] == [(4096, 11.0), (16384, 11.0)]
    assert curves["vllm"] == [(4096, 19.1), (16384, 51.8)]
    pytest.importorskip("matplotlib")
    offload_plot.draw(tmp_path / "a.png", results)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
