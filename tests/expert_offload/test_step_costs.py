"""Seconds of steps with experts on the host."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.expert_offload.step_costs import with_host_experts
from hetero_llm.spec_decode.budget import choose, verify_times

PROFILE = [(1, 0.010), (2, 0.010), (4, 0.011), (6, 0.012), (8, 0.013), (16, 0.014)]


def test_exchanges_are_added() -> None:
    found = with_host_experts(PROFILE, {4: 1e-3, 8: 3e-3}, num_layers=10, streamed_seconds=4e-3)
    assert [size for size, _ in found] == [1, 2, 4, 6, 8, 16]
    expected = [0.015, 0.015, 0.021, 0.032, 0.043, 0.054]
    assert [seconds for _, seconds in found] == pytest.approx(expected)


def kept(profile: list[tuple[int, float]]) -> int:
    """Nodes of a draft of 15 likely ones that the budget keeps for one sequence."""
    times = verify_times(profile)
    nodes = np.zeros(1, np.int64)
    probs = (0.7 ** np.arange(1, 16, dtype=np.float32))[None].astype(np.float32)
    choose(
        probs, np.array([15]), np.ones(1, np.float32), times.table(), times.sizes,
        1, 0.0, 0.0, 64, nodes,
    )  # fmt: skip
    return int(nodes[0])


def test_the_budget_plans_fewer_nodes() -> None:
    costly = with_host_experts(PROFILE, {1: 1e-3, 16: 16e-3}, num_layers=10, streamed_seconds=20e-3)
    assert kept(costly) < kept(PROFILE)
