"""Keys, paths, cross-origin calls, isolation between keys, and what the log shows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.errors import ApiError
from hetero_llm.server.middleware import PUBLIC, ApiKeys
from hetero_llm.server.settings import Cors, ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

COMPLETIONS = "/v1/completions"
KEYS = ServerSettings(api_keys=("key-one", "key-two"))
GOOD = {"authorization": "Bearer key-two"}


def routes(served: Served) -> list[tuple[str, str]]:
    """Every route of the application, with a path that fits it."""
    found = []
    for path, methods in served.http.get("/openapi.json").json()["paths"].items():
        found += [(method.upper(), path.replace("{model}", "demo")) for method in methods]
    return found


def test_every_route_but_the_public_ones_needs_a_key(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), KEYS) as served:
        found = routes(served)
        assert len(found) >= 14
        for method, path in found:
            public = path in PUBLIC | {"/metrics"}
            open_status = served.http.request(method, path).status_code
            assert (open_status != 401) == public, path
            for header in ("Bearer wrong", "Bearer", "key-one", "Basic key-one", "bearer key-on"):
                status = served.http.request(
                    method, path, headers={"authorization": header}
                ).status_code
                assert (status != 401) == public, (path, header)
            for header in ("Bearer key-one", "bearer key-two", "Bearer  key-one"):
                answer = served.http.request(method, path, headers={"authorization": header})
                assert answer.status_code != 401, (path, header)


def test_a_header_that_is_given_twice(tokenizer: Tokenizer) -> None:
    """Whichever of the two counts, a proxy may have looked at the other one."""
    good, bad = ("authorization", "Bearer key-one"), ("authorization", "Bearer wrong")
    with serving(FakeEngine(tokenizer), KEYS) as served:
        for pair in (
            [good, bad], [bad, good], [good, good],
            [good, ("X-Api-Key", "a"), ("x-api-key", "b")],
            [good, ("content-type", "application/json"), ("content-type", "text/plain")],
        ):  # fmt: skip
            for path in ("/v1/models", "/health?verbose=1", "/live"):
                answer = served.http.get(path, headers=pair)
                assert answer.status_code == 400, (pair, path)
                assert answer.json()["error"]["code"] == "duplicate_header"
        assert served.http.get("/v1/models", headers=[good, ("x-other", "1"), ("x-other", "2")])


def test_the_401_is_an_openai_error(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), KEYS) as served:
        answer = served.http.get("/v1/models")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_details_of_health_need_a_key(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), KEYS) as served:
        assert served.http.get("/health").content == b""
        assert served.http.get("/health?verbose=1").status_code == 401
        details = served.http.get("/health?verbose=1", headers=GOOD).json()
        assert details["state"] == "ready" and details["queue"] == 0


def test_metrics_can_be_closed(tokenizer: Tokenizer) -> None:
    closed = ServerSettings(api_keys=("key-two",), public_metrics=False)
    with serving(FakeEngine(tokenizer), closed) as served:
        assert served.http.get("/metrics").status_code == 401
        assert served.http.head("/metrics", headers=GOOD).status_code == 200


def test_more_public_paths(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=("key-two",), public_paths=("/page.js",))
    with serving(FakeEngine(tokenizer), settings) as served:
        assert served.http.get("/page.js").status_code == 404
        assert served.http.get("/page.css").status_code == 401


def test_behind_a_proxy_with_a_prefix(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=("key-two",), root_path="/llm")
    with serving(FakeEngine(tokenizer), settings) as served:
        for prefix in ("", "/llm"):  # a proxy may leave it in or take it off
            assert served.http.get(f"{prefix}/health").status_code == 200
            assert served.http.get(f"{prefix}/v1/models").status_code == 401
            answer = served.http.get(f"{prefix}/v1/models", headers=GOOD)
            assert answer.status_code == 200
        assert served.http.get("/llmhealth").status_code == 401


def test_keys_are_compared_whole() -> None:
    keys = ApiKeys(["schlüssel", "b"])
    assert keys.match("Bearer schlüssel") == "schlüssel"
    for wrong in (None, "", "Bearer ", "Bearer a", "Bearer b b", "Token b"):
        with pytest.raises(ApiError):
            keys.match(wrong)
    assert not ApiKeys([])


def test_one_keys_prefixes_are_not_found_by_another(tokenizer: Tokenizer) -> None:
    def salts(settings: ServerSettings, *headers: dict[str, str]) -> list[str | None]:
        with serving(FakeEngine(tokenizer), settings) as served:
            for header in headers:
                for salt in ({}, {"cache_salt": "mine"}):
                    body = {"prompt": "a", "max_tokens": 1} | salt
                    assert served.post(COMPLETIONS, body, headers=header).status_code == 200
            return [prompt.cache_salt for _, prompt, _ in served.engine.seen]

    one, two = {"authorization": "Bearer key-one"}, GOOD
    apart = salts(KEYS, one, two)
    assert len(set(apart)) == 4 and None not in apart
    assert not any("key-" in str(salt) for salt in apart)
    shared = ServerSettings(api_keys=KEYS.api_keys, prefix_cache_isolation="none")
    assert salts(shared, one, two) == [None, "mine"] * 2
    assert salts(ServerSettings(api_keys=("key-one",)), one) == [None, "mine"]


def test_cross_origin_calls_are_closed_by_default(server: Served) -> None:
    origin = {"origin": "https://page.example"}
    answer = server.http.get("/version", headers=origin)
    assert "access-control-allow-origin" not in answer.headers


def test_cross_origin_calls_can_be_opened(tokenizer: Tokenizer) -> None:
    cors = Cors(origins=("https://page.example",), methods=("POST",), headers=("authorization",))
    settings = ServerSettings(api_keys=("key-two",), cors=cors)
    with serving(FakeEngine(tokenizer), settings) as served:
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        preflight = served.http.options(COMPLETIONS, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        refused = served.http.get("/v1/models", headers={"origin": "https://page.example"})
        assert refused.status_code == 401  # and the page can read why
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        other = served.http.options(COMPLETIONS, headers=asked | {"origin": "https://x.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_log_shows_no_keys_and_prompts_only_if_wanted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hetero_llm")
    with serving(FakeEngine(tokenizer), replace(KEYS, log_prompts=False)) as served:
        body = {"prompt": "private words", "max_tokens": 1, "request_id": "line\nbreak"}
        headers = GOOD | {"x-request-id": "trace-7"}
        assert served.post(COMPLETIONS, body, headers=headers).status_code == 200
        assert served.post(COMPLETIONS, body, headers={"authorization": "Bearer oops"})
    assert "key-" not in caplog.text and "oops" not in caplog.text
    assert "private" not in caplog.text
    (line,) = [r.getMessage() for r in caplog.records if "trace-7" in r.getMessage()]
    assert "\n" not in line and "max_tokens=1" in line
    assert "key-" not in repr(KEYS)


def test_prompts_in_the_log_are_cut(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hetero_llm")
    for settings, texts in (
        (ServerSettings(), ['ab\n"cdef', list(range(70, 80))]),  # as in TACO-LLM's manual
        (ServerSettings(max_log_len=5), ['ab\n"c', [70, 71, 72, 73, 74]]),
        (ServerSettings(max_log_len=0), []),
        (ServerSettings(log_prompts=False, max_log_len=5), []),
    ):
        caplog.clear()
        with serving(FakeEngine(tokenizer), settings) as served:
            served.post(COMPLETIONS, {"prompt": 'ab\n"cdef', "max_tokens": 1})
            served.post(COMPLETIONS, {"prompt": list(range(70, 80)), "max_tokens": 1})
        lines = [r.getMessage() for r in caplog.records if ": prompt " in r.getMessage()]
        assert [json.loads(line.partition(": prompt ")[2]) for line in lines] == texts
        assert len([r for r in caplog.records if "prompt(s)" in r.getMessage()]) == 2


def test_the_log_can_be_silent(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hetero_llm")
    with serving(FakeEngine(tokenizer), ServerSettings(log_requests=False)) as served:
        served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert not [r for r in caplog.records if r.name.startswith("hetero_llm.server")]
