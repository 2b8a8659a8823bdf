"""Mixtures that two processes share, each with its slices of all experts, some of them on the host:
tokens are those of one process, wherever the experts are and while they change places.

Through the runner of the GPU in Triton's interpreter; gloo adds up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_llm.bridge.expert_mailbox import LinkPart
from hetero_llm.bridge.ipc.shared_memory import allocate_shared
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.promotion import Promotion, promotions_from_rows, promotions_to_rows
from hetero_llm.cpu import native
from hetero_llm.distributed.agreement import GroupAgreement
from hetero_llm.distributed.group_collectives import GroupCollectives
from hetero_llm.distributed.process_group import create_store, process_group
from hetero_llm.distributed.rank_share import RankShare
from hetero_llm.engine.builders.build_experts import choose_experts, open_experts, open_memory
from hetero_llm.engine.builders.expert_store import ExpertMemory
from hetero_llm.engine.builders.rank_faults import fault_bytes
from hetero_llm.expert_offload.step_costs import LaneCosts
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import OrderedPlacement, Placement
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.models.collectives import Rank
from hetero_llm.models.loader import expert_sizes, load_model
from hetero_llm.models.rank_config import sharded_config
from hetero_llm.models.read_config import load_model_config
from hetero_llm.utils import topology
from tests.engine.builders.test_build_experts import LIMITS
from tests.helpers import fast_interpreter
from tests.helpers.fork_server import run_processes
from tests.helpers.hybrid import DelayedCopies, EveryStep, open_hybrid
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_hybrid_experts import (
    ASKS,
    STREAMS,
    checkpoint_of,
    plain_tokens,
    poison,
    run_steps,
    runner_of,
    runner_with,
    steps,
)

SIZE = 2
CPU = torch.device("cpu")
GIB = 1 << 30
HALF_OF_MISSED = LinkPart(whole=128)
Tokens = list[list[int]]

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/two_gpus does this on devices")


def on_ranks(act: Callable[..., None], *arguments: Any) -> None:
    """Calls `act(collectives, *arguments)` in two processes; what fails there fails here."""
    store = create_store()
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{store}")
        run_processes(as_rank, (path, act, arguments), SIZE)
    finally:
        os.close(store)


def as_rank(index: int, store: Path, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    fast_interpreter.install()
    rank = Rank(index, SIZE)
    with process_group(rank, os.open(store, os.O_RDWR), CPU) as group:
        act(GroupCollectives(rank, group), *arguments)


def check_places(
    collectives: GroupCollectives, wanted: dict[str, Tokens], folders: dict[str, Path]
) -> None:
    """Banks of none, half and all of the experts, for steps that ask and steps that stream; of one
    family the GPU computes half of what small steps miss."""
    cases = [
        ("qwen3_moe", 0.0, ASKS), ("qwen3_moe", 0.5, STREAMS), ("qwen3_moe", 1.0, ASKS),
        ("gpt_oss", 0.5, ASKS), ("glm4_moe", 0.5, STREAMS),
    ]  # fmt: skip
    for family, residency, most_rows in cases:
        with open_hybrid(
            folders[family], CPU, residency=residency, most_rows=most_rows, collectives=collectives
        ) as hybrid:
            if most_rows == STREAMS:
                costs = LaneCosts(exchange=0.0, expert=1.0, row=0.1, link=1.0)
                hybrid.experts.share_long_steps(costs)
            if family == "qwen3_moe":
                hybrid.experts.use_link({2: HALF_OF_MISSED})
            found = run_steps(hybrid.model, hybrid.config, hybrid.experts, CPU, 1)
            assert found == wanted[family], (family, residency, collectives.rank)
            assert bool(hybrid.team.requests) == (residency < 1.0)
            linked = family == "qwen3_moe" and residency < 1.0
            assert (HALF_OF_MISSED in hybrid.team.parts) == linked


def test_tokens_do_not_depend_on_where_experts_are(tmp_path: Path) -> None:
    folders = {name: checkpoint_of(tmp_path / name, name) for name in ("gpt_oss", "glm4_moe")}
    changes = {"moe_intermediate_size": 384}  # the kernels of the link need more than 128 a rank
    folders["qwen3_moe"] = make_tiny_checkpoint(
        tmp_path / "qwen3_moe", "qwen3_moe", "full", layers=2, changes=changes
    )
    wanted = {family: plain_tokens(folder, CPU, 1) for family, folder in folders.items()}
    on_ranks(check_places, wanted, folders)


class Announced:
    """What rank 0 promotes, as it reaches the other rank: before that one's next step."""

    def __init__(self, collectives: GroupCollectives) -> None:
        self._rank = collectives.rank
        self._chosen: list[Promotion] = []
        self.count = 0

    def announce(self, chosen: Sequence[Promotion]) -> None:
        self._chosen += chosen

    def pass_on(self, order: Callable[[Sequence[Promotion]], None]) -> None:
        rows: list[Any] = [promotions_to_rows(self._chosen)]
        dist.broadcast_object_list(rows, 0)
        self._chosen = []
        self.count += len(rows[0])
        if self._rank.index:
            order(promotions_from_rows(rows[0]))


