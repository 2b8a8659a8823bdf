"""A mixture whose layers two GPUs share, with experts on the host: tokens of one GPU that has all.

Each rank has its slices of all experts, a bank, a mailbox and threads. Threads and copies are those
of the library and of CUDA, steps are in graphs; `tests/scenarios/test_hybrid_ranks.py` has the same
without devices.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, EngineDeadError
from hetero_llm.gpu.hybrid_experts import HybridExperts
from tests.models.tiny import make_tiny_checkpoint
from tests.two_gpus.engines import (
    DRAFTS,
    GREEDY,
    MODEL,
    SMALL,
    check_death,
    run,
    run_long,
    run_mixed,
)

EXPERTS, LAYERS, INNER = 8, 3, 256
RANKED = {**SMALL, "tensor_parallel_size": 2}
HALF = LAYERS * EXPERTS / 2 * 3 * MODEL["hidden_size"] * INNER / 2 * 4 / (1 << 30)
"""GiB of each GPU that hold half of the experts: of each, half of the inner rows in float32."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {
        **MODEL, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
        "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("hybrid_ranks") / "qwen3_moe"
    return make_tiny_checkpoint(
        path, "qwen3_moe", "full", with_tokenizer=True, layers=LAYERS, changes=changes
    )


@pytest.fixture(scope="module")
def expected(mixture: Path) -> list[Any]:
    """`run`, `run_long` and `run_mixed` on one GPU, without graphs."""
    options = {**SMALL, "max_num_batched_tokens": 2176, "enforce_eager": True}
    with LLM(str(mixture), **options) as llm:
        return [run(llm), run_long(llm), run_mixed(llm)]


@contextmanager
def start(mixture: Path, **given: Any) -> Iterator[tuple[LLM, HybridExperts]]:
    """The engine, and the experts of rank 0."""
    with LLM(str(mixture), **{**RANKED, **given}) as llm:
        yield llm, llm.engine.runner.runner.experts  # type: ignore[attr-defined]


class TestHalf:
    """Half of the experts in the banks, at first; long prompts stream the others."""

    @pytest.fixture(scope="class")
    def half(self, mixture: Path) -> Iterator[tuple[LLM, HybridExperts]]:
        with start(
            mixture, moe_expert_memory=HALF * 1.01, max_num_batched_tokens=2176, **DRAFTS
        ) as opened:
            yield opened

    def test_tokens_of_one_gpu(self, half: tuple[LLM, HybridExperts], expected: list[Any]) -> None:
        llm, experts = half
        assert experts.bank.num_slots == LAYERS * EXPERTS // 2
        assert run(llm) == expected[0]
        assert run(llm) == expected[0], "with cached prefixes"
        assert experts.exchange.state[0] > 0, "steps have asked the threads"

    def test_long_prompts(self, half: tuple[LLM, HybridExperts], expected: list[Any]) -> None:
        assert run_long(half[0]) == expected[1]

    def test_tokens_while_experts_change_places(
        self, half: tuple[LLM, HybridExperts], expected: list[Any]
    ) -> None:
        """Each time other experts are said to be in demand, at random."""
        llm, experts = half
        scores = experts.moves.placement.scores  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(0)
        before = experts.moves.num_promoted
        for _ in range(3):
            shuffled = torch.rand(LAYERS * EXPERTS, generator=generator) * 1e6
            scores.start_from(shuffled.numpy())
            assert run_mixed(llm) == expected[2]
        assert experts.moves.num_promoted > before

    def test_a_killed_rank_ends_the_engine(self, half: tuple[LLM, HybridExperts]) -> None:
        check_death(half[0], signal.SIGKILL)


def test_all_experts_in_the_threads(mixture: Path, expected: list[Any]) -> None:
    """Afterwards the threads of rank 0 stop: the next step ends the engine."""
    with start(mixture, moe_cpu_experts="all") as (llm, experts):
        assert experts.bank.num_slots == 0
        assert run(llm) == expected[0]
        experts.wake.__self__.stop()  # type: ignore[attr-defined]  # the team's
        with pytest.raises((RuntimeError, EngineDeadError), match="compute experts of rank 0 have"):
            llm.generate(["a"], GREEDY, use_tqdm=False)


def test_through_nccl_without_graphs(mixture: Path, expected: list[Any]) -> None:
    options = {"moe_expert_memory": HALF * 1.01, "disable_custom_all_reduce": True}
    with start(mixture, **options) as (llm, _):
        assert run(llm) == expected[0]
