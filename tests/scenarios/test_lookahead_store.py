"""The lookahead cache's files through `LLM`: they change how fast tokens come, never which, and
what is wrong with one does not stop an engine."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import LLM, ConfigError, SamplingParams, SnapshotError
from hetero_llm.config.lookahead_config import FILE_NAME
from hetero_llm.core.step_times import StepTimes
from hetero_llm.cpu import native
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.spec_decode.proposal_account import ProposalAccount

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = [heldout_prompts().prompts[5 * i, :60].tolist() for i in range(3)]

pytestmark = pytest.mark.skipif(native.load() is None, reason="float32 as exact as the native one")


def start(**engine_args: Any) -> LLM:
    return LLM("demo", device="cpu", dtype="float32", max_model_len=256, **engine_args)


def served(llm: LLM) -> tuple[list[list[int]], int]:
    """The tokens, and the steps that they took."""
    before = llm.metrics()["num_steps"]
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    steps = int(llm.metrics()["num_steps"] - before)
    return [output.outputs[0].token_ids for output in outputs], steps


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps cost nothing that the budget knows of, so that all drafts are verified."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(ProposalAccount, "set_step_times", lambda *_: None)


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list[list[int]], int]]:
    with start() as llm:
        yield served(llm)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an engine that has served the prompts."""
    path = tmp_path_factory.mktemp("store") / "cache.snapshot"
    with start(use_lookahead=True) as llm:
        served(llm)
        llm.save_lookahead_cache(path)
    return str(path)


def configured(folder: Path, warmup_file: str) -> dict[str, str]:
    (folder / FILE_NAME).write_text(json.dumps({"warmup_file": warmup_file}))
    return {"lookahead_cache_config_dir": str(folder)}


def warm(llm: LLM) -> LLM:
    """Waits for the end of the thread that reads the warm-up file."""
    for thread in threading.enumerate():
        if thread.name == "hetero-warmup":
            thread.join()
    return llm


def test_a_cache_goes_on_in_another_engine(plain: Any, snapshot: str, tmp_path: Path) -> None:
    tokens, steps = plain
    with start(use_lookahead=True) as llm:
        cold, cold_steps = served(llm)
        held = llm.metrics()["lookahead_cache_tokens"]
        assert held > 100
        llm.load_lookahead_cache(snapshot)
        loaded = llm.metrics()
        warmed, warm_steps = served(llm)
    assert cold == warmed == tokens
    assert warm_steps < 0.5 * cold_steps and cold_steps <= steps
    assert loaded["lookahead_cache_tokens"] == held
    assert loaded["lookahead_cache_documents"] >= 3 and loaded["lookahead_cache_bytes"] > 1000
    assert "lookahead_warmup_records" not in loaded


@pytest.mark.parametrize("form", ["snapshot", "json"])
def test_a_warmup_file(plain: Any, snapshot: str, tmp_path: Path, form: str) -> None:
    tokens, steps = plain
    if form == "json":
        snapshot = str(tmp_path / "warm.json")
        records = [{"prompt": p, "output": o} for p, o in zip(PROMPTS, tokens)]
        Path(snapshot).write_text(json.dumps(records))
    with start(**configured(tmp_path, snapshot)) as llm:
        assert served(llm)[0] == tokens, "whether it has been read or not"
        assert served(warm(llm))[0] == tokens
        llm.reset_prefix_cache()
        again, warm_steps = served(llm)
        metrics = llm.metrics()
    assert again == tokens and warm_steps < 0.5 * steps
    assert metrics["lookahead_warmup_is_over"] == 1
    assert metrics["lookahead_warmup_records"] >= 3
    assert metrics["lookahead_warmup_records_left_out"] == 0
    assert metrics["lookahead_warmup_tokens"] > 100


def test_damage_is_told_and_serving_goes_on(
    plain: Any, snapshot: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = Path(snapshot).read_bytes()
    good = json.dumps({"prompt": PROMPTS[0], "output": plain[0][0]})
    cases = (
        (content[:-3], "is damaged", 1),
        (f'{good}\n{{"prompt": [], "output": [999999]}}\n', "line 2: token id 999999", 1),
    )
    for number, (bad, reason, left_out) in enumerate(cases):
        caplog.clear()
        file = tmp_path / f"bad{number}"
        file.write_bytes(bad.encode() if isinstance(bad, str) else bad)
        with (
            caplog.at_level(logging.WARNING, logger="hetero_llm"),
            start(**configured(tmp_path, str(file))) as llm,
        ):
            assert served(warm(llm))[0] == plain[0]
            assert llm.metrics()["lookahead_warmup_records_left_out"] == left_out
        told = [r.message for r in caplog.records if r.message.startswith("warm-up file")]
        assert len(told) == 1 and str(file) in told[0] and reason in told[0]


def test_a_wrong_snapshot_changes_nothing(plain: Any, snapshot: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(Path(snapshot).read_bytes()[:-3])
    with start(use_lookahead=True) as llm:
        served(llm)
        before = llm.metrics()["lookahead_cache_tokens"]
        for path in (bad, tmp_path / "nowhere"):
            with pytest.raises(SnapshotError, match=str(path)):
                llm.load_lookahead_cache(path)
        with pytest.raises(SnapshotError, match="cannot be written"):
            llm.save_lookahead_cache(tmp_path / "nowhere" / "a")
        assert llm.metrics()["lookahead_cache_tokens"] == before
        assert served(llm)[0] == plain[0]


def test_files_that_are_refused_at_start(snapshot: str, tmp_path: Path) -> None:
    other = tmp_path / "other.snapshot"
    content = bytearray(Path(snapshot).read_bytes())
    place = content.index(b'"tokenizer":"') + 13
    content[place] = ord("0") if content[place] != ord("0") else ord("1")
    other.write_bytes(content)
    for name, reason in (("gone.json", "No such file"), (str(other), "is of another tokenizer")):
        with pytest.raises(ConfigError, match=reason) as caught:
            start(**configured(tmp_path, name))
        assert "warmup_file" in caught.value.field
    inline = {"method": "lookahead", "warmup_file": snapshot, "cache_size": 20}
    with pytest.raises(ConfigError, match="needs a cache_size of at least") as caught:
        start(speculative_config=inline)
    assert caught.value.field == "warmup_file"


def test_an_engine_without_the_cache(tmp_path: Path) -> None:
    for engine_args in (
        {},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 3,
         "ngram_prompt_lookup_max": 3},
    ):  # fmt: skip
        with start(**engine_args) as llm:
            for call in (llm.save_lookahead_cache, llm.load_lookahead_cache):
                with pytest.raises(ConfigError, match="has no lookahead cache"):
                    call(tmp_path / "a")
            assert not any(name.startswith("lookahead_") for name in llm.metrics())


def test_salts_stay_apart(plain: Any, tmp_path: Path) -> None:
    """Also through a file: what was learned under one salt helps requests of that salt alone."""
    path = tmp_path / "salted"
    salted = [{"prompt_token_ids": ids, "cache_salt": "mine"} for ids in PROMPTS]
    params = replace(GREEDY, max_tokens=32)
    with start(use_lookahead=True) as llm:
        llm.generate(salted, params, use_tqdm=False)
        llm.save_lookahead_cache(path)
    steps = [0.0]
    with start(use_lookahead=True) as llm:
        llm.load_lookahead_cache(path)
        for prompts in ([{"prompt_token_ids": ids} for ids in PROMPTS], salted):
            llm.generate(prompts, params, use_tqdm=False)
            steps.append(llm.metrics()["num_steps"])
    assert steps[2] - steps[1] < 0.6 * steps[1]
