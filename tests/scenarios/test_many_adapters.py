"""A thousand adapters pass through one engine, and nothing of them stays but their names."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, LoRARequest, SamplingParams
from hetero_llm.lora.adapter import Adapter
from hetero_llm.lora.store import FORGOTTEN
from tests.helpers.adapters import write_adapter
from tests.models.tiny import make_tiny_checkpoint

COUNT = 1000
SLOTS, IN_MEMORY = 4, 8
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    torch.set_num_threads(1)


def write_adapters(folder: Path, model: Any, count: int) -> list[LoRARequest]:
    """Adapters that share a file of tensors and differ in their scale, so in their content."""
    first = write_adapter(folder / "0", model, modules=".*q_proj", rank=1, strength=0.1).folder
    config = json.loads((first / "adapter_config.json").read_text())
    found = []
    for number in range(1, count + 1):
        own = folder / str(number)
        own.mkdir()
        (own / "adapter_model.safetensors").symlink_to(first / "adapter_model.safetensors")
        text = json.dumps({**config, "lora_alpha": 1 + number / count})
        (own / "adapter_config.json").write_text(text)
        found.append(LoRARequest(f"a{number}", number, str(own)))
    return found


def num_files() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def num_alive() -> int:
    """Adapters that this process holds in memory."""
    gc.collect()
    return sum(type(one) is Adapter for one in gc.get_objects())


def test_a_thousand_adapters(tmp_path: Path) -> None:
    base = make_tiny_checkpoint(tmp_path / "base", "llama", layers=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    requests = write_adapters(tmp_path, model, COUNT)
    most = num_alive() + IN_MEMORY + SLOTS  # fixtures of other tests hold some, too
    with LLM(
        str(base), device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=16,
        enable_lora=True, max_loras=SLOTS, max_cpu_loras=IN_MEMORY, num_gpu_blocks_override=64,
        max_model_len=32,
    ) as llm:  # fmt: skip
        store, scheduler = llm.engine.adapters, llm.engine.scheduler

        def generate(chosen: list[LoRARequest]) -> None:
            outputs = llm.generate(
                prompt_token_ids=[[5, 6, 7]] * len(chosen), sampling_params=GREEDY,
                lora_request=chosen, use_tqdm=False,
            )  # fmt: skip
            assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)

        generate(requests[:20])
        files = num_files()
        assert num_alive() <= most
        generate(requests[20:])
        assert num_files() <= files
        assert num_alive() <= most
        assert store.num_loaded == IN_MEMORY
        assert len(store.names()) == store.num_sources == COUNT
        assert llm.metrics()["lora_loads"] == COUNT
        scheduler.check_integrity()
        for request in requests:
            store.forget(request.lora_name)
        assert store.names() == {}
        assert store.num_sources <= FORGOTTEN
        generate(requests[:5])  # known again by their files
        scheduler.check_integrity()
        assert store.num_loaded == IN_MEMORY
