"""What one API key may send: at once, and in a minute. Others are not held up."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.errors import ApiError
from hetero_llm.server.middleware import KeyLimits
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

COMPLETIONS = "/v1/completions"
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("key-one", "key-two"))
KEYS = ("key-one", "key-two")
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 1}


def test_too_many_at_once(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()
    # Only a comment begins an answer that has nothing to say yet.
    settings = ServerSettings(api_keys=KEYS, max_requests_per_key=1, keep_alive_seconds=0.05)
    with serving(engine, settings) as served:
        body = BODY | {"stream": True}
        with served.http.stream("POST", COMPLETIONS, json=body, headers=ONE) as running:
            refused = served.post(COMPLETIONS, BODY, headers=ONE)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.content == (
                b'{"error":{"message":"this API key may send 1 requests at once and has sent more; '
                b'try again later","type":"rate_limit_error","param":null,'
                b'"code":"rate_limit_exceeded"}}'
            )
            assert served.http.get("/v1/models", headers=ONE).status_code == 200
            assert served.post("/tokenize", {"prompt": "a"}, headers=TWO).status_code == 200
            served.call(engine.unpaused.set)
            assert running.read().endswith(b"[DONE]\n\n")
        # What has been answered counts no more, whatever the answer was.
        for wanted in (200, 400, 400, 200):
            body = BODY if wanted == 200 else {}
            assert served.post(COMPLETIONS, body, headers=ONE).status_code == wanted
        metrics = served.http.get("/metrics").text
        assert 'reason="rate_limit_exceeded"} 1.0' in metrics


def test_too_many_in_a_minute(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=KEYS, max_requests_per_minute=2)
    with serving(FakeEngine(tokenizer), settings) as served:
        begun = time.monotonic()
        statuses = [served.post(COMPLETIONS, BODY, headers=ONE).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = served.post(COMPLETIONS, BODY, headers=ONE)
        assert 29 - (time.monotonic() - begun) <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"] == {
            "message": "this API key may send 2 requests a minute and has sent more; "
            "try again later",
            "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded",
        }  # fmt: skip
        assert served.post(COMPLETIONS, BODY, headers=TWO).status_code == 200
        wrong = {"authorization": "Bearer key-three"}
        assert served.post(COMPLETIONS, BODY, headers=wrong).status_code == 401


@pytest.mark.parametrize("name", ["max_requests_per_key", "max_requests_per_minute"])
def test_limits_of_keys_need_keys(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*needs api_key"):
        ServerSettings(**{name: 5})


@given(
    per_minute=st.integers(1, 200),
    pauses=st.lists(st.floats(0, 90, allow_nan=False), min_size=1, max_size=300),
)
def test_no_minute_holds_more_than_two_budgets(per_minute: int, pauses: list[float]) -> None:
    """A client that waits for `retry-after` is served."""
    now = 0.0
    limits = KeyLimits(None, per_minute, clock=lambda: now)
    served: list[float] = []
    for pause in pauses:
        now += pause
        try:
            with limits.admitted("key"):
                served.append(now)
        except ApiError as error:
            assert sum(1 for when in served if when > now - 60) >= min(per_minute, len(served))
            seconds = int(error.headers["retry-after"])
            assert 1 <= seconds <= math.ceil(60 / per_minute) + 1
            now += seconds
            with limits.admitted("key"):
                served.append(now)
    for when in served:
        assert sum(1 for other in served if when - 60 < other <= when) <= 2 * per_minute
