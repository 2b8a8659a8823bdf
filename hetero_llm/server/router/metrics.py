"""The router's own metrics; those of the servers are at their own /metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24,
            20.48, 40.96, 81.92)  # fmt: skip


class RouterMetrics:
    """
    Args:
        names: of the replicas.
        running: a replica's number to its requests on their way.
        is_up: a replica's number to whether it gets requests.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        running: Callable[[int], float],
        is_up: Callable[[int], float],
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        prefix = "hetero_llm:router_"
        label = ("replica",)

        def counter(name: str, text: str, *label_names: str) -> Counter:
            return Counter(f"{prefix}{name}", text, label_names, registry=self.registry)

        answers = counter("answers", "Answers of replicas by kind of status.", *label, "status")
        failures = counter(
            "replica_failures", "Requests that a replica did not answer, or broke off.", *label
        )
        seconds = Histogram(
            f"{prefix}first_byte_seconds",
            "From a request's end to its answer's head.",
            label,
            buckets=_SECONDS,
            registry=self.registry,
        )
        text = "Requests on their way."
        load = Gauge(f"{prefix}requests_running", text, label, registry=self.registry)
        text = "1 while the replica gets requests."
        up = Gauge(f"{prefix}replica_up", text, label, registry=self.registry)
        for number, name in enumerate(names):
            load.labels(name).set_function(partial(running, number))
            up.labels(name).set_function(partial(is_up, number))
        self._answers = [
            {kind: answers.labels(name, f"{kind}xx") for kind in range(1, 6)} for name in names
        ]
        self._failures = [failures.labels(name) for name in names]
        self._seconds = [seconds.labels(name) for name in names]
        self.retries = counter("retries", "Requests sent to another replica.")
        self.refused = counter(
            "refused", "Requests that no replica got, by the error's code.", "code"
        )
        self.pieces = counter("prefix_pieces", "Pieces of 256 bytes of the requests' texts.")
        self.matched = counter(
            "prefix_pieces_matched", "Those that the chosen replica probably held."
        )

    def answered(self, replica: int, status: int, seconds: float) -> None:
        """`seconds`: until the answer's head."""
        found = self._answers[replica].get(status // 100)
        if found is not None:
            found.inc()
        self._seconds[replica].observe(seconds)

    def failed(self, replica: int) -> None:
        self._failures[replica].inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
