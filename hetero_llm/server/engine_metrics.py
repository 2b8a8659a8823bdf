"""The figures of the engine's last heartbeat as Prometheus metrics."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hetero_llm.core.errors import EngineDeadError, EngineHungError
from hetero_llm.core.histogram import Histogram
from hetero_llm.engine.engine_client import EngineClient

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait for a place.",
    "kv_cache_usage_perc": "Used part of the KV cache, 0 to 1.",
}
_COUNTERS = {
    "num_preemptions": "Requests put back because the KV cache was full.",
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Drafts that were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
}
_OFFLOAD_COUNTERS = {
    "external_prefix_cache_queries": "Prompt tokens looked up in host memory.",
    "external_prefix_cache_hits": "Prompt tokens found in host memory.",
    "kv_offload_load_bytes": "Bytes of KV loaded from host memory to the GPU.",
    "kv_offload_store_bytes": "Bytes of KV stored from the GPU to host memory.",
    "kv_offload_load_time": "Seconds in which KV was being loaded.",
    "kv_offload_store_time": "Seconds in which KV was being stored.",
}
"""As `_COUNTERS`, but exported only if the prefix cache is offloaded."""
_ENGINE_NAMES = {
    "kv_offload_load_bytes": "kv_offload_bytes_h2d",
    "kv_offload_store_bytes": "kv_offload_bytes_d2h",
    "kv_offload_load_time": "kv_offload_h2d_busy_seconds_total",
    "kv_offload_store_time": "kv_offload_d2h_busy_seconds_total",
}
"""vLLM's name of a metric, and the engine's."""
_OLD_TRANSFERS = {
    "kv_offload_total_bytes": ("kv_offload_load_bytes", "kv_offload_store_bytes"),
    "kv_offload_total_time": ("kv_offload_load_time", "kv_offload_store_time"),
}
"""Old metrics of vLLM with the direction as a label, and the new ones: loads, stores."""
_DIRECTIONS = ("CPU_to_GPU", "GPU_to_CPU")
_OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
"""vLLM's name of a metric, and its old name."""
_OLD_GAUGES = {
    "num_requests_swapped": "0: sequences are never swapped out.",
    "cpu_cache_usage_perc": "Used part of the host memory for KV blocks, 0 to 1.",
    "gpu_prefix_cache_hit_rate": "prefix_cache_hits by prefix_cache_queries; -1 before the first.",
    "cpu_prefix_cache_hit_rate": "The same of host memory; -1 without any.",
    "spec_decode_draft_acceptance_rate": "Accepted draft tokens by verified ones.",
    "spec_decode_efficiency": "Tokens of verifying steps by what full acceptance had given.",
    "avg_prompt_throughput_toks_per_s": "prompt_tokens a second, since it was last asked for.",
    "avg_generation_throughput_toks_per_s": "generation_tokens a second, as above.",
}
_OLD_COUNTERS = {
    "tokens": "prompt_tokens and generation_tokens.",
    "spec_decode_num_emitted_tokens": "Tokens of verifying steps: accepted drafts and one more.",
}
"""Metrics that vLLM no longer has, or not as such."""
_OWN_COUNTERS = {
    "num_requests_finished": "The engine's num_requests_finished.",
    "num_steps": "The engine's num_steps.",
    "prefix_blocks_total": "KV blocks given to sequences.",
    "prefix_blocks_gpu": "KV blocks of sequences that were found on the GPU.",
    "prefix_blocks_cpu": "KV blocks of sequences that were found in host memory.",
    "kv_offload_loads": "Loads of KV from host memory that came to their end.",
    "kv_offload_failed_loads": "Loads of KV of which some bytes never came.",
    "kv_offload_aborted_loads": "Loads of KV that nobody wanted any more.",
    "kv_offload_loaded_blocks": "KV blocks loaded from host memory.",
    "kv_offload_stores": "Stores of KV to host memory that came to their end.",
    "kv_offload_failed_stores": "Stores of KV of which some bytes never came.",
    "kv_offload_dropped_stores": "KV blocks for which host memory had no room.",
    "kv_offload_stored_blocks": "KV blocks stored to host memory.",
    "kv_offload_host_evictions": "KV blocks that left host memory for others.",
    "kv_offload_driver_errors": "Calls for copies that the driver refused.",
    "kv_offload_copy_thread_cpu_seconds_total": "CPU time of the thread that submits copies.",
    "kv_offload_load_seconds_total": "Time of all loads, each from its beginning to its end.",
    "kv_offload_hidden_seconds_total": "Part of the loads' time in which something was computed.",
    "kv_offload_exposed_seconds_total": "Part of the loads' time that was waited for.",
}
_OWN_GAUGES = {
    "kv_offload_host_slots": "KV blocks that host memory has room for by now.",
    "kv_offload_host_slots_used": "KV blocks that are in host memory.",
    "kv_offload_broken": "1 once offloading has switched itself off after an error.",
}
_OWN_NAMES = {"hit_rate": "lookahead_hit_rate"}
_AT_PLACE = "spec_decode_num_accepted_tokens_per_pos_"
_STEP_SECONDS = "step_seconds/"
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_RATE_SECONDS = 1.0
"""The shortest time over which a rate is computed."""


