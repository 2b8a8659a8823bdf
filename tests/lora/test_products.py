"""Products with adapters, beyond what the scenarios of `tests/scenarios/test_lora.py` see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from hetero_llm.core.lora import NO_ADAPTER, LoRARequest
from hetero_llm.lora.adapter import read_adapter
from hetero_llm.lora.products import AdaptedProducts
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.experts import Experts, expert_weight
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.adapters import write_expert_adapter
from tests.models.tiny import make_tiny_checkpoint

TOKENS = 9


def test_quantized_experts_keep_their_products(tmp_path: Path) -> None:
    """What adapters add is exact: the outputs are those of the dequantized weights, merged."""
    folder = make_tiny_checkpoint(tmp_path / "base", "qwen3_moe")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_expert_adapter(tmp_path / "a", theirs, modules=None, rank=3)
    config = load_model_config(folder, quantization="fp8")
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    targets = adapter_targets(model, config)
    request = LoRARequest("a", 1, str(tmp_path / "a"))
    adapter = read_adapter(request, targets, max_rank=8, dtype=torch.float32)
    products = AdaptedProducts(model, targets.linears(), 2, F.linear)
    products.fill(1, adapter)
    modules = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
    assert all(set(module.quantized) == {"gate_up", "down"} for module in modules.values())
    generator = torch.Generator().manual_seed(0)
    slots = np.array([1, 1, NO_ADAPTER, 1, NO_ADAPTER, 1, 1, NO_ADAPTER, 1])
    adapted = torch.from_numpy(slots == 1)
    for name, module in modules.items():
        count, hidden, inner = module.down.shape
        x = torch.randn(TOKENS, hidden, generator=generator)
        weights, ids = torch.randn(TOKENS, count, generator=generator).softmax(-1).topk(2)
        products.begin_step(np.full(TOKENS, NO_ADAPTER), torch.device("cpu"))
        plain = module(x, ids, weights)
        products.begin_step(slots, torch.device("cpu"))
        found = module(x, ids, weights)
        merged = Experts(count, hidden, inner, module.activation.name)
        for which in ("gate_up", "down"):
            for expert in range(count):
                own = adapter.experts[f"{name}.{which}"][expert]
                weight = expert_weight(getattr(module, which), expert, torch.float32)
                target = getattr(merged, which).data
                target[expert] = weight + own.delta(len(weight))
        expected = merged(x, ids, weights)
        assert torch.equal(found[~adapted], plain[~adapted])
        torch.testing.assert_close(found[adapted], expected[adapted], atol=1e-5, rtol=1e-5)
        assert (expected - plain)[adapted].abs().max() > 0.01
