"""What cannot be combined with ranks is refused before any process starts."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hetero_llm import LLM
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.parallel_config import ParallelConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.promotion import Promotion
from hetero_llm.distributed.rank_processes import NoRanks
from hetero_llm.distributed.rank_share import ALONE_SHARE
from hetero_llm.distributed.value_codec import ValueCodec, types_within
from hetero_llm.engine.builders.build_ranks import (
    EngineRanks,
    RankSettings,
    check_parallel,
    check_sequence_ranks,
    for_ranks,
    join_ranks,
    read_settings,
    start_ranks,
)
from hetero_llm.engine.resolve import limit_steps
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.sequence_parallel import LEAST_TOKENS
from hetero_llm.utils import topology
from tests.models.tiny_images import make_tiny_vision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(**given: Any) -> EngineConfig:
    return EngineConfig.from_args(
        resolve_engine_args({"model": "m", "tensor_parallel_size": 2, **given})
    )


def test_ipex_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(config(cpu_backend="ipex"), CPU)
    assert str(caught.value) == (
        "cpu_backend='ipex': cannot be combined with tensor_parallel_size (2) yet: leave one of "
        "them out"
    )
    check_parallel(config(cpu_backend="ipex", tensor_parallel_size=1), CPU)


def test_native_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cpu_weight_dtype='int8': needs the native backend"):
        check_parallel(config(cpu_weight_dtype="int8"), CPU)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError) as caught:
        check_parallel(config(), GPU)
    assert str(caught.value) == (
        "tensor_parallel_size=2: needs as many GPUs, and this process sees 1"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_parallel(config(), GPU)


def shared(**given: Any) -> EngineConfig:
    return config(**{"tensor_parallel_size": 1, "sequence_parallel_size": 2, **given})


def test_ranks_that_share_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(shared(cpu_offload_gb=1.0), CPU)
    reason = "cannot be combined with sequence_parallel_size (2) yet: leave one of them out"
    assert str(caught.value) == f"cpu_offload_gb=1.0: {reason}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    check_parallel(shared(), GPU)
    with pytest.raises(ConfigError, match="^sequence_parallel_size=4: needs as many GPUs, .* 3$"):
        check_parallel(shared(sequence_parallel_size=4), GPU)
    with pytest.raises(ConfigError) as caught:
        check_parallel(shared(tensor_parallel_size=2), GPU)
    both = "4 (tensor_parallel_size=2 times sequence_parallel_size=2)"
    assert str(caught.value) == (
        f"tensor_parallel_size=2: needs {both} GPUs, and this process sees 3"
    )


def test_steps_too_short_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device, kind in ((CPU, "cpu"), (GPU, "cuda")):
        least = LEAST_TOKENS[kind]
        check_parallel(shared(max_num_batched_tokens=least, max_num_seqs=8), device)
        few = least - 1
        with pytest.raises(ConfigError, match=rf"^max_num_batched_tokens={few}: .*fewer than"):
            check_parallel(shared(max_num_batched_tokens=few, max_num_seqs=8), device)
        check_parallel(config(max_num_batched_tokens=few, max_num_seqs=8), device)


def test_models_with_images_do_not_share_tokens(tiny_folder: Path, tmp_path: Path) -> None:
    two = ParallelConfig(sequence_parallel_size=2)
    check_sequence_ranks(load_model_config(tiny_folder), two)
    images = load_model_config(make_tiny_vision(tmp_path / "images", "llava"))
    check_sequence_ranks(images, ParallelConfig(2))
    with pytest.raises(ConfigError, match=r"^sequence_parallel_size=2: .* takes images, which are"):
        check_sequence_ranks(images, two)


def test_each_rank_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topology, "compute_cpus", lambda reserve: tuple(range(8)))
    with caplog.at_level(logging.INFO):
        assert for_ranks(config(), CPU).cpu.threads == 4
        assert for_ranks(config(tensor_parallel_size=16), CPU).cpu.threads == 1
        assert for_ranks(config(sequence_parallel_size=2), CPU).cpu.threads == 2
    assert len(caplog.messages) == 3 and "torch serves" in caplog.text
    found = for_ranks(config(cpu_threads=6, cpu_backend="torch"), CPU)
    assert (found.cpu.threads, found.cpu.backend) == (3, "torch")
    for same, device in ((config(), GPU), (config(tensor_parallel_size=1), CPU)):
        assert for_ranks(same, device) is same


def test_settings_as_bytes() -> None:
    made = config(use_lookahead=True, num_speculative_tokens=4, hf_overrides={"a": 1})
    settings = RankSettings(
        made,
        limit_steps(made, 128, "cpu", serving=False),
        "float32",
        "cpu",
        64,
        True,
        2,
        20,
        "text",
    )
    data = ValueCodec(*types_within(RankSettings)).write(settings)
    assert read_settings(data) == settings


def test_one_rank_starts_nothing(tmp_path: Path) -> None:
    alone = config(tensor_parallel_size=1)
    before = psutil.Process().children()
    processes = start_ranks(alone, CPU)
    ranks = join_ranks(
        processes, alone, folder=tmp_path, scheduler=limit_steps(alone, 8, "cpu", serving=False),
        dtype=torch.float32, device=CPU, row_bytes=64, most_drafted_tokens=0,
    )  # fmt: skip
    assert isinstance(processes, NoRanks) and psutil.Process().children() == before
    assert ranks.share.collectives.rank.size == ranks.share.agreement.size == 1
    runner: Any = object()
    ranks.wait_loaded()
    assert ranks.parallel(runner) is runner
    experts: Any = SimpleNamespace(moves=SimpleNamespace(announce=None))
    ranks.share_experts(experts)
    assert experts.moves.announce is None


def test_promotions_are_announced() -> None:
    announced: list[np.ndarray] = []
    processes: Any = SimpleNamespace(promote=announced.append)
    experts: Any = SimpleNamespace(moves=SimpleNamespace(announce=None))
    EngineRanks(processes, ALONE_SHARE).share_experts(experts)
    experts.moves.announce((Promotion(1, 2, 3, (0, 4)),))
    assert [rows.tolist() for rows in announced] == [[[1, 2, 3, 0, 4]]]


def test_a_model_that_cannot_be_cut_is_refused_before_any_process_starts(
    tiny_folder: Path,
) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="^tensor_parallel_size=3: "):
        LLM(str(tiny_folder), device="cpu", dtype="float32", tensor_parallel_size=3)
    assert psutil.Process().children() == before
