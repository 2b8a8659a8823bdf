"""What can go wrong between a client and a server."""

from __future__ import annotations

from hetero_llm.core.errors import HeteroLLMError


class ServerError(HeteroLLMError):
    """The server cannot be reached, refused a request, or broke off its answer.

    `status` is the HTTP status, None where there was none or where the stream had begun.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
