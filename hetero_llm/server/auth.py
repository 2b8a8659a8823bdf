"""Who may call which path."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from hetero_llm.server.errors import ApiError

PUBLIC = frozenset(
    ("/", "/health", "/live", "/ready", "/ping", "/version", "/load", "/openapi.json")
)
"""Paths that tell nothing about models or users. All others need a key, those that do not exist
included."""


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


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
