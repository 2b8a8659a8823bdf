"""An engine whose layers two GPUs share: tokens of one GPU, and what the death of a rank does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_llm import LLM
from tests.two_gpus.engines import DRAFTS, SMALL, Expected, check_death, run, run_long, run_mixed


@pytest.fixture(scope="class")
def graphs(folder: Path, expected: Expected) -> Iterator[LLM]:
    """Steps in graphs, those with drafts and those of up to 2,048 prompt tokens included."""
    options = {**SMALL, "max_num_batched_tokens": 2176}
    with LLM(str(folder), **options, **DRAFTS, tensor_parallel_size=2) as llm:
        yield llm


class TestGraphs:
    def test_tokens_of_one_gpu(self, graphs: LLM, expected: Expected) -> None:
        assert run(graphs) == expected.requests
        assert run(graphs) == expected.requests, "with cached prefixes"
        assert graphs.metrics()["spec_decode_num_accepted_tokens"] > 0

    def test_prompts_whose_steps_are_captured(self, graphs: LLM, expected: Expected) -> None:
        assert run_long(graphs) == expected.long

    def test_many_steps(self, graphs: LLM, expected: Expected) -> None:
        assert run_mixed(graphs) == expected.mixed

    def test_a_killed_rank_ends_the_engine(self, graphs: LLM) -> None:
        check_death(graphs, signal.SIGKILL)


@pytest.fixture(scope="class")
def nccl(folder: Path, expected: Expected) -> Iterator[LLM]:
    """Where GPUs do not map each other's memory."""
    options = {"disable_custom_all_reduce": True, "tensor_parallel_size": 2}
    with LLM(str(folder), **SMALL, **options) as llm:
        yield llm


class TestNccl:
    def test_tokens_of_one_gpu(self, nccl: LLM, expected: Expected) -> None:
        assert run(nccl) == expected.requests

    def test_a_stopped_rank_ends_the_engine(self, nccl: LLM) -> None:
        check_death(nccl, signal.SIGSTOP)


@pytest.fixture(scope="class")
def eager(folder: Path, expected: Expected) -> Iterator[LLM]:
    """Without graphs, some weights in host memory."""
    options = {"enforce_eager": True, "cpu_offload_gb": 0.001, "tensor_parallel_size": 2}
    with LLM(str(folder), **SMALL, **options) as llm:
        yield llm


class TestEagerSteps:
    def test_tokens_of_one_gpu(self, eager: LLM, expected: Expected) -> None:
        assert run(eager) == expected.requests

    def test_a_stopped_rank_ends_the_engine(self, eager: LLM) -> None:
        check_death(eager, signal.SIGSTOP)
