"""Metric objects of the library have the names, kinds and values of the server's `/metrics`."""

from __future__ import annotations

from prometheus_client.core import Metric

from hetero_llm.core.histogram import Histogram
from hetero_llm.engine.engine_client import EngineStats
from hetero_llm.engine.metric_objects import metric_objects
from hetero_llm.server.engine_metrics import EngineCollector
from hetero_llm.v1.metrics.reader import Counter, Gauge, Vector
from hetero_llm.v1.metrics.reader import Histogram as HistogramObject
from tests.server.fake_engine import FakeEngine

LABELS = {"model_name": "demo", "engine": "0"}
FIGURES = {
    "num_requests_running": 1, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.5,
    "num_requests_finished": 3, "num_preemptions": 4, "num_steps": 5, "prompt_tokens": 6,
    "generation_tokens": 7, "prefix_cache_queries": 8, "prefix_cache_hits": 9,
    "spec_decode_num_drafts": 10, "spec_decode_num_draft_tokens": 11,
    "spec_decode_num_accepted_tokens": 12, "last_step_timestamp_seconds": 13.0,
    "external_prefix_cache_queries": 14, "kv_offload_bytes_h2d": 15,
    "kv_offload_d2h_busy_seconds_total": 1.5, "prefix_blocks_total": 16, "hit_rate": 0.25,
    "kv_offload_host_slots": 17, "kv_offload_loads": 18, "lookahead_cache_tokens": 19,
    "spec_decode_num_accepted_tokens_per_pos_0": 3,
    "spec_decode_num_accepted_tokens_per_pos_2": 1,
}  # fmt: skip
HISTOGRAMS = {
    "iteration_tokens_total": Histogram((1.0, 8.0), [3, 2, 1], 29.0),
    "step_seconds/launch": Histogram((1e-05, 0.5), [1, 0, 0], 5e-06),
}


def families() -> dict[str, Metric]:
    engine = FakeEngine(None)
    engine.stats = lambda: EngineStats(FIGURES, 5, 0.0, 0, HISTOGRAMS)  # type: ignore[method-assign]
    return {family.name: family for family in EngineCollector(engine, LABELS).collect()}


def test_they_are_those_of_the_server() -> None:
    known = families()
    kinds = {Counter: "counter", Vector: "counter", Gauge: "gauge", HistogramObject: "histogram"}
    made = metric_objects(FIGURES, HISTOGRAMS, LABELS)
    assert len(made) == len(FIGURES) - 2 + 1 + len(HISTOGRAMS)
    for metric in made:
        family = known[metric.name]
        assert kinds[type(metric)] == family.type, metric.name
        assert metric.labels.items() >= LABELS.items()
        samples = [s for s in family.samples if s.labels.items() >= metric.labels.items()]
        if isinstance(metric, (Counter, Gauge)):
            assert [sample.value for sample in samples] == [metric.value], metric.name
        elif isinstance(metric, Vector):
            assert metric.values == [3, 0, 1]
        else:
            assert isinstance(metric, HistogramObject)
            values = {s.labels.get("le", s.name.rpartition("_")[2]): s.value for s in samples}
            assert values == {**metric.buckets, "count": metric.count, "sum": metric.sum}