class EngineCollector(Collector):
    """Makes the metrics of the engine's last heartbeat at each scrape.

    Args:
        labels: of every vLLM metric.
        legacy_names: also export the metrics that vLLM has renamed or dropped.
    """

    def __init__(
        self, client: EngineClient, labels: dict[str, str], *, legacy_names: bool = False
    ) -> None:
        self._client = client
        self._labels = labels
        self._old_names = _OLD_NAMES if legacy_names else {}
        self._busy = BusyRatios()
        self._throughput = GrowthRates()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats()
        left = dict(stats.metrics)
        engine_cpu = left.pop("cpu_seconds") if "cpu_seconds" in left else None
        for names, make in ((_GAUGES, self._gauge), (_COUNTERS, self._counter)):
            for name, text in names.items():
                value = left.pop(name, 0.0)
                yield make(f"vllm:{name}", text, value)
                if name in self._old_names:
                    yield make(f"vllm:{self._old_names[name]}", f"Now {name}.", value)
        if self._old_names:
            yield from self._dropped(stats.metrics)
        yield self._accepted_at(left)
        yield from self._adapters(left)
        yield from self._offload(left)
        yield self._cache_config()
        yield from self._histograms(stats.histograms)
        yield from self._cpu(engine_cpu)
        for own, make in ((_OWN_COUNTERS, self._counter), (_OWN_GAUGES, self._gauge)):
            for name, text in own.items():
                if name in left:
                    yield make(f"hetero_llm:{name}", text, left.pop(name))
        yield self._gauge(
            "hetero_llm:last_step_timestamp_seconds",
            "When the engine's last step ended, in Unix time; 0 before the first.",
            left.pop("last_step_timestamp_seconds", 0.0),
        )
        yield self._gauge(
            "hetero_llm:last_heartbeat_timestamp_seconds",
            "When the engine last showed life, in Unix time.",
            time.time() - stats.last_step_age,
        )
        yield self._gauge(
            "hetero_llm:queue", "Requests accepted and not finished.", float(stats.queue)
        )
        yield self._gauge(
            "hetero_llm:engine_up", "1 while the engine is well.", float(self._is_up())
        )
        yield from self._replicas(stats.replicas)
        for name, value in sorted(left.items()):
            safe = _NOT_A_NAME.sub("_", _OWN_NAMES.get(name, name))
            yield self._gauge(f"hetero_llm:{safe}", f"The engine's {name}.", value)

    def _replicas(self, all_figures: Sequence[Mapping[str, float]]) -> Iterator[Metric]:
        """The gauges of each replica, of which vLLM's are the sums or means; none if there is
        one."""
        for name, text in _GAUGES.items() if all_figures else ():
            values = {str(i): one.get(name, 0.0) for i, one in enumerate(all_figures)}
            name = f"hetero_llm:replica_{name}"
            yield self._by_label(GaugeMetricFamily, name, text, "replica", values)

    def _dropped(self, figures: Mapping[str, float]) -> Iterator[Metric]:
        """The metrics that vLLM has dropped, from figures that it has kept."""
        found = old_figures(figures)
        now = time.monotonic()
        for name in ("prompt", "generation"):
            rate = self._throughput.rate(name, figures.get(f"{name}_tokens", 0.0), now)
            found[f"avg_{name}_throughput_toks_per_s"] = rate or 0.0
        for names, make in ((_OLD_GAUGES, self._gauge), (_OLD_COUNTERS, self._counter)):
            for name, text in names.items():
                yield make(f"vllm:{name}", text, found[name])

    def _is_up(self) -> bool:
        try:
            self._client.check_health()
        except (EngineDeadError, EngineHungError):
            return False
        return True

    def _accepted_at(self, left: dict[str, float]) -> Metric:
        """Accepted draft tokens by position; removes these figures from `left`."""
        names = [name for name in left if name.startswith(_AT_PLACE)]
        values = {name.removeprefix(_AT_PLACE): left.pop(name) for name in names}
        name = f"vllm:{_AT_PLACE.removesuffix('_')}"
        text = "Draft tokens that were accepted, by their place in the draft."
        return self._by_label(CounterMetricFamily, name, text, "position", values)

    def _adapters(self, left: dict[str, float]) -> Iterator[Metric]:
        """vLLM's gauge whose labels name the adapters of requests; removes their figures from
        `left`. Its value is the time, so that the newest labels can be found."""
        slots = left.pop("max_loras") if "max_loras" in left else None
        if slots is None:
            return
        labels = {"max_lora": str(int(slots))}
        for kind in ("waiting", "running"):
            start = f"lora_{kind}/"
            names = sorted(name for name in left if name.startswith(start))
            for name in names:
                del left[name]
            labels[f"{kind}_lora_adapters"] = ",".join(n.removeprefix(start) for n in names)
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of requests.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), time.time())
        yield family
        yield self._counter(
            "hetero_llm:lora_loads", "Adapters that were put into a slot.", left.pop("lora_loads")
        )

    def _offload(self, left: dict[str, float]) -> Iterator[Metric]:
        """The offload metrics for which vLLM has names; removes their figures from `left`."""
        found = {
            name: left.pop(_ENGINE_NAMES.get(name, name))
            for name in _OFFLOAD_COUNTERS
            if _ENGINE_NAMES.get(name, name) in left
        }
        for name, value in found.items():
            yield self._counter(f"vllm:{name}", _OFFLOAD_COUNTERS[name], value)
        for old, names in _OLD_TRANSFERS.items() if self._old_names else ():
            if not all(name in found for name in names):
                continue
            values = dict(zip(_DIRECTIONS, (found[name] for name in names), strict=True))
            text = f"Now {' and '.join(names)}."
            yield self._by_label(CounterMetricFamily, f"vllm:{old}", text, "transfer_type", values)

    def _cache_config(self) -> Metric:
        info = self._client.info
        labels = self._labels | {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's configuration.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _histograms(self, histograms: Mapping[str, Histogram]) -> Iterator[Metric]:
        tokens = histograms.get("iteration_tokens_total")
        if tokens is not None:
            family = HistogramMetricFamily(
                "vllm:iteration_tokens_total",
                "Tokens of a step: of prompts, computed, and generated.",
                labels=list(self._labels),
            )
            family.add_metric(list(self._labels.values()), _buckets(tokens), tokens.total)
            yield family
        family = HistogramMetricFamily(
            "hetero_llm:step_seconds",
            "Time of a step by what it is spent on.",
            labels=[*self._labels, "phase"],
        )
        for name, kept in histograms.items():
            if name.startswith(_STEP_SECONDS):
                phase = name.removeprefix(_STEP_SECONDS)
                family.add_metric([*self._labels.values(), phase], _buckets(kept), kept.total)
        yield family

    def _cpu(self, engine_seconds: float | None) -> Iterator[Metric]:
        """CPU time of each process, in seconds and as a share of all usable cores."""
        used = {"api": time.process_time()}
        if engine_seconds is not None:
            used["engine"] = engine_seconds
        now = time.monotonic()
        ratios = {role: self._busy.ratio(role, seconds, now) for role, seconds in used.items()}
        busy = {role: ratio for role, ratio in ratios.items() if ratio is not None}
        text = "CPU time of our processes"
        yield self._by_label(
            CounterMetricFamily, "hetero_llm:cpu_seconds", f"{text}.", "role", used
        )
        text += " by that of all usable cores, 0 to 1, since it was last asked for."
        yield self._by_label(GaugeMetricFamily, "hetero_llm:cpu_busy_ratio", text, "role", busy)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=list(self._labels)), value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=list(self._labels)), value)

    def _by_label(
        self, kind: Any, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        """A family with one more label, and a value for each of its values."""
        family = kind(name, text, labels=[*self._labels, label])
        for one, value in values.items():
            family.add_metric([*self._labels.values(), one], float(value))
        return family

    def _filled(self, family: Any, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), float(value))
        return family


