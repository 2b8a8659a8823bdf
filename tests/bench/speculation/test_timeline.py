"""bench/speculation/timeline.py: what it computes out of spans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.speculation.timeline import (
    Text,
    chrome_trace,
    draw,
    figures,
    is_used,
    overlap,
    spans_of,
    used_ids,
)
from hetero_llm.core.draft_tree import DraftBatch

VERIFY = np.array([[0.0, 4.0], [5.0, 9.0], [10.0, 14.0]])


def test_overlap_is_the_shared_part_of_the_drafts_time() -> None:
    assert overlap(np.array([[1.0, 2.0], [6.0, 7.0]]), VERIFY) == 1.0
    assert overlap(np.array([[4.0, 5.0]]), VERIFY) == 0.0
    # One that begins in a step, lasts through the gap and ends in the next step.
    assert overlap(np.array([[3.0, 6.0]]), VERIFY) == pytest.approx(2 / 3)
    assert overlap(np.array([[-1.0, 15.0]]), VERIFY) == pytest.approx(12 / 16)
    assert overlap(np.zeros((0, 2)), VERIFY) == 0.0
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


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_nodes_of_drafts_are_found_in_the_workers_tree() -> None:
    # Rows of a tree replica: id, parent's row, token, kind.
    nodes = np.array([[3, -1, 50, 0], [4, -1, 60, 0], [7, 0, 50, 0], [9, 2, 80, 0]], np.int32)
    drafts = DraftBatch(numbers(4), numbers(50, 50, 70, 80), numbers(-1, 0, -1, 1))
    below_strange = DraftBatch(numbers(2), numbers(70, 80), numbers(-1, 0))
    other = DraftBatch(numbers(1), numbers(60), numbers(-1))
    used = used_ids([(5, nodes, drafts), (5, nodes, below_strange), (6, nodes, other)])
    assert used == {5: {3, 7, 9}, 6: {4}}


def test_a_step_is_used_if_one_of_its_nodes_is() -> None:
    used = {5: {3, 9}, 6: {4}}
    steps = np.array(
        [[0, 1, 1, 5, 1, 3], [1, 2, 8, 5, 4, 8], [2, 3, 8, 6, 4, 4], [3, 4, 8, 7, 1, 9],
         [4, 5, 1, -1, 0, -1]], np.float64,
    )  # fmt: skip
    assert is_used(steps, used).tolist() == [True, False, True, False, False]
    assert len(is_used(steps[:0], used)) == 0


def test_figures_of_texts() -> None:
    text = Text(
        np.array([[1.0, 3, 4, 5, 1, 2], [3, 5, 8, 5, 3, 3], [6, 7, 6, 5, 4, 6]]),
        VERIFY, np.array([True, False, True]),
    )  # fmt: skip
    found = figures([text, text], {5: {2, 3}})
    # Used are the first two, of 4 seconds together, of which one lies in a gap.
    assert found["overlap"] == pytest.approx(3 / 4)
    assert found["overlap, all"] == pytest.approx(4 / 5)
    assert found["used"] == pytest.approx(2 / 3)
    assert found["worker busy"] == pytest.approx(5 / 14)
    assert found["device busy"] == pytest.approx(12 / 14)
    assert (found["verify steps"], found["plain steps"], found["draft steps"]) == (4, 2, 6)
    assert found["rows of a draft step"] == 6.0
    assert found["gap p50 ms"] == pytest.approx(1e3)
    assert figures([text], {})["overlap"] == 0.0
