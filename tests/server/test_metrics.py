"""The figures of /metrics are those of a known run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero_llm.core.histogram import Histogram
from hetero_llm.engine.async_engine import AsyncLLMEngine
from hetero_llm.engine.engine import PHASES
from hetero_llm.engine.engine_client import EngineStats
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.engine_metrics import BusyRatios, GrowthRates, old_figures
from hetero_llm.server.settings import ServerSettings
from tests.helpers.time_limits import growing_limits
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, raw_post, received, serving

pytestmark = pytest.mark.usefixtures("forked_engines")

COMPLETIONS = "/v1/completions"
LABELS = {"model_name": "demo", "engine": "0"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

# reliability goals, B5: what can be measured without a draft worker, offload and LoRA.
B5_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
             "cache_config_info")  # fmt: skip
B5_COUNTERS = ("num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries",
               "prefix_cache_hits", "request_success", "spec_decode_num_drafts",
               "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")  # fmt: skip
B5_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds",
                 "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
                 "request_queue_time_seconds", "request_prefill_time_seconds",
                 "request_decode_time_seconds", "request_inference_time_seconds",
                 "request_prompt_tokens", "request_generation_tokens", "request_params_n",
                 "request_params_max_tokens", "iteration_tokens_total")  # fmt: skip
DROPPED = ("num_requests_swapped", "cpu_cache_usage_perc", "gpu_prefix_cache_hit_rate",
           "cpu_prefix_cache_hit_rate", "spec_decode_draft_acceptance_rate",
           "spec_decode_efficiency", "spec_decode_num_emitted_tokens_total", "tokens_total",
           "avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s",
           "request_params_best_of_count", "time_in_queue_requests_count")  # fmt: skip
OLD = ("gpu_cache_usage_perc", "vllm:time_per_output_token_seconds",
       "gpu_prefix_cache_queries", "gpu_prefix_cache_hits")  # fmt: skip


def samples(served: Served) -> Samples:
    text = served.http.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def vllm(found: Samples, name: str, **labels: str) -> float:
    return found[(f"vllm:{name}", frozenset((LABELS | labels).items()))]


def own(found: Samples, name: str, **labels: str) -> float:
    return found[(f"hetero_llm:{name}", frozenset(labels.items()))]


class Reporting(FakeEngine):
    """Says of its steps what a test tells it to say."""

    histograms: dict[str, Histogram]
    more: dict[str, float]

    def stats(self) -> EngineStats:
        stats = super().stats()
        metrics = {**stats.metrics, **self.more}
        return EngineStats(metrics, 0, 0.5, 0, self.histograms)


def until_heard(served: Served, generated: int) -> Samples:
    """The metrics of the first heartbeat that counts this many tokens, with nothing running."""

    def heard() -> bool:
        metrics = served.engine.stats().metrics
        return metrics.get("generation_tokens") == generated and not metrics["num_requests_running"]

    served.wait(heard)
    return samples(served)


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    args: dict[str, Any] = {
        "model": "demo", "device": "cpu", "max_model_len": 512, "cpu_threads": 1,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                               "prompt_lookup_max": 3},
    }  # fmt: skip
    with serving(AsyncLLMEngine(args)) as served:
        yield served
        served.engine.process.kill()


def test_a_known_run_of_the_real_engine(real: Served) -> None:
    """Two equal prompts of 40 tokens, one after the other, and one of 7 with two sequences."""
    repeated = [70, 71, 72, 73, 74, 75, 76, 77] * 5
    body = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    for prompt, more in ((repeated, {}), (repeated, {}), ([80, 81, 82, 83, 84, 85, 86], {"n": 2})):
        answer = real.post(COMPLETIONS, body | more | {"prompt": prompt})
        assert answer.status_code == 200, answer.text
    found = until_heard(real, 4 * 30)
    assert vllm(found, "generation_tokens_total") == 120
    assert vllm(found, "prompt_tokens_total") == 87
    assert vllm(found, "prefix_cache_queries_total") == 87
    hits = vllm(found, "prefix_cache_hits_total")
    assert hits == 32  # two blocks of 16
    assert vllm(found, "iteration_tokens_total_sum") == 87 - hits + 120
    steps = own(found, "num_steps_total", **LABELS)
    assert vllm(found, "iteration_tokens_total_count") == steps < 3 * 31
    for phase in PHASES:
        assert own(found, "step_seconds_count", **LABELS, phase=phase) == steps
    assert own(found, "step_seconds_sum", **LABELS, phase="launch") > 0
    accepted = vllm(found, "spec_decode_num_accepted_tokens_total")
    places = [
        vllm(found, "spec_decode_num_accepted_tokens_per_pos_total", position=str(place))
        for place in range(4)
        if vllm_has(found, str(place))
    ]
    assert sum(places) == accepted > 0 and places == sorted(places, reverse=True)
    assert 0 < own(found, "lookahead_hit_rate", **LABELS) <= 1
    assert own(found, "global_average_hit_len", **LABELS) > 0
    assert vllm(found, "request_success_total", finished_reason="length") == 4
    assert vllm(found, "request_params_n_count") == 3
    assert vllm(found, "request_params_n_bucket", le="1.0") == 2
    assert vllm(found, "request_params_max_tokens_sum") == 90
    assert vllm(found, "request_inference_time_seconds_count") == 3
    info = real.engine.info
    assert vllm(
        found, "cache_config_info", block_size="16", num_gpu_blocks=str(info.num_blocks),
        cache_dtype=info.dtype,
    ) == 1  # fmt: skip
    then = own(found, "last_step_timestamp_seconds", **LABELS)
    assert 0 < then <= own(found, "last_heartbeat_timestamp_seconds", **LABELS)
    assert own(found, "cpu_seconds_total", **LABELS, role="engine") > 0


def vllm_has(found: Samples, place: str) -> bool:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return (name, frozenset((LABELS | {"position": place}).items())) in found


def test_every_name_is_there_and_of_its_type(tokenizer: Tokenizer) -> None:
    engine = Reporting(tokenizer)
    engine.histograms = {"iteration_tokens_total": Histogram.empty((1, 2))}
    engine.more = {"spec_decode_num_accepted_tokens_per_pos_0": 4}
    with serving(engine) as served:
        text = served.http.get("/metrics").text
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    for kind, names in (
        ("gauge", B5_GAUGES), ("counter", B5_COUNTERS), ("histogram", B5_HISTOGRAMS)
    ):  # fmt: skip
        for name in names:
            assert types[f"vllm:{name}"] == kind, name
    assert types["vllm:admission_rejections"] == "counter"
    assert types["vllm:spec_decode_num_accepted_tokens_per_pos"] == "counter"
    assert types["hetero_llm:aborted_requests"] == types["hetero_llm:http_requests"] == "counter"
    # What does not exist yet is not there.
    for part in ("draft_worker_up", "kv_offload", "external_prefix", "lora_requests"):
        assert part not in text


def test_histograms_of_the_engine(tokenizer: Tokenizer) -> None:
    engine = Reporting(tokenizer)
    tokens, waits = Histogram.empty((1, 2, 4)), Histogram.empty((0.001, 0.1))
    for value in (1, 1, 2, 3, 50):
        tokens.observe(value)
    waits.observe(0.05)
    engine.histograms = {"iteration_tokens_total": tokens, "step_seconds/wait": waits}
    engine.more = {
        "spec_decode_num_accepted_tokens_per_pos_0": 5.0,
        "spec_decode_num_accepted_tokens_per_pos_1": 1.0,
        "last_step_timestamp_seconds": 1234.5,
        "hit_rate": 0.25,
    }
    with serving(engine) as served:
        found = samples(served)
    for bound, count in (("1.0", 2), ("2.0", 3), ("4.0", 4), ("+Inf", 5)):
        assert vllm(found, "iteration_tokens_total_bucket", le=bound) == count
    assert vllm(found, "iteration_tokens_total_sum") == 57
    waited = {**LABELS, "phase": "wait"}
    assert own(found, "step_seconds_bucket", **waited, le="0.001") == 0
    assert own(found, "step_seconds_bucket", **waited, le="0.1") == 1
    assert own(found, "step_seconds_sum", **waited) == 0.05
    assert vllm(found, "spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert own(found, "last_step_timestamp_seconds", **LABELS) == 1234.5
    assert own(found, "lookahead_hit_rate", **LABELS) == 0.25
    assert ("hetero_llm:hit_rate", frozenset(LABELS.items())) not in found


OFFLOAD_COUNTERS = ("loads", "failed_loads", "aborted_loads", "loaded_blocks", "stores",
                    "failed_stores", "dropped_stores", "stored_blocks", "host_evictions",
                    "driver_errors")  # fmt: skip
OFFLOAD_SECONDS = ("load_seconds", "hidden_seconds", "exposed_seconds", "copy_thread_cpu_seconds")
OFFLOAD_GAUGES = ("host_slots", "host_slots_used", "broken")
OFFLOAD: dict[str, float] = {
    "external_prefix_cache_queries": 900, "external_prefix_cache_hits": 160,
    "prefix_blocks_total": 132, "prefix_blocks_gpu": 3, "prefix_blocks_cpu": 10,
    "kv_offload_bytes_h2d": 2048, "kv_offload_bytes_d2h": 4096,
    "kv_offload_h2d_busy_seconds_total": 1.5, "kv_offload_d2h_busy_seconds_total": 2.5,
    "kv_offload_open_loads": 7,
    **{f"kv_offload_{name}": i + 20 for i, name in enumerate(OFFLOAD_COUNTERS)},
    **{f"kv_offload_{name}_total": i + 0.5 for i, name in enumerate(OFFLOAD_SECONDS)},
    **{f"kv_offload_{name}": i + 40 for i, name in enumerate(OFFLOAD_GAUGES)},
}  # fmt: skip
"""What an engine says that offloads; a figure that is not listed is a gauge."""


@pytest.mark.parametrize("legacy", [False, True])
def test_offloaded_prefixes(tokenizer: Tokenizer, legacy: bool) -> None:
    engine = Reporting(tokenizer)
    engine.histograms, engine.more = {}, OFFLOAD
    with serving(engine, ServerSettings(legacy_metric_names=legacy)) as served:
        text = served.http.get("/metrics").text
        found = samples(served)
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert vllm(found, "external_prefix_cache_queries_total") == 900
    assert vllm(found, "external_prefix_cache_hits_total") == 160
    assert vllm(found, "kv_offload_load_bytes_total") == 2048
    assert vllm(found, "kv_offload_store_bytes_total") == 4096
    assert vllm(found, "kv_offload_load_time_total") == 1.5
    assert vllm(found, "kv_offload_store_time_total") == 2.5
    for i, place in enumerate(("total", "gpu_total", "cpu_total")):
        assert own(found, f"prefix_blocks_{place}", **LABELS) == (132, 3, 10)[i]
    for i, name in enumerate(OFFLOAD_COUNTERS):
        assert own(found, f"kv_offload_{name}_total", **LABELS) == i + 20
    for i, name in enumerate(OFFLOAD_SECONDS):
        assert own(found, f"kv_offload_{name}_total", **LABELS) == i + 0.5
    for i, name in enumerate(OFFLOAD_GAUGES):
        assert own(found, f"kv_offload_{name}", **LABELS) == i + 40
        assert types[f"hetero_llm:kv_offload_{name}"] == "gauge"
    for name in (*OFFLOAD_COUNTERS, *OFFLOAD_SECONDS):
        assert types[f"hetero_llm:kv_offload_{name}"] == "counter"
    assert own(found, "kv_offload_open_loads", **LABELS) == 7
    assert "h2d" not in text and "d2h" not in text
    old = {"CPU_to_GPU": (2048, 1.5), "GPU_to_CPU": (4096, 2.5)}
    for kind, (num_bytes, seconds) in old.items() if legacy else ():
        assert vllm(found, "kv_offload_total_bytes_total", transfer_type=kind) == num_bytes
        assert vllm(found, "kv_offload_total_time_total", transfer_type=kind) == seconds
    assert ("kv_offload_total_bytes" in text) is ("kv_offload_total_time" in text) is legacy


def test_old_names_are_there_unless_unwanted(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), ServerSettings(legacy_metric_names=False)) as served:
        text = served.http.get("/metrics").text
        assert not [name for name in (*OLD, *(f"vllm:{one}" for one in DROPPED)) if name in text]
    with serving(FakeEngine(tokenizer)) as served:
        body = {"prompt": [66, 67], "max_tokens": 4, "stream": True}
        served.post(COMPLETIONS, body)
        served.post(COMPLETIONS, {"prompt": [66], "max_tokens": 1, "best_of": 3})
        found = samples(served)
    for name in DROPPED:
        assert any(sample == f"vllm:{name}" for sample, _ in found), name
    assert vllm(found, "request_params_best_of_sum") == 4
    assert vllm(found, "time_in_queue_requests_count") == 2
    assert vllm(found, "num_requests_swapped") == vllm(found, "cpu_cache_usage_perc") == 0
    assert vllm(found, "gpu_prefix_cache_hit_rate") == -1
    # 3 drafts with 9 tokens of which 6 were accepted, so 9 of 12 possible tokens
    assert vllm(found, "spec_decode_draft_acceptance_rate") == pytest.approx(6 / 9)
    assert vllm(found, "spec_decode_efficiency") == 0.75
    assert vllm(found, "spec_decode_num_emitted_tokens_total") == 9
    assert vllm(found, "gpu_cache_usage_perc") == vllm(found, "kv_cache_usage_perc") == 0.25
    assert vllm(found, "gpu_prefix_cache_queries_total") == 0
    assert vllm(found, "time_per_output_token_seconds_count") == 3
    assert vllm(found, "time_per_output_token_seconds_sum") == vllm(
        found, "inter_token_latency_seconds_sum"
    )


def test_a_client_that_leaves_is_an_abort(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, delay=0.01)) as served:
        body = {"prompt": [66], "max_tokens": 2000, "stream": True, "n": 2, "ignore_eos": True}
        with raw_post(served, COMPLETIONS, body) as connection:
            received(connection, b"data: ")
        served.wait(lambda: served.engine.aborted and not served.context.load)
        found = samples(served)
    assert vllm(found, "request_success_total", finished_reason="abort") == 2
    assert vllm(found, "request_prompt_tokens_sum") == 1
    assert vllm(found, "request_params_max_tokens_sum") == 2000
    assert vllm(found, "e2e_request_latency_seconds_count") == 0  # it came to no end
    assert own(found, "aborted_requests_total", cause="client_gone") == 1
    assert own(found, "aborted_requests_total", cause="timeout") == 0


def test_errors_and_refusals(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, fail_after=2)) as served:
        assert served.post(COMPLETIONS, {"prompt": [66], "max_tokens": 4}).status_code == 500
        assert served.post(COMPLETIONS, {"prompt": [-1]}).status_code == 400
        served.engine.max_queue = 0
        assert served.post(COMPLETIONS, {"prompt": [66]}).status_code == 503
        found = samples(served)
    assert vllm(found, "request_success_total", finished_reason="error") == 1
    assert vllm(found, "request_params_n_count") == 1  # what was refused had not begun
    assert vllm(found, "admission_rejections_total", reason="overloaded") == 1


def test_a_deadline_is_an_abort_by_timeout(tokenizer: Tokenizer) -> None:
    body = {"prompt": [66], "max_tokens": 2000, "ignore_eos": True}
    for limit in growing_limits(0.15):
        with serving(FakeEngine(tokenizer, delay=limit / 8)) as served:
            headers = {"x-request-timeout-ms": str(round(1000 * limit))}
            answer = served.post(COMPLETIONS, body, headers=headers)
            found = samples(served)
        if answer.status_code == 200:  # else there was no token in time
            break
    assert own(found, "aborted_requests_total", cause="timeout") == 1
    assert vllm(found, "request_success_total", finished_reason="abort") == 1


def test_requests_in_flight(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    with serving(engine) as served:
        served.call(engine.unpaused.clear)
        answers: list[httpx.Response] = []

        def post() -> None:
            answers.append(served.post(COMPLETIONS, {"prompt": [66], "max_tokens": 1}))

        thread = threading.Thread(target=post)
        thread.start()
        served.wait(lambda: engine.num_live == 1)
        assert own(samples(served), "http_requests_in_flight") == 2  # and the one that asks
        served.call(engine.unpaused.set)
        thread.join()
        assert answers[0].status_code == 200
        assert own(samples(served), "http_requests_in_flight") == 1


def test_answers_are_counted_as_by_vllms_instrumentation(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        for body in ({"prompt": [66], "max_tokens": 1}, {"prompt": [66], "n": 0}):
            served.post(COMPLETIONS, body)
        served.http.get("/v1/models")
        served.http.get("/nothing")
        served.http.request("BREW", "/v1/models")
        served.http.get("/health")  # of a monitor: not counted
        found = {
            tuple(labels[name] for name in ("method", "handler", "status")): value
            for (name, items), value in samples(served).items()
            for labels in [dict(items)]
            if name == "http_requests_total"
        }
    assert found == {
        ("POST", COMPLETIONS, "2xx"): 1,
        ("POST", COMPLETIONS, "4xx"): 1,
        ("GET", "/v1/models", "2xx"): 1,
        ("GET", "none", "4xx"): 1,
        ("other", "/v1/models", "4xx"): 1,
    }


def test_figures_of_older_metrics() -> None:
    figures = {
        "prefix_cache_hits": 3, "prefix_cache_queries": 4, "kv_offload_host_slots": 10,
        "kv_offload_host_slots_used": 5, "external_prefix_cache_hits": 1,
        "external_prefix_cache_queries": 5, "prompt_tokens": 8, "generation_tokens": 2,
    }  # fmt: skip
    found = old_figures(figures)
    assert (found["gpu_prefix_cache_hit_rate"], found["cpu_prefix_cache_hit_rate"]) == (0.75, 0.2)
    assert found["cpu_cache_usage_perc"] == 0.5 and found["tokens"] == 10
    assert old_figures({})["spec_decode_efficiency"] == 0
    rates = GrowthRates()
    assert [rates.rate("a", value, now) for value, now in ((0, 0.0), (5, 0.5), (30, 3.0))] == [
        None, None, 10.0,
    ]  # fmt: skip


def test_busy_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    busy = BusyRatios()
    assert busy.ratio("engine", 10.0, 100.0) is None
    assert busy.ratio("engine", 10.5, 100.5) is None  # too early to say
    assert busy.ratio("engine", 14.0, 102.0) == 0.5
    assert busy.ratio("engine", 14.1, 102.2) == 0.5
    assert busy.ratio("engine", 14.1, 112.0) == pytest.approx(0.1 / 40)
    assert busy.ratio("api", 1.0, 112.0) is None
