"""Guided requests through captured graphs: plain steps launched ahead, and draft trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.speculation.synthetic_drafter import SyntheticDrafter
from tests.gpu.test_model_runner_engine_steps import Work, guided_work, run, start
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_tiny_checkpoint(folder, "llama", "heads_of_16", layers=2)


def many(count: int) -> Work:
    """More requests than run at once, so that slots change hands beside launched steps."""
    return [work for _ in range(count) for work in guided_work()]


def test_steps_launched_ahead_replay_graphs(checkpoint: Path, device: torch.device) -> None:
    expected = run(start(checkpoint, device, ours=False)[0], many(4))
    engine, scheduler = start(checkpoint, device, ours=True, graphs=True, most_looks=1 << 22)
    for _ in range(5):
        assert run(engine, many(4)) == expected
        engine.reset_prefix_cache()
    scheduler.check_integrity()


def test_guided_trees_replay_graphs(checkpoint: Path, device: torch.device) -> None:
    work = [guided_work()[i] for i in (0, 2, 3, 6)]
    expected = run(start(checkpoint, device, ours=False)[0], work)
    record = {tuple(ids): expected[str(i)][0][0] for i, (ids, _) in enumerate(work)}
    drafter = SyntheticDrafter(record, right=2, nodes=4, vocab_size=VOCAB_SIZE)
    engine, scheduler = start(
        checkpoint, device, ours=True, drafter=drafter, graphs=True, most_looks=1 << 22
    )
    assert run(engine, work) == expected
    scheduler.check_integrity()
    assert scheduler.stats.num_accepted_tokens >= 4


def test_forced_tokens_replay_graphs_without_a_drafter(
    checkpoint: Path, device: torch.device
) -> None:
    expected = run(start(checkpoint, device, ours=False)[0], many(4))
    engine, scheduler = start(
        checkpoint, device, ours=True, graphs=True, most_looks=1 << 22, forced=16
    )
    for _ in range(3):
        assert run(engine, many(4)) == expected
        engine.reset_prefix_cache()
    scheduler.check_integrity()
    assert scheduler.stats.num_accepted_tokens >= 4
