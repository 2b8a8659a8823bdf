"""What users get back."""

from __future__ import annotations

from hetero_llm.core.outputs import RequestMetrics, RequestOutput


def test_times_by_vllms_names() -> None:
    metrics = RequestMetrics(10.0)
    assert metrics.queued_ts == 10.0
    assert metrics.time_in_queue is metrics.first_token_latency is metrics.scheduled_ts is None
    metrics.first_scheduled_time, metrics.first_token_time = 10.5, 12.0
    metrics.last_token_time = 13.0
    assert (metrics.time_in_queue, metrics.first_token_latency) == (0.5, 2.0)
    assert (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts) == (
        10.5, 12.0, 13.0,
    )  # fmt: skip


def test_names_of_vllm_that_hold_nothing() -> None:
    output = RequestOutput("a", "b", [1], None, [], True)
    assert output.encoder_prompt is output.encoder_prompt_token_ids is None
    assert output.kv_transfer_params is None
