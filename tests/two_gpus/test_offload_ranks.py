"""Prefix offload on two GPUs that share layers: the tokens that the reference draws, whatever is
evicted, aborted or fails on one of them; and wrong bytes in one rank's host memory are seen.

Sums depend on the batch, so float32 logits of transformers judge every token. Which blocks leave,
failures of rank 1 and its wrong bytes are tested on CPUs (`tests/scenarios/test_offload_ranks.py`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hetero_llm import LLM, EngineDeadError, SamplingParams
from hetero_llm.bridge.kv_offload.rank_copies import RanksCopier
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.engine.engine import Engine
from tests.gpu.scenarios.serving import TIES, generate, regrets, regrets_of
from tests.helpers import offload_traffic as traffic
from tests.models.tiny import VOCAB_SIZE
from tests.two_gpus.engines import DEATH_SECONDS, DRAFTS

GPU_BLOCKS, HOST_BLOCKS = 40, 150
BLOCK_BYTES = 2 * 3 * 2 * 64 * 16 * 4  # K and V, layers, KV heads, their size, tokens, float32
SEEDS = range(3)


@contextmanager
def start(folder: Path, **given: Any) -> Iterator[LLM]:
    """Few blocks on the GPUs, so that most prompts' blocks leave; sequences run as soon as their
    loads have begun."""
    options: dict[str, Any] = {
        "dtype": "float32", "device": "cuda", "block_size": 16, "max_num_seqs": 8,
        "max_model_len": 400, "max_num_batched_tokens": 128, "skip_tokenizer_init": True,
        "disable_log_stats": True, "gpu_memory_utilization": 0.3, "tensor_parallel_size": 2,
        "num_gpu_blocks_override": GPU_BLOCKS, "enable_prefix_cache_offload": True,
        "apc_offload_background_pin": False, "apc_offload_gpu_evictor_limit": 0,
        "cpu_prefill_memory_utilization": traffic.share_for(HOST_BLOCKS * BLOCK_BYTES),
    }  # fmt: skip
    with LLM(str(folder), **options, **given) as llm:
        traffic.join_at_once(llm.engine)
        traffic.load_always(llm.engine)
        yield llm


def judge(engine: Engine, folder: Path) -> int:
    """Serves random traffic; returns the number of its tokens.

    Raises:
        WrongTokens: the reference draws another token.
    """
    count = 0
    for seed in SEEDS:
        jobs = traffic.traffic(seed)
        found = traffic.serve(engine, jobs)
        for job in jobs:
            tokens, params = found[job.name], job.params
            if not tokens:
                continue
            noise = (params.temperature, params.seed) if params.temperature else (0.0, None)
            worst = float(regrets_of(tuple(job.prompt), tuple(tokens), *noise, folder).max())
            if worst > TIES:
                raise traffic.WrongTokens(f"{job.name}: a token is {worst:.4f} below the best")
            count += len(tokens)
    return count


def serve_turns(llm: LLM, folder: Path) -> None:
    """Prompts that go on behind the same heads, again and again."""
    rng = np.random.default_rng(40)
    heads = [rng.integers(3, VOCAB_SIZE, 240).tolist() for _ in range(4)]
    for turn in range(5):
        prompts = [head + rng.integers(3, VOCAB_SIZE, 3 + 9 * turn).tolist() for head in heads]
        params = [
            SamplingParams(
                temperature=float(i % 2), seed=i, max_tokens=24, ignore_eos=True, detokenize=False
            )
            for i in range(len(prompts))
        ]
        for _ in range(2):
            outputs = generate(llm, prompts, params)
            assert float(regrets(outputs, params, folder).max()) < TIES
    assert llm.metrics()["kv_offload_loads"] > 8
    traffic.check_over(llm.engine)


@pytest.fixture(scope="class")
def graphs(folder: Path) -> Iterator[LLM]:
    """Steps in graphs, those with drafts and those that wait for loads included."""
    with start(folder, **DRAFTS) as llm:
        yield llm


class TestGraphs:
    def test_random_traffic(self, graphs: LLM, folder: Path) -> None:
        assert judge(graphs.engine, folder) > 300
        traffic.check_over(graphs.engine)
        metrics = graphs.metrics()
        for name in ("kv_offload_loads", "kv_offload_stores", "kv_offload_host_evictions"):
            assert metrics[name] > 0, name
        assert not metrics["kv_offload_failed_loads"] and not metrics["kv_offload_broken"]

    def test_steps_that_wait(self, graphs: LLM, folder: Path) -> None:
        serve_turns(graphs, folder)
        assert graphs.metrics()["spec_decode_num_accepted_tokens"] > 20

    def test_failing_copies_change_no_token(self, graphs: LLM, folder: Path) -> None:
        """Some loads bring other blocks on both ranks and are reported as failed, as are stores."""
        tier = traffic.tier_of(graphs.engine)
        copier = traffic.spoil(graphs.engine, 1, 0.3)
        judge(graphs.engine, folder)
        traffic.check_over(graphs.engine)
        tier.copier = tier.copier.inner
        assert copier.spoiled["loads"] > 3 and copier.spoiled["stores"] > 3
        assert graphs.metrics()["kv_offload_failed_loads"] > 0

    def test_wrong_bytes_in_one_rank_are_seen(self, graphs: LLM, folder: Path) -> None:
        """The negative control: loads of rank 0 bring other blocks than those asked for."""
        copier = traffic.tier_of(graphs.engine).copier
        assert isinstance(copier, RanksCopier)
        load = copier.own.load

        def wrong(order: TransferOrder) -> None:
            others = (order.host_blocks + 1) % copier.num_host_blocks
            load(replace(order, host_blocks=others))

        copier.own.load = wrong  # type: ignore[method-assign]
        with pytest.raises(traffic.WrongTokens):
            judge(graphs.engine, folder)

    def test_the_death_of_a_rank_beside_loads_ends_the_engine(self, graphs: LLM) -> None:
        rng = np.random.default_rng(41)
        prompts = rng.integers(3, VOCAB_SIZE, (6, 300)).tolist()
        params = replace(traffic.GREEDY, max_tokens=4)
        begun = []
        (rank,) = (
            one for one in psutil.Process().children() if "rank_process" in " ".join(one.cmdline())
        )

        def end_it() -> None:
            begun.append(time.monotonic())
            os.kill(rank.pid, signal.SIGKILL)

        timer = threading.Timer(1.0, end_it)
        timer.start()
        try:
            with pytest.raises(EngineDeadError, match=r"rank 1|did not come to it"):
                while True:
                    generate(graphs, prompts, [params] * len(prompts))
            assert time.monotonic() - begun[0] < DEATH_SECONDS
        finally:
            timer.join()
        assert psutil.wait_procs([rank], 5)[1] == []


def test_steps_that_wait_through_nccl(folder: Path) -> None:
    """Without graphs."""
    with start(folder, disable_custom_all_reduce=True) as llm:
        serve_turns(llm, folder)
