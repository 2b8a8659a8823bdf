"""Images from https URLs of domains that the operator has listed; by default none are fetched.

URLs come from clients, who must not reach anything else through this machine: the host has to be
listed, redirects included; its name must lead to public addresses alone, and the connection goes to
the address that was checked. Time and size are bounded.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import SplitResult, urljoin, urlsplit

from hetero_llm.core.errors import ConfigError, PromptError

FIELD = "allowed_media_domains"
_SECONDS = 10.0
_MOST_REDIRECTS = 3
_MOST_URL = 4096
_NUM_THREADS = 8
_HTTPS_PORT = 443
_CHUNK = 1 << 16
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_PLAIN = re.compile(r"[!-~]+")
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*", re.ASCII)
_SHOWN = 80


class Fetcher(Protocol):
    """Fetches what a URL names."""

    def fetch(self, url: str, where: str, most_bytes: int) -> bytes:
        """The content.

        Args:
            where: the URL's place in the request: the field of errors.
            most_bytes: of the content.

        Raises:
            PromptError: it is not allowed, not there, too large or too slow.
        """

    async def fetch_beside(self, url: str, where: str, most_bytes: int) -> bytes:
        """As `fetch`, in a thread."""


class NoFetcher:
    """Fetches nothing."""

    def fetch(self, url: str, where: str, most_bytes: int) -> bytes:
        what = "must be a data URI (data:image/png;base64,...)"
        reason = f"{what}: nothing is fetched without {FIELD}"
        raise PromptError(where, url[:_SHOWN], reason)

    async def fetch_beside(self, url: str, where: str, most_bytes: int) -> bytes:
        return self.fetch(url, where, most_bytes)


class HttpsFetcher:
    """Fetches from listed hosts, by HTTPS alone.

    Args:
        domains: hosts, as `host` or `host:port`, without wildcards. A listed IP address may be a
            private one; a listed name must lead to public ones.
        seconds: that one URL may take, redirects included, once its host's address is known.

    Raises:
        ConfigError: an entry is no host.
    """

    def __init__(self, domains: Sequence[str], *, seconds: float = _SECONDS) -> None:
        self._hosts = frozenset(_listed(domain) for domain in domains)
        self._seconds = seconds
        self._tls = ssl.create_default_context()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "hetero-llm-fetch")

    async def fetch_beside(self, url: str, where: str, most_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.fetch, url, where, most_bytes)

    def fetch(self, url: str, where: str, most_bytes: int) -> bytes:
        shown, deadline = url[:_SHOWN], None
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                parts = self._checked(url)
                address = _address(parts.hostname or "", parts.port or _HTTPS_PORT)
                if deadline is None:
                    deadline = time.monotonic() + self._seconds
                content, target = self._get(parts, address, deadline, most_bytes)
                if target is None:
                    return content
                url = urljoin(url, target)
        except _Refused as error:
            raise PromptError(where, shown, str(error)) from None
        except TimeoutError:
            raise PromptError(where, shown, f"took longer than {self._seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = f"cannot be fetched: {type(error).__name__}"
            raise PromptError(where, shown, reason) from None
        raise PromptError(where, shown, f"redirects more than {_MOST_REDIRECTS} times")

    def _checked(self, url: str) -> SplitResult:
        if len(url) > _MOST_URL or not _PLAIN.fullmatch(url):
            raise _Refused(f"must be a URL of at most {_MOST_URL} plain characters")
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").rstrip("."), parts.port or _HTTPS_PORT
        except ValueError:
            raise _Refused("is no URL") from None
        if parts.scheme != "https":
            raise _Refused("must be an https URL or a data URI")
        if parts.username is not None or parts.password is not None:
            raise _Refused("must not hold a user or a password")
        if host not in self._hosts:
            raise _Refused(f"leads to {host[0]!r}, which is not one of {FIELD}")
        return parts

    def _get(
        self, parts: SplitResult, address: tuple[Any, ...], deadline: float, most_bytes: int
    ) -> tuple[bytes, str | None]:
        """The content, or the target of a redirect."""
        host, port = parts.hostname or "", parts.port or _HTTPS_PORT
        connection = http.client.HTTPConnection(host, port)
        with socket.create_connection(address[:2], _left(deadline)) as plain:
            plain.settimeout(_left(deadline))
            with self._tls.wrap_socket(plain, server_hostname=host) as secure:
                connection.sock = _Until(secure, deadline)
                path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
                headers = {"Accept": "image/*", "Connection": "close"}
                connection.request("GET", path, headers=headers)
                return _read(connection.getresponse(), most_bytes)


class _Refused(Exception):
    """The reason why a URL is not fetched."""


class _Until:
    """A socket for `http.client` whose reads and writes end at a deadline; its owner closes it."""

    def __init__(self, secure: ssl.SSLSocket, deadline: float) -> None:
        self._socket = secure
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_left(self._deadline))
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._socket, self._deadline))

    def close(self) -> None:
        pass


class _Reader(io.RawIOBase):
    """Reads from a socket until a deadline."""

    def __init__(self, secure: ssl.SSLSocket, deadline: float) -> None:
        super().__init__()
        self._socket = secure
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_left(self._deadline))
        return self._socket.recv_into(buffer)


def _read(response: http.client.HTTPResponse, most_bytes: int) -> tuple[bytes, str | None]:
    if response.status in _REDIRECTS:
        target = response.getheader("location")
        if not target:
            raise _Refused("redirects to nowhere")
        return b"", target
    if response.status != 200:
        raise _Refused(f"was answered with status {response.status}")
    too_large = _Refused(f"the image is larger than {most_bytes} bytes")
    if response.length is not None and response.length > most_bytes:
        raise too_large
    content = bytearray()
    while chunk := response.read1(_CHUNK):
        content += chunk
        if len(content) > most_bytes:
            raise too_large
    if response.length:
        raise _Refused("ended too early")
    return bytes(content), None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _listed(domain: str) -> tuple[str, int]:
    """Host and port of an entry of the list."""
    try:
        parts = urlsplit(f"//{domain}")
        host, port = (parts.hostname or "").rstrip("."), parts.port or _HTTPS_PORT
    except ValueError:
        host, port = "", 0
    more = parts.path or parts.query or parts.fragment or parts.username if host else True
    if more or not (_NAME.fullmatch(host) or _literal(host)):
        raise ConfigError(FIELD, domain, "must be hosts such as images.example.com, or host:port")
    return host, port


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _address(host: str, port: int) -> tuple[Any, ...]:
    """The address to connect to. All addresses of a name must be public ones."""
    found = [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if _literal(host) is None and not all(_is_public(str(address[0])) for address in found):
        raise _Refused(f"leads to {host!r}, which has an address that is not public")
    return found[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_global and not ip.is_multicast
