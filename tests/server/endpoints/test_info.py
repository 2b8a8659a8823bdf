"""The small endpoints."""

from __future__ import annotations

from datetime import datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hetero_llm
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.protocol import UNAVAILABLE, ChatRequest
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.serving import Served, serving

COMPLETIONS = "/v1/completions"

VLLM_NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
    "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n", "request_params_max_tokens", "cache_config_info", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "admission_rejections",
}  # fmt: skip
COUNTERS = {
    "num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "request_success", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/demo", "GET, HEAD"),
        ("/ping", "GET, HEAD, POST"),
        ("/v1/responses/resp_1", "DELETE, GET"),
        ("/v1/completions", "POST"),
    ],
)
def test_all_methods_of_a_path_are_named(server: Served, path: str, methods: str) -> None:
    answer = server.http.request("PATCH", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
    if "HEAD" in methods:
        assert server.http.head(path).status_code == 200


def test_a_model_card(server: Served) -> None:
    card = server.http.get("/v1/models/demo").json()
    assert card == server.http.get("/v1/models").json()["data"][0]
    assert card["object"] == "model" and card["max_model_len"] == CONTEXT
    assert card["root"] == "demo" and card["parent"] is None and card["owned_by"] == "hetero_llm"
    assert card["permission"][0]["object"] == "model_permission"


def test_tokenize_and_detokenize(server: Served, tokenizer: Tokenizer) -> None:
    text = "def f(x): # é"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == CONTEXT and len(answer["token_strs"]) == len(ids)
    assert server.post("/tokenize", {"prompt": text}).json()["token_strs"] is None
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    opened = server.post("/tokenize", chat).json()["count"]
    assert (
        server.post("/tokenize", chat | {"add_generation_prompt": False}).json()["count"] < opened
    )


def test_tokenizer_info_is_what_lm_eval_reads(server: Served, tokenizer: Tokenizer) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.hf.eos_token
    assert info["bos_token"] == tokenizer.hf.bos_token
    assert info["pad_token"] == tokenizer.hf.pad_token
    assert info["chat_template"] == tokenizer.hf.chat_template


def test_version_and_load(server: Served) -> None:
    assert server.http.get("/version").json() == {"version": hetero_llm.__version__}
    assert server.http.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("state", "health", "live", "ready"),
    [
        ("ready", 200, 200, 200),
        ("draining", 200, 200, 503),
        ("hung", 503, 503, 503),
        ("dead", 503, 503, 503),
    ],
)
def test_health(tokenizer: Tokenizer, state: str, health: int, live: int, ready: int) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        served.context.draining = state == "draining"
        served.engine.hung = state == "hung"
        served.engine.dead = state == "dead"
        expected = {"/health": health, "/live": live, "/ping": live, "/ready": ready}
        for path, status in expected.items():
            answer = served.http.get(path)
            assert (answer.status_code, answer.content) == (status, b""), path
            assert served.http.head(path).status_code == status
        assert served.http.post("/ping").status_code == live  # SageMaker asks with either method
        details = served.http.get("/health?verbose=1")
        assert details.status_code == health and details.json()["state"] == state
        if state == "ready":
            return
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = served.post(path, body)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            code = state if state == "draining" else f"engine_{state}"
            assert answer.json()["error"]["code"] == code
            assert "/var" not in answer.text


