"""Who may call which path, and how often."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from hmac import compare_digest

from hetero_llm.server.errors import ApiError

PUBLIC = frozenset(
    ("/", "/health", "/live", "/ready", "/ping", "/version", "/load", "/openapi.json")
)
"""Paths that tell nothing about models or users. All others need a key, those that do not exist
included."""

_AT_ONCE_RETRY_SECONDS = 1.0


class Keys:
    """The accepted keys, as digests: comparing those takes the same time whatever was sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(key, _digest(key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def match(self, authorization: str | None) -> str:
        """The key in an `Authorization` header.

        Raises:
            ApiError: 401, there is none or it is not accepted.
        """
        scheme, _, given = (authorization or "").partition(" ")
        if not authorization:
            raise _refused("no API key was sent; send the header 'Authorization: Bearer KEY'")
        if scheme.lower() != "bearer":
            raise _refused("the authorization scheme must be Bearer")
        digest, found = _digest(given.strip()), None
        for key, known in self._keys:  # all of them, so that the time tells nothing
            if compare_digest(digest, known):
                found = key
        if found is None:
            raise _refused("the API key is not accepted")
        return found


class KeyLimits:
    """What one key may ask for, whatever others do.

    Args:
        at_once: requests being answered.
        per_minute: requests; so many may come at once, later ones when as much time has passed.
        clock: seconds.
    """

    def __init__(
        self,
        at_once: int | None,
        per_minute: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once = at_once
        self._per_minute = per_minute
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._used_up_to: dict[str, float] = {}

    def __bool__(self) -> bool:
        return self._at_once is not None or self._per_minute is not None

    @contextmanager
    def admitted(self, key: str) -> Iterator[None]:
        """Counts a request of this key while it is answered.

        Raises:
            ApiError: 429, it is one too many.
        """
        if self._at_once is not None and self._running[key] >= self._at_once:
            raise _too_many(f"{self._at_once} requests at once", _AT_ONCE_RETRY_SECONDS)
        self._count(key)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1

    def _count(self, key: str) -> None:
        """Each request uses up an equal part of a minute, of which a key has one ahead."""
        if self._per_minute is None:
            return
        now, part = self._clock(), 60.0 / self._per_minute
        used = max(self._used_up_to.get(key, now), now) + part
        ahead = used - now - 60.0
        if ahead > part * 1e-6:  # rounding is not the key's fault
            raise _too_many(f"{self._per_minute} requests a minute", ahead)
        self._used_up_to[key] = used


def _too_many(limit: str, retry_after: float) -> ApiError:
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"this API key may send {limit} and has sent more; try again later",
        headers={"retry-after": str(max(1, math.ceil(retry_after)))},
    )


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
