"""Collectives over mapped memory: two processes with memory that both share, a gloo group between
them, and Triton's interpreter. `tests/two_gpus` has the same on devices."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.distributed.process_group import create_store, process_group
from hetero_llm.gpu import fused
from hetero_llm.gpu.collectives import PeerCollectives, open_peer_collectives
from hetero_llm.gpu.kernels.collectives import sum_reference
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.peer_memory import GroupExchange
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.collectives import Rank, same
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers import fast_interpreter
from tests.helpers.fork_server import run_processes
from tests.models.tiny import DenseAttend, make_tiny_checkpoint

SIZE = 2
CPU = torch.device("cpu")
FAMILIES = ("llama", "gemma2", "mixtral")


class SharedMemory:
    """`PeerMemory` of tensors that all ranks got from their parent."""

    def __init__(self, tensors: tuple[Tensor, ...], num_bytes: int, *_: Any) -> None:
        self.tensors = tuple(tensor[: num_bytes // 2] for tensor in tensors)

    def unmap(self) -> None:
        self.tensors = ()

    def free(self) -> None:
        pass


def run(rank: int, store: Path, memories: tuple[Tensor, ...], models: list[Path]) -> None:
    """A rank. What fails here fails the test.

    Args:
        store: of `create_store`.
    """
    torch.set_num_threads(1)
    fast_interpreter.install()
    own = os.open(store, os.O_RDWR)
    with process_group(Rank(rank, SIZE), own, CPU) as group:
        check(rank, GroupExchange(group), memories, models)


def check(
    rank: int, exchange: GroupExchange, memories: tuple[Tensor, ...], models: list[Path]
) -> None:
    makers = [("shared", partial(SharedMemory, memories))]
    collectives = open_peer_collectives(256, CPU, exchange, makers=makers)
    assert (collectives.rank.index, collectives.rank.size) == (rank, SIZE)
    check_sums(collectives)
    check_columns(collectives)
    for path in models:
        check_model(collectives, path)
    assert not collectives.gave_up
    exchange.gather(None)
    collectives.check_integrity()
    exchange.gather(None)
    if rank == 0:  # rank 1 does not come
        collectives.set_patience(1e-5)
        collectives.all_reduce(torch.ones(1, 8))
        assert collectives.gave_up
    exchange.gather(None)
    if rank == 1:  # rank 0 has come once: the second launch waits until another thread ends it
        begun = threading.Event()
        ends = threading.Thread(target=lambda: (begun.wait(), collectives.abort()))
        ends.start()
        collectives.all_reduce(torch.ones(1, 8))
        begun.set()
        collectives.all_reduce(torch.ones(1, 8))
        ends.join()
        assert collectives.gave_up
    exchange.gather(None)
    collectives.close()


def parts_of(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What each rank has: the same in all processes, which draw alike."""
    return [torch.randn(shape).to(dtype) for _ in range(SIZE)]


def check_sums(collectives: PeerCollectives) -> None:
    """One shot, two shots, and several launches."""
    torch.manual_seed(1)
    shapes = [(1, 64), (5, 64), (70, 2), (3, 65), (9000,), (2, 3, 64), (0, 64), ()]
    for shape in shapes * 2:
        for dtype in (torch.float32, torch.float16):
            parts = parts_of(*shape, dtype=dtype)
            found = collectives.all_reduce(parts[collectives.rank.index])
            assert torch.equal(found, sum_reference(parts)), (shape, dtype)


def check_columns(collectives: PeerCollectives) -> None:
    torch.manual_seed(2)
    for rows, n in ((1, 3000), (3, 7), (0, 8), (520, 1)):  # the last one takes two launches
        parts = parts_of(rows, n)
        found = collectives.gather_columns(parts[collectives.rank.index])
        assert torch.equal(found, torch.cat(parts, dim=1))


def check_model(collectives: PeerCollectives, path: Path) -> None:
    """Norms that make the sums give the bits of sums and norms in two launches."""
    config = load_model_config(path)
    model = load_model(path, config, dtype=torch.float32, device="cpu", show_progress=False)
    assert isinstance(model, DecoderLM)
    layers = 2 * config.num_layers
    summing: list[Any] = [
        module
        for name, module in model.named_modules()
        if name.endswith((".out_proj", ".mlp.down_proj", ".mlp.experts"))
    ]
    assert len(summing) == layers
    with torch.no_grad():
        for module in summing:  # each rank has a part of its own
            weight = module.weight if hasattr(module, "weight") else module.down
            weight.mul_(0.25 + collectives.rank.index)
            module.reduce = collectives.all_reduce
    fused.speed_up(model)
    ids = torch.arange(3, 12)

    def logits() -> Tensor:
        with torch.no_grad():
            return model.logits(model(ids, torch.arange(9), DenseAttend(config, [9])))

    expected = logits()
    assert fused.fuse_sums(model, collectives) == layers
    assert all(module.reduce is same for module in summing)
    assert torch.equal(logits(), expected)
    assert fused.fuse_sums(model, collectives) == 0


@pytest.mark.skipif(not INTERPRETED, reason="tests/two_gpus does this on devices")
def test_two_processes(tmp_path: Path) -> None:
    models = [make_tiny_checkpoint(tmp_path / family, family) for family in FAMILIES]
    memories = tuple(torch.empty(64 << 20, dtype=torch.int16).share_memory_() for _ in range(SIZE))
    store = create_store()
    try:
        run_processes(run, (Path(f"/proc/{os.getpid()}/fd/{store}"), memories, models), SIZE)
    finally:
        os.close(store)
