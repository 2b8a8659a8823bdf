"""Routes of vLLM's development mode."""

from __future__ import annotations

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

ROUTES = ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")


def test_caches_are_reset_in_development_mode(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    settings = ServerSettings(server_dev_mode=True, api_keys=("key",))
    with serving(engine, settings) as served:
        good = {"authorization": "Bearer key"}
        for route in ROUTES:
            assert served.http.post(route).status_code == 401
            assert served.http.post(route, headers=good).content == b""
        query = "?reset_running_requests=true&reset_external=False"
        assert served.http.post(ROUTES[0] + query, headers=good).status_code == 200
        assert engine.num_resets == 2
        for query, param in (("reset_external=maybe", "reset_external"), ("x=1", "x")):
            wrong = served.http.post(f"{ROUTES[0]}?{query}", headers=good)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param
        assert engine.num_resets == 2
        served.context.draining = True
        assert served.http.post(ROUTES[0], headers=good).status_code == 503


@pytest.mark.parametrize("route", ROUTES)
def test_the_switch_is_named(server: Served, route: str) -> None:
    answer = server.http.post(route)
    assert answer.status_code == 404 and "--server-dev-mode" in answer.json()["error"]["message"]
