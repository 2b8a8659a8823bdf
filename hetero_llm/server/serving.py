"""From checked arguments to a server that answers, and to its end.

The port is bound before the model loads, so that a wrong one is known at once. The first SIGTERM
drains: /ready turns to 503, running requests get `shutdown_timeout`, then the engine and the server
end. A second signal ends both at once.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from hetero_llm import __version__
from hetero_llm.core.config import EngineConfig
from hetero_llm.core.errors import ConfigError, EngineDeadError, EngineHungError
from hetero_llm.engine.async_engine import AsyncEngineArgs, AsyncLLMEngine
from hetero_llm.engine.client import EngineClient, EngineInfo
from hetero_llm.server.app import build_app
from hetero_llm.server.context import Context
from hetero_llm.server.settings import Cors, ServerSettings

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 70
_HEADER_SECONDS = 10
_LOOK = 0.5
_BACKLOG = 2048


def serve(engine_args: Mapping[str, Any], server_args: Mapping[str, Any]) -> int:
    """Serves until a signal or the engine's death.

    Args:
        engine_args: those given, unchecked.
        server_args: all of them, checked.

    Returns:
        0 after a signal, 70 after the engine's death.

    Raises:
        ConfigError: an argument is wrong, or the port is taken.
        ModelLoadError: the model cannot be loaded.
    """
    arguments = AsyncEngineArgs(**engine_args)
    settings = settings_of(server_args)
    middleware = [_imported(path) for path in server_args["middleware"]]
    listener = bind(server_args["host"], server_args["port"])
    with listener:
        _warn_if_open(server_args)
        print(f"hetero_llm {__version__}: loading {arguments.values['model']}", flush=True)
        engine = AsyncLLMEngine(
            arguments,
            served_names=settings.served_names,
            max_queued_requests=server_args["max_queued_requests"],
            step_timeout=server_args["step_timeout"],
        )
        app = build_app(engine, settings)
        for one in middleware:
            _add_middleware(app, one)
        app.state.context.plan = plan_table(engine.info, _drafts(arguments.values))
        print(app.state.context.plan, flush=True)
        server = Server(
            uvicorn_config(app, server_args),
            app.state.context,
            shutdown_timeout=server_args["shutdown_timeout"],
            drain_delay=server_args["drain_delay"],
            ready=_ready_text(listener, engine.info, server_args),
        )
        return asyncio.run(server.run_until_told(listener))


def settings_of(args: Mapping[str, Any]) -> ServerSettings:
    """The HTTP side's settings out of the server's arguments."""
    return ServerSettings(
        api_keys=tuple(args["api_key"]),
        served_names=tuple(args["served_model_name"]),
        chat_template=read_template(args["chat_template"]),
        response_role=args["response_role"],
        return_tokens_as_token_ids=args["return_tokens_as_token_ids"],
        root_path=args["root_path"] or "",
        strict_fields=args["strict_fields"],
        force_include_usage=args["enable_force_include_usage"],
        request_timeout=args["request_timeout"],
        prefix_cache_isolation=args["prefix_cache_isolation"],
        log_requests=not args["disable_log_requests"],
        log_prompts=args["log_prompts"],
        max_log_len=args["max_log_len"],
        cors=Cors(
            origins=tuple(args["allowed_origins"]),
            methods=tuple(args["allowed_methods"]),
            headers=tuple(args["allowed_headers"]),
            credentials=args["allow_credentials"],
        ),
    )


def read_template(value: str | None) -> str | None:
    """A chat template: a file's text, or the value itself if it looks like a template.

    Raises:
        ConfigError: neither.
    """
    if value is None:
        return None
    try:
        return Path(value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if "{" in value:
            return value.replace("\\n", "\n")
        reason = f"is neither a template nor a file that can be read: {error}"
        raise ConfigError("chat_template", value, reason) from None


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; not listening yet, so that nobody connects to a server that still loads.

    Raises:
        ConfigError: the address is not ours or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("host", host, f"is no address: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port"
        raise ConfigError("port", port, reason) from None
    return listener


def uvicorn_config(app: FastAPI, args: Mapping[str, Any]) -> uvicorn.Config:
    """uvicorn's settings: h11, whose limits on headers we rely on."""
    return uvicorn.Config(
        app,
        log_level=args["uvicorn_log_level"],
        access_log=args["uvicorn_log_level"] in ("debug", "trace"),
        http="h11",
        ws="none",
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=256 << 10,  # above our own limit, which answers better
        timeout_keep_alive=_HEADER_SECONDS,
        timeout_graceful_shutdown=2,
        backlog=_BACKLOG,
        ssl_keyfile=args["ssl_keyfile"],
        ssl_certfile=args["ssl_certfile"],
        ssl_ca_certs=args["ssl_ca_certs"],
        ssl_cert_reqs=args["ssl_cert_reqs"],
    )


