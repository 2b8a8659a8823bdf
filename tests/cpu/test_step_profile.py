"""What steps cost on this CPU, measured before the first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_llm import LLM
from hetero_llm.cpu import native
from tests.models.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C++ compiler")

LOOKAHEAD = {"method": "lookahead"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama", "heads_of_16")


def start(folder: Path, **engine_args: object) -> LLM:
    return LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, cpu_threads=1,
        **engine_args,
    )  # fmt: skip


def test_the_drafter_knows_what_steps_cost(folder: Path) -> None:
    with start(folder, speculative_config=LOOKAHEAD, num_gpu_blocks_override=64) as llm:
        engine = llm.engine
        profile = engine.runner.profile
        assert [rows for rows, _ in profile] == [*range(1, 9), *range(16, 65, 8)]
        assert all(0 < seconds < 1 for _, seconds in profile)
        times = engine.scheduler.drafter.step_times
        assert times.predict(8) == pytest.approx(dict(profile)[8])
        # The places that the measuring wrote to are anybody's.
        assert llm.metrics()["kv_cache_usage_perc"] == 0.0


def test_no_larger_step_than_the_cache_holds(folder: Path) -> None:
    with start(
        folder, speculative_config=LOOKAHEAD, num_gpu_blocks_override=3, max_model_len=48
    ) as llm:
        profile = llm.engine.runner.profile
        assert [rows for rows, _ in profile][-1] == 32


def test_nothing_is_measured_without_drafts(folder: Path) -> None:
    with start(folder) as llm:
        assert llm.engine.runner.profile == []
