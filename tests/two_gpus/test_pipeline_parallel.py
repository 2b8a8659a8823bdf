"""Two stages on two GPUs: the tokens of one GPU, steps of both at the same time, and what the death
of a stage does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_llm import LLM
from tests.two_gpus.engines import (
    ADAPTERS,
    SMALL,
    Expected,
    check_death,
    run,
    run_adapted,
    run_mixed,
)


class TestGraphs:
    @pytest.fixture(scope="class")
    def llm(self, folder: Path, expected: Expected) -> Iterator[LLM]:
        with LLM(str(folder), **SMALL, **ADAPTERS, pipeline_parallel_size=2) as llm:
            yield llm

    def test_tokens_of_one_gpu(self, llm: LLM, expected: Expected) -> None:
        assert run(llm) == expected.requests
        assert run(llm) == expected.requests, "with cached prefixes"
        metrics = llm.metrics()
        assert metrics["num_steps_ahead"] > metrics["num_steps"] // 3

    def test_many_steps_with_random_prompts(self, llm: LLM, expected: Expected) -> None:
        assert run_mixed(llm) == expected.mixed

    def test_adapters_and_grammars(self, llm: LLM, expected: Expected) -> None:
        assert run_adapted(llm, expected.adapters) == expected.adapted

    def test_a_killed_stage_ends_the_engine(self, llm: LLM) -> None:
        check_death(llm, signal.SIGKILL)


class TestEagerSteps:
    @pytest.fixture(scope="class")
    def llm(self, folder: Path, expected: Expected) -> Iterator[LLM]:
        with LLM(str(folder), **SMALL, enforce_eager=True, pipeline_parallel_size=2) as llm:
            yield llm

    def test_tokens_of_one_gpu(self, llm: LLM, expected: Expected) -> None:
        assert run(llm) == expected.requests

    def test_a_stopped_stage_ends_the_engine(self, llm: LLM) -> None:
        check_death(llm, signal.SIGSTOP)
