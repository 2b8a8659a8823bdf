"""Prefix offload of a model that two processes run: each has its part of every block in its own
host memory, on a driver that is played there. Tokens are those of one process without offload.

The processes share layers, are stages with layers of their own, or share the tokens of long
prompts, and each has all of every block then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.engine.builders import build_ranks
from hetero_llm.engine.builders.build_host_tier import HostPlatform
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from tests.bridge.kv_offload.conftest import FakeCuda, fake, fake_cuda_library  # noqa: F401
from tests.helpers import offload_traffic as traffic
from tests.helpers.polled_gates import PolledGates

pytestmark = pytest.mark.usefixtures("forked_engines")

TIGHT: dict[str, Any] = {
    "device": "cpu", "cpu_backend": "torch", "dtype": "float32", "skip_tokenizer_init": True,
    "max_num_seqs": 4, "block_size": 16, "max_model_len": 400, "max_num_batched_tokens": 96,
    "disable_log_stats": True,
}  # fmt: skip
OFFLOAD: dict[str, Any] = {
    "enable_prefix_cache_offload": True, "apc_offload_background_pin": False,
    "apc_offload_gpu_evictor_limit": 4, "tensor_parallel_size": 2, "num_gpu_blocks_override": 40,
}  # fmt: skip

STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
SHARED_TOKENS = {"tensor_parallel_size": 1, "sequence_parallel_size": 2}
DRAFTS = {"use_lookahead": True, "num_speculative_tokens": 4}
HOST_BLOCKS = 60
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, their size, tokens, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traffic.tiny_folder(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def compute(fake: FakeCuda) -> Iterator[int]:  # noqa: F811
    stream = fake.new_stream()
    yield stream
    fake.destroy_stream(stream)


def config_of(folder: Path, **given: Any) -> EngineConfig:
    return EngineConfig.from_args(resolve_engine_args({"model": str(folder), **TIGHT, **given}))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    torch.set_num_threads(1)
    config = config_of(folder, num_gpu_blocks_override=400)
    return build_engine(config, show_progress=False).engine


@pytest.fixture
def start(
    folder: Path,
    fake: FakeCuda,  # noqa: F811
    compute: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    monkeypatch.setattr(build_ranks, "MODULE", "tests.helpers.offload_rank")
    monkeypatch.setenv("OFFLOAD_RANK_DRIVER", fake.path)
    started: list[Engine] = []

    def begin(fault: str = "", **given: Any) -> Engine:
        monkeypatch.setenv("OFFLOAD_RANK_FAULT", fault)
        copies = given.get("sequence_parallel_size", 1)
        share = traffic.share_for(copies * HOST_BLOCKS * BLOCK_BYTES)
        config = config_of(folder, cpu_prefill_memory_utilization=share, **{**OFFLOAD, **given})
        platform = HostPlatform(fake.path, lambda: compute, PolledGates)
        engine = build_engine(config, show_progress=False, platform=platform).engine
        started.append(engine)
        traffic.join_at_once(engine)
        traffic.load_always(engine)
        return engine

    yield begin
    for engine in started:
        engine.shut_down()


def compare(engine: Engine, plain: Engine, seed: int, count: int = 16) -> int:
    jobs = traffic.traffic(seed, count)
    expected = traffic.serve(plain, jobs, aborts=False)
    return traffic.check_same(jobs, traffic.serve(engine, jobs), expected)


def compare_until(engine: Engine, plain: Engine, **wanted: int) -> int:
    """Compares rounds of traffic until the metrics are as large as wanted. Every other round
    repeats the one before it, whose blocks have been stored by then. Returns the number of tokens
    compared in all rounds."""
    return traffic.repeat_until(
        engine, lambda turn: compare(engine, plain, seed=2 + turn // 2), **wanted
    )


@pytest.mark.parametrize("ranks", [{}, STAGES, SHARED_TOKENS], ids=["layers", "stages", "tokens"])
def test_tokens_are_those_of_one_process(start: Any, plain: Engine, ranks: dict[str, Any]) -> None:
    """With drafts of the lookahead cache; the same traffic again, so that some are accepted."""
    engine = start(**DRAFTS, **ranks)
    tokens = compare_until(
        engine, plain, kv_offload_loads=4, kv_offload_stores=4, kv_offload_host_evictions=1,
        spec_decode_num_accepted_tokens=11,
    )  # fmt: skip
    assert tokens > 150
    traffic.check_over(engine)
    metrics = engine.metrics()
    assert not metrics["kv_offload_failed_loads"] and not metrics["kv_offload_broken"]
    # Bytes of both ranks: an aborted load may have brought some of its own.
    stored = metrics["kv_offload_stored_blocks"] * BLOCK_BYTES
    assert metrics["kv_offload_bytes_d2h"] == stored * ranks.get("sequence_parallel_size", 1)


def test_all_is_stored_and_copied_at_once(start: Any, plain: Engine) -> None:
    """Blocks are written through while memory is still being locked, and loads are not lazy."""
    engine = start(
        apc_offload_write_policy="write_through", apc_offload_not_lazy=True,
        apc_offload_background_pin=True,
    )  # fmt: skip
    assert compare_until(engine, plain, kv_offload_loads=1, kv_offload_stores=4) > 150
    traffic.check_over(engine)
    metrics = engine.metrics()
    assert not metrics["kv_offload_failed_loads"] and not metrics["kv_offload_broken"]


@pytest.mark.parametrize("ranks", [{}, STAGES], ids=["layers", "stages"])
def test_what_fails_in_another_rank_changes_no_token(
    start: Any, plain: Engine, ranks: dict[str, Any]
) -> None:
    """Copies of rank 1 fail, and its steps do not wait for loads but say that they gave them up:
    rank 0 drops the tokens of such steps. A failed load that was aborted counts as aborted."""
    engine = start("failures", **ranks)
    compare_until(
        engine, plain, kv_offload_failed_loads=1, kv_offload_failed_stores=1, kv_offload_loads=1
    )
    traffic.check_over(engine)
    assert not engine.metrics()["kv_offload_broken"]


def test_wrong_bytes_in_another_rank_are_seen(start: Any, plain: Engine) -> None:
    """The negative control: loads of rank 1 bring other blocks than those asked for."""
    engine = start("poison")
    with pytest.raises(traffic.WrongTokens):
        for turn in range(traffic.MOST_ROUNDS):
            compare(engine, plain, seed=6 + turn // 2)
            traffic.rest(engine)