def old_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures of vLLM's older metrics, computed from those of the engine."""

    def of(name: str) -> float:
        return figures.get(name, 0.0)

    def share(part: float, whole: float, *, without: float) -> float:
        return part / whole if whole else without

    accepted, drafted = of("spec_decode_num_accepted_tokens"), of("spec_decode_num_draft_tokens")
    drafts = of("spec_decode_num_drafts")
    emitted = accepted + drafts
    return {
        "num_requests_swapped": 0.0,
        "cpu_cache_usage_perc": share(
            of("kv_offload_host_slots_used"), of("kv_offload_host_slots"), without=0.0
        ),
        "gpu_prefix_cache_hit_rate": share(
            of("prefix_cache_hits"), of("prefix_cache_queries"), without=-1.0
        ),
        "cpu_prefix_cache_hit_rate": share(
            of("external_prefix_cache_hits"), of("external_prefix_cache_queries"), without=-1.0
        ),
        "spec_decode_draft_acceptance_rate": share(accepted, drafted, without=0.0),
        "spec_decode_efficiency": share(emitted, drafted + drafts, without=0.0),
        "spec_decode_num_emitted_tokens": emitted,
        "tokens": of("prompt_tokens") + of("generation_tokens"),
    }


class GrowthRates:
    """How much counters grow in a second: each since it was asked for at least `_RATE_SECONDS`
    ago."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._rates: dict[str, float] = {}

    def rate(self, name: str, value: float, now: float) -> float | None:
        """The growth of `name`; None until it is known. `now` is of the monotonic clock."""
        then, before = self._last.setdefault(name, (now, value))
        if now - then >= _RATE_SECONDS:
            self._last[name] = now, value
            self._rates[name] = (value - before) / (now - then)
        return self._rates.get(name)


class BusyRatios:
    """Computes CPU time as a share of that of all usable cores."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._rates = GrowthRates()

    def ratio(self, role: str, cpu_seconds: float, now: float) -> float | None:
        """The share of `role`; None until it is known. `now` is of the monotonic clock."""
        rate = self._rates.rate(role, cpu_seconds, now)
        return None if rate is None else min(max(rate / self._cores, 0.0), 1.0)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Each upper bound with the number of values up to it."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
