"""The OpenAI server as a deployment of Ray Serve: one engine in each replica, on any machine of a
Ray cluster.

    pip install 'hetero-llm[server]' 'ray[serve]>=2.60'
    serve run serve_app:build model=/models/NAME replicas=2 gpus=1

Run it in this folder, or name it with its path in a config file of Ray Serve (`import_path:
serve_app:build`). Arguments are those of `hetero-llm serve`, by their Python names, and:

- replicas: how many; Ray starts each where there is room.
- gpus, cpus: of one replica, for Ray's accounting (default: no GPU, 1 CPU).
- ongoing: requests that one replica takes at once (default 256).

Ray's proxy listens on port 8000, sends each request to a replica with few requests, and restarts a
replica whose engine has died. Keys, limits and errors are those of the server. What changes one
server (adapters loaded by request) reaches one replica: give `lora_modules` at the start.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve

from hetero_llm.config.args import is_argument_of, resolve_server_args
from hetero_llm.config.args_spec import Scope
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.async_engine import AsyncEngineArgs, AsyncLLMEngine
from hetero_llm.server.app import build_app
from hetero_llm.server.serving import settings_of

_OF_RAY = {"replicas": 1, "gpus": 0, "cpus": 1, "ongoing": 256}
_OF_CONNECTIONS = frozenset(("host", "port", "ssl_certfile", "ssl_keyfile", "config"))
"""Arguments of `serve` that concern its port, which is Ray's here."""


@serve.deployment(name="hetero-llm", health_check_period_s=5, graceful_shutdown_timeout_s=40)
@serve.ingress()
class ModelServer:
    """One replica: the application and its engine."""

    async def __init__(self, engine_args: dict[str, Any], server_args: dict[str, Any]) -> None:
        arguments = AsyncEngineArgs(**engine_args)
        config = EngineConfig.from_args(arguments.resolved())
        checked = resolve_server_args(server_args)
        settings = settings_of(checked, config.constraints)
        # The constructor blocks until the model is loaded; Ray's loop goes on meanwhile.
        self._engine = await asyncio.to_thread(
            AsyncLLMEngine,
            arguments,
            served_names=settings.served_names,
            max_queued_requests=checked["max_queued_requests"],
            step_timeout=checked["step_timeout"],
        )
        self._app = build_app(self._engine, settings)
        self._context = self._app.state.context
        await self._context.adapters.open_all()
        await self._context.prompt_adapters.open_all()
        self._context.tokenizer.start()
        self._reading = asyncio.create_task(self._context.readings.run())

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Ray replaces the replica when this raises."""
        self._engine.check_health()

    async def __del__(self) -> None:
        self._reading.cancel()
        await self._engine.shutdown(0.0)
        self._context.tokenizer.close()


def build(args: dict[str, Any]) -> serve.Application:
    """The application of `serve run`, from its `name=value` words or a file's `args`.

    Raises:
        ConfigError: an argument is unknown, or concerns the port.
    """
    left = dict(args)
    of_ray = {name: _number(name, left.pop(name, usual)) for name, usual in _OF_RAY.items()}
    for name in left:
        if name in _OF_CONNECTIONS:
            raise ConfigError(name, left[name], "is Ray's here: give it to Ray Serve")
        if not (is_argument_of(Scope.ENGINE, name) or is_argument_of(Scope.SERVE, name)):
            raise ConfigError(name, left[name], "unknown argument")
    engine_args = {
        name: value for name, value in left.items() if is_argument_of(Scope.ENGINE, name)
    }
    server_args = {name: value for name, value in left.items() if is_argument_of(Scope.SERVE, name)}
    # Mistakes are found here, and not in a replica that is started again and again.
    EngineConfig.from_args(AsyncEngineArgs(**engine_args).resolved())
    resolve_server_args(server_args)
    deployment = ModelServer.options(
        num_replicas=of_ray["replicas"],
        max_ongoing_requests=of_ray["ongoing"],
        ray_actor_options={
            "num_gpus": of_ray["gpus"],
            "num_cpus": of_ray["cpus"],
            "runtime_env": {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
        },
    )
    return deployment.bind(engine_args, server_args)


def _number(name: str, value: Any) -> int:
    text = str(value)
    if not text.isdecimal():
        raise ConfigError(name, value, "must be an integer of at least 0")
    return int(text)
