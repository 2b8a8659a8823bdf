"""bench/timeline.py: what it computes out of spans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.timeline import chrome_trace, draw, overlap, spans_of

VERIFY = np.array([[0.0, 4.0], [5.0, 9.0], [10.0, 14.0]])


def test_overlap_is_the_shared_part_of_the_drafts_time() -> None:
    assert overlap(np.array([[1.0, 2.0], [6.0, 7.0]]), VERIFY) == 1.0
    assert overlap(np.array([[4.0, 5.0]]), VERIFY) == 0.0
    # One that begins in a step, lasts through the gap and ends in the next step.
    assert overlap(np.array([[3.0, 6.0]]), VERIFY) == pytest.approx(2 / 3)
    assert overlap(np.array([[-1.0, 15.0]]), VERIFY) == pytest.approx(12 / 16)
    # Steps that a span ends in count for the next span, too.
    assert overlap(np.array([[3.0, 5.5, 8], [5.5, 8.0, 4]]), VERIFY) == pytest.approx(4 / 5)


def test_a_trace_holds_all_spans(tmp_path: Path) -> None:
    draft = np.array([[1.0, 2.0, 3], [6.0, 7.5, 8]])
    trace = json.loads(json.dumps(chrome_trace(draft, VERIFY)))
    found_draft, found_verify = spans_of(trace)
    assert found_draft == pytest.approx(draft[:, :2])
    assert found_verify == pytest.approx(VERIFY)
    rows = [event["args"]["rows"] for event in trace["traceEvents"] if event["name"] == "draft"]
    assert rows == [3, 8]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "timeline.png", np.array([[5.001, 5.002]]), VERIFY, "a title")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
