"""An engine whose layers two GPUs share: tokens of one GPU, and what the death of a rank does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_llm import LLM
from tests.two_gpus.engines import DRAFTS, SMALL, Expected, check_death, run, run_long, run_mixed


class TestGraphs:
    """Steps in graphs, those with drafts and those of up to 2,048 prompt tokens included."""

    @pytest.fixture(scope="class")
    def llm(self, folder: Path, expected: Expected) -> Iterator[LLM]:
        options = {**SMALL, "max_num_batched_tokens": 2176}
        with LLM(str(folder), **options, **DRAFTS, tensor_parallel_size=2) as llm:
            yield llm

    def test_tokens_of_one_gpu(self, llm: LLM, expected: Expected) -> None:
        assert run(llm) == expected.requests
        assert run(llm) == expected.requests, "with cached prefixes"
        assert llm.metrics()["spec_decode_num_accepted_tokens"] > 0

    def test_prompts_whose_steps_are_captured(self, llm: LLM, expected: Expected) -> None:
        assert run_long(llm) == expected.long

    def test_many_steps(self, llm: LLM, expected: Expected) -> None:
        assert run_mixed(llm) == expected.mixed

    def test_a_killed_rank_ends_the_engine(self, llm: LLM) -> None:
        check_death(llm, signal.SIGKILL)


class TestNccl:
    """Where GPUs do not map each other's memory."""

    @pytest.fixture(scope="class")
    def llm(self, folder: Path, expected: Expected) -> Iterator[LLM]:
        options = {"disable_custom_all_reduce": True, "tensor_parallel_size": 2}
        with LLM(str(folder), **SMALL, **options) as llm:
            yield llm

    def test_tokens_of_one_gpu(self, llm: LLM, expected: Expected) -> None:
        assert run(llm) == expected.requests

    def test_a_stopped_rank_ends_the_engine(self, llm: LLM) -> None:
        check_death(llm, signal.SIGSTOP)


class TestEagerSteps:
    """Without graphs, some weights in host memory."""

    @pytest.fixture(scope="class")
    def llm(self, folder: Path, expected: Expected) -> Iterator[LLM]:
        options = {"enforce_eager": True, "cpu_offload_gb": 0.001, "tensor_parallel_size": 2}
        with LLM(str(folder), **SMALL, **options) as llm:
            yield llm

    def test_tokens_of_one_gpu(self, llm: LLM, expected: Expected) -> None:
        assert run(llm) == expected.requests

    def test_a_stopped_rank_ends_the_engine(self, llm: LLM) -> None:
        check_death(llm, signal.SIGSTOP)
