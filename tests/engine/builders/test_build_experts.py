"""Experts on the host, from the arguments to a runner: which are chosen, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.bridge.expert_mailbox import NO_PART, LinkPart
from hetero_llm.bridge.host_experts import HostExperts
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare
from hetero_llm.engine.builders.build_experts import (
    choose_experts,
    expert_modules,
    open_experts,
    open_memory,
    share_link,
)
from hetero_llm.engine.builders.expert_store import ExpertMemory, host_experts
from hetero_llm.expert_offload.plan import ExpertPlan
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.hybrid_experts import HybridExperts, LinkedTimes
from hetero_llm.models.loader import expert_sizes, load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.utils import topology
from tests.helpers.gguf_files import make_tiny_gguf
from tests.helpers.hybrid import open_hybrid
from tests.helpers.rank_threads import ThreadCollectives, ThreadRanks
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_hybrid_experts import cut_checkpoint, plain_tokens, run_steps

GIB = 1 << 30
LIMITS = SchedulerConfig(
    max_num_seqs=2,
    max_num_batched_tokens=32,
    max_model_len=64,
    enable_chunked_prefill=True,
    block_size=16,
)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe", "full", layers=2)


def config_of(checkpoint: Path, **changes: Any) -> EngineConfig:
    args = {"model": str(checkpoint), "max_model_len": 64, "max_num_seqs": 2, **changes}
    return EngineConfig.from_args(resolve_engine_args(args))


def sizes_of(checkpoint: Path) -> Any:
    return expert_sizes(checkpoint, load_model_config(checkpoint), dtype=torch.float32)


@dataclasses.dataclass
class Machine:
    """A GPU and a host as large as a test needs."""

    gpu: int
    host: int = 64 * GIB

    share: RankShare = ALONE_SHARE

    def choose(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.gpu, self.gpu))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(topology, "usable_memory_bytes", lambda: self.host)
        config = config_of(checkpoint, gpu_memory_utilization=1.0, **changes)
        model_config = load_model_config(checkpoint)
        return choose_experts(
            *(config, checkpoint, model_config, LIMITS), dtype=torch.float32, device=CUDA,
            share=self.share,
        )  # fmt: skip


def test_sizes_of_a_checkpoint(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=CPU, show_progress=False)
    modules, sizes = expert_modules(model), sizes_of(checkpoint)
    each = 4 * (modules[0].gate_up[0].numel() + modules[0].down[0].numel())
    assert (sizes.num_layers, sizes.num_experts) == (len(modules), modules[0].down.shape[0])
    assert sizes.expert_bytes == each
    everything = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert sizes.other_bytes == everything - len(modules) * sizes.num_experts * each


def test_what_fits_stays_on_the_gpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(8 * GIB).choose(checkpoint, monkeypatch) is None
    assert Machine(8 * GIB).choose(checkpoint, monkeypatch, moe_cpu_experts="off") is None
    # Nor is there a bank of all experts: it would be slower than none.
    assert Machine(8 * GIB).choose(checkpoint, monkeypatch, moe_expert_memory=1.0) is None


def test_a_bank_of_the_size_that_is_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = sizes_of(checkpoint).expert_bytes
    asked = 3.5 * each / GIB
    choice = Machine(8 * GIB).choose(checkpoint, monkeypatch, moe_expert_memory=asked)
    assert choice.plan.mode == "inclusive" and choice.plan.slots == 3
    none = Machine(8 * GIB).choose(checkpoint, monkeypatch, moe_cpu_experts="all")
    assert none.plan.slots == 0


def test_experts_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"mlp_only_layers": [], "moe_intermediate_size": 32, "num_hidden_layers": 2}
    path = make_tiny_gguf(
        tmp_path, "qwen3_moe", "full", types=lambda _: "Q4_0", changes=changes
    ).path
    each = sizes_of(path).expert_bytes
    assert each == 3 * 32 * 32 // 32 * 18
    choice = Machine(8 * GIB).choose(path, monkeypatch, moe_expert_memory=3.5 * each / GIB)
    assert choice.plan.mode == "inclusive" and choice.plan.slots == 3


def test_what_neither_holds_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of(checkpoint)
    half = sizes.num_layers * sizes.num_experts * sizes.expert_bytes // 2
    with pytest.raises(ConfigError, match="keeps up to .* GiB on the GPU"):
        Machine(8 * GIB, host=int(half * 1.4)).choose(
            checkpoint, monkeypatch, moe_expert_memory=half / GIB
        )
    with pytest.raises(ConfigError, match="too little before the first expert"):
        Machine(1 * GIB).choose(checkpoint, monkeypatch)


class WithOthers:
    """The agreement of a rank whose peer has found other numbers, in the order of the calls."""

    size = 2

    def __init__(self, *others: int) -> None:
        self._others = list(others)

    def least(self, value: int) -> int:
        return min(value, self._others.pop(0))

    def of_first(self, values: Sequence[int]) -> list[int]:
        return list(values)


def test_ranks_plan_alike_with_their_shares(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks each has half of every expert and of host memory. The other one's GPU may be
    smaller, or something else takes its memory."""
    sizes = sizes_of(checkpoint)
    count = sizes.num_layers * sizes.num_experts
    collectives = ThreadCollectives(ThreadRanks(2), 0)
    needed = int(count * sizes.expert_bytes / 0.95) + 64

    def choose(host: int, *others: int, **changes: Any) -> Any:
        share = RankShare(collectives, WithOthers(*others))
        machine = Machine(8 * GIB, host, share)
        return machine.choose(checkpoint, monkeypatch, tensor_parallel_size=2, **changes)

    found = choose(needed, 8 * GIB, 0, needed, moe_cpu_experts="all")
    assert found.shape.expert_bytes == sizes.expert_bytes // 2
    assert found.plan.mode == "inclusive"
    assert found.plan.host_bytes == count * sizes.expert_bytes // 2
    asked = {"moe_expert_memory": 3.5 * sizes.expert_bytes / 2 / GIB}
    assert choose(needed, 8 * GIB, 0, needed, **asked).plan.slots == 3
    with pytest.raises(ConfigError, match="^moe_cpu_experts='all': of each of 2 ranks: the"):
        choose(needed, 8 * GIB, 0, int(0.9 * needed), moe_cpu_experts="all")
    with pytest.raises(ConfigError, match="too little before the first expert: of 2.00 GiB of the"):
        choose(needed, 2 * GIB, 0, needed, **asked)
    with pytest.raises(ConfigError, match="of each of 2 ranks: .* too little before"):
        choose(needed, 8 * GIB, -7 * GIB, needed, **asked)
    assert choose(needed, 8 * GIB, 0, needed) is None  # all fit


