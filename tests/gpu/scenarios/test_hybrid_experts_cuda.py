"""Mixtures with experts on the host, on a device: graphs, streams, and the library's threads."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import SamplingParams
from hetero_llm.bridge.expert_mailbox import NO_PART, LinkPart
from hetero_llm.core.errors import EngineDeadError
from hetero_llm.engine.builders import build_experts
from hetero_llm.engine.builders.build_experts import expert_modules
from hetero_llm.expert_offload.plan import ExpertPlan, plan_experts
from hetero_llm.expert_offload.step_costs import LaneCosts
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import StreamCopies
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.loader import expert_sizes
from hetero_llm.models.read_config import load_model_config
from tests.gpu.scenarios.serving import GREEDY, TIES, generate, regrets, start
from tests.helpers.gguf_files import make_tiny_gguf
from tests.helpers.hybrid import DelayedCopies, EveryStep, open_hybrid
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_hybrid_experts import (
    ASKS,
    LINKED,
    MAX_LEN,
    SLOTS,
    STREAMS,
    cache_of,
    cut_checkpoint,
    plain_tokens,
    poison,
    steps,
)

GIB = 1 << 30
BF16 = {"dtype": "bfloat16", "max_num_seqs": 8}  # more would compile one more decoding kernel
LONG = {"max_position_embeddings": 512}  # as `serving.start` asks for
# Sizes that the kernels of one row and blocks of scales serve.
WIDE = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
    "head_dim": 64, **LONG,
}  # fmt: skip


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    return make_tiny_checkpoint(folder, "qwen3_moe", "full", layers=2, changes=LONG)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    return make_tiny_checkpoint(folder, "qwen3_moe", "full", layers=2, changes=WIDE)


@pytest.fixture(scope="module")
def wide_cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts that can be cut."""
    folder, changes = tmp_path_factory.mktemp("cut"), {**WIDE, "moe_intermediate_size": 384}
    return make_tiny_checkpoint(folder, "qwen3_moe", "full", layers=2, changes=changes)


