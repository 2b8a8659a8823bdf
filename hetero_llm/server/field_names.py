"""Errors in the words of the client: which of its fields became the one that an error names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hetero_llm.core.errors import RequestError
from hetero_llm.server.errors import ApiError, as_api_error


class FieldNames:
    """What the client calls the fields of what its request became: a chat request, or the
    parameters of a constraint.

    Args:
        names: paths such as "messages[2].content" to paths in the client's request. A path that is
            not in it has the name of the longest one that it begins with, and its own rest.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Errors that are raised inside name the client's fields."""
        try:
            yield
        except (ApiError, RequestError) as error:
            raise self._renamed(as_api_error(error, "")) from None

    def _renamed(self, error: ApiError) -> ApiError:
        param = None if error.param is None else self.of(error.param)
        return ApiError(
            error.status,
            error.code,
            self.of(error.message),
            param=param,
            headers=error.headers,
        )

    def of(self, text: str) -> str:
        """A path, or a message that begins with one, with the client's name for it."""
        end = _path_end(text)
        path = text[:end]
        while path:
            if path in self._names:
                return self._names[path] + text[len(path) :]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return text


def _path_end(text: str) -> int:
    """How far a text is a path: names, dots and indexes in brackets."""
    end = 0
    while end < len(text) and (text[end].isalnum() or text[end] in "_.[]"):
        end += 1
    return end
