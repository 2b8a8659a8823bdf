"""Events of a whole engine with host memory: after every step, what they leave is what the caches
hold."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.kv_events import CPU, GPU
from hetero_llm.core.request import Request
from hetero_llm.kv_cache.block_transfers import OffloadLimits
from hetero_llm.kv_cache.kv_event_log import KvEventLog
from tests.helpers import offload_traffic as traffic
from tests.helpers.harness import VOCAB
from tests.helpers.kv_event_model import FollowedCaches
from tests.scenarios.test_offload_engine import (
    BLOCK,
    LONGEST,
    MODES,
    SEEDS,
    Served,
    build,
    compare,
    request_of,
)


class Follower:
    """An event stream that ends in a model of the caches."""

    def __init__(self) -> None:
        self.log = KvEventLog()
        self.followed = FollowedCaches(BLOCK)
        self.served: Served
        self.most = {GPU: 0, CPU: 0}

    def note_request(self, request: Request) -> None:
        pass

    def flush(self) -> None:
        self.followed.apply(self.log.take())
        held = self.followed.held
        assert held[GPU] == set(self.served.blocks.prefix_cache.hashes())
        index = traffic.tier_of(self.served.engine).index
        assert held[CPU] == {block_hash for _, block_hash, ready in index.entries() if ready}
        self.most = {medium: max(self.most[medium], len(held[medium])) for medium in held}

    def close(self) -> None:
        pass


def followed(seed: int, asynchronous: bool, **options: object) -> tuple[Served, Follower]:
    follower = Follower()
    served = build(seed, asynchronous, events=follower, **options)  # type: ignore[arg-type]
    follower.served = served
    return served, follower


@MODES
@pytest.mark.parametrize("seed", SEEDS)
def test_events_are_the_caches(seed: int, asynchronous: bool) -> None:
    served, follower = followed(seed, asynchronous, gpu_blocks=30, host_blocks=40)
    traffic.load_always(served.engine)
    assert compare(served, seed) > 0
    traffic.check_over(served.engine)
    follower.flush()
    assert follower.followed.num_events > 50
    assert follower.most[GPU] > 5 and follower.most[CPU] > 5
    assert served.engine.metrics()["kv_offload_loads"] > 0


def test_events_of_copies_that_fail() -> None:
    for seed in SEEDS:
        limits = OffloadLimits(8, write_through=True)
        served, follower = followed(seed, False, limits=limits, policy="slru")
        faulty = traffic.spoil(served.engine, seed, 0.3)
        assert compare(served, seed) > 0
        assert faulty.spoiled["stores"] > 0
        follower.flush()


def test_a_reset_clears_everything_once() -> None:
    served, follower = followed(1, False)
    jobs = traffic.traffic(1, 12, longest=LONGEST, vocab=VOCAB)
    traffic.serve(served.engine, jobs, make=request_of)
    traffic.rest(served.engine)
    assert follower.followed.held[GPU] and follower.followed.held[CPU]
    served.engine.reset_prefix_cache()
    assert follower.followed.held == {GPU: set(), CPU: set()}
    assert compare(served, 2) > 0


def test_a_library_engine_publishes(tmp_path: Path) -> None:
    """The replay socket has what was sent since the start."""
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    prompt = list(range(300, 340))
    with LLM("demo", device="cpu", num_gpu_blocks_override=128, kv_events_config=config) as llm:
        llm.generate(
            prompt_token_ids=[prompt], sampling_params=SamplingParams(max_tokens=1), use_tqdm=False
        )
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(config["replay_endpoint"])
            socket.send_multipart((b"", bytes(8)))
            assert socket.poll(120_000), "no answer"
            _, number, batch = socket.recv_multipart()
    _, events, rank = msgspec.msgpack.decode(batch)
    ((tag, hashes, parent, tokens, block_size, *_),) = events
    assert (number, rank, tag, parent, block_size) == (bytes(8), 0, "BlockStored", None, 16)
    assert tokens == prompt[:32] and len(hashes) == 2
