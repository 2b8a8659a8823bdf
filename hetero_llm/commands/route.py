"""`hetero-llm route`: one address for several servers of a model."""

from __future__ import annotations

import argparse
import logging

from hetero_llm.commands.console import Finish, needs_server_packages
from hetero_llm.commands.options import add_rows, values_of
from hetero_llm.config.args_spec import Kind, effective, grouped

_ROWS = grouped(
    "Router",
    effective("host", Kind.STR, "127.0.0.1", "Address to listen on."),
    effective("port", Kind.INT, 8080, "Port to listen on; 0 takes a free one.", minimum=0,
              maximum=65535),
    effective(
        "prefix_weight", Kind.FLOAT, 1.0, "Worth of 256 bytes of text that a server probably has "
        "in its prefix cache; 0 chooses by load alone.", minimum=0,
    ),
    effective(
        "load_weight", Kind.FLOAT, 1.0, "Cost of 256 bytes of text that others wait for on a "
        "server; a running request counts as four times as many.", above=0,
    ),
    effective(
        "session_weight", Kind.FLOAT, 64.0, "Worth of having served the session before: the header "
        "x-session-id, or the request's prompt_cache_key or user.", minimum=0,
    ),
    effective(
        "index_pieces", Kind.INT, 1 << 17, "Pieces of 256 bytes remembered of each server: about "
        "what its prefix cache holds.", minimum=1, maximum=1 << 24,
    ),
    effective(
        "retries", Kind.INT, 2, "Other servers that a request is sent to when one fails before the "
        "first byte of its answer.", minimum=0, maximum=64,
    ),
    effective("health_path", Kind.STR, "/health", "Path that a serving server answers with 200."),
    effective("health_seconds", Kind.FLOAT, 2.0, "Between two probes, and time for each.", above=0),
    effective("failures", Kind.INT, 3, "Failures in a row after which a server gets no more "
              "requests, until a probe succeeds.", minimum=1),
    effective("connect_timeout", Kind.FLOAT, 5.0, "Seconds to open a connection to a server.",
              above=0),
    effective("header_timeout", Kind.FLOAT, 10.0, "Seconds that a client has for a request's head.",
              above=0),
    effective("max_request_bytes", Kind.INT, 32 << 20, "Largest request.", minimum=1,
              suffixes=True),
    effective("max_connections", Kind.INT, 4096, "Connections of clients at once.", minimum=1),
    effective("shutdown_timeout", Kind.FLOAT, 30.0, "Seconds that running requests get after "
              "SIGTERM.", minimum=0),
)  # fmt: skip


def add_route(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `route`."""
    parser.add_argument(
        "urls", metavar="URL", nargs="+", help="servers of one model, such as http://10.0.0.1:8000"
    )
    add_rows(parser, _ROWS)
    parser.usage = "%(prog)s URL... [options]"
    parser.epilog = "docs/routing.md says how a server is chosen."
    finish(parser, run_route)


def run_route(options: argparse.Namespace) -> int:
    """Routes until SIGTERM, SIGHUP or Ctrl-C, after which the exit code is 0."""
    values = values_of(_ROWS, options)
    with needs_server_packages("the router"):
        from hetero_llm.engine.processes.replica_choice import ChoiceWeights
        from hetero_llm.server.connection import bind, connections_possible
        from hetero_llm.server.router.serving import serve_router
        from hetero_llm.server.router.settings import RouterSettings, read_addresses
    settings = RouterSettings(
        replicas=read_addresses(options.urls),
        weights=ChoiceWeights(
            prefix=values["prefix_weight"],
            load=values["load_weight"],
            session=values["session_weight"],
        ),
        pieces=values["index_pieces"],
        retries=values["retries"],
        health_path=values["health_path"],
        health_seconds=values["health_seconds"],
        failures=values["failures"],
        connect_seconds=values["connect_timeout"],
        header_seconds=values["header_timeout"],
        body_bytes=values["max_request_bytes"],
        connections=connections_possible(values["max_connections"]),
        shutdown_timeout=values["shutdown_timeout"],
    )
    logging.getLogger("hetero_llm").setLevel(logging.INFO)
    with bind(values["host"], values["port"]) as listener:
        return serve_router(settings, listener, say=_say)


def _say(text: str) -> None:
    print(text, flush=True)
