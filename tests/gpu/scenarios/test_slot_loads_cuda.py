"""Adapters that reach their slots late, on the stream that loads them: before, the slots hold
numbers that are none, and each piece comes after a delay. Tokens are those of loads that come at
once, or those of transformers with the adapter merged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm import LLM
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.gpu.slot_loads import Copies, CudaLoadStream, SlotLoads
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape
from tests.gpu.scenarios.serving import DEMO, GREEDY, TIES, ragged, regrets, runner_of, start
from tests.gpu.scenarios.test_kv_load_cuda import MILLISECOND, Replays
from tests.gpu.scenarios.test_lookahead_cuda import DRAFTERS
from tests.gpu.scenarios.test_lora_cuda import SERVED, Adapters, largest_regret, make, run
from tests.gpu.test_slot_loads import (
    DECODE,
    MODEL,
    WAITING,
    Arm,
    drafted,
    joining,
    make_adapters,
)
from tests.helpers.offload_traffic import share_for
from tests.models.tiny import make_tiny_checkpoint

DEVICE = torch.device("cuda")
ROUNDS = 3


class LateStream(CudaLoadStream):
    """The first piece comes later than the end of any step of a small model that does not wait."""

    first_delay = 30 * MILLISECOND
    num_loads = 0

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        LateStream.num_loads += 1
        super().load(self._late([list(copies) for copies in pieces], count), count)

    def _late(self, pieces: list[list[tuple[Tensor, Tensor]]], seed: int) -> Iterator[Copies]:
        """The pieces, drawn while the load stream is the current one."""
        delays = np.random.default_rng(seed).integers(0, 2 * MILLISECOND, len(pieces))
        delays[0] += self.first_delay
        for copies in pieces:
            for target, _ in copies:
                target.fill_(255)
        for copies, delay in zip(pieces, delays.tolist(), strict=True):
            torch.cuda._sleep(delay)
            yield copies


class BlindLoads(SlotLoads):
    """Steps do not wait."""

    def __init__(self, slots: Tensor, pieces: Sequence[int]) -> None:
        super().__init__(slots, pieces, open_stream=LateStream)

    def wait(self, piece: int) -> None:
        pass


late_loads = partial(SlotLoads, open_stream=LateStream)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four layers, each of them a piece."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", "heads_of_16", layers=4)


@pytest.fixture(scope="module")
def tiny(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_see_adapters_that_come_while_they_run(
    checkpoint: Path, tiny: Any, graphs: bool
) -> None:
    """Slots are filled again while steps that read what they held may still run."""
    work = joining(tiny[1])
    expected = Arm.of(checkpoint, tiny, SlotLoads, device=DEVICE, graphs=graphs).run(work)
    kinds = [WAITING, WAITING, MODEL, WAITING, DECODE]
    assert expected[1] == (kinds if graphs else [])
    arm = Arm.of(checkpoint, tiny, late_loads, device=DEVICE, graphs=graphs)
    for _ in range(ROUNDS):
        assert arm.run(work) == expected
    blind = Arm.of(checkpoint, tiny, BlindLoads, device=DEVICE, graphs=graphs)
    results = [blind.run(work)[0] for _ in range(2)]
    torch.cuda.synchronize()
    assert results[1] != expected[0]  # so this test can fail


def test_a_step_with_drafts_waits_for_the_adapter_of_another_sequence(
    checkpoint: Path, tiny: Any
) -> None:
    results = []
    for open_loads in (SlotLoads, late_loads):
        arm = Arm.of(checkpoint, tiny, open_loads, device=DEVICE, drafts=True)
        ((token,),), _ = arm.run(joining(tiny[1])[:1])
        results.append(arm.run([drafted(token, [(0, tiny[1][1])])]))
        results.append(arm.run([drafted(token, [])]))
    assert results[:2] == results[2:] and results[0][0] == results[1][0]
    kinds = [kinds for _, kinds in results[:2]]
    assert kinds == [["waiting verify with adapters"], ["short verify with adapters"]]


def test_launching_does_not_wait_for_a_load(checkpoint: Path, tiny: Any) -> None:
    streams: list[LateStream] = []

    def open_stream(flag: Tensor) -> LateStream:
        streams.append(LateStream(flag))
        return streams[0]

    open_loads = partial(SlotLoads, open_stream=open_stream)
    arm = Arm.of(checkpoint, tiny, open_loads, device=DEVICE)
    work: list[SchedulerOutput] = joining(tiny[1])[:2]
    for index in range(ROUNDS):
        torch.cuda.synchronize()
        launched = [arm.runner.launch(step) for step in work]
        assert not streams[0].stream.query() or index == 0  # which may load kernels
        for one in launched:
            arm.runner.finish(one)


class LostStream:
    """Never loads anything."""

    def __init__(self, flag: Tensor) -> None:
        pass

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        pass


def test_an_adapter_that_never_comes_ends_the_step_with_an_error(
    checkpoint: Path, tiny: Any
) -> None:
    open_loads = partial(SlotLoads, open_stream=LostStream, most_looks=1000)
    for graphs in (True, False):
        arm = Arm.of(checkpoint, tiny, open_loads, device=DEVICE, graphs=graphs)
        first, second = (arm.runner.launch(step) for step in joining(tiny[1])[:2])
        for launched in (first, second):
            with pytest.raises(RuntimeError, match="adapters have not reached the GPU"):
                arm.runner.finish(launched)


# -- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return make(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_llm.gpu.slot_loads.CudaLoadStream", LateStream)
    monkeypatch.setattr(LateStream, "num_loads", 0)
    monkeypatch.setattr(LateStream, "first_delay", 5 * MILLISECOND)


def host_memory() -> dict[str, Any]:
    """Prefixes leave a small pool for host memory and come back beside adapters."""
    config = load_model_config(DEMO)
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    return {
        "num_gpu_blocks_override": 40,
        "enable_prefix_cache_offload": True,
        "cpu_prefill_memory_utilization": share_for(600 * shape.block_bytes),
        "apc_offload_background_pin": False,
        "apc_offload_gpu_evictor_limit": 0,
    }


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 40},
        {"speculative_config": DRAFTERS["hybrid"]},
        {"max_num_batched_tokens": 1024},
        "host memory",
    ],
    ids=["graphs", "eager", "few blocks", "drafts", "many rows", "host memory"],
)
def test_float32_has_the_merged_models_tokens(
    engine: dict[str, Any] | str, adapters: Adapters, late: None
) -> None:
    given = host_memory() if isinstance(engine, str) else engine
    with start(**SERVED, **given) as llm:
        replays = Replays.of(runner_of(llm))
        for _ in range(3):  # later over cached prefixes
            assert largest_regret(run(llm, adapters), adapters) < TIES
        assert LateStream.num_loads > 4
        names = replays.take()
        if "enforce_eager" not in given:
            assert WAITING in names
        if isinstance(engine, str):
            assert llm.metrics()["kv_offload_loads"] > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_bfloat16_has_them_inside_of_products(drafts: bool, adapters: Adapters, late: None) -> None:
    """Kernels that read weights before their inputs are there."""
    more = {"speculative_config": DRAFTERS["hybrid"]} if drafts else {}
    with start(dtype="bfloat16", **SERVED, **more) as llm:
        for _ in range(3):
            assert largest_regret(run(llm, adapters), adapters) < 0.5
    assert LateStream.num_loads > 4


def test_a_request_is_aborted_while_its_adapter_is_loaded(adapters: Adapters, late: None) -> None:
    """Its slot, the only one, goes to another adapter at once, and back."""
    prompts = ragged(8)
    served = SERVED | {"max_loras": 1}
    outputs: dict[str, Any] = {}
    with start(**served) as llm:
        add(llm, "base", prompts[3], adapters, 0)
        step(llm, outputs)
        for number in (1, 2, 3, 1):
            name = f"gone{number}"
            add(llm, name, prompts[5], adapters, number)
            step(llm, outputs)  # the step behind it has been launched, with the request
            llm.engine.abort(name)
        add(llm, "stays", prompts[6], adapters, 2)
        while llm.engine.has_unfinished:
            step(llm, outputs)
    assert LateStream.num_loads >= 3
    for name, number in (("base", 0), ("stays", 2)):
        assert regrets([outputs[name]], [GREEDY], adapters.merged[number]).max() < TIES


def add(llm: LLM, name: str, prompt: list[int], adapters: Adapters, number: int) -> None:
    wanted = adapters.requests[number]
    request = llm.engine.make_request(name, Prompt(token_ids=prompt), GREEDY, wanted)
    llm.engine.add_request(request)


def step(llm: LLM, outputs: dict[str, Any]) -> None:
    outputs |= {one.request_id: one for one in llm.engine.step() if one.finished}
