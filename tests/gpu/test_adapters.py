"""Steps with LoRA adapters through the GPU's runner, without graphs, against the torch runner."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.lora import NO_ADAPTER, AdapterLoad, AdapterRef, LoRARequest
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.adapters import GpuAdapters
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.kernels import fused_lora, lora_product
from hetero_llm.gpu.kernels.skinny_gemm import linear
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.lora.adapter import Adapter, LinearAdapter, read_adapter
from hetero_llm.lora.products import AdaptedProducts
from hetero_llm.lora.slot_layout import SlotLayout
from hetero_llm.lora.targets import AdapterTargets, adapter_targets
from hetero_llm.models.layers import Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.adapters import StepAdapters
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.gpu.test_model_runner import MAX_LEN, SLOTS, build, step_of, steps
from tests.helpers.adapters import write_adapter, write_expert_adapter
from tests.models.tiny import DenseAttend, make_tiny_checkpoint

RANK = 16
SIZES = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN}


class Memory:
    """Host memory with a few adapters, as they are or packed."""

    def __init__(
        self, adapters: list[Adapter], layout: SlotLayout | None = None, *, pin: bool = False
    ) -> None:
        self._held: dict[str, Any] = {
            one.ref.content_hash: one if layout is None else layout.pack(one, pin=pin)
            for one in adapters
        }

    def held(self, adapter: AdapterRef) -> Any:
        return self._held[adapter.content_hash]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", "heads_of_16", layers=1)


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[AdapterTargets, list[Adapter]]:
    """Two of all layers, and one of a part of them."""
    config, model, _ = build(checkpoint, torch.device("cpu"))
    targets = adapter_targets(model, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for number, (rank, modules) in enumerate(((4, ".*"), (7, ".*"), (2, ".*[qv]_proj")), 1):
        folder = tmp_path_factory.mktemp(f"a{number}")
        write_adapter(folder, theirs, modules=modules, rank=rank, seed=number, strength=1.0)
        wanted = LoRARequest(f"a{number}", number, str(folder))
        found.append(read_adapter(wanted, targets, max_rank=RANK, dtype=torch.float32))
    return targets, found


def torch_runner(checkpoint: Path, held: Any, device: torch.device) -> TorchModelRunner:
    targets, found = held
    config, model, cache = build(checkpoint, device)
    runner = TorchModelRunner(model, config, cache, device=device, **SIZES)
    on_device = [_on(device, one) for one in found]
    products = AdaptedProducts(model, targets.linears(), 2, F.linear)
    runner.adapters = StepAdapters(products, Memory(on_device), max_num_seqs=SLOTS, device=device)
    return runner


def gpu_runner(
    checkpoint: Path, held: Any, device: torch.device, *, drafts: bool = False
) -> GpuModelRunner:
    targets, found = held
    config, model, cache = build(checkpoint, device)
    speed_up(model)
    layout = SlotLayout.of(targets, RANK, torch.float32)
    served = GpuAdapters(
        model, layout, Memory(found, layout), num_slots=2, max_num_seqs=SLOTS, device=device
    )
    return GpuModelRunner(
        model, config, cache, max_num_batched_tokens=64, graphs=False,
        most_drafted_tokens=64 if drafts else 0,
        adapters=served, **SIZES,
    )  # fmt: skip


def test_experts_have_adapters_of_their_own(tmp_path: Path, device: torch.device) -> None:
    """Sequences with two adapters of experts and attention, and one without, in float32."""
    folder = make_tiny_checkpoint(
        tmp_path / "moe", "qwen3_moe", "full", layers=1, changes={"head_dim": 16}
    )
    config, model, _ = build(folder, torch.device("cpu"))
    targets = adapter_targets(model, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for number, modules in ((1, None), (2, ("mlp", "gate_proj", "up_proj", "down_proj"))):
        write_expert_adapter(
            tmp_path / f"a{number}", theirs, modules=modules, rank=3, seed=number, strength=2.0
        )
        wanted = LoRARequest(f"a{number}", number, str(tmp_path / f"a{number}"))
        found.append(read_adapter(wanted, targets, max_rank=RANK, dtype=torch.float32))
    held = targets, found
    plain = steps()
    work = [with_adapters(plain[0], [0, NO_ADAPTER, 1], list(enumerate(found))), *plain[1:]]
    expected = run(torch_runner(folder, held, device), work)
    assert run(gpu_runner(folder, held, device), work) == expected
    assert run(gpu_runner(folder, held, device), plain) != expected


def _on(device: torch.device, adapter: Adapter) -> Adapter:
    def moved(linear: LinearAdapter) -> LinearAdapter:
        return dataclasses.replace(
            linear,
            a=linear.a.to(device),
            scales=linear.scales.to(device),
            parts=tuple(dataclasses.replace(p, b=p.b.to(device)) for p in linear.parts),
        )

    return dataclasses.replace(
        adapter,
        linears={name: moved(linear) for name, linear in adapter.linears.items()},
        experts={
            name: {expert: moved(linear) for expert, linear in experts.items()}
            for name, experts in adapter.experts.items()
        },
    )


def with_adapters(
    step: SchedulerOutput, slots: list[int], loads: list[tuple[int, Adapter]]
) -> SchedulerOutput:
    """The same step; the sequences that it admits have these adapter slots."""
    admitted = tuple(
        dataclasses.replace(state, adapter_slot=slot)
        for state, slot in zip(step.admitted, slots, strict=True)
    )
    return dataclasses.replace(
        step,
        admitted=admitted,
        adapter_loads=tuple(AdapterLoad(slot, one.ref) for slot, one in loads),
    )


def run(runner: Any, work: list[SchedulerOutput]) -> list[list[int]]:
    """Two steps under way at the beginning."""
    launched = [runner.launch(step) for step in work[:2]]
    outputs = [runner.finish(pending) for pending in launched]
    outputs += [runner.finish(runner.launch(step)) for step in work[2:]]
    return [list(output.token_ids) for output in outputs]


def test_it_draws_what_the_torch_runner_draws(
    checkpoint: Path, adapters: Any, device: torch.device
) -> None:
    """Some sequences have an adapter, the last step's have none."""
    first, second, third = adapters[1]
    plain = steps()
    # The later one of two loads of a slot counts; a slot is filled again for another request.
    work = [with_adapters(plain[0], [0, NO_ADAPTER, 1], [(0, third), (1, second), (0, first)])]
    again = dataclasses.replace(work[0].admitted[1], request_slot=3)
    prompt = step_of([(3, 0, list(again.token_ids), 1)], (again,), [(3, 0, 23)])
    work += [plain[1], with_adapters(prompt, [0], [(0, third)]), step_of([(1, 6, [-1], 1)])]
    expected = run(torch_runner(checkpoint, adapters, device), work)
    assert run(gpu_runner(checkpoint, adapters, device), work) == expected
    work[0], work[2] = plain[0], prompt
    assert run(torch_runner(checkpoint, adapters, device), work) != expected


