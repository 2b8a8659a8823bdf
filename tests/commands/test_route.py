"""`hetero-llm route` as a process: it starts, serves, drains and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from hetero_llm.cli import main

PATIENCE = 120.0  # seconds; only a hang comes near


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hold = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/held":
            self.hold.wait(PATIENCE)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def backend() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        _Handler.hold.set()
        server.shutdown()


def test_it_routes_and_drains() -> None:
    _Handler.hold.clear()
    with backend() as url:
        words = [sys.executable, "-m", "hetero_llm.cli", "route", url, "--port", "0"]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as router:
            assert router.stdout is not None
            ready = router.stdout.readline()
            assert ready.startswith("Ready on http://127.0.0.1:"), ready
            address = ready.split()[2].rstrip(",")
            with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as http:
                assert http.get("/v1/models").text == "ok"
                answers: list[httpx.Response] = []
                held = threading.Thread(
                    target=lambda: answers.append(httpx.get(f"{address}/held", timeout=PATIENCE))
                )
                held.start()
                running = 'router_requests_running{replica="'
                while (
                    f'{running}{url.removeprefix("http://")}"}} 1.0'
                    not in http.get("/metrics").text
                ):
                    pass
                router.send_signal(signal.SIGTERM)
            assert router.poll() is None
            _Handler.hold.set()
            held.join(PATIENCE)
            assert [answer.text for answer in answers] == ["ok"]
            assert router.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://a"], "urls='ftp://a': must be http://HOST:PORT"),
        (["http://a", "--retries", "-1"], "retries=-1"),
        (["http://a", "--load-weight", "0"], "load_weight=0"),
        (["http://a", "--host", "192.0.2.1"], "cannot be listened on"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *words, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
