"""Starts the server from checked arguments, and stops it.

The port is bound before the model loads, so that a wrong one is reported at once. The first SIGTERM
drains: /ready turns to 503, running requests get `shutdown_timeout`, then the engine and the server
end. A second signal ends both at once. SIGHUP, sent when a terminal closes, drains as well, however
often it comes; where it is ignored at the start (nohup), it stays ignored. A dead engine, or one
that stays hung, ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from hetero_llm import __version__
from hetero_llm.config.engine_config import ConstraintsConfig, EngineConfig
from hetero_llm.core.errors import ConfigError, EngineDeadError, EngineHungError
from hetero_llm.engine.async_engine import AsyncEngineArgs, AsyncLLMEngine
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.adapters import lora_modules_of, prompt_adapters_of
from hetero_llm.server.app import build_app
from hetero_llm.server.connection import (
    bind,
    connection_class,
    connections_possible,
)
from hetero_llm.server.context import Context, check_formats
from hetero_llm.server.logs import log_stats, server_log
from hetero_llm.server.settings import TEMPLATE_KWARGS, Cors, Limits, ServerSettings
from hetero_llm.server.startup import plan_table, ready_text
from hetero_llm.server.tls import check_tls
from hetero_llm.server.tracing import TraceHeaders, Tracer, open_provider
from hetero_llm.utils.files import MIB, read_text

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 70
_KEEP_ALIVE_SECONDS = 10
_MOST_TEMPLATE = MIB
_POLL_SECONDS = 0.5
_HANG_GRACE = 5.0
"""Seconds in which a hung engine may recover, with /live at 503, before the server ends."""
_BACKLOG = 2048
_COLLECT_AFTER = 20_000, 10, 10
"""See gc.set_threshold. Collections find little: a request leaves no reference cycle, and a
connection one of seven objects."""


def serve(engine_args: Mapping[str, Any], server_args: Mapping[str, Any]) -> int:
    """Serves until a signal or the engine's death.

    Args:
        engine_args: those given, unchecked.
        server_args: all of them, checked.

    Returns:
        0 after a signal, 70 after the engine's death or when it hangs for good.

    Raises:
        ConfigError: an argument is wrong, or the port is taken.
        ModelLoadError: the model cannot be loaded.
    """
    arguments = AsyncEngineArgs(**engine_args)
    config = EngineConfig.from_args(arguments.resolved())
    settings = settings_of(server_args, config.constraints)
    _check_adapters(settings, config)
    middleware = [import_middleware(path) for path in server_args["middleware"]]
    check_tls(server_args)
    collector = server_args["otlp_traces_endpoint"]
    traces = None if collector is None else open_provider(collector)
    listener = bind(server_args["host"], server_args["port"])
    polls = server_args["uvicorn_log_level"] in ("debug", "trace")
    log = server_log(server_args["log_format"], secrets=settings.api_keys, polls=polls)
    with listener, log as console:
        _warn_if_open(server_args)
        most = connections_possible(server_args["max_connections"])
        server_args = {**server_args, "max_connections": most}
        console.say(f"hetero_llm {__version__}: loading {arguments.model}")
        engine = AsyncLLMEngine(
            arguments,
            served_names=settings.served_names,
            max_queued_requests=server_args["max_queued_requests"],
            step_timeout=server_args["step_timeout"],
            check_tokenizer=partial(check_formats, settings),
        )
        app = build_app(engine, settings)
        for one in middleware:
            _add_middleware(app, one)
        context: Context = app.state.context
        if traces is not None:
            context.metrics.tracer = Tracer(traces, context.names[0])
            app.add_middleware(TraceHeaders)
        context.plan = plan_table(engine.info, config, parsers=context.parsers.format.words)
        console.say(context.plan)
        address = listener.getsockname()[:2]
        server = Server(
            uvicorn_config(app, server_args),
            context,
            shutdown_timeout=server_args["shutdown_timeout"],
            drain_delay=server_args["drain_delay"],
            ready=ready_text(
                address,
                engine.info.started_seconds,
                server_args,
                chat=context.tokenizer.chat_template is not None,
                tasks=() if engine.info.pooling is None else engine.info.pooling.tasks,
            ),
            keep_alive_on_hang=server_args["keep_alive_on_hang"],
            say=console.say,
            stats_interval=None if config.disable_log_stats else server_args["log_stats_interval"],
        )
        freeze_collector()
        context.tokenizer.start()
        try:
            return asyncio.run(server.run_until_stopped(listener))
        finally:
            context.tokenizer.close()


def freeze_collector() -> None:
    """Call it once after the start. Collections, and the end of the process, then skip all objects
    of the start; collections of the oldest generation, which take 100 ms with a thousand open
    streams, become rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def settings_of(
    args: Mapping[str, Any], constraints: ConstraintsConfig | None = None
) -> ServerSettings:
    """The settings of the HTTP server from the arguments of the command.

    Args:
        constraints: the engine's; None: the defaults.
    """
    constraints = constraints or ConstraintsConfig()
    # Arguments under the name of a setting are its value, but for those that follow.
    same = {one.name: args[one.name] for one in fields(ServerSettings) if one.name in args}
    other = {
        "api_keys": tuple(args["api_key"]),
        "served_names": tuple(args["served_model_name"]),
        "chat_template": read_template(args["chat_template"]),
        "reasoning_parser": constraints.reasoning_parser,
        "constrained_reasoning": constraints.enable_in_reasoning,
        "root_path": args["root_path"] or "",
        "chat_template_kwargs": (*TEMPLATE_KWARGS, *args["allowed_chat_template_kwargs"]),
        "keep_alive_seconds": args["stream_keep_alive"],
        "force_include_usage": args["enable_force_include_usage"],
        "log_requests": not args["disable_log_requests"],
        "log_prompts": _shows_prompts(args),
        "lora_modules": lora_modules_of(args["lora_modules"]),
        "prompt_adapters": prompt_adapters_of(args["prompt_adapters"]),
        "stored_responses": args["max_stored_responses"],
        "stored_response_bytes": args["max_stored_response_bytes"],
        "cors": Cors(
            origins=tuple(args["allowed_origins"]),
            methods=tuple(args["allowed_methods"]),
            headers=tuple(args["allowed_headers"]),
            credentials=args["allow_credentials"],
        ),
        "limits": Limits(body_seconds=args["body_timeout"], write_seconds=args["write_timeout"]),
    }
    return ServerSettings(**same | other)