def test_the_last_layer_goes_on_with_sampled_rows(
    checkpoint: Path, adapters: Any, device: torch.device
) -> None:
    """With adapters as without. A step with as many samples as tokens keeps all rows, since a
    product knows them by their number."""
    targets, found = adapters
    config, model, cache = build(checkpoint, device)
    speed_up(model)
    rows: list[int] = []
    model.layers[-1].mlp.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    layout = SlotLayout.of(targets, RANK, torch.float32)
    served = GpuAdapters(
        model, layout, Memory(found, layout), num_slots=2, max_num_seqs=SLOTS, device=device
    )
    runner = GpuModelRunner(
        model, config, cache, max_num_batched_tokens=64, graphs=False, adapters=served, **SIZES
    )
    plain = steps()
    work = [with_adapters(plain[0], [1, NO_ADAPTER, 0], list(enumerate(found[:2]))), plain[1]]
    twice = step_of([(0, 21, [7, 8], 2)])
    ours = run(runner, [*work, twice])
    assert rows == [2, 4, 2]
    assert run(torch_runner(checkpoint, adapters, device), [*work, twice]) == ours


def test_draft_trees_are_verified_with_the_adapter(
    checkpoint: Path, adapters: Any, device: torch.device
) -> None:
    begin = steps()[:2]
    begin[0] = with_adapters(begin[0], [1, NO_ADAPTER, 0], list(enumerate(adapters[1][:2])))
    plain = gpu_runner(checkpoint, adapters, device)
    last = run(plain, begin)[-1]
    coming: list[int] = []
    for position in range(21, 23):
        output = plain.finish(plain.launch(step_of([(0, position, [-1], 1)])))
        coming += output.token_ids
    drafted = gpu_runner(checkpoint, adapters, device, drafts=True)
    assert run(drafted, begin)[-1] == last
    tree = step_of([(0, 21, [last[0], coming[0]], 1)])
    batch = DraftBatch(*(np.array(values, np.int32) for values in ([1], coming[:1], [-1])))
    step = dataclasses.replace(tree, token_ids=tree.token_ids[:1], drafts=batch)
    output = drafted.finish(drafted.launch(step))
    assert output.token_ids == coming


