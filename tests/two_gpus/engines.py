"""Engines on two GPUs: what they are asked for, what one GPU answers, and the death of a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hetero_llm import LLM, EngineDeadError, LoRARequest, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from tests.scenarios.test_tensor_parallel import adapters_of

MODEL: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
    "max_position_embeddings": 2304,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)
REQUESTS: list[tuple[str | list[int], SamplingParams]] = [
    ("one prompt", GREEDY),
    ("another prompt", SAMPLED),
    ([7, 8, 9], replace(SAMPLED, top_k=20, n=3)),
    ("abcabcabc", replace(GREEDY, logprobs=3, prompt_logprobs=2)),
    ("penalties", replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.4)),
    ("x" * 150, GREEDY),
]
SMALL: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 8,
    "num_gpu_blocks_override": 400, "max_model_len": 2304, "gpu_memory_utilization": 0.3,
}  # fmt: skip
DRAFTS: dict[str, Any] = {"use_lookahead": True, "num_speculative_tokens": 5}
ADAPTERS: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8, "enable_lora": True}
DEATH_SECONDS = 5.0


@dataclass(frozen=True)
class Expected:
    """Tokens on one GPU.

    Attributes:
        requests: of `run`.
        long, mixed, adapted: of `run_long`, `run_mixed`, `run_adapted`.
        adapters: of `run_adapted`.
    """

    requests: list[list[list[int]]]
    long: list[list[int]]
    mixed: list[list[int]]
    adapted: list[list[int]]
    adapters: list[LoRARequest | None]


def compile_drafts() -> None:
    """Compiles what drafts with `DRAFTS` run, for all processes behind this one."""
    speculation = EngineConfig.from_args(resolve_engine_args({"model": "-", **DRAFTS})).speculation
    assert speculation is not None and speculation.lookahead is not None
    wanted = replace(speculation.lookahead, max_seq_len=64, eos_token_id=(2,))
    HybridDrafter(wanted, width=64, capacity=1 << 14)


def expected_on_one_gpu(folder: Path) -> Expected:
    """Without graphs: fewer kernels to compile."""
    adapters = adapters_of(folder.parent / "adapters", folder)
    options = {**SMALL, **ADAPTERS, "max_num_batched_tokens": 2176, "enforce_eager": True}
    with LLM(str(folder), **options) as llm:
        return Expected(
            run(llm), run_long(llm), run_mixed(llm), run_adapted(llm, adapters), adapters
        )


def run(llm: LLM) -> list[list[list[int]]]:
    """Tokens of `REQUESTS`."""
    prompts, params = zip(*REQUESTS, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def run_long(llm: LLM) -> list[list[int]]:
    """Prompts of more than 512 tokens, one by one: two whose steps are captured where several GPUs
    share layers, and a longer one."""
    prompts = [[(7 * i + i // 11) % 90 + 1 for i in range(n)] for n in (513, 2048, 2100)]
    return [_first(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in prompts]


def run_mixed(llm: LLM) -> list[list[int]]:
    """Hundreds of steps, of sizes that change."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 250, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 120, (60,), generator=generator)
    ]
    params = [replace(GREEDY, max_tokens=5 + number % 40) for number in range(len(prompts))]
    return _first(llm.generate(prompts, params, use_tqdm=False))


def run_adapted(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    """Prompts with adapters, more than there are slots for, some of them guided."""
    guided = replace(GREEDY, structured_outputs={"regex": "[0-9]{12}"}, max_tokens=16)
    params = [guided if number % 3 == 2 else GREEDY for number in range(8)]
    chosen = [adapters[number % len(adapters)] for number in range(8)]
    prompts = [[5 + number, 6, 7] for number in range(8)]
    return _first(llm.generate(prompts, params, use_tqdm=False, lora_request=chosen))


def _first(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_death(llm: LLM, how: signal.Signals) -> None:
    """Ends rank 1 in the middle of steps: the engine ends with a line that says so."""
    (rank,) = (
        one for one in psutil.Process().children() if "rank_process" in " ".join(one.cmdline())
    )
    begun = []

    def end_it() -> None:
        begun.append(time.monotonic())
        os.kill(rank.pid, how)

    timer = threading.Timer(0.5, end_it)
    timer.start()
    try:
        with pytest.raises(EngineDeadError, match=r"rank 1|did not come to it"):
            while True:
                llm.generate(["a"] * 8, replace(GREEDY, max_tokens=200), use_tqdm=False)
        assert time.monotonic() - begun[0] < DEATH_SECONDS
    finally:
        timer.join()
        llm.close()
    assert psutil.wait_procs([rank], 5)[1] == []
