"""An engine on two GPUs: tokens of one GPU, and what the death of a rank does."""

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

from hetero_llm import LLM, EngineDeadError, SamplingParams
from tests.distributed.group_members import check_exchanges
from tests.models.tiny import make_tiny_checkpoint

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
    "num_gpu_blocks_override": 200, "max_model_len": 256, "gpu_memory_utilization": 0.3,
}  # fmt: skip
DEATH_SECONDS = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, as the kernels take them."""
    changes = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
        "max_position_embeddings": 256,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("tp") / "llama"
    return make_tiny_checkpoint(path, "llama", with_tokenizer=True, changes=changes)


def run(llm: LLM) -> list[list[list[int]]]:
    prompts, params = zip(*REQUESTS, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    with LLM(str(folder), **SMALL) as llm:
        return run(llm)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"enforce_eager": True},
        {"disable_custom_all_reduce": True},
        {"use_lookahead": True, "num_speculative_tokens": 5},
        {"cpu_offload_gb": 0.001},
    ],
    ids=["graphs", "eager", "nccl", "drafts", "weights on the host"],
)
def test_tokens_of_one_gpu(
    folder: Path, expected: list[list[list[int]]], arguments: dict[str, Any]
) -> None:
    with LLM(str(folder), **SMALL, **arguments, tensor_parallel_size=2) as llm:
        assert run(llm) == expected
        assert run(llm) == expected, "with cached prefixes, and drafts where there are any"


def test_prompts_whose_steps_are_captured(tmp_path: Path) -> None:
    """Of more than 512 tokens, up to 2,048; longer ones and long contexts are not."""
    changes = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    path = make_tiny_checkpoint(tmp_path / "llama", "llama", changes=changes)
    sizes = {"max_num_batched_tokens": 2560, "max_model_len": 8192, "num_gpu_blocks_override": 1200}
    lengths = (513, 768, 1000, 2048, 2100, 5200)
    prompts = [[(7 * i + i // 11) % 90 + 1 for i in range(n)] for n in lengths]
    found = []
    for ranks in (1, 2):
        arguments = SMALL | sizes | {"tensor_parallel_size": ranks, "skip_tokenizer_init": True}
        with LLM(str(path), **arguments) as llm:
            one_by_one = [llm.generate([p], GREEDY, use_tqdm=False)[0] for p in prompts]
            found.append([output.outputs[0].token_ids for output in one_by_one])
    assert found[1] == found[0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("nccl", [False, True])
def test_the_death_of_a_rank_ends_the_engine(folder: Path, how: signal.Signals, nccl: bool) -> None:
    llm = LLM(str(folder), **SMALL, disable_custom_all_reduce=nccl, tensor_parallel_size=2)
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


def test_exchanges_through_nccl() -> None:
    check_exchanges(2, "cuda")