def _check_adapters(settings: ServerSettings, config: EngineConfig) -> None:
    """Raises ConfigError: adapters are given and not served, or there is no such folder."""
    root = settings.lora_root
    if settings.prompt_adapters and not config.prompt_adapters.enabled:
        given = settings.prompt_adapters
        raise ConfigError("prompt_adapters", given, "needs enable_prompt_adapter")
    if not config.lora.enabled:
        for name, value in (("lora_modules", settings.lora_modules), ("lora_root", root)):
            if value:
                raise ConfigError(name, value, "needs enable_lora")
    if root is not None and not Path(root).is_dir():
        raise ConfigError("lora_root", root, "no such folder")


def _shows_prompts(args: Mapping[str, Any]) -> bool:
    """Whether prompts are logged: with every request that is, unless they are not wanted."""
    wanted, length = args["log_prompts"], args["max_log_len"]
    if wanted is False and length is not None:
        raise ConfigError("max_log_len", length, "contradicts --no-log-prompts")
    if args["disable_log_requests"]:
        for name, value in (("log_prompts", wanted or None), ("max_log_len", length)):
            if value is not None:
                raise ConfigError(name, value, "contradicts --disable-log-requests")
        return False
    return wanted is not False


def read_template(value: str | None) -> str | None:
    """A chat template: a file's text, or the value itself if it looks like a template.

    Raises:
        ConfigError: it is neither.
    """
    if value is None:
        return None
    try:
        return read_text(value, most=_MOST_TEMPLATE, pipes=True)
    except (OSError, ValueError) as error:  # not text, or a name that no file can have
        if "{" in value:
            return value.replace("\\n", "\n")
        reason = f"is neither a template nor a file that can be read: {_why(error)}"
        raise ConfigError("chat_template", value, reason) from None


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def uvicorn_config(app: FastAPI, args: Mapping[str, Any]) -> uvicorn.Config:
    """uvicorn's settings: HTTP by h11, which limits headers, with our `Connection`."""
    connection = connection_class(
        header_seconds=args["header_timeout"],
        most=args["max_connections"],
        refused=app.state.context.metrics.rejected,
    )
    return uvicorn.Config(
        app,
        log_config=None,
        log_level=args["uvicorn_log_level"],
        access_log=not args["disable_uvicorn_access_log"],
        http=connection,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
        backlog=_BACKLOG,
        ssl_keyfile=args["ssl_keyfile"],
        ssl_certfile=args["ssl_certfile"],
        ssl_ca_certs=args["ssl_ca_certs"],
        ssl_cert_reqs=args["ssl_cert_reqs"],
        ssl_ciphers=args["ssl_ciphers"],
    )


