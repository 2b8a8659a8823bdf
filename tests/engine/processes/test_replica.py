"""Places of replicas, and their figures as those of one engine."""

from __future__ import annotations

import socket
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.core.histogram import Histogram
from hetero_llm.engine.processes import messages
from hetero_llm.engine.processes.engine_launcher import ReplicaPlace
from hetero_llm.engine.processes.replica import (
    Replica,
    merge_figures,
    merge_histograms,
    name_of,
    places,
)
from hetero_llm.utils.message_socket import MessageSocket


def devices(num_replicas: int, *, device: str = "auto", each: int = 1, visible: str) -> list[str]:
    found = places(num_replicas, device=device, devices_each=each, visible=visible)
    assert [one.index for one in found] == list(range(num_replicas))
    return [str(one.devices) for one in found]


def test_the_only_engine_has_the_whole_machine() -> None:
    assert places(1, device="auto", devices_each=1) == [ReplicaPlace()]


def test_each_replica_has_gpus_of_its_own() -> None:
    assert devices(2, visible="4,5,7") == ["4", "5"]
    assert devices(2, each=2, visible="0,1,2,3") == ["0,1", "2,3"]
    assert devices(2, visible="GPU-a, GPU-b") == ["GPU-a", "GPU-b"]


def test_without_a_list_gpus_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = places(2, device="cuda", devices_each=2)
    assert [one.devices for one in found] == ["0,1", "2,3"]


def test_cpus_need_no_gpu() -> None:
    assert devices(2, device="cpu", visible="0") == ["None", "None"]
    assert devices(2, device="auto", visible="") == ["None", "None"]


@pytest.mark.parametrize(("visible", "device"), [("3", "auto"), ("3", "cuda"), ("", "cuda")])
def test_too_few_gpus_are_one_line(visible: str, device: str) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2: needs 2 GPUs") as caught:
        places(2, device=device, devices_each=1, visible=visible)
    assert "\n" not in str(caught.value)


def test_figures_are_sums_means_and_maxima() -> None:
    merged = merge_figures(
        [
            {"num_steps": 3, "kv_cache_usage_perc": 0.5, "max_loras": 4, "hit_rate": 0.2, "a": 1},
            {"num_steps": 4, "kv_cache_usage_perc": 0.0, "max_loras": 4, "hit_rate": 0.4},
        ]
    )
    assert merged == {
        "num_steps": 7,
        "kv_cache_usage_perc": 0.25,
        "max_loras": 4,
        "hit_rate": pytest.approx(0.3),
        "a": 1,
    }
    assert merge_figures([{"max_loras": 1.5}]) == {"max_loras": 1.5}


def test_histograms_are_sums() -> None:
    def observed(*values: float) -> Histogram:
        found = Histogram.empty((1.0, 2.0))
        for value in values:
            found.observe(value)
        return found

    merged = merge_histograms(
        [{"x": observed(0.5, 1.5)}, {"x": observed(1.5, 9.0), "y": observed()}]
    )
    assert merged == {"x": observed(0.5, 1.5, 1.5, 9.0), "y": observed()}
    only = {"x": observed(1.0)}
    assert merge_histograms([only]) == only


def test_a_message_that_cannot_be_read_is_the_end_of_an_engine() -> None:
    ours, theirs = socket.socketpair()
    with closing(MessageSocket(ours)) as ours_end, closing(MessageSocket(theirs)) as theirs_end:
        process, said, handled = SimpleNamespace(socket=ours_end), [], []
        replica = Replica(cast(Any, process), "it", handle=handled.append, fail=said.append)
        theirs_end.send(messages.encode(messages.CallResult(1)))
        broken = {"key": "1", "values": [["<f8", [0], b""]], "scheduled": 0.0}
        theirs_end.send(msgspec.msgpack.encode(["PooledOutputs", [broken]]))
        replica.receive()
    assert handled == [messages.CallResult(1)]
    (text,) = said
    assert text.startswith("it is dead: it sent what cannot be read: ")


def test_names() -> None:
    assert name_of(0, 1) == "the engine"
    assert name_of(1, 2) == "engine 1 of 2"
