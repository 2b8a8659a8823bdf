"""The engine as the factory builds it, with pool, native copier and layer-ready flags, on a driver
that is played on host memory: the manual's example to the letter, and tokens as without offload."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.bridge.kv_offload.copier import NativeCopier
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.engine.builders.build_host_tier import HostPlatform
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from tests.bridge.kv_offload.conftest import FakeCuda, fake, fake_cuda_library  # noqa: F401
from tests.helpers import offload_traffic as traffic
from tests.helpers.polled_gates import PolledGates


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traffic.tiny_folder(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def compute(fake: FakeCuda) -> Iterator[int]:  # noqa: F811
    """The stream of the steps; on a CPU they are over when they are launched."""
    stream = fake.new_stream()
    yield stream
    fake.destroy_stream(stream)


def start(
    folder: Path, driver: FakeCuda, compute: int, gates: PolledGates, **engine_args: Any
) -> Engine:
    torch.set_num_threads(1)
    given = {
        "model": str(folder), "device": "cpu", "cpu_backend": "torch", "dtype": "float32",
        "skip_tokenizer_init": True, "max_num_seqs": 4, "block_size": 16, "max_model_len": 176,
        "max_num_batched_tokens": 176, "num_gpu_blocks_override": 100, "disable_log_stats": True,
        "enable_prefix_cache_offload": True, "apc_offload_enable_hit_cnt": True,
        "apc_offload_background_pin": False,
        "cpu_prefill_memory_utilization": traffic.share_for(8 << 20),
    }  # fmt: skip
    config = EngineConfig.from_args(resolve_engine_args(given | engine_args))
    platform = HostPlatform(driver.path, lambda: compute, lambda: gates)
    return build_engine(config, show_progress=False, platform=platform).engine


def test_the_manuals_example(
    folder: Path,
    fake: FakeCuda,  # noqa: F811
    compute: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "hetero_llm")
    # Whether a load pays is judged by measured rates, which a busy machine turns around.
    monkeypatch.setattr(NativeCopier, "load_rate", lambda self: 1e12)
    engine = start(folder, fake, compute, PolledGates())
    seen = []
    for number, prompt in enumerate(traffic.golden_prompts()):
        job = traffic.Job(str(number), prompt, traffic.GREEDY, 0)
        seen.append(traffic.serve(engine, [job])[job.name])
        traffic.rest(engine)
    assert seen[0] == seen[-1]
    traffic.check_over(engine)
    engine.shut_down()
    lines = [r.getMessage() for r in caplog.records if "[HIT CNT]" in r.getMessage()]
    assert len(lines) == 2 and lines[0].startswith("[HIT CNT] total: 110, ")
    assert lines[-1] == traffic.GOLDEN


@pytest.mark.parametrize(
    ("spoiled", "model_impl"), [(0.0, "native"), (0.3, "native"), (0.0, "transformers")]
)
def test_tokens_are_those_without_host_memory(
    folder: Path,
    fake: FakeCuda,  # noqa: F811
    compute: int,
    spoiled: float,
    model_impl: str,
) -> None:
    """Prompts of a few heads, over and over, with and without failing copies."""
    rng = np.random.default_rng(6)
    heads = rng.integers(3, traffic.VOCAB_SIZE, (5, 96)).tolist()
    jobs = [
        traffic.Job(f"{turn}-{i}", head + rng.integers(3, traffic.VOCAB_SIZE, 5).tolist(),
                    traffic.GREEDY, 3 * (5 * turn + i))
        for turn in range(4) for i, head in enumerate(heads)
    ]  # fmt: skip
    args = {
        "batch_invariant": True, "num_gpu_blocks_override": 16, "max_model_len": 128,
        "model_impl": model_impl,
    }  # fmt: skip
    gates = PolledGates()
    engine = start(folder, fake, compute, gates, apc_offload_gpu_evictor_limit=0, **args)
    traffic.join_at_once(engine)
    traffic.load_always(engine)
    if spoiled:
        traffic.spoil(engine, 0, spoiled)
    plain = start(
        folder, fake, compute, gates, enable_prefix_cache_offload=False,
        apc_offload_enable_hit_cnt=False, apc_offload_background_pin=True,
        cpu_prefill_memory_utilization=0.3, **args,
    )  # fmt: skip
    expected = traffic.serve(plain, jobs, aborts=False)

    def serve_round(_: int) -> int:
        compared = traffic.check_same(jobs, traffic.serve(engine, jobs), expected)
        assert compared == len(jobs)
        return compared

    failures = 1 if spoiled else 0
    traffic.repeat_until(
        engine, serve_round, kv_offload_loads=4, kv_offload_failed_loads=failures,
        kv_offload_failed_stores=failures,
    )  # fmt: skip
    traffic.check_over(engine)
    engine.shut_down()