def check_promotions(collectives: GroupCollectives, wanted: Tokens, folder: Path) -> None:
    """Copies of rank 1 take three times as long. Slots hold no numbers meanwhile, and two steps are
    under way at a time."""
    rank, made = collectives.rank, []

    def delayed(bank: ExpertBank) -> DelayedCopies:
        made.append(DelayedCopies(lambda slot: poison(bank, slot), steps=1 + 2 * rank.index))
        return made[0]

    def placed(table: np.ndarray) -> Placement:
        return OrderedPlacement(table) if rank.index else EveryStep(table)

    with open_hybrid(
        folder, CPU, residency=0.5, most_rows=STREAMS, placement=placed, copies=delayed,
        collectives=collectives,
    ) as hybrid:  # fmt: skip
        moves, announced = hybrid.experts.moves, Announced(collectives)
        moves.announce = announced.announce
        runner, found = runner_of(hybrid, CPU), []
        work = steps(len(wanted) - 1)
        under_way = [runner.launch(work[0])]
        for step in work[1:]:
            announced.pass_on(moves.order)
            under_way.append(runner.launch(step))
            found.append(runner.finish(under_way.pop(0)).token_ids)
            made[0].advance()
            assert (hybrid.bank.table.numpy() == moves.placement.table).all()
        found.append(runner.finish(under_way.pop(0)).token_ids)
        assert found == wanted
        assert announced.count >= 4 and moves.num_promoted >= 2


def test_tokens_while_experts_change_places_in_every_step(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, "qwen3_moe")
    on_ranks(check_promotions, plain_tokens(folder, CPU, 7), folder)


def check_engine(collectives: GroupCollectives, wanted: Tokens, folder: Path, faults: Path) -> None:
    """As the engine builds its ranks, but for CUDA: three experts in each bank, the others in the
    threads of the library. The threads of rank 1 stop: both ranks end with an error that says so.
    """
    rank, dtype = collectives.rank, torch.float32
    share = RankShare(collectives, GroupAgreement(SIZE), faults=os.open(faults, os.O_RDWR))
    config = load_model_config(folder)
    each = expert_sizes(folder, config, dtype=dtype, rank=rank).expert_bytes
    args = {
        "model": str(folder), "max_model_len": 64, "max_num_seqs": 2, "tensor_parallel_size": SIZE,
        "moe_expert_memory": 3.5 * each / GIB, "gpu_memory_utilization": 1.0,
    }  # fmt: skip
    engine_config = EngineConfig.from_args(resolve_engine_args(args))
    # The smaller of both GPUs counts, and a half of host memory is each rank's.
    torch.cuda.mem_get_info = lambda: ((8 - rank.index) * GIB,) * 2  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device: (9, 0)  # type: ignore[assignment]
    topology.usable_memory_bytes = lambda: 64 * GIB  # type: ignore[assignment]
    choice = choose_experts(
        *(engine_config, folder, config, LIMITS), dtype=dtype, device=torch.device("cuda"),
        share=share,
    )  # fmt: skip
    assert choice is not None and choice.plan.slots == 3 and choice.plan.mode == "inclusive"
    opened = open_memory(choice, ExpertMemory(libcuda=None), dtype=dtype, device=CPU)
    model = load_model(
        folder, config, dtype=dtype, device=CPU, show_progress=False, collectives=collectives,
        expert_memory=opened.memory,
    )  # fmt: skip
    speed_up(model)
    experts = open_experts(
        *(choice, engine_config, model, LIMITS), opened=opened, dtype=dtype, device=CPU, share=share
    )
    assert int((experts.bank.table >= 0).sum()) == 3
    assert isinstance(experts.moves.placement, OrderedPlacement) == (rank.index == 1)
    own_config = sharded_config(config, rank)
    assert run_steps(model, own_config, experts, CPU, 1) == wanted
    dist.barrier()
    if rank.index == 1:
        experts.wake.__self__.stop()  # type: ignore[attr-defined]  # the team's
    runner = runner_with(model, own_config, experts, CPU)
    pending = runner.launch(steps(0)[0])
    with pytest.raises(RuntimeError, match="compute experts of rank 1 have stopped"):
        runner.finish(pending)
    dist.barrier()


@pytest.mark.skipif(native.load() is None, reason="no compiled library")
def test_the_engines_parts_and_threads_that_stop(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, "qwen3_moe")
    faults = allocate_shared(fault_bytes(SIZE))
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{faults}")
        on_ranks(check_engine, plain_tokens(folder, CPU, 1), folder, path)
    finally:
        os.close(faults)
