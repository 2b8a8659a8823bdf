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
    DRAFTS,
    SMALL,
    Expected,
    check_death,
    run,
    run_adapted,
    run_mixed,
)


@pytest.fixture(scope="class")
def graphs(folder: Path, expected: Expected) -> Iterator[LLM]:
    with LLM(str(folder), **SMALL, **ADAPTERS, pipeline_parallel_size=2) as llm:
        yield llm


class TestGraphs:
    def test_tokens_of_one_gpu(self, graphs: LLM, expected: Expected) -> None:
        assert run(graphs) == expected.requests
        assert run(graphs) == expected.requests, "with cached prefixes"
        metrics = graphs.metrics()
        assert metrics["num_steps_ahead"] > metrics["num_steps"] // 3

    def test_many_steps_with_random_prompts(self, graphs: LLM, expected: Expected) -> None:
        assert run_mixed(graphs) == expected.mixed

    def test_adapters_and_grammars(self, graphs: LLM, expected: Expected) -> None:
        assert run_adapted(graphs, expected.adapters) == expected.adapted

    def test_a_killed_stage_ends_the_engine(self, graphs: LLM) -> None:
        check_death(graphs, signal.SIGKILL)


@pytest.fixture(scope="class")
def drafts(folder: Path, expected: Expected) -> Iterator[LLM]:
    """Trees that the last stage verifies, in graphs."""
    with LLM(str(folder), **SMALL, **DRAFTS, pipeline_parallel_size=2) as llm:
        yield llm


class TestDrafts:
    def test_tokens_of_one_gpu(self, drafts: LLM, expected: Expected) -> None:
        for _ in range(2):
            assert run(drafts) == expected.requests
            assert run_mixed(drafts) == expected.mixed
        assert drafts.metrics()["spec_decode_num_accepted_tokens"] > 0


@pytest.fixture(scope="class")
def eager(folder: Path, expected: Expected) -> Iterator[LLM]:
    options = {"enforce_eager": True, "pipeline_parallel_size": 2}
    with LLM(str(folder), **SMALL, **DRAFTS, **options) as llm:
        yield llm


class TestEagerSteps:
    def test_tokens_of_one_gpu(self, eager: LLM, expected: Expected) -> None:
        assert run(eager) == expected.requests

    def test_a_stopped_stage_ends_the_engine(self, eager: LLM) -> None:
        check_death(eager, signal.SIGSTOP)
