"""How many ranks, and who starts them."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.parallel_config import MAX_RANKS, ParallelConfig, parallel_from_args
from hetero_llm.core.errors import ConfigError


def parallel(**given: Any) -> ParallelConfig:
    return parallel_from_args(resolve_engine_args({"model": "m", **given}))


def test_sizes() -> None:
    assert parallel() == ParallelConfig(1)
    assert parallel(tensor_parallel_size=4).tensor_parallel_size == 4
    assert not parallel(disable_custom_all_reduce=True).peer_memory
    assert parallel(tensor_parallel_size=2, distributed_executor_backend="mp") == ParallelConfig(2)
    assert parallel(distributed_executor_backend="uni") == ParallelConfig(1)
    for size, reason in ((0, "at least 1"), (MAX_RANKS + 1, "at most"), (True, "integer")):
        with pytest.raises(ConfigError, match=f"^tensor_parallel_size={size}: .*{reason}"):
            parallel(tensor_parallel_size=size)


def test_stages() -> None:
    both = parallel(pipeline_parallel_size=3, tensor_parallel_size=2)
    assert both == ParallelConfig(2, pipeline_parallel_size=3)
    assert (both.num_ranks, both.asked_by) == (6, ("tensor_parallel_size", 2))
    alone = parallel(pipeline_parallel_size=3)
    assert (alone.num_ranks, alone.asked_by) == (3, ("pipeline_parallel_size", 3))
    with pytest.raises(
        ConfigError, match=r"^pipeline_parallel_size=9: .*=8 these are 72 processes; 64 at most"
    ):
        parallel(pipeline_parallel_size=9, tensor_parallel_size=8)
    with pytest.raises(ConfigError, match=r"'uni': is one process, and pipeline_parallel_size=2"):
        parallel(pipeline_parallel_size=2, distributed_executor_backend="uni")


def test_ray_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"^distributed_executor_backend='ray': .*one host"):
        parallel(distributed_executor_backend="ray", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="deploy/ray"):
        parallel(distributed_executor_backend="ray")


def test_one_process_is_not_several() -> None:
    with pytest.raises(ConfigError, match=r"^distributed_executor_backend='uni': .*needs as many"):
        parallel(distributed_executor_backend="uni", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="distributed_executor_backend='pigeon'"):
        parallel(distributed_executor_backend="pigeon")


def test_ranks_of_both_kinds() -> None:
    both = parallel(tensor_parallel_size=2, sequence_parallel_size=4)
    assert (both.num_ranks, both.asked_by) == (8, ("tensor_parallel_size", 2))
    tokens = parallel(sequence_parallel_size=4)
    assert (tokens.num_ranks, tokens.asked_by) == (4, ("sequence_parallel_size", 4))
    assert parallel().num_ranks == 1
    for size, reason in ((0, "at least 1"), (MAX_RANKS + 1, "at most"), (1.5, "integer")):
        with pytest.raises(ConfigError, match=f"^sequence_parallel_size={size}: .*{reason}"):
            parallel(sequence_parallel_size=size)
    with pytest.raises(ConfigError) as caught:
        parallel(tensor_parallel_size=16, sequence_parallel_size=8)
    reason = "with tensor_parallel_size=16 these are 128 processes; 64 at most"
    assert str(caught.value) == f"sequence_parallel_size=8: {reason}"
    with pytest.raises(ConfigError, match="'uni': is one process, and sequence_parallel_size=2"):
        parallel(distributed_executor_backend="uni", sequence_parallel_size=2)


def test_stages_do_not_share_tokens_yet() -> None:
    reason = r"^sequence_parallel_size=2: cannot be combined with pipeline_parallel_size \(3\)"
    with pytest.raises(ConfigError, match=reason):
        parallel(sequence_parallel_size=2, pipeline_parallel_size=3)
