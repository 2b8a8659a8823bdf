"""The bench of experts on a CPU: what a step reads, and its table."""

from __future__ import annotations

import pytest

from bench.kernels import cpu_experts
from bench.speculation.draft_step import Work
from hetero_llm.cpu import native

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")


def test_bytes_of_a_step() -> None:
    config = cpu_experts.make_config("qwen1.5-moe-a2.7b", 2)
    expert, shared, attention = 3 * 2048 * 1408, 3 * 2048 * 5632, 4 * 2048 * 128
    outside = 2 * (2 * 2048 * 60) + 2 * 2048 * 512
    for experts, weight_bytes in ((4, 2.0), (10.5, 1.0)):
        layer = (attention + experts * expert + shared) * weight_bytes
        assert cpu_experts.step_bytes(config, experts, weight_bytes) == 2 * layer + outside


def test_table() -> None:
    config = cpu_experts.make_config("tiny", 2)
    works = [Work("batch", rows, 16) for rows in (1, 6)]
    bench = cpu_experts.Bench(config, [1, 6])
    table = cpu_experts.measure(bench, works, ["bf16", "int4"], 1, rounds=1, round_s=0.0)
    assert [(row["weights"], row["rows"]) for row in table] == [
        ("bf16", 1), ("bf16", 6), ("int4", 1), ("int4", 6),
    ]  # fmt: skip
    for row in table:
        assert row["experts"] == 2 if row["rows"] == 1 else 2 < row["experts"] <= 8
        assert row["ours_ms"] > 0 and row["torch_ms"] > 0
        assert row["gb_s"] / row["read_gb_s"] == pytest.approx(row["of_read"])
