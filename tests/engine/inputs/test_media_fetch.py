"""Images by URL: from listed hosts alone, bounded in size and time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError, PromptError
from hetero_llm.engine.inputs.image_uri import chat_images, picture_of_uri
from hetero_llm.engine.inputs.media_fetch import HttpsFetcher, NoFetcher
from tests.helpers.tls import CERTIFICATE, KEY

MOST = 5000
IMAGE = b"\x89PNG not really"


class Handler(BaseHTTPRequestHandler):
    """Answers by path; `released` ends what is slow."""

    protocol_version = "HTTP/1.1"
    released = threading.Event()
    seen: list[tuple[str, str | None]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("host")))
        name = self.path.partition("?")[0].strip("/")
        if name.startswith("to-"):
            self.answer(302, b"", location=TARGETS[name])
        elif name == "large":
            self.answer(200, b"x" * (MOST + 1))
        elif name == "endless":
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(b"x" * (MOST + 1))
        elif name == "cut":
            self.answer(200, IMAGE, **{"content-length": "100"})
            self.close_connection = True
        elif name == "slow":
            self.answer(200, IMAGE, **{"content-length": "100"})
            self.released.wait(20)
        elif name == "silent":
            self.released.wait(20)
        else:
            self.answer(200 if name == "image" else 404, IMAGE)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *words: Any) -> None:
        pass


TARGETS = {
    "to-image": "/image",
    "to-loop": "/to-loop",
    "to-http": "http://127.0.0.1/image",
    "to-other": "https://localhost/image",
    "to-other-port": "https://127.0.0.1:1/image",
    "to-file": "file:///etc/passwd",
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("tls")
    (folder / "both.pem").write_text(CERTIFICATE + KEY)
    (folder / "cert.pem").write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
        yield server.server_address[1]
    Handler.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetcher(port: int) -> HttpsFetcher:
    return HttpsFetcher([f"127.0.0.1:{port}", f"images.test:{port}"])


def refused(fetcher: HttpsFetcher | NoFetcher, url: str) -> str:
    with pytest.raises(PromptError) as caught:
        fetcher.fetch(url, "here", MOST)
    assert caught.value.field == "here"
    return str(caught.value)


def test_listed_hosts_are_fetched(fetcher: HttpsFetcher, port: int) -> None:
    url = f"https://127.0.0.1:{port}"
    assert fetcher.fetch(f"{url}/image?size=1", "here", MOST) == IMAGE
    assert Handler.seen[-1] == ("/image?size=1", f"127.0.0.1:{port}")
    assert fetcher.fetch(f"{url}/to-image", "here", MOST) == IMAGE
    assert asyncio.run(fetcher.fetch_beside(f"{url}/image", "here", MOST)) == IMAGE


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing", "was answered with status 404"),
        ("large", "larger than 5000 bytes"),
        ("endless", "larger than 5000 bytes"),
        ("cut", "ended too early"),
        ("to-loop", "redirects more than 3 times"),
        ("to-http", "must be an https URL"),
        ("to-other", "leads to 'localhost', which is not one of allowed_media_domains"),
        ("to-other-port", "leads to '127.0.0.1', which is not one of"),
        ("to-file", "must be an https URL"),
    ],
)
def test_answers_that_are_refused(fetcher: HttpsFetcher, port: int, path: str, reason: str) -> None:
    assert reason in refused(fetcher, f"https://127.0.0.1:{port}/{path}")


@pytest.mark.parametrize("path", ["slow", "silent"])
def test_time_is_bounded(port: int, path: str) -> None:
    fetcher = HttpsFetcher([f"127.0.0.1:{port}"], seconds=0.2)
    assert "took longer than 0.2 s" in refused(fetcher, f"https://127.0.0.1:{port}/{path}")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://a.com/x.png", "must be an https URL"),
        ("ftp://a.com/x.png", "must be an https URL"),
        ("//a.com/x.png", "must be an https URL"),
        ("/etc/passwd", "must be an https URL"),
        ("https://b.com/x.png", "leads to 'b.com'"),
        ("https://x.a.com/x.png", "leads to 'x.a.com'"),
        ("https://a.com.b.com/x.png", "leads to 'a.com.b.com'"),
        ("https://a.com:444/x.png", "leads to 'a.com'"),
        ("https://a.com@b.com/x.png", "must not hold a user"),
        ("https://user:pass@a.com/x.png", "must not hold a user"),
        ("https://a.com\\@b.com/x", "must not hold a user"),
        ("https://a.com:x/", "is no URL"),
        ("https://[::1/", "is no URL"),
        ("https://a.com/a b", "plain characters"),
        ("https://a.com/\r\nhost:b", "plain characters"),
        ("https://a.com/" + "x" * 5000, "at most 4096"),
    ],
)
def test_urls_that_are_not_even_tried(
    monkeypatch: pytest.MonkeyPatch, url: str, reason: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **rest: pytest.fail("looked up"))
    assert reason in refused(HttpsFetcher(["a.com"]), url)


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["192.168.0.1"],
        ["0.0.0.0"],
        ["::1"],
        ["fe80::1%eth0"],
        ["::ffff:127.0.0.1"],
        ["224.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
    ],
)
def test_names_with_private_addresses_are_refused(
    fetcher: HttpsFetcher, port: int, monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **rest: found)
    url = f"https://images.test:{port}/image"
    assert "which has an address that is not public" in refused(fetcher, url)


def test_the_certificate_is_checked(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    fetcher = HttpsFetcher([f"127.0.0.1:{port}"])
    said = refused(fetcher, f"https://127.0.0.1:{port}/image")
    assert "cannot be fetched: SSLCertVerificationError" in said


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        fetcher = HttpsFetcher([f"127.0.0.1:{port}"])
        said = refused(fetcher, f"https://127.0.0.1:{port}/")
    assert "cannot be fetched: ConnectionRefusedError" in said


@pytest.mark.parametrize(
    "domain", ["", "https://a.com", "a.com/x", "*.a.com", "a.com:x", "a com", "u@a.com", "-a"]
)
def test_entries_that_are_no_hosts(domain: str) -> None:
    with pytest.raises(ConfigError, match="must be hosts such as images.example.com"):
        HttpsFetcher([domain])


def test_entries() -> None:
    HttpsFetcher(["A.com", "a.com:8443", "10.0.0.1", "[::1]:443", "localhost"])


def test_without_domains_nothing_is_fetched() -> None:
    assert "nothing is fetched without allowed_media_domains" in refused(NoFetcher(), "https://a/")


def test_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (3, 2), (1, 2, 3)).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    picture = picture_of_uri(
        "https://a/x", "here", most_bytes=MOST, most_pixels=10, fetch=lambda *asked: content
    )
    assert picture.size == (3, 2)
    with pytest.raises(PromptError, match="has more than 5 pixels"):
        picture_of_uri(
            "https://a/x", "here", most_bytes=MOST, most_pixels=5, fetch=lambda *asked: content
        )
    part = {"type": "image_url", "image_url": {"url": "https://a/x"}}
    _, images = chat_images([{"role": "user", "content": [part]}], lambda *asked: content)
    assert [one.size for one in images] == [(3, 2)]
