"""Two stages on two GPUs: the tokens of one GPU, steps of both at the same time, and what the death
of a stage does."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hetero_llm import LLM, EngineDeadError, LoRARequest
from tests.models.tiny import make_tiny_checkpoint
from tests.scenarios.test_tensor_parallel import adapters_of
from tests.two_gpus.test_engine_ranks import DEATH_SECONDS, GREEDY, SMALL, run

SIZES = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, as the kernels take them; the first stage has two of three layers."""
    path = tmp_path_factory.mktemp("pp") / "llama"
    return make_tiny_checkpoint(path, "llama", "tied", with_tokenizer=True, layers=3, changes=SIZES)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    with LLM(str(folder), **SMALL) as llm:
        return run(llm)


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_tokens_of_one_gpu(
    folder: Path, expected: list[list[list[int]]], arguments: dict[str, Any]
) -> None:
    with LLM(str(folder), **SMALL, **arguments, pipeline_parallel_size=2) as llm:
        assert run(llm) == expected
        assert run(llm) == expected, "with cached prefixes"
        metrics = llm.metrics()
        assert metrics["num_steps_ahead"] > metrics["num_steps"] // 3


def test_many_steps_with_random_prompts(folder: Path) -> None:
    """Hundreds of steps of both stages, of sizes that change: every sequence has the tokens that it
    has alone on one GPU."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 250, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 120, (60,), generator=generator)
    ]
    params = [replace(GREEDY, max_tokens=5 + number % 40) for number in range(len(prompts))]

    def tokens(**more: Any) -> list[list[int]]:
        with LLM(str(folder), **SMALL, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    assert tokens(pipeline_parallel_size=2) == tokens()


def test_adapters_and_grammars(folder: Path, tmp_path: Path) -> None:
    adapters = adapters_of(tmp_path, folder)
    chosen: list[LoRARequest | None] = [adapters[number % len(adapters)] for number in range(8)]
    guided = replace(GREEDY, structured_outputs={"regex": "[0-9]{12}"}, max_tokens=16)
    params = [guided if number % 3 == 2 else GREEDY for number in range(8)]
    options = {**SMALL, "max_loras": 2, "max_lora_rank": 8, "enable_lora": True}

    def tokens(**more: Any) -> list[list[int]]:
        with LLM(str(folder), **options, **more) as llm:
            prompts = [[5 + number, 6, 7] for number in range(8)]
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
            return [output.outputs[0].token_ids for output in outputs]

    assert tokens(pipeline_parallel_size=2) == tokens()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_death_of_a_stage_ends_the_engine(folder: Path, how: signal.Signals) -> None:
    llm = LLM(str(folder), **SMALL, pipeline_parallel_size=2)
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
        with pytest.raises(EngineDeadError, match=r"rank 1"):
            while True:
                llm.generate(["a"] * 8, replace(GREEDY, max_tokens=200), use_tqdm=False)
        assert time.monotonic() - begun[0] < DEATH_SECONDS
    finally:
        timer.join()
        llm.close()
    assert psutil.wait_procs([rank], 5)[1] == []
