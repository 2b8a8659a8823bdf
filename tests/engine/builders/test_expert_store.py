"""Experts that settle in the bank or on the host while weights are loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetero_llm.bridge.host_experts import HostExperts
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.builders.build_experts import expert_modules
from hetero_llm.engine.builders.expert_store import ExpertMemory, ExpertStore, host_experts
from hetero_llm.gpu.expert_bank import BankMatrices, ExpertBank
from hetero_llm.gpu.kernels.expert_requests import ON_HOST
from hetero_llm.models.collectives import ONE_RANK, Collectives
from hetero_llm.models.experts import Experts, HostMemory
from hetero_llm.models.loader import expert_sizes, load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.matrix import BLOCK_ROWS
from tests.gpu.test_expert_bank import EXPERTS, LAYERS, layer_of
from tests.helpers.expert_team import expert_outputs
from tests.helpers.gguf_files import make_tiny_gguf
from tests.helpers.hybrid import empty_on_host
from tests.helpers.rank_threads import ThreadCollectives, ThreadRanks
from tests.models.mxfp4_checkpoints import make_mxfp4_checkpoint
from tests.models.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")
SLOTS, SPARES = 4, 2
FORMS = {
    "plain": (torch.float32, None, {}),
    "biased": (torch.float16, None, {"bias": True}),
    "blocks": (torch.float16, "fp8", {"group": 128, "rows": BLOCK_ROWS}),
    "int4": (torch.bfloat16, "int4", {"group": 32, "zeros": "zero"}),
}


def modules_of(form: str) -> list[Experts]:
    dtype, kind, more = FORMS[form]
    return [layer_of(9 * i, 256, 128, dtype, "silu", kind, **more) for i in range(LAYERS)]


def settled(form: str, seed: int = 0) -> tuple[ExpertStore, list[Experts], np.ndarray]:
    """The same modules with weights in a store."""
    dtype = FORMS[form][0]
    table = np.full((LAYERS, EXPERTS), ON_HOST, np.int32)
    owners = np.random.default_rng(seed).permutation(table.size)[:SLOTS]
    table.flat[owners] = np.arange(SLOTS)
    store = ExpertStore(
        table, num_places=table.size - SLOTS + SPARES, num_slots=SLOTS + 2 * EXPERTS,
        memory=ExpertMemory(libcuda=None), dtype=dtype, device=CPU,
    )  # fmt: skip
    modules = modules_of(form)
    for index, module in enumerate(modules):
        module.host_memory = store
        module.settle = partial(store.settle, index)
        for name in ("gate_up", "down"):
            weight = getattr(module, name)
            if isinstance(weight, nn.Parameter):
                data = store(tuple(weight.shape), weight.dtype).copy_(weight)
                setattr(module, name, nn.Parameter(data, requires_grad=False))
                module.settle(module, name)
            else:
                setattr(module, name, nn.Parameter(torch.empty(weight.shape, device="meta"), False))
                module.set_quantized(name, weight.matrix)
    return store, modules, table


def tensors_of(part: BankMatrices) -> list[Tensor]:
    weights = part.weights
    tensors = (
        [weights]
        if isinstance(weights, Tensor)
        else [
            tensor
            for name in ("data", "scale", "zero", "offset", "row_scale")
            if (tensor := getattr(weights, name)) is not None
        ]
    )
    return tensors + ([] if part.bias is None else [part.bias])


@pytest.mark.parametrize("form", list(FORMS))
def test_each_expert_is_on_one_side(form: str) -> None:
    """The bank is that of a host that holds all experts, and each place has its expert's numbers;
    then one goes to the host and back, bit for bit."""
    store, modules, table = settled(form)
    host = store.host_experts(modules)
    bank = store.open_bank(host, SLOTS, staging=EXPERTS)
    whole = host_experts(modules_of(form))
    other = ExpertBank(whole, SLOTS, staging=EXPERTS, device=CPU)
    other.place(table)
    assert torch.equal(bank.table, other.table)
    for ours, theirs in ((bank.gate_up, other.gate_up), (bank.down, other.down)):
        for one, two in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
    places = host.places
    assert places is not None and places.num_free == SPARES
    places.check_integrity()

    def check(layer: int, expert: int) -> None:
        place = int(places.table[layer, expert])
        for name in ("gate_up", "down"):
            mine, all_ = getattr(host.layers[layer], name), getattr(whole.layers[layer], name)
            numbers = all_.data[expert].view(torch.uint8)
            assert torch.equal(mine.data[place].view(torch.uint8), numbers)

    for layer, expert in np.argwhere(table < 0).tolist():
        check(layer, expert)
    (layer, expert), slot = np.argwhere(table >= 0)[1].tolist(), int(table[table >= 0][1])
    place = places.begin(layer, expert)
    bank.save(slot, place)
    places.publish(place)
    check(layer, expert)
    bank.fill(slot, layer, expert)
    for ours, theirs in ((bank.gate_up, other.gate_up), (bank.down, other.down)):
        for one, two in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def test_pages_go_back_though_the_loader_has_views_of_them() -> None:
    """What it reads there then are zeros."""
    store, modules, table = settled("plain")
    data = store((EXPERTS, 256, 256), torch.float32).fill_(1.0)
    modules[0].gate_up = nn.Parameter(data, requires_grad=False)
    store.settle(0, modules[0], "gate_up")
    assert not data.any()
    more = store((5,), torch.float32).fill_(1.0)
    store.give_back(more)
    assert not more.any()


@pytest.mark.parametrize("quantization", ["fp8", "int4", None])
def test_random_weights_settle_like_those_of_files(
    quantization: str | None, tmp_path: Path
) -> None:
    """Quantized ones are made of plain ones, weight after weight; the experts are those of a host
    that holds all."""
    changes = {"hidden_size": 64, "moe_intermediate_size": 32}
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe", "full", layers=2, changes=changes)
    config = load_model_config(folder, quantization=quantization)
    shape = (2, config.num_experts)  # type: ignore[attr-defined]
    table = np.full(shape, ON_HOST, np.int32)
    table[:, :2] = np.arange(4).reshape(2, 2)
    store = ExpertStore(
        table, num_places=table.size - 4, num_slots=4 + 2 * shape[1],
        memory=ExpertMemory(libcuda=None), dtype=torch.bfloat16, device=CPU,
    )  # fmt: skip

    def load(memory: HostMemory) -> list[Experts]:
        model = load_model(
            folder, config, dtype=torch.bfloat16, device=CPU, show_progress=False,
            load_format="dummy", expert_memory=memory,
        )  # fmt: skip
        return [module for module in model.modules() if isinstance(module, Experts)]

    host = store.host_experts(load(store))
    bank = store.open_bank(host, 4, staging=shape[1])
    whole = host_experts(load(lambda shape, dtype: torch.empty(shape, dtype=dtype)))
    other = ExpertBank(whole, 4, staging=shape[1], device=CPU)
    other.place(table)
    for ours, theirs in ((bank.gate_up, other.gate_up), (bank.down, other.down)):
        for one, two in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
    assert host.places is not None
    for layer, expert in np.argwhere(table < 0).tolist():
        place = int(host.places.table[layer, expert])
        for name in ("gate_up", "down"):
            mine, all_ = getattr(host.layers[layer], name), getattr(whole.layers[layer], name)
            assert mine.kind == all_.kind == (quantization or "bfloat16")
            for part, tensor in all_.tensors():
                index = place if part == "data" else expert
                found = getattr(mine, part)[index]
                assert torch.equal(found.view(torch.uint8), tensor[expert].view(torch.uint8))
                assert part != "data" or found.view(torch.uint8).any()


def test_weights_leave_the_memory_that_they_were_read_to() -> None:
    _, modules, _ = settled("plain")
    assert all(m.gate_up.is_meta and m.down.is_meta for m in modules)
    assert modules[0].gate_up.shape == (EXPERTS, 256, 256)


def test_layers_that_differ_are_refused() -> None:
    store, modules, _ = settled("plain")
    data = store((EXPERTS, 256, 256), torch.float16)
    modules[0].gate_up = nn.Parameter(data, requires_grad=False)
    with pytest.raises(ConfigError, match="quantized alike"):
        store.settle(0, modules[0], "gate_up")


def test_what_no_kernel_serves_is_refused() -> None:
    store, modules, _ = settled("plain")
    fresh = ExpertStore(
        np.zeros((LAYERS, EXPERTS), np.int32) - 1, num_places=LAYERS * EXPERTS, num_slots=1,
        memory=ExpertMemory(libcuda=None), dtype=torch.bfloat16, device=CPU,
    )  # fmt: skip
    data = store((EXPERTS, 256, 256), torch.float16)
    modules[0].gate_up = nn.Parameter(data, requires_grad=False)
    with pytest.raises(ConfigError, match="float16 experts of a model that runs in bfloat16"):
        fresh.settle(0, modules[0], "gate_up")


def make_mixture(folder: Path, form: str) -> Path:
    """With experts that two ranks can share, of 128 inner rows each where they have groups."""
    sizes = {"moe_intermediate_size": 256, "hidden_size": 128}
    if form == "biases":
        return make_tiny_checkpoint(folder, "gpt_oss", "heads_of_16", layers=1)
    if form == "mxfp4":
        sizes = {"intermediate_size": 64, "hidden_size": 32}
        return make_mxfp4_checkpoint(folder, layers=1, changes=sizes)
    if form == "gguf":
        sizes = {"moe_intermediate_size": 64, "num_hidden_layers": 1, "mlp_only_layers": []}
        return make_tiny_gguf(
            folder, "qwen3_moe", "full", types=lambda _: "Q4_0", changes=sizes
        ).path
    return make_tiny_checkpoint(folder, "qwen3_moe", "full", layers=1, changes=sizes)


@pytest.mark.parametrize("form", ["biases", "mxfp4", "gguf", "fp8", "fp8_block", "int4", "ifq_nf4"])
def test_slices_of_ranks_add_up_to_the_experts(tmp_path: Path, form: str) -> None:
    """Of two ranks each has half of every expert's inner rows, and rank 0 the biases of `down`."""
    online = None if form in ("biases", "mxfp4", "gguf") else form
    folder, dtype = make_mixture(tmp_path, form), torch.float32
    config = load_model_config(folder, quantization=online)

    def load(collectives: Collectives) -> HostExperts:
        model = load_model(
            folder, config, dtype=dtype, device=CPU, show_progress=False, collectives=collectives,
            expert_memory=empty_on_host,
        )  # fmt: skip
        host = host_experts(expert_modules(model))
        sizes = expert_sizes(folder, config, dtype=dtype, rank=collectives.rank)
        # As stored: scales may have fewer bytes there than in memory.
        assert 0.7 < host.expert_bytes / sizes.expert_bytes < 1.3
        return host

    whole, threads = load(ONE_RANK), ThreadRanks(2)
    parts = [load(ThreadCollectives(threads, index)) for index in range(2)]
    assert [part.inner for part in parts] == [whole.inner // 2] * 2
    assert all(part.hidden == whole.hidden for part in parts)
    x = torch.randn(3, whole.hidden, generator=torch.Generator().manual_seed(0))
    for expert in range(whole.num_experts):
        expected = expert_outputs(whole)(0, expert, x, 0)
        found = sum(expert_outputs(part)(0, expert, x, 0) for part in parts)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
