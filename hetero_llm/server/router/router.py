"""The router: chooses a replica for each request, passes answers through, tries another replica
while the client has seen nothing."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from functools import partial

import msgspec

from hetero_llm.engine.processes.replica_choice import Assignment, ReplicaChooser
from hetero_llm.server.errors import ApiError, busy
from hetero_llm.server.router.client_connection import ClientConnection, ClientRequest
from hetero_llm.server.router.http_heads import (
    passed_on,
    request_headers,
    response_framing,
    value_of,
)
from hetero_llm.server.router.metrics import CONTENT_TYPE, RouterMetrics
from hetero_llm.server.router.replica_link import Exchange, Replica, ReplicaError
from hetero_llm.server.router.request_key import SESSION_HEADER, RequestKey, read_key
from hetero_llm.server.router.settings import RouterSettings

logger = logging.getLogger(__name__)

TO_ALL = frozenset(
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/sleep",
     "/wake_up")
)  # fmt: skip
"""Requests that change a server: every replica gets them."""
_RETRIED = frozenset((502, 503, 504))
"""Statuses after which another replica is asked: of a replica that is full, ends, or has lost its
engine."""
_RETRY_SECONDS = 1.0
_JSON, _TEXT = b"application/json", b"text/plain; charset=utf-8"


class Router:
    """
    Attributes:
        draining: no new connections are accepted, and none is kept.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._chooser = ReplicaChooser(
            len(settings.replicas), weights=settings.weights, capacity=settings.pieces
        )
        tls = ssl.create_default_context() if any(one.tls for one in settings.replicas) else None
        self.replicas = [
            Replica(
                address,
                failures=settings.failures,
                connect_seconds=settings.connect_seconds,
                tls=tls,
                recovered=partial(self._chooser.forget, number),
            )
            for number, address in enumerate(settings.replicas)
        ]
        self.metrics = RouterMetrics(
            [one.address.name for one in self.replicas],
            running=self._chooser.num_requests,
            is_up=lambda number: self.replicas[number].is_up,
        )
        self._clients: set[ClientConnection] = set()
        self.draining = False

    # -- clients ----------------------------------------------------------------------------

    def connection(self) -> ClientConnection:
        """Makes the protocol of a new client's connection."""
        return ClientConnection(
            self.answer,
            opened=self._client_opened,
            closed=self._clients.discard,
            header_seconds=self._settings.header_seconds,
            body_bytes=self._settings.body_bytes,
        )

    def _client_opened(self, client: ClientConnection) -> None:
        if len(self._clients) >= self._settings.connections:
            self.metrics.refused.labels("too_many_connections").inc()
            client.abort()
            return
        self._clients.add(client)

    @property
    def num_busy(self) -> int:
        """Clients whose request is being answered."""
        return sum(client.busy for client in self._clients)

    # -- health -----------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probes all replicas again and again."""
        settings = self._settings
        while True:
            begun = time.monotonic()
            probes = (
                one.probe(settings.health_path, settings.health_seconds) for one in self.replicas
            )
            await asyncio.gather(*probes)
            await asyncio.sleep(max(settings.health_seconds - (time.monotonic() - begun), 0.05))

    def start_draining(self) -> None:
        """Ends idle connections now, and others with their answers."""
        self.draining = True
        for client in list(self._clients):
            client.close_if_idle()

    def close(self) -> None:
        """Ends all connections."""
        for client in list(self._clients):
            client.abort()
        for replica in self.replicas:
            replica.close()

    # -- requests ---------------------------------------------------------------------------

    async def answer(self, client: ClientConnection, request: ClientRequest) -> None:
        """Answers one request.

        Raises:
            ApiError: no replica can.
        """
        path = request.path
        if request.method in (b"GET", b"HEAD") and self._answer_own(client, path):
            return
        try:
            if path in TO_ALL and request.method == b"POST":
                await self._ask_all(client, request)
            else:
                await self._pass_on(client, request)
        except ApiError as error:
            self.metrics.refused.labels(error.code).inc()
            raise

    def _answer_own(self, client: ClientConnection, path: str) -> bool:
        up = [replica.is_up for replica in self.replicas]
        if path == "/metrics":
            client.send(200, CONTENT_TYPE.encode(), self.metrics.text())
        elif path in ("/health", "/ping"):
            client.send(200 if any(up) else 503, _TEXT, b"")
        elif path == "/ready":
            client.send(200 if any(up) and not self.draining else 503, _TEXT, b"")
        elif path == "/live":
            client.send(200, _TEXT, b"")
        elif path == "/router/replicas":
            client.send(200, _JSON, msgspec.json.encode(self._described()))
        else:
            return False
        return True

    def _described(self) -> list[dict[str, object]]:
        return [
            {
                "replica": replica.address.name,
                "up": replica.is_up,
                "requests": self._chooser.num_requests(number),
                "load_pieces": self._chooser.load(number),
            }
            for number, replica in enumerate(self.replicas)
        ]

    async def _pass_on(self, client: ClientConnection, request: ClientRequest) -> None:
        """Sends a request to the best replica, or to others while it has no answer."""
        key = RequestKey([])
        if request.method == b"POST":
            key = read_key(request.body, value_of(request.headers, SESSION_HEADER))
        tried: set[int] = set()
        why = "no replica is up"
        while len(tried) <= self._settings.retries:
            usable = [
                number
                for number, replica in enumerate(self.replicas)
                if replica.is_up and number not in tried
            ]
            if not usable:
                break
            if tried:
                self.metrics.retries.inc()
            last = len(usable) == 1 or len(tried) == self._settings.retries
            assignment = self._chooser.choose(
                key.pieces, key.session, usable=usable, num_pieces=key.num_pieces
            )
            tried.add(assignment.replica)
            if not tried - {assignment.replica}:
                self.metrics.pieces.inc(len(key.pieces))
                self.metrics.matched.inc(assignment.num_matched)
            try:
                if await self._try(client, request, assignment, is_last=last):
                    return
                why = "every replica is full"
            except ReplicaError as error:
                why = f"{self.replicas[assignment.replica].address.name} {error}"
        if not tried:
            raise busy("no_replica", f"{why}; try again later", _RETRY_SECONDS)
        raise ApiError(
            502, "replica_failed", f"no replica has answered: {why}",
            headers={"retry-after": "1"},
        )  # fmt: skip

    async def _try(
        self,
        client: ClientConnection,
        request: ClientRequest,
        assignment: Assignment,
        *,
        is_last: bool,
    ) -> bool:
        """Sends a request to a replica and relays its answer.

        Args:
            is_last: no other replica can be asked.

        Returns:
            False if another replica should be asked.

        Raises:
            ReplicaError: the replica has not answered, and the client has seen nothing.
        """
        number = assignment.replica
        replica = self.replicas[number]
        begun = time.monotonic()
        answered = False
        exchange: Exchange | None = None
        try:
            try:
                exchange = await self._send(replica, request, client.peer)
                head = exchange.head.result()
            except ReplicaError as error:
                replica.failed(str(error))
                self.metrics.failed(number)
                raise
            self.metrics.answered(number, head.status, time.monotonic() - begun)
            if head.status in _RETRIED and not is_last:
                return False
            replica.succeeded()
            self._chooser.answered(assignment)
            answered = True
            await self._relay(client, request, exchange)
            return True
        finally:
            self._chooser.finished(assignment, answered=answered)
            if exchange is not None:
                exchange.stop()  # if the client has left

    async def _send(self, replica: Replica, request: ClientRequest, peer: str) -> Exchange:
        """Sends a request; over a new connection if an idle one turns out to have ended."""
        headers = request_headers(
            request.headers, host=replica.host, client=peer, length=len(request.body)
        )
        target = replica.address.base_path.encode() + request.target
        while True:
            connection = await replica.connect()
            exchange = connection.start(request.method, target, headers, request.body)
            try:
                await asyncio.wait((exchange.head,))
            except asyncio.CancelledError:
                exchange.stop()
                raise
            error = exchange.head.exception()
            if isinstance(error, ReplicaError) and error.stale:
                replica.close_idle()  # the others are as old
                continue
            return exchange

    async def _relay(
        self, client: ClientConnection, request: ClientRequest, exchange: Exchange
    ) -> None:
        """Passes an answer through. A broken one ends the client's connection in its middle."""
        head = exchange.head.result()
        headers = passed_on(head.headers)
        framing = response_framing(
            headers, status=head.status, method=request.method, http_1_0=request.http_1_0
        )
        if self.draining:
            client.close_after = True
        exchange.relay_to(client)
        pieces = exchange.take()
        client.begin(head.status, headers, framing, pieces, on_pause=exchange.pause)
        if not exchange.is_over:
            await asyncio.wait((exchange.done,))
        error = exchange.done.exception()
        if error is not None:
            logger.warning("an answer was broken off: a replica %s", error)
            client.break_off()
            return
        client.finish()

    async def _ask_all(self, client: ClientConnection, request: ClientRequest) -> None:
        """Sends a request to every replica; answers with the first error, else with the first
        answer.

        Raises:
            ApiError: a replica did not answer.
        """
        kept = [
            (name, value)
            for name, value in passed_on(request.headers)
            if name not in (b"host", b"content-length")
        ]
        answers = await asyncio.gather(
            *(
                one.fetch(request.method, request.target, kept, request.body)
                for one in self.replicas
            ),
            return_exceptions=True,
        )
        found: list[tuple[int, bytes]] = []
        for replica, answer in zip(self.replicas, answers, strict=True):
            if isinstance(answer, ReplicaError):
                text = f"{replica.address.name} {answer}; the others have done it"
                raise ApiError(502, "replica_failed", text)
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        status, body = next((one for one in found if one[0] >= 400), found[0])
        client.send(status, _JSON, body)