def families(served: Served) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by family, then by sample name and label values."""
    text = served.http.get("/metrics").text
    return {
        family.name: {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_metrics_names(server: Served) -> None:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = families(server)
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= found.keys()
    for name in COUNTERS:
        assert any(key[0] == f"vllm:{name}_total" for key in found[f"vllm:{name}"]) or (
            name == "request_success"
        )
    own = ("http_requests", "aborted_requests", "queue", "last_step_timestamp_seconds",
           "engine_up", "global_average_hit_len", "num_steps")  # fmt: skip
    assert {f"hetero_llm:{name}" for name in own} <= found.keys()
    labels = {"demo", "0"}
    assert ("vllm:kv_cache_usage_perc", *sorted(labels)) in found["vllm:kv_cache_usage_perc"]


def test_metrics_count_what_happened(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        served.post(COMPLETIONS, {"prompt": [66, 67, 68], "max_tokens": 5})
        served.post(COMPLETIONS, {"prompt": [66], "max_tokens": 4, "n": 2, "stream": True})
        served.post(COMPLETIONS, {"prompt": [66, 0], "max_tokens": 9})
        served.post(COMPLETIONS, {"prompt": ""})
        served.http.get("/nothing/42")
        served.http.get("/v1/models/demo")
        found = families(served)

        def value(family: str, suffix: str, *labels: str) -> float:
            return found[f"vllm:{family}"][
                (f"vllm:{family}{suffix}", *sorted((*labels, "demo", "0")))
            ]

        assert value("generation_tokens", "_total") == 5 + 8 + 2
        assert value("prompt_tokens", "_total") == 6
        assert value("request_success", "_total", "length") == 3
        assert value("request_success", "_total", "stop") == 1
        assert value("time_to_first_token_seconds", "_count") == 3
        assert value("e2e_request_latency_seconds", "_count") == 3
        assert value("inter_token_latency_seconds", "_count") == 3  # of the stream
        assert value("request_time_per_output_token_seconds", "_count") == 3
        assert value("request_queue_time_seconds", "_count") == 3
        assert value("request_prompt_tokens", "_sum") == 6
        assert value("request_generation_tokens", "_sum") == 15
        assert value("request_params_n", "_sum") == 4
        assert value("request_params_max_tokens", "_sum") == 18
        http = found["hetero_llm:http_requests"]
        name = "hetero_llm:http_requests_total"
        assert http[(name, *sorted(("/v1/completions", "200")))] == 3
        assert http[(name, *sorted(("/v1/completions", "400")))] == 1
        assert http[(name, *sorted(("other", "404")))] == 1
        assert http[(name, *sorted(("/v1/models/{model:path}", "200")))] == 1


def test_labels_are_bounded(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        for number in range(20):
            served.http.get(f"/x{number}")
            served.http.get(f"/v1/models/x{number}")
            served.post(COMPLETIONS, {"prompt": "a", "model": f"x{number}", f"f{number}": 1})
        names = {key[1:] for key in families(served)["hetero_llm:http_requests"]}
        assert len([key for key in names if "404" in key]) == 3


def test_two_servers_count_apart(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as one, serving(FakeEngine(tokenizer)) as two:
        one.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        line = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"}'
        assert f"{line} 1.0" in one.http.get("/metrics").text
        assert f"{line} 0.0" in two.http.get("/metrics").text


def test_the_schema_has_every_field_of_a_request(server: Served) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]
    properties = body["content"]["application/json"]["schema"]["properties"]
    assert properties.keys() == set(ChatRequest.__struct_fields__) - UNAVAILABLE.keys()
    assert "$ref" not in str(body)


def test_the_page_of_the_api_is_our_own(server: Served) -> None:
    """The framework's pages would load scripts from other hosts."""
    assert "assets/docs.js" in server.http.get("/docs").text
    assert server.http.get("/redoc").status_code == 404
    assert server.http.get("/openapi.json").json()["paths"]["/generate"]["post"]


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ServerSettings().root_path = "/x"  # type: ignore[misc]


def test_models_as_anthropics_clients_read_them(server: Served) -> None:
    header = {"anthropic-version": "2023-06-01"}
    listed = server.http.get("/v1/models", headers=header).json()
    (model,) = listed["data"]
    assert listed == {"data": [model], "first_id": "demo", "last_id": "demo", "has_more": False}
    assert (model["type"], model["id"], model["display_name"]) == ("model", "demo", "demo")
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert server.http.get("/v1/models/demo", headers=header).json() == model
    assert server.http.get("/v1/models/demo").json()["object"] == "model"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches"])
def test_files_are_refused_with_the_other_way(server: Served, path: str) -> None:
    for method in ("GET", "POST"):
        answer = server.http.request(method, path)
        assert answer.status_code == 404 and "run-batch" in answer.json()["error"]["message"]
