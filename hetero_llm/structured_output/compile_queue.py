"""Requests whose grammars are being compiled, in a thread beside the engine's."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from hetero_llm.core.request import Request
from hetero_llm.structured_output.compiler import GrammarCompiler

_LONG_TEXT = 1 << 14
"""Characters of a grammar whose request waits until it is compiled. Shorter ones compile while the
prompt is computed: some milliseconds for which the first token waits, if it must."""
_NAP_SECONDS = 0.001


class CompileQueue:
    """Compiles the grammars of arriving requests, and holds back those that take long, so that no
    step waits for them.

    Args:
        compiler: None without a tokenizer; then no request has a grammar.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(1, "hetero-llm-grammar")
        self._held: list[tuple[Request, Future[None]]] = []

    def __len__(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    def add(self, request: Request) -> bool:
        """Begins to compile the request's grammar, if it has one. Returns whether the request is
        held back until `take_ready` returns it."""
        grammar = request.grammar
        if grammar is None:
            return False
        assert self._compiler is not None
        if self._compiler.knows(grammar):
            return False
        compiled = self._threads.submit(self._compiler.prepare, grammar)
        if len(grammar.text) <= _LONG_TEXT:
            return False
        self._held.append((request, compiled))
        return True

    def take_ready(self) -> list[Request]:
        """Returns the requests whose grammars have been compiled since, in order of arrival."""
        if not self._held:
            return []
        ready = [request for request, compiled in self._held if compiled.done()]
        self._held = [item for item in self._held if item[0] not in ready]
        return ready

    def take(self, request_id: str) -> Request | None:
        """Returns a request that is held back, no longer held; None if it is not."""
        for item in self._held:
            if item[0].request_id == request_id:
                self._held.remove(item)
                return item[0]
        return None

    def nap(self) -> None:
        """Waits a moment for a grammar, when nothing else is to be done."""
        wait([compiled for _, compiled in self._held], timeout=_NAP_SECONDS)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
