"""Scores of experts on disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_llm.expert_offload.profile import (
    MOST_EXPERTS,
    ProfileError,
    load_or_none,
    load_profile,
    model_fingerprint,
    save_profile,
)

MODEL = model_fingerprint({"hidden_size": 8, "num_experts": 3})
SCORES = np.array([[0, 1.5, 2], [3, 0.25, 7]], np.float32)
SHAPE = (2, 3)


@pytest.fixture
def path(tmp_path: Path) -> str:
    name = str(tmp_path / "scores")
    save_profile(name, SCORES, model=MODEL)
    return name


def test_round_trip(path: str) -> None:
    found = load_profile(path, model=MODEL, shape=SHAPE)
    assert found.dtype == np.float32 and found.flags.writeable and (found == SCORES).all()
    assert os.stat(path).st_mode & 0o077 == 0


def test_a_file_is_replaced_and_nothing_else_stays(path: str) -> None:
    save_profile(path, 2 * SCORES, model=MODEL)
    assert (load_profile(path, model=MODEL, shape=SHAPE) == 2 * SCORES).all()
    assert os.listdir(os.path.dirname(path)) == ["scores"]


def test_a_file_that_cannot_be_written_stays(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match="cannot be written: No space left"):
        save_profile(path, 2 * SCORES, model=MODEL)
    monkeypatch.undo()
    assert (load_profile(path, model=MODEL, shape=SHAPE) == SCORES).all()
    assert os.listdir(os.path.dirname(path)) == ["scores"]
    with pytest.raises(ProfileError, match="cannot be written: No such file"):
        save_profile(path + ".d/scores", SCORES, model=MODEL)


def test_the_fingerprint_is_of_the_values() -> None:
    assert model_fingerprint({"num_experts": 3, "hidden_size": 8}) == MODEL
    assert model_fingerprint({"num_experts": 4, "hidden_size": 8}) != MODEL


def with_header(**changes: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        line, _, data = content.partition(b"\n")
        return json.dumps({**json.loads(line), **changes}).encode() + b"\n" + data

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"", "is no profile"),
        (lambda _: b"\n" * 99, "is no profile"),
        (lambda _: b"[" * 4000 + b"\n", "is no profile"),
        (lambda _: b"x" * 9000 + b"\n", "is no profile"),
        (lambda _: b'{"format": "other"}\n', "is no profile"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "damaged"),
        (lambda content: content[:-4], "damaged"),
        (lambda content: content + b"1234", "damaged"),
        (with_header(version=2), "version 2, and 1 is needed"),
        (with_header(model="f" * 64), "another model \\('ffffffffffff'"),
        (with_header(shape=[3, 2]), "experts\\] \\[3, 2\\], the model has \\[2, 3\\]"),
        (lambda _: bytes(MOST_EXPERTS * 4 + 5000), "larger than 4 MiB"),
    ],
)  # fmt: skip
def test_refusals(
    path: str, change: Callable[[bytes], bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path(path).write_bytes(change(Path(path).read_bytes()))
    with pytest.raises(ProfileError, match=reason):
        load_profile(path, model=MODEL, shape=SHAPE)
    with caplog.at_level(logging.WARNING):
        assert load_or_none(path, model=MODEL, shape=SHAPE) is None
    (line,) = caplog.messages
    assert path in line and "begins without it" in line


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_scores_that_are_none(path: str, value: float) -> None:
    scores = SCORES.copy()
    scores[1, 1] = value
    save_profile(path, scores, model=MODEL)
    if value == np.inf:  # cut off when it is written
        assert load_profile(path, model=MODEL, shape=SHAPE)[1, 1] == 1e9
        return
    with pytest.raises(ProfileError, match="negative or no numbers"):
        load_profile(path, model=MODEL, shape=SHAPE)


def test_no_file_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load_or_none(str(tmp_path / "none"), model=MODEL, shape=SHAPE) is None
    assert "no profile of experts yet" in caplog.text
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        load_profile(str(tmp_path / "none"), model=MODEL, shape=SHAPE)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="is a pipe"):
        load_profile(str(tmp_path / "pipe"), model=MODEL, shape=SHAPE)
