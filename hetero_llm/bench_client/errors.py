"""Errors between client and server."""

from __future__ import annotations

from hetero_llm.core.errors import HeteroLLMError


class ServerError(HeteroLLMError):
    """The server cannot be reached, refused a request, or did not complete its answer.

    `status`: the HTTP status; None if there was none or the stream had begun.
    """

    exit_code = 1

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
