"""Requests whose grammars are being compiled, in a thread beside the engine's."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from hetero_llm.core.grammar import Grammar
from hetero_llm.core.request import Request
from hetero_llm.structured_output.compiler import GrammarCompiler

_LONG_TEXT = 1 << 14
"""Characters of a grammar whose request waits until it is compiled. Shorter ones compile while the
prompt is computed: some milliseconds for which the first token waits, if it must."""
_NAP_SECONDS = 0.001


class CompileQueue:
    """Compiles the grammars of arriving requests, and holds back those that take long, so that no
    step waits for them.

    A grammar is compiled from the next `start` on, which follows the launch of a step: reading its
    text keeps the GIL from the launch, and the device computes the prompt meanwhile.

    Args:
        compiler: None without a tokenizer; then no request has a grammar.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(1, "hetero-llm-grammar")
        self._arrived: list[tuple[Grammar, Future[None]]] = []  # not begun
        self._held: list[tuple[Request, Future[None]]] = []

    def __len__(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    def add(self, request: Request) -> bool:
        """Lets the next `start` compile the request's grammar, if it has one. Returns whether the
        request is held back until `take_ready` returns it."""
        grammar = request.grammar
        if grammar is None:
            return False
        assert self._compiler is not None
        if self._compiler.knows(grammar):
            return False
        compiled: Future[None] = Future()
        self._arrived.append((grammar, compiled))
        if len(grammar.text) <= _LONG_TEXT:
            return False
        self._held.append((request, compiled))
        return True

    def start(self) -> None:
        """Begins to compile the grammars that have arrived."""
        if self._arrived:
            for grammar, compiled in self._arrived:
                self._threads.submit(self._compile, grammar, compiled)
            self._arrived.clear()

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

    def _compile(self, grammar: Grammar, compiled: Future[None]) -> None:
        assert self._compiler is not None
        try:
            self._compiler.prepare(grammar)
        finally:  # an error is found again when a sequence opens the grammar
            compiled.set_result(None)
