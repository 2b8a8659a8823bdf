"""Metric objects out of an engine's figures. Names and kinds are those of the server's `/metrics`,
for all figures that a library has, too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate

from hetero_llm.core.histogram import Histogram
from hetero_llm.core.metrics import Counter, Gauge, HistogramMetric, Metric, Vector

_COUNTERS = (
    "num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "external_prefix_cache_queries",
    "external_prefix_cache_hits",
)  # fmt: skip
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_RENAMED = {
    "kv_offload_bytes_h2d": "kv_offload_load_bytes",
    "kv_offload_bytes_d2h": "kv_offload_store_bytes",
    "kv_offload_h2d_busy_seconds_total": "kv_offload_load_time",
    "kv_offload_d2h_busy_seconds_total": "kv_offload_store_time",
}
"""The engine's name of a counter, and vLLM's."""
_OWN_COUNTERS = (
    "num_requests_finished", "num_steps", "prefix_blocks_total", "prefix_blocks_gpu",
    "prefix_blocks_cpu", "kv_offload_loads", "kv_offload_failed_loads", "kv_offload_aborted_loads",
    "kv_offload_loaded_blocks", "kv_offload_stores", "kv_offload_failed_stores",
    "kv_offload_dropped_stores", "kv_offload_stored_blocks", "kv_offload_host_evictions",
    "kv_offload_driver_errors", "kv_offload_copy_thread_cpu_seconds_total",
    "kv_offload_load_seconds_total", "kv_offload_hidden_seconds_total",
    "kv_offload_exposed_seconds_total",
)  # fmt: skip
_OWN_NAMES = {"hit_rate": "lookahead_hit_rate"}
_AT_PLACE = "spec_decode_num_accepted_tokens_per_pos_"
_OF_ADAPTERS = ("lora_running/", "lora_waiting/")
_STEP_SECONDS = "step_seconds/"


def metric_objects(
    figures: Mapping[str, float], histograms: Mapping[str, Histogram], labels: Mapping[str, str]
) -> list[Metric]:
    """One object for each figure.

    Args:
        figures: of `Engine.metrics`.
        histograms: of `Engine.histograms`.
        labels: of every metric, such as {"model_name": "demo", "engine": "0"}.
    """
    found = [
        _scalar(name, value, dict(labels))
        for name, value in figures.items()
        if not name.startswith((_AT_PLACE, *_OF_ADAPTERS))
    ]
    places = {
        int(name.removeprefix(_AT_PLACE)): int(value)
        for name, value in figures.items()
        if name.startswith(_AT_PLACE)
    }
    if "max_loras" in figures:
        of_adapters = {
            f"{start[5:-1]}_lora_adapters": ",".join(
                sorted(name.removeprefix(start) for name in figures if name.startswith(start))
            )
            for start in _OF_ADAPTERS
        }
        slots = str(int(figures["max_loras"]))
        about = {**labels, "max_lora": slots, **of_adapters}
        found.append(Gauge("vllm:lora_requests_info", about, time.time()))
    counts = [places.get(place, 0) for place in range(max(places, default=-1) + 1)]
    found.append(Vector(f"vllm:{_AT_PLACE.removesuffix('_')}", dict(labels), counts))
    return [*found, *_histograms(histograms, labels)]


def _scalar(name: str, value: float, labels: dict[str, str]) -> Metric:
    if name in _GAUGES:
        return Gauge(f"vllm:{name}", labels, value)
    if name in _COUNTERS or name in _RENAMED:
        return Counter(f"vllm:{_RENAMED.get(name, name)}", labels, value)
    own = f"hetero_llm:{_OWN_NAMES.get(name, name)}"
    if name in _OWN_COUNTERS:
        return Counter(own.removesuffix("_total"), labels, value)
    return Gauge(own, labels, value)


def _histograms(
    histograms: Mapping[str, Histogram], labels: Mapping[str, str]
) -> Iterator[HistogramMetric]:
    for name, kept in histograms.items():
        bounds = [*map(repr, map(float, kept.bounds)), "+Inf"]
        buckets = dict(zip(bounds, accumulate(kept.counts), strict=True))
        if name.startswith(_STEP_SECONDS):
            own = {**labels, "phase": name.removeprefix(_STEP_SECONDS)}
            name = "hetero_llm:step_seconds"
        else:
            own, name = dict(labels), f"vllm:{name}"
        yield HistogramMetric(name, own, buckets["+Inf"], kept.total, buckets)