def test_few_rows_in_16_bits_have_the_adapters_inside_of_the_products(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers of a model, with and without adapters, and as if no product could take them."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    changes |= {"num_attention_heads": 4, "num_key_value_heads": 1}
    folder = make_tiny_checkpoint(tmp_path, "llama", changes=changes, layers=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, outside = load_model_config(folder), []
    shrink = lora_product.lora_shrink

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        outside.append(len(x))
        return shrink(x, *others)

    monkeypatch.setattr(lora_product, "lora_shrink", counted)
    results = {}
    for inside in (True, False):
        monkeypatch.setattr(fused_lora, "MAX_ROWS", fused_lora.MAX_ROWS if inside else 0)
        model = load_model(folder, config, dtype=torch.bfloat16, device=device, show_progress=False)
        targets = adapter_targets(model, config)
        found = []
        for number in (1, 2):
            write_adapter(tmp_path / f"a{number}", theirs, rank=5, seed=number, strength=0.5)
            wanted = LoRARequest(f"a{number}", number, str(tmp_path / f"a{number}"))
            found.append(read_adapter(wanted, targets, max_rank=RANK, dtype=torch.bfloat16))
        speed_up(model)
        for module in model.modules():  # as on a GPU, wherever this runs
            if isinstance(module, Linear):
                module.product = linear
        layout = SlotLayout.of(targets, RANK, torch.bfloat16)
        served = GpuAdapters(
            model, layout, Memory(found, layout),
            num_slots=2, max_num_seqs=SLOTS, device=device,
        )  # fmt: skip
        served.prepare(with_adapters(steps()[0], [1, NO_ADAPTER, 0], list(enumerate(found))))
        for slots in ([0], [2, 0, 1, 1, 2]):
            count = len(slots)
            ids = torch.arange(3, 3 + count, device=device)
            for adapted in (True, False):
                rows = torch.tensor(slots, dtype=torch.int32, device=device) if adapted else None
                served.begin(rows)
                with torch.no_grad():
                    attend = DenseAttend(config, [1] * count)
                    hidden = model(ids, torch.zeros_like(ids), attend)
                results[inside, adapted, count] = hidden.float()
    assert outside == [1] * 4 + [5] * 4
    for count in (1, 5):
        plain, found_inside = results[True, False, count], results[True, True, count]
        assert torch.equal(plain, results[False, False, count])
        assert (found_inside - plain).norm() > 0.1 * plain.norm()
        assert (found_inside - results[False, True, count]).norm() < 0.02 * plain.norm()
