"""Torch runners that share steps sample what one alone does, and end with the same KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_llm.models.collectives import ONE_RANK
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from hetero_llm.runner.sequence_parallel import (
    NO_SEQUENCE_PARALLEL,
    NoSequenceParallel,
    SequenceParallel,
    sequence_parallel,
)
from tests.helpers.rank_threads import ThreadCollectives, ThreadRanks
from tests.helpers.shared_steps import (
    BLOCK_SIZE,
    BLOCKS,
    MAX_LEN,
    SLOTS,
    check_same,
    check_same_cache,
    run_shared,
    steps,
)
from tests.models.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")
FAMILIES = (("llama", 2), ("qwen3_moe", 3), ("gemma2", 2), ("bloom", 3), ("gpt_oss", 2))
"""Rotary embeddings; experts, norms of heads; soft caps and windows; ALiBi; sinks. With as many
ranks."""


def runner_of(
    folder: Path,
    sequence: SequenceParallel | NoSequenceParallel = NO_SEQUENCE_PARALLEL,
    *,
    row_by_row: bool = False,
) -> TorchModelRunner:
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    shape = KVCacheShape(
        config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32
    )
    runner = TorchModelRunner(
        model, config, PagedKVCache(shape, BLOCKS, CPU), max_num_seqs=SLOTS, max_model_len=MAX_LEN,
        device=CPU, batch_invariant=row_by_row,
    )  # fmt: skip
    runner.sequence = sequence
    return runner


@pytest.mark.parametrize(("family", "size"), FAMILIES)
def test_runners_that_share_steps(family: str, size: int, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, layers=2)
    for drafts in (False, True) if family == "llama" else (size > 2,):
        work = steps(drafts=drafts)
        alone = runner_of(folder)
        expected = [alone.finish(alone.launch(step)) for step in work]
        found, caches, gathers = run_shared(
            lambda sequence: runner_of(folder, sequence), work, size
        )
        check_same(found, expected)
        check_same_cache(caches, alone.cache.data)
        shared = 2 if drafts else 3  # of the steps; those of few tokens are not
        assert gathers == shared * (2 + 1), "keys and values of two layers, and hidden states"


def test_token_by_token(tmp_path: Path) -> None:
    """Attention of `batch_invariant`."""
    folder = make_tiny_checkpoint(tmp_path, "llama", layers=2)
    alone = runner_of(folder, row_by_row=True)
    expected = [alone.finish(alone.launch(step)) for step in steps()]
    found, caches, _ = run_shared(
        lambda sequence: runner_of(folder, sequence, row_by_row=True), steps(), 2
    )
    check_same(found, expected)
    check_same_cache(caches, alone.cache.data)


def test_one_rank_shares_nothing() -> None:
    (work, *_) = steps()
    assert sequence_parallel(ONE_RANK, CPU) is NO_SEQUENCE_PARALLEL
    assert NO_SEQUENCE_PARALLEL.part(work, CPU).own is work
    assert NO_SEQUENCE_PARALLEL.split(work) is None


def test_ranks_decide_alike() -> None:
    threads = ThreadRanks(2)
    ranks = [sequence_parallel(ThreadCollectives(threads, index), CPU) for index in range(2)]
    for step in steps():  # none has 64 tokens of chunks
        assert [one.split(step) for one in ranks] == [None, None]
        assert all(one.part(step, CPU).own is step for one in ranks)
