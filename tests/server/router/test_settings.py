"""Addresses of replicas."""

from __future__ import annotations

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.server.router.settings import ReplicaAddress, read_addresses


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:8000", ReplicaAddress("a", 8000)),
        ("a:8000", ReplicaAddress("a", 8000)),
        ("http://a", ReplicaAddress("a", 80)),
        ("https://a/", ReplicaAddress("a", 443, tls=True)),
        ("http://a:1/v1", ReplicaAddress("a", 1)),
        ("http://a:1/base/v1/", ReplicaAddress("a", 1, base_path="/base")),
        ("http://[::1]:9", ReplicaAddress("::1", 9)),
    ],
)
def test_urls(url: str, expected: ReplicaAddress) -> None:
    assert read_addresses([url]) == (expected,)


def test_names() -> None:
    assert ReplicaAddress("::1", 9).name == "[::1]:9"


@pytest.mark.parametrize(
    "url",
    ["ftp://a", "http://", "http://a:99999", "http://user:key@a", "http://a?b=1", "http://a/x y"],
)
def test_wrong_urls_are_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="urls=") as caught:
        read_addresses([url])
    assert "\n" not in str(caught.value)


def test_how_many() -> None:
    with pytest.raises(ConfigError, match="is required"):
        read_addresses([])
    with pytest.raises(ConfigError, match="is given twice"):
        read_addresses(["http://a:1", "a:1/v1"])
