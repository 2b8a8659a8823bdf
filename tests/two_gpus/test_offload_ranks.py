"""Prefix offload on two GPUs: tokens as without it, whatever is evicted, aborted or fails on one of
them; and wrong bytes in one rank's host memory are seen."""

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
from hetero_llm.engine.builders import build_ranks
from hetero_llm.engine.engine import Engine
from tests.gpu.scenarios.serving import generate, regrets
from tests.helpers import offload_traffic as traffic
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

GPU_BLOCKS, HOST_BLOCKS = 40, 150
BLOCK_BYTES = 2 * 2 * 2 * 64 * 16 * 4  # K and V, layers, KV heads, their size, tokens, float32
TIES = 1e-4
DEATH_SECONDS = 5.0
SEEDS = range(3)
MIXED: dict[str, dict[str, Any]] = {
    "all leave": {"apc_offload_gpu_evictor_limit": 0},
    "not lazy": {"apc_offload_gpu_evictor_limit": 8, "apc_offload_not_lazy": True},
    "written through": {"apc_offload_write_policy": "write_through"},
    "pinned behind": {"apc_offload_gpu_evictor_limit": 0, "apc_offload_background_pin": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and heads of 64, as the kernels take them."""
    changes = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
        "max_position_embeddings": 512, "num_hidden_layers": 2,
    }  # fmt: skip
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tp") / "llama", "llama", changes=changes)


def start(folder: Path, **given: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32", "device": "cuda", "block_size": 16, "max_num_seqs": 8,
        "max_model_len": 400, "max_num_batched_tokens": 128, "skip_tokenizer_init": True,
        "disable_log_stats": True, "gpu_memory_utilization": 0.3,
    }  # fmt: skip
    return LLM(str(folder), **{**defaults, **given})


@contextmanager
def two_ranks(folder: Path, *, at_once: bool = True, **given: Any) -> Iterator[LLM]:
    """Few blocks on the GPUs, so that most prompts' blocks leave; sequences run as soon as their
    loads have begun."""
    defaults = {
        "tensor_parallel_size": 2, "num_gpu_blocks_override": GPU_BLOCKS,
        "enable_prefix_cache_offload": True, "apc_offload_background_pin": False,
        "cpu_prefill_memory_utilization": traffic.share_for(HOST_BLOCKS * BLOCK_BYTES),
    }  # fmt: skip
    with start(folder, **{**defaults, **given}) as llm:
        if at_once:
            traffic.join_at_once(llm.engine)
            traffic.load_always(llm.engine)
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, dict[str, list[int]]]:
    """Tokens of each traffic on two ranks without host memory and with room for everything."""
    with start(
        folder, tensor_parallel_size=2, num_gpu_blocks_override=640, batch_invariant=True
    ) as llm:
        return {
            seed: traffic.serve(llm.engine, traffic.traffic(seed), aborts=False) for seed in SEEDS
        }


def compare(engine: Engine, expected: dict[int, dict[str, list[int]]]) -> int:
    compared = 0
    for seed, plain in expected.items():
        jobs = traffic.traffic(seed)
        compared += traffic.check_same(jobs, traffic.serve(engine, jobs), plain)
    return compared


@pytest.mark.parametrize("case", MIXED)
def test_random_traffic_has_the_same_tokens(
    folder: Path, expected: dict[int, dict[str, list[int]]], case: str
) -> None:
    given = {"batch_invariant": True, **MIXED[case]}
    with two_ranks(folder, at_once=case != "written through", **given) as llm:
        assert compare(llm.engine, expected) > 300
        traffic.check_over(llm.engine)
        metrics = llm.metrics()
        for name in ("kv_offload_loads", "kv_offload_stores", "kv_offload_host_evictions"):
            assert metrics[name] > 0, name
        assert not metrics["kv_offload_failed_loads"] and not metrics["kv_offload_broken"]


@pytest.mark.parametrize(
    "given",
    [{}, {"enforce_eager": True}, {"disable_custom_all_reduce": True},
     {"use_lookahead": True, "num_speculative_tokens": 5}],
    ids=["graphs", "eager", "nccl", "drafts"],
)  # fmt: skip
def test_steps_that_wait_draw_what_the_reference_draws(folder: Path, given: dict[str, Any]) -> None:
    """Their sums depend on the batch, so float32 logits of transformers judge every token."""
    with two_ranks(folder, apc_offload_gpu_evictor_limit=0, **given) as llm:
        rng = np.random.default_rng(40)
        heads = [rng.integers(3, VOCAB_SIZE, 240).tolist() for _ in range(4)]
        for turn in range(5):
            prompts = [head + rng.integers(3, VOCAB_SIZE, 3 + 9 * turn).tolist() for head in heads]
            params = [
                SamplingParams(
                    temperature=float(i % 2), seed=i, max_tokens=24, ignore_eos=True,
                    detokenize=False,
                )
                for i in range(len(prompts))
            ]  # fmt: skip
            for _ in range(2):  # drafts know the second one's tokens
                outputs = generate(llm, prompts, params)
                assert float(regrets(outputs, params, folder).max()) < TIES
        metrics = llm.metrics()
        assert metrics["kv_offload_loads"] > 8
        assert "use_lookahead" not in given or metrics["spec_decode_num_accepted_tokens"] > 50
        traffic.check_over(llm.engine)


def test_failing_copies_change_no_token(
    folder: Path, expected: dict[int, dict[str, list[int]]]
) -> None:
    """Some loads bring other blocks on both ranks and are reported as failed, as are stores."""
    with two_ranks(folder, batch_invariant=True, apc_offload_gpu_evictor_limit=0) as llm:
        copier = traffic.spoil(llm.engine, 1, 0.3)
        compare(llm.engine, expected)
        traffic.check_over(llm.engine)
        assert copier.spoiled["loads"] > 3 and copier.spoiled["stores"] > 3
        assert llm.metrics()["kv_offload_failed_loads"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_bytes_in_one_rank_are_seen(
    folder: Path,
    expected: dict[int, dict[str, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
) -> None:
    """The negative control: loads of one rank bring other blocks than those asked for."""
    monkeypatch.setattr(build_ranks, "MODULE", "tests.helpers.offload_rank")
    monkeypatch.setenv("OFFLOAD_RANK_FAULT", "poison" if rank == 1 else "")
    with two_ranks(folder, batch_invariant=True, apc_offload_gpu_evictor_limit=0) as llm:
        if rank == 0:
            copier = traffic.tier_of(llm.engine).copier
            assert isinstance(copier, RanksCopier)
            load = copier.own.load

            def wrong(order: TransferOrder) -> None:
                others = (order.host_blocks + 1) % copier.num_host_blocks
                load(replace(order, host_blocks=others))

            copier.own.load = wrong  # type: ignore[method-assign]
        with pytest.raises(traffic.WrongTokens):
            compare(llm.engine, expected)


def test_the_death_of_a_rank_beside_loads_ends_the_engine(folder: Path) -> None:
    rng = np.random.default_rng(41)
    prompts = rng.integers(3, VOCAB_SIZE, (6, 300)).tolist()
    params = replace(traffic.GREEDY, max_tokens=4)
    begun = []
    with two_ranks(folder, apc_offload_gpu_evictor_limit=0) as llm:
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
                    generate(llm, prompts, [params] * len(prompts))
            assert time.monotonic() - begun[0] < DEATH_SECONDS
        finally:
            timer.join()
    assert psutil.wait_procs([rank], 5)[1] == []
