"""Adapters of attention on a mixture whose experts are partly on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import NO_ADAPTER, LoRARequest
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.adapters import GpuAdapters
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.lora.adapter import read_adapter
from hetero_llm.lora.products import AdaptedProducts
from hetero_llm.lora.slot_layout import SlotLayout
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.adapters import StepAdapters
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.gpu.test_adapters import RANK, Memory, with_adapters
from tests.helpers.adapters import write_adapter, write_expert_adapter
from tests.helpers.hybrid import open_hybrid
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_hybrid_experts import MAX_LEN, SLOTS, STREAMS, cache_of, steps

ATTENTION = r".*self_attn\.(q|k|v|o)_proj"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    return make_tiny_checkpoint(folder, "qwen3_moe", "full", layers=1, changes={"head_dim": 16})


def tokens_of(runner: Any, work: list[SchedulerOutput]) -> list[list[int]]:
    return [runner.finish(runner.launch(step)).token_ids for step in work]


def test_tokens_of_adapted_attention(checkpoint: Path, tmp_path: Path) -> None:
    """One of two sequences has the adapter; the prompts stream, and their experts' places are not
    the adapter's concern."""
    config = load_model_config(checkpoint)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    write_adapter(tmp_path, theirs, modules=ATTENTION, seed=1, strength=2.0)
    model = load_model(checkpoint, config, dtype=torch.float32, device=CPU, show_progress=False)
    targets = adapter_targets(model, config, experts=False)
    wanted = LoRARequest("a", 1, str(tmp_path))
    adapter = read_adapter(wanted, targets, max_rank=RANK, dtype=torch.float32)
    plain = steps(1)
    work = [with_adapters(plain[0], [0, NO_ADAPTER], [(0, adapter)]), *plain[1:]]
    sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN}
    runner = TorchModelRunner(model, config, cache_of(config, CPU), device=CPU, **sizes)
    without = tokens_of(runner, plain)
    runner = TorchModelRunner(model, config, cache_of(config, CPU), device=CPU, **sizes)
    products = AdaptedProducts(model, targets.linears(), 2, F.linear)
    runner.adapters = StepAdapters(products, Memory([adapter]), max_num_seqs=SLOTS, device=CPU)
    expected = tokens_of(runner, work)
    assert expected != without
    with open_hybrid(checkpoint, CPU, residency=0.5, most_rows=STREAMS, spares=2) as hybrid:
        own = adapter_targets(hybrid.model, config)
        assert own.targets.keys() == targets.targets.keys()
        layout = SlotLayout.of(own, RANK, torch.float32)
        served = GpuAdapters(
            hybrid.model, layout, Memory([adapter], layout), num_slots=2, max_num_seqs=SLOTS,
            device=CPU,
        )  # fmt: skip
        ours = GpuModelRunner(
            hybrid.model, config, cache_of(config, CPU), max_num_batched_tokens=32, graphs=False,
            experts=hybrid.experts, adapters=served, **sizes,
        )  # fmt: skip
        assert tokens_of(ours, work) == expected
        assert hybrid.team.requests


def test_adapters_of_experts_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    config = load_model_config(checkpoint)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    write_expert_adapter(tmp_path, theirs, modules=None)
    with open_hybrid(checkpoint, CPU, residency=0.5, most_rows=STREAMS, spares=2) as hybrid:
        targets = adapter_targets(hybrid.model, config)
        assert not targets.banks
        with pytest.raises(AdapterError, match="experts of which some are on the host take no"):
            read_adapter(
                LoRARequest("a", 1, str(tmp_path)), targets, max_rank=RANK, dtype=torch.float32
            )