# large: uvicorn's server with the state of a stop in several stages.
class Server(uvicorn.Server):
    """uvicorn's server that drains before it stops, and stops when the engine is dead.

    Args:
        context: of the application.
        shutdown_timeout, drain_delay, keep_alive_on_hang: see docs/flags.md.
        ready: text to print once requests are accepted.
        say: prints a text; see `Console`.
        stats_interval: seconds between lines about throughput; None: no such lines.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        context: Context,
        *,
        shutdown_timeout: float,
        drain_delay: float,
        ready: str,
        keep_alive_on_hang: bool = False,
        say: Callable[[str], None] = print,
        stats_interval: float | None = None,
    ) -> None:
        super().__init__(config)
        self.context = context
        self._client: EngineClient = context.client
        self._shutdown_timeout = shutdown_timeout
        self._drain_delay = drain_delay
        self._ready = ready
        self._say = say
        self._stats_interval = stats_interval
        self._tasks: list[asyncio.Task[None]] = []
        self._keep_alive_on_hang = keep_alive_on_hang
        self._hung_since: float | None = None
        self._stop, self._end_at_once = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_until_stopped(self, listener: socket.socket) -> int:
        """Serves; returns the exit code.

        Raises:
            ConfigError: an adapter of the start cannot be served.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self.context.adapters.open_all()
            await self.context.prompt_adapters.open_all()
        except BaseException:
            await self._client.shutdown(0.0)
            raise
        drain_on_hangup(self.handle_exit)
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        end = asyncio.create_task(self._until_the_end())
        await asyncio.wait([serving, end], return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not end.done():  # the server could not start
            end.cancel()
            await self._client.shutdown(0.0)
            serving.result()
            return EXIT_ENGINE_DEAD
        self.should_exit = True
        await serving
        if self.context.metrics.tracer is not None:
            await self.context.metrics.tracer.close()
        return end.result()

    async def _until_the_end(self) -> int:
        """Waits for a signal or the end of the engine, and drains; returns the exit code."""
        while not self.started:
            await asyncio.sleep(0.01)
        self._say(self._ready)
        self._tasks = [asyncio.create_task(self.context.readings.run())]
        if self._stats_interval is not None:
            reports = log_stats(self._client, self._stats_interval)
            self._tasks.append(asyncio.create_task(reports))
        while not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), _POLL_SECONDS)
            except TimeoutError:
                if self._is_dead():
                    await asyncio.sleep(_POLL_SECONDS)  # streams get their error frames
                    await self._client.shutdown(0.0)
                    return EXIT_ENGINE_DEAD
        logger.info("stopping: %d requests are running", self.context.load)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end_at_once.wait(), self._drain_delay)
        self.context.draining = True
        await self._client.shutdown(self._shutdown_timeout)
        await asyncio.sleep(0.1)  # the last frames go out
        return 0

    def _is_dead(self) -> bool:
        """Whether the engine is dead, or has been hung for too long to recover."""
        hung_since, self._hung_since = self._hung_since, None
        try:
            self._client.check_health()
        except EngineHungError as error:
            now = time.monotonic()
            self._hung_since = now if hung_since is None else hung_since
            if self._keep_alive_on_hang or now - self._hung_since < _HANG_GRACE:
                return False
            logger.error("%s; ending", error)
            return True
        except EngineDeadError as error:
            logger.error("%s", error)
            return True
        return False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler. The first signal starts draining, the second ends at once; but for
        SIGHUP, which a shell sends again to the jobs of a terminal that has closed."""
        assert self._loop is not None
        if self.context.leaving and sig == signal.SIGHUP:
            return
        if not self.context.leaving and sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.context.leaving = True
            self.context.draining = self._drain_delay == 0
            self._loop.call_soon_threadsafe(self._stop.set)
            return
        self._shutdown_timeout = 0.0
        self._loop.call_soon_threadsafe(self._end_now)

    def _end_now(self) -> None:
        self.force_exit = True
        self._end_at_once.set()
        self._ending = asyncio.ensure_future(self._client.shutdown(0.0))


def drain_on_hangup(handler: Callable[[int, FrameType | None], None]) -> None:
    """Installs the handler for SIGHUP, unless this process ignores the signal already, as under
    nohup. uvicorn installs those for SIGTERM and SIGINT."""
    if threading.current_thread() is not threading.main_thread():
        return  # as uvicorn: only the main thread may install handlers
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def _warn_if_open(args: Mapping[str, Any]) -> None:
    if args["host"] not in ("127.0.0.1", "localhost", "::1") and not args["api_key"]:
        logger.warning("anybody who reaches %s can use the server: no --api-key", args["host"])


def import_middleware(path: str) -> Any:
    """Imports a path such as "package.module.Class".

    Raises:
        ConfigError: there is no such object, or it cannot be middleware.
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
