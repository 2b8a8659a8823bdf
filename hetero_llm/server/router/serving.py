"""Runs the router until a signal: the first one drains, the second one ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable

from hetero_llm.server.router.router import Router
from hetero_llm.server.router.settings import RouterSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_POLL_SECONDS = 0.02


def serve_router(
    settings: RouterSettings, listener: socket.socket, *, say: Callable[[str], None] = print
) -> int:
    """Serves on a bound socket; returns the exit code.

    Args:
        say: prints a text for the person who starts the router.
    """
    return asyncio.run(_serve(settings, listener, say))


async def _serve(
    settings: RouterSettings, listener: socket.socket, say: Callable[[str], None]
) -> int:
    router = Router(settings)
    loop = asyncio.get_running_loop()
    stop, end_now = asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        if not stop.is_set():
            stop.set()
        elif number != signal.SIGHUP:  # a shell sends it twice when a terminal closes
            end_now.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)
    server = await loop.create_server(router.connection, sock=listener, backlog=_BACKLOG)
    watching = asyncio.create_task(router.watch())
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"Ready on http://{shown}:{port}, before {len(router.replicas)} servers")
    await stop.wait()
    logger.info("stopping: %d requests are on their way", router.num_busy)
    server.close()
    router.start_draining()
    deadline = time.monotonic() + settings.shutdown_timeout
    while router.num_busy and time.monotonic() < deadline and not end_now.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    router.close()
    await asyncio.sleep(_POLL_SECONDS)  # connections end
    return 0