class Server(uvicorn.Server):
    """uvicorn's server with our way to stop.

    Args:
        context: of the application.
        shutdown_timeout, drain_delay: seconds, see docs/flags.md.
        ready: what to print when requests are answered.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        context: Context,
        *,
        shutdown_timeout: float,
        drain_delay: float,
        ready: str,
    ) -> None:
        super().__init__(config)
        self._context = context
        self._client: EngineClient = context.client
        self._shutdown_timeout = shutdown_timeout
        self._drain_delay = drain_delay
        self._ready = ready
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_until_told(self, listener: socket.socket) -> int:
        """Serves; returns the exit code."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        end = asyncio.create_task(self._until_the_end())
        await asyncio.wait([serving, end], return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not end.done():  # it could not start
            end.cancel()
            await self._client.shutdown(0.0)
            serving.result()
            return EXIT_ENGINE_DEAD
        self.should_exit = True
        await serving
        return end.result()

    async def _until_the_end(self) -> int:
        """Watches over the server; ends when it is to stop, with the exit code."""
        assert self._stop is not None
        while not self.started:
            await asyncio.sleep(0.01)
        print(self._ready, flush=True)
        while not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), _LOOK)
            except TimeoutError:
                if self._is_dead():
                    await asyncio.sleep(_LOOK)  # streams get their error frames
                    await self._client.shutdown(0.0)
                    return EXIT_ENGINE_DEAD
        print(f"stopping: {self._context.load} requests are running", file=sys.stderr, flush=True)
        await asyncio.sleep(self._drain_delay)
        self._context.draining = True
        await self._client.shutdown(self._shutdown_timeout)
        await asyncio.sleep(0.1)  # the last frames go out
        return 0

    def _is_dead(self) -> bool:
        """A hung engine may come back; a dead one does not."""
        try:
            self._client.check_health()
        except EngineHungError:
            return False
        except EngineDeadError as error:
            logger.error("%s", error)
            return True
        return False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler. The first signal drains, the second one ends."""
        assert self._stop is not None and self._loop is not None
        if not self._context.leaving and sig in (signal.SIGTERM, signal.SIGINT):
            self._context.leaving = True
            self._context.draining = self._drain_delay == 0
            self._loop.call_soon_threadsafe(self._stop.set)
            return
        self._shutdown_timeout = 0.0
        self._loop.call_soon_threadsafe(self._end_now)

    def _end_now(self) -> None:
        self.force_exit = True
        self._ending = asyncio.ensure_future(self._client.shutdown(0.0))


def plan_table(info: EngineInfo, drafts: str) -> str:
    """What serves, as lines of a name and a value."""
    tokens = info.num_blocks * info.block_size
    rows = [
        ("model", f"{info.model} ({info.dtype})"),
        ("device", f"{info.device}, {info.backend}"),
        ("context", f"{info.max_model_len} tokens"),
        ("KV cache", f"{tokens} tokens in {info.num_blocks} blocks of {info.block_size}"),
        ("full contexts", f"{tokens / info.max_model_len:.1f} at once"),
        ("drafts", drafts),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _drafts(engine_args: Mapping[str, Any]) -> str:
    """Who drafts, in words."""
    speculation = EngineConfig.from_args(engine_args).speculation
    if speculation is None:
        return "none"
    if speculation.method == "ngram":
        return f"prompt lookup, {speculation.num_speculative_tokens} tokens"
    assert speculation.lookahead is not None
    modes = ("n-grams", "suffix trie", "suffix trie and n-grams", "both merged")
    return f"lookahead cache on the CPU: {modes[speculation.lookahead.cache_mode]}"


def _ready_text(listener: socket.socket, info: EngineInfo, args: Mapping[str, Any]) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if args["ssl_certfile"] else "http"
    url = f"{scheme}://{shown}:{port}"
    seconds = info.started_seconds
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total")
    key = ' -H "Authorization: Bearer $API_KEY"' if args["api_key"] else ""
    return (
        f"Ready on {url} ({seconds['total']:.1f} s: {parts})\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} "
        '-d \'{"prompt": "def add(a, b):", "max_tokens": 16}\''
    )


def _warn_if_open(args: Mapping[str, Any]) -> None:
    if args["host"] not in ("127.0.0.1", "localhost", "::1") and not args["api_key"]:
        logger.warning("anybody who reaches %s can use the server: no --api-key", args["host"])


def _imported(path: str) -> Any:
    """What an import path such as "package.module.Class" names.

    Raises:
        ConfigError: it names nothing that can be middleware.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("middleware", path, f"cannot be imported: {error}") from None
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        raise ConfigError("middleware", path, "must be a class or a coroutine function")
    return found


def _add_middleware(app: FastAPI, found: Any) -> None:
    if inspect.iscoroutinefunction(found):
        app.middleware("http")(found)
    else:
        app.add_middleware(found)