def residency(
    checkpoint: Path,
    share: float,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Arguments for a bank with a share of all experts."""
    if share == 0.0:
        return {"moe_cpu_experts": "all"}
    config = load_model_config(checkpoint, quantization=quantization)
    sizes = expert_sizes(checkpoint, config, dtype=dtype)
    slots = round(share * sizes.num_layers * sizes.num_experts)
    return {"moe_expert_memory": (slots + 0.5) * sizes.expert_bytes / GIB}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 90, n).tolist() for n in (3, 12, 40, 90, 7)]


def many_prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, 90, n).tolist() for n in range(2, 42)]


@pytest.mark.parametrize(
    ("share", "eager"), [(0.0, False), (0.3, False), (0.7, False), (0.3, True)]
)
def test_tokens_through_the_engine(checkpoint: Path, share: float, eager: bool) -> None:
    """Judged token by token by transformers in float32; prompts of one step and of several, twice,
    so that the second time finds the prefixes in the cache."""
    llm = start(checkpoint, enforce_eager=eager, **residency(checkpoint, share))
    try:
        for _ in range(2):
            outputs = generate(llm, prompts())
            assert float(regrets(outputs, [GREEDY] * len(outputs), checkpoint).max()) < TIES
    finally:
        llm.close()


def test_all_in_the_bank_is_the_plain_model(checkpoint: Path) -> None:
    llm = start(checkpoint)
    try:
        assert all(module.host_memory is None for module in expert_modules(llm.engine.runner.model))
    finally:
        llm.close()


@pytest.mark.parametrize("quantization", [None, "fp8_block", "int4"])
def test_half_precision_through_the_engine(wide: Path, quantization: str | None) -> None:
    """First tokens are those of the GPU alone, but for near ties in 16 bits."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    found = []
    settings = {**BF16, "quantization": quantization}
    for more in ({}, residency(wide, 0.2, torch.bfloat16)):
        llm = start(wide, **settings, **more)
        try:
            outputs = generate(llm, many_prompts(), params)
            found.append([output.outputs[0].token_ids[0] for output in outputs])
        finally:
            llm.close()
            gc.collect()
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 0.7 * len(found[0])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_gguf_file_through_the_engine(tmp_path: Path, kind: str) -> None:
    """As above, with blocks, whose scales stand for 32 numbers."""
    changes = {**WIDE, "moe_intermediate_size": 256, "num_hidden_layers": 2, "mlp_only_layers": []}
    path = make_tiny_gguf(tmp_path, "qwen3_moe", "full", types=lambda _: kind, changes=changes).path
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    found = []
    for more in ({}, residency(path, 0.2, torch.bfloat16)):
        llm = start(path, skip_tokenizer_init=True, **BF16, **more)
        try:
            outputs = generate(llm, many_prompts(), params)
            found.append([output.outputs[0].token_ids[0] for output in outputs])
        finally:
            llm.close()
            gc.collect()
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 0.7 * len(found[0])


def the_paying_part(
    random: dict[LinkPart, float], one_miss: dict[LinkPart, float], none: LinkPart
) -> LinkPart:
    return next((part for part in one_miss if part != none), none)


@pytest.mark.parametrize(
    ("quantization", "exclusive"), [(None, True), ("fp8_block", False), ("int4", True)]
)
def test_the_link_as_a_third_lane_of_the_engine(
    wide_cut: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None, exclusive: bool
) -> None:
    """The most inner rows, and the most experts, that are tried, of all small steps: first tokens
    are those of the threads alone, but for near ties in 16 bits."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    settings = {
        **BF16,
        "quantization": quantization,
        "moe_link_lane": True,
        **residency(wide_cut, 0.3, torch.bfloat16, quantization),
    }
    if exclusive:
        monkeypatch.setattr(build_experts, "plan_experts", exclusive_plan)
    found = []
    for wanted in ("", "rows", "whole"):

        def pays(
            random: dict[LinkPart, float], none: LinkPart, wanted: str = wanted
        ) -> list[LinkPart]:
            return [max(random, key=lambda part: getattr(part, wanted))] if wanted else []

        monkeypatch.setattr(build_experts, "paying_parts", pays)
        monkeypatch.setattr(build_experts, "choose_linked", the_paying_part)
        llm = start(wide_cut, **settings)
        try:
            experts = llm.engine.runner.experts
            assert (experts.link_part(1) != NO_PART) == bool(wanted)
            outputs = [generate(llm, [prompt], params)[0] for prompt in many_prompts()]
            found.append([output.outputs[0].token_ids[0] for output in outputs])
        finally:
            llm.close()
            gc.collect()
    for other in found[1:]:
        same = sum(a == b for a, b in zip(found[0], other, strict=True))
        assert same >= 0.8 * len(other)


@pytest.mark.parametrize("part", [LINKED, LinkPart(whole=128)], ids=["rows", "whole"])
def test_the_part_of_the_gpu_beside_graphs_and_exchanges(
    tmp_path: Path, device: torch.device, part: LinkPart
) -> None:
    """Tokens of decoding steps that are replayed, while experts change sides in every step."""
    count = 40
    checkpoint = cut_checkpoint(tmp_path)
    wanted = plain_tokens(checkpoint, device, count)
    with open_hybrid(
        checkpoint, device, residency=0.5, most_rows=ASKS, spares=2,
        copies=lambda bank: StreamCopies(device),
        placement=lambda table: EveryStep(table, owners_stay=True),
    ) as hybrid:  # fmt: skip
        hybrid.experts.use_link({16: part})
        runner = runner_on(hybrid, device)
        found = [runner.finish(runner.launch(step)).token_ids for step in steps(count)]
        assert found == wanted
        assert part in hybrid.team.parts and hybrid.experts.moves.num_promoted >= 5


def test_threads_that_stop_end_the_engine(checkpoint: Path) -> None:
    llm = start(checkpoint, moe_cpu_experts="all")
    try:
        generate(llm, prompts()[:1])
        llm.engine.runner.experts.wake.__self__.stop()
        with pytest.raises((RuntimeError, EngineDeadError)):
            generate(llm, prompts()[:1])
    finally:
        llm.close()


def runner_on(hybrid: Any, device: torch.device) -> GpuModelRunner:
    return GpuModelRunner(
        hybrid.model, hybrid.config, cache_of(hybrid.config, device), max_num_seqs=SLOTS,
        max_model_len=MAX_LEN, max_num_batched_tokens=32, graphs=True, experts=hybrid.experts,
    )  # fmt: skip


@pytest.mark.parametrize("most_rows", [ASKS, STREAMS])
@pytest.mark.parametrize("delayed", [False, True])
def test_tokens_while_experts_change_places_in_every_step(
    checkpoint: Path, device: torch.device, delayed: bool, most_rows: int
) -> None:
    """Graphs, two steps under way; copies on a stream of their own, or such as end late into slots
    that hold no numbers until then."""
    count = 40
    wanted = plain_tokens(checkpoint, device, count)
    made: list[DelayedCopies] = []

    def copies(bank: ExpertBank) -> Any:
        if not delayed:
            return StreamCopies(device)
        made.append(DelayedCopies(lambda slot: poison(bank, slot)))
        return made[0]

    with open_hybrid(
        checkpoint, device, residency=0.5, most_rows=most_rows, placement=EveryStep, copies=copies
    ) as hybrid:
        runner, found = runner_on(hybrid, device), []
        work = steps(count)
        under_way = [runner.launch(work[0])]
        for step in work[1:]:
            under_way.append(runner.launch(step))
            found.append(runner.finish(under_way.pop(0)).token_ids)
            for one in made:
                one.advance()
        found.append(runner.finish(under_way.pop(0)).token_ids)
        assert found == wanted
        assert hybrid.experts.moves.num_promoted >= 5


def test_a_team_that_is_gone_ends_a_graph_in_time(checkpoint: Path, device: torch.device) -> None:
    with open_hybrid(
        checkpoint, device, residency=0.0, most_rows=ASKS, most_looks=200_000
    ) as hybrid:
        runner = runner_on(hybrid, device)
        work = steps(2)
        runner.finish(runner.launch(work[0]))
        hybrid.team.die()
        pending = runner.launch(work[1])
        with pytest.raises(RuntimeError, match="CPU threads that compute experts"):
            runner.finish(pending)


@pytest.mark.parametrize("delayed", [False, True])
def test_tokens_while_experts_change_sides_in_every_step(
    checkpoint: Path, device: torch.device, delayed: bool
) -> None:
    """Host memory holds what the bank does not: copies in both directions on streams of their own,
    or such as end late, beside graphs and two steps under way."""
    count = 40
    wanted = plain_tokens(checkpoint, device, count)
    made: list[DelayedCopies] = []

    def copies(bank: ExpertBank) -> Any:
        if not delayed:
            return StreamCopies(device)

        def poison_place(place: int) -> None:
            for part in (bank.host.layers[0].gate_up, bank.host.layers[0].down):
                part.data[place].fill_(float("nan"))

        made.append(
            DelayedCopies(lambda slot: poison(bank, slot), steps=1, poison_place=poison_place)
        )
        return made[0]

    with open_hybrid(
        checkpoint, device, residency=0.5, most_rows=STREAMS, copies=copies, spares=2,
        placement=lambda table: EveryStep(table, owners_stay=True),
    ) as hybrid:  # fmt: skip
        hybrid.experts.share_long_steps(LaneCosts(exchange=0.0, expert=0.4, row=0.01, link=1.0))
        runner, found = runner_on(hybrid, device), []
        work = steps(count)
        under_way = [runner.launch(work[0])]
        for step in work[1:]:
            under_way.append(runner.launch(step))
            found.append(runner.finish(under_way.pop(0)).token_ids)
            for one in made:
                one.advance()
            assert hybrid.host.places is not None
            hybrid.host.places.check_integrity()
        found.append(runner.finish(under_way.pop(0)).token_ids)
        assert found == wanted
        assert hybrid.experts.moves.num_promoted >= 5


@pytest.mark.parametrize("quantization", [None, "fp8_block", "int4"])
def test_a_host_that_does_not_hold_all_experts(
    wide: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """The engine's way, with a plan as for a host of too little memory: first tokens are those of
    a host that holds all."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    settings = {
        **BF16,
        "quantization": quantization,
        **residency(wide, 0.3, torch.bfloat16, quantization),
    }
    found = []
    for exclusive in (False, True):
        if exclusive:
            monkeypatch.setattr(build_experts, "plan_experts", exclusive_plan)
        llm = start(wide, **settings)
        try:
            assert (llm.engine.runner.experts.bank.host.places is not None) == exclusive
            outputs = generate(llm, many_prompts(), params)
            found.append([output.outputs[0].token_ids[0] for output in outputs])
        finally:
            llm.close()
            gc.collect()
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 0.8 * len(found[0])


def exclusive_plan(shape: Any, *args: Any, ranks: int) -> ExpertPlan:
    plan = plan_experts(shape, *args, ranks=ranks)
    return dataclasses.replace(plan, mode="exclusive", places=shape.count - plan.slots + 2)
