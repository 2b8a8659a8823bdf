"""Adapters packed into slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm.core.lora import LoRARequest
from hetero_llm.lora.adapter import Adapter, read_adapter
from hetero_llm.lora.slot_layout import SlotLayout
from hetero_llm.lora.targets import AdapterTargets, Target, adapter_targets
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.adapters import write_adapter, write_expert_adapter
from tests.models.tiny import make_tiny_checkpoint

RANK = 16


@pytest.fixture(params=["llama", "opt", "gpt_neox"])
def parts(request: Any, tmp_path: Path) -> tuple[AdapterTargets, Adapter]:
    """A model's targets, and an adapter of most of its layers with ranks that differ."""
    folder = make_tiny_checkpoint(tmp_path / "model", request.param, layers=2)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    targets = adapter_targets(model, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = r".*(q_proj|v_proj|query_key_value|down_proj|fc2|dense_4h_to_h)"
    pattern = {"v_proj": 3, "fc2": 2}
    write_adapter(tmp_path / "a", theirs, modules=modules, rank=5, rank_pattern=pattern)
    wanted = LoRARequest("a", 1, str(tmp_path / "a"))
    return targets, read_adapter(wanted, targets, max_rank=RANK, dtype=torch.float32)


def test_slots_hold_what_the_adapter_adds(parts: tuple[AdapterTargets, Adapter]) -> None:
    targets, adapter = parts
    layout = SlotLayout.of(targets, RANK, torch.float32)
    slots = torch.full((3, layout.num_bytes), 255, dtype=torch.uint8)
    slots[1] = layout.pack(adapter, pin=False)
    assert set(layout.places) == targets.linears() > set(adapter.linears)
    for name, place in layout.places.items():
        a, b, scales = (view[1] for view in layout.views(slots, name))
        rows, columns = targets.sizes[name]
        assert place.bounds[-1] == rows
        delta = torch.zeros(rows, columns)
        for part, first in enumerate(place.bounds[:-1]):
            own, out = slice(part * RANK, (part + 1) * RANK), slice(first, place.bounds[part + 1])
            delta[out] = b[out] @ (scales[own, None] * a[own])
        expected = torch.zeros(rows, columns)
        if name in adapter.linears:
            expected = adapter.linears[name].delta(rows)
            assert expected.abs().max() > 0.01
        torch.testing.assert_close(delta, expected)
        assert all(view.stride(0) * view.element_size() == layout.num_bytes
                   for view in layout.views(slots, name))  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_slots_hold_what_adapters_add_to_experts(family: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", family, layers=2)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    targets = adapter_targets(model, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_expert_adapter(tmp_path / "a", theirs, modules=None, rank=5)
    wanted = LoRARequest("a", 1, str(tmp_path / "a"))
    adapter = read_adapter(wanted, targets, max_rank=RANK, dtype=torch.float32)
    layout = SlotLayout.of(targets, RANK, torch.float32)
    slots = torch.full((2, layout.num_bytes), 255, dtype=torch.uint8)
    slots[1] = layout.pack(adapter, pin=False)
    assert set(layout.places) == targets.linears() | targets.expert_weights()
    for name, experts in adapter.experts.items():
        place = layout.places[name]
        assert place.experts == len(experts) and place.parts == (2 if "gate_up" in name else 1)
        a, b, scales = (view[1] for view in layout.views(slots, name))
        for expert, linear in experts.items():
            delta = torch.zeros(targets.sizes[name])
            for part, first in enumerate(place.bounds[:-1]):
                own, out = (
                    slice(part * RANK, (part + 1) * RANK),
                    slice(first, place.bounds[part + 1]),
                )
                delta[out] = b[expert, out] @ (scales[expert, own, None] * a[expert, own])
            torch.testing.assert_close(delta, linear.delta(len(delta)))


def test_places_do_not_overlap(parts: tuple[AdapterTargets, Adapter]) -> None:
    layout = SlotLayout.of(parts[0], RANK, torch.bfloat16)
    slots = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    views = [view for name in layout.places for view in layout.views(slots, name)]
    for view in views:
        view.fill_(1)
    for view in views:
        assert (view == 1).all()
    used = sum(view[0].numel() * view.element_size() for view in views)
    assert used <= layout.num_bytes < used + 128 * len(views)
    assert all(view.data_ptr() % 16 == 0 for view in views)


def test_pieces_are_whole_layers_in_the_order_in_which_they_run() -> None:
    """Whatever the order of the checkpoint; the last piece has what is left."""
    names = [f"stack.layers.{layer}.{part}.2" for part in ("up", "down") for layer in range(9)]
    names.insert(5, "project_in")
    targets = {name: Target(name, 0, 8 + at, 24) for at, name in enumerate(names)}
    sizes = {name: (target.rows, target.columns) for name, target in targets.items()}
    layout = SlotLayout.of(AdapterTargets(targets, {}, str, sizes), RANK, torch.bfloat16)
    layers = [[-1], [0], [1], [2, 3], [4, 5, 6], [7, 8]]
    wanted = [
        [f"stack.layers.{layer}.{part}.2" for layer in piece for part in ("up", "down")]
        for piece in layers
    ]
    wanted[0] = ["project_in"]
    found = [[n for n, p in layout.places.items() if p.piece == piece] for piece in range(6)]
    assert found == wanted and len(layout.pieces) == 6
    assert list(layout.places) == [name for piece in wanted for name in piece]
    end = 0
    for piece, members in enumerate(found):
        begin, end = end, end + layout.pieces[piece]
        for name in members:
            place = layout.places[name]
            firsts = (place.a, place.b, place.scales)
            counts = (RANK * 24 * 2, sizes[name][0] * RANK * 2, RANK * 4)
            assert all(begin <= first and first + count <= end
                       for first, count in zip(firsts, counts, strict=True))  # fmt: skip
    assert end == layout.num_bytes


def test_layers_of_a_model_follow_each_other(parts: tuple[AdapterTargets, Adapter]) -> None:
    layout = SlotLayout.of(parts[0], RANK, torch.bfloat16)
    pieces = [place.piece for place in layout.places.values()]
    assert pieces == sorted(pieces) and set(pieces) == {0, 1}
    assert layout.pieces[0] == layout.pieces[1]  # two equal layers
