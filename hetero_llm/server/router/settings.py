"""Settings of the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.processes.replica_choice import ChoiceWeights

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a server listens. `base_path` comes before every path; it has no slash at its end."""

    host: str
    port: int
    tls: bool = False
    base_path: str = ""

    @property
    def name(self) -> str:
        """For logs and metrics: host and port."""
        return f"{self.host_in_url}:{self.port}"

    @property
    def host_in_url(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """
    Attributes:
        replicas: the servers, of one model.
        weights: of the choice.
        pieces: remembered of each replica.
        retries: other replicas that a request may be sent to when one fails before its answer.
        health_path: GET of a replica; 200: it serves.
        health_seconds: between two probes of a replica, and a probe's time limit.
        failures: failed probes or requests in a row after which a replica gets no more requests.
        connect_seconds: to open a connection to a replica.
        header_seconds: that a client has for a request's head.
        body_bytes: most of a request.
        connections: of clients, at once.
        shutdown_timeout: seconds that running requests get after SIGTERM.
    """

    replicas: tuple[ReplicaAddress, ...]
    weights: ChoiceWeights = ChoiceWeights()
    pieces: int = 1 << 17
    retries: int = 2
    health_path: str = "/health"
    health_seconds: float = 2.0
    failures: int = 3
    connect_seconds: float = 5.0
    header_seconds: float = 10.0
    body_bytes: int = 32 << 20
    connections: int = 4096
    shutdown_timeout: float = 30.0


def read_addresses(urls: Sequence[str]) -> tuple[ReplicaAddress, ...]:
    """The replicas of a command line, such as http://10.0.0.1:8000. "http://" may be left out; a
    path at the end such as /v1 belongs to the API and is left out, too.

    Raises:
        ConfigError: there is none, one is wrong, or one is given twice.
    """
    if not urls:
        raise ConfigError("urls", None, "is required: hetero-llm route URL...")
    found: list[ReplicaAddress] = []
    for url in urls:
        address = _read(url)
        if address in found:
            raise ConfigError("urls", url, "is given twice")
        found.append(address)
    return tuple(found)


def _read(url: str) -> ReplicaAddress:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError("urls", url, f"is no URL: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError("urls", url, "must be http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.query or parts.fragment:
        reason = "must be scheme, host, port and path; keys come with the requests"
        raise ConfigError("urls", url, reason)
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.isascii() or any(character <= " " for character in path):
        raise ConfigError("urls", url, "has a path with characters that belong in no URL")
    tls = parts.scheme == "https"
    return ReplicaAddress(parts.hostname, port or _PORTS[parts.scheme], tls, path)