def test_what_it_cannot_be_combined_with(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("batch_invariant", True),
        ("cpu_offload_gb", 1.0),
        ("enable_prompt_adapter", True),
        ("pipeline_parallel_size", 2),
        ("sequence_parallel_size", 2),
    ):
        more = {"max_prompt_adapter_token": 8} if name == "enable_prompt_adapter" else {}
        with pytest.raises(ConfigError, match="cannot be combined") as error:
            Machine(8 * GIB).choose(
                checkpoint, monkeypatch, moe_cpu_experts="all", **{name: value}, **more
            )
        assert error.value.field == name


def test_arguments_without_effect_are_a_warning(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    dense = make_tiny_checkpoint(tmp_path, "llama", layers=1)
    with caplog.at_level(logging.WARNING):
        assert Machine(8 * GIB).choose(dense, monkeypatch, moe_cpu_experts="all") is None
    assert "the model has no experts" in caplog.text
    config = config_of(checkpoint, moe_cpu_experts="all")
    model_config = load_model_config(checkpoint)
    with caplog.at_level(logging.WARNING):
        chosen = choose_experts(
            config, checkpoint, model_config, LIMITS, dtype=torch.float32, device=CPU
        )
    assert chosen is None and "computed by the CPU" in caplog.text


def test_memory_lives_as_long_as_a_view() -> None:
    memory = ExpertMemory(libcuda=None)
    whole = memory((3, 40, 64), torch.bfloat16).fill_(2)
    part = whole[1:]
    assert memory.num_bytes == whole.nbytes and whole.data_ptr() % 4096 == 0
    del whole
    gc.collect()
    assert bool((part == 2).all())


@pytest.mark.skipif(native.load() is None, reason="no compiled library")
def test_tokens_with_threads_of_the_library(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way but CUDA: three experts in the bank, all others in the threads. Afterwards the
    scores are on disk, and the next engine's bank begins with the experts in demand; that one's
    host memory holds no expert of the bank."""
    config = load_model_config(checkpoint)
    profile = tmp_path / "scores"
    asked = 3.5 * sizes_of(checkpoint).expert_bytes / GIB
    wanted = plain_tokens(checkpoint, CPU, 2)
    for run in range(2):
        choice = Machine(8 * GIB).choose(
            checkpoint, monkeypatch, moe_expert_memory=asked, moe_expert_profile=str(profile)
        )
        if run == 1:
            plan = ExpertPlan("exclusive", 3, 0, 0, choice.shape.count - 2)
            choice = dataclasses.replace(choice, plan=plan)
        opened = open_memory(choice, ExpertMemory(libcuda=None), dtype=torch.float32, device=CPU)
        model = load_model(
            checkpoint, config, dtype=torch.float32, device=CPU, show_progress=False,
            expert_memory=opened.memory,
        )  # fmt: skip
        speed_up(model)
        experts = open_experts(
            *(choice, config_of(checkpoint), model, LIMITS), opened=opened, dtype=torch.float32,
            device=CPU,
        )  # fmt: skip
        assert (experts.bank.host.places is not None) == (run == 1)
        assert experts.bank.num_slots == 3 and int((experts.bank.table >= 0).sum()) == 3
        if run == 1:
            scores = experts.moves.placement.scores.slowest  # type: ignore[attr-defined]
            assert scores.any()
        assert run_steps(model, config, experts, CPU, 2) == wanted
        counts = experts.bank.hits.cpu().numpy()
        experts.moves.placement.observe(counts, steps=3, seconds=1.0)
        del experts, model
        gc.collect()
        assert profile.exists()


def test_experts_share_the_models_memory(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    model = load_model(
        checkpoint, config, dtype=torch.float32, device=CPU, show_progress=False,
        expert_memory=ExpertMemory(libcuda=None),
    )  # fmt: skip
    host = host_experts(expert_modules(model))
    for layer, module in zip(host.layers, expert_modules(model), strict=True):
        assert layer.gate_up.data.data_ptr() == module.gate_up.data_ptr()
        assert layer.down.data.data_ptr() == module.down.data_ptr()


def test_the_log_has_both_times_of_the_links_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One token: what is faster with random routes loses where one expert is missed. 16: nothing
    pays."""
    rows, whole = LinkPart(rows=64), LinkPart(whole=128)
    found = {
        1: LinkedTimes(
            {NO_PART: 6e-4, rows: 5.5e-4, whole: 5e-4}, {NO_PART: 2e-4, rows: 1.9e-4, whole: 2.1e-4}
        ),
        4: LinkedTimes({NO_PART: 2e-3, rows: 3e-3, whole: 1.5e-3}, {NO_PART: 8e-4, whole: 7e-4}),
        16: LinkedTimes({NO_PART: 4e-3, rows: 5e-3, whole: 4.5e-3}, {}),
    }
    monkeypatch.setattr(HostExperts, "is_page_locked", lambda self: True)
    monkeypatch.setattr(HybridExperts, "measure_linked", lambda *args: found)
    with open_hybrid(cut_checkpoint(tmp_path), CPU, residency=0.5, most_rows=32) as hybrid:
        with caplog.at_level(logging.INFO):
            share_link(hybrid.experts, 3)
        chosen = {size: hybrid.experts.link_part(size) for size in (1, 2, 4, 16, 17)}
    assert chosen == {1: rows, 2: whole, 4: whole, 16: NO_PART, 17: NO_PART}
    assert caplog.messages[-1].endswith(
        "by tokens: 1: 64 of 192 inner rows, 0.550 over 0.600 (random experts), 0.190 over 0.200 "
        "(one miss a token); 4: 0.50 of the experts, 1.500 over 2.000 (random experts), 0.700 over "
        "0.800 (one miss a token); 16: nothing, 4.000 over 4.000 (random experts)"
    )
