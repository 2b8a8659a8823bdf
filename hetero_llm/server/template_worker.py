"""The process that renders chat templates, which are programs and may never end.

    python -m hetero_llm.server.template_worker SOCKET

Unlike a thread it can be killed, and the kernel limits its memory and time. It has the rights of
its parent, so the sandbox of transformers is still needed.
"""

from __future__ import annotations

import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

import msgspec

READY = b"ready"
LENGTH = struct.Struct("<I")
_UNUSED = ("torch", "PIL")
"""Packages that transformers imports if they are there, and that no template needs."""
_MORE_MEMORY = 512 << 20
_GRACE_SECONDS = 1.0
"""A worker ends itself this much later than its parent would, in case the parent is gone."""


class Setup(msgspec.Struct):
    """The first message. `special_tokens` are those that templates can name."""

    template: str
    special_tokens: dict[str, Any]
    seconds: float


class Job(msgspec.Struct):
    """One conversation. `kwargs` are transformers' and the template's."""

    messages: list[dict[str, Any]]
    kwargs: dict[str, Any]
    most_chars: int


class Rendered(msgspec.Struct):
    """The text, or why there is none. `spent`: the worker should be replaced."""

    text: str = ""
    refused: str | None = None
    spent: bool = False


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the group; this ends at EOF
        signal.signal(number, signal.SIG_IGN)
    for name in _UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]
    with socket.socket(fileno=int(sys.argv[1])) as end, end.makefile("rwb") as stream:
        message = _read(stream)
        if message is None:
            return
        setup = msgspec.json.decode(message, type=Setup)
        apply = _apply()
        _bound_memory()
        _write(stream, READY)
        jobs = msgspec.json.Decoder(Job)
        while (message := _read(stream)) is not None:
            # Without a handler the signal ends the process, inside of C code, too.
            signal.setitimer(signal.ITIMER_REAL, setup.seconds + _GRACE_SECONDS)
            rendered = _render(apply, setup, jobs.decode(message))
            _write(stream, msgspec.json.encode(rendered))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _apply() -> Callable[..., Any]:
    """transformers' function from messages to text, of a tokenizer without tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    apply: Callable[..., Any] = empty.apply_chat_template
    return apply


def _render(apply: Callable[..., Any], setup: Setup, job: Job) -> Rendered:
    named = {**setup.special_tokens, **job.kwargs}
    try:
        text = apply(job.messages, chat_template=setup.template, tokenize=False, **named)
    except MemoryError:
        return Rendered(refused="it takes too much memory", spent=True)
    except Exception as error:
        return Rendered(refused=_utf8(str(error)[:2048]) or type(error).__name__)
    if len(text) > job.most_chars:
        return Rendered(refused=f"it writes more than {job.most_chars} characters")
    return Rendered(_utf8(text))


def _utf8(text: str) -> str:
    """Replaces lone surrogates, which a template can write though no request can hold them."""
    return text.encode("utf-8", "replace").decode()


def _bound_memory() -> None:
    """Limits the address space to what is in use now, and 512 MiB more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + _MORE_MEMORY
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _read(stream: BufferedRWPair) -> bytes | None:
    """The next message; None when the parent has closed its end."""
    try:
        header = stream.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        return stream.read(LENGTH.unpack(header)[0])
    except OSError:
        return None


def _write(stream: BufferedRWPair, message: bytes) -> None:
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


if __name__ == "__main__":
    main()
