"""Memory on a real GPU: the size of the KV pool, and every way to run out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.shapes import SHAPES, write_config
from hetero_llm import LLM, ConfigError, SamplingParams
from hetero_llm.core.outputs import CompletionOutput
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.gpu.weight_offload import GIB, plan_offload
from hetero_llm.models.read_config import load_model_config
from tests.gpu.scenarios.serving import start

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
MIB = 1 << 20
UTILIZATION = 0.3

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield


@pytest.fixture(scope="module")
def one_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(SHAPES["llama-3.2-1b"], tmp_path_factory.mktemp("one_b"))


def start_one_b(folder: Path, **engine_args: Any) -> LLM:
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        **{
            "device": "cuda",
            "max_model_len": 2048,
            "gpu_memory_utilization": UTILIZATION,
            **engine_args,
        },
    )


def num_blocks(llm: LLM) -> int:
    return llm.engine.scheduler.blocks.num_blocks


def one_b_block_bytes() -> int:
    return 16 * 2 * 16 * 8 * 64 * 2  # layers, K and V, tokens, kv heads, dim, bytes


def results(llm: LLM) -> list[CompletionOutput]:
    prompts = [row[: 20 + 30 * i].tolist() for i, row in enumerate(heldout_prompts().prompts[:6])]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)
    return [o.outputs[0] for o in outputs]


@dataclass(frozen=True)
class Plain:
    """An engine without special arguments: its KV pool, and the most memory that steps took."""

    num_blocks: int
    peak_bytes: int


@pytest.fixture(scope="module")
def plain(one_b: Path) -> Plain:
    with start_one_b(one_b) as llm:
        torch.cuda.reset_peak_memory_stats()
        prompts = torch.randint(3, 128256, (40, 1000)).tolist()
        params = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=3, detokenize=False)
        llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        return Plain(num_blocks(llm), torch.cuda.max_memory_allocated())


def test_the_pool_grows_by_what_offloading_frees(one_b: Path, plain: Plain) -> None:
    plan = plan_offload(load_model_config(one_b), torch.bfloat16, 1.0)
    assert plan.freed_bytes > 0.8 * GIB
    with start_one_b(one_b, cpu_offload_gb=1.0) as llm:
        gained = (num_blocks(llm) - plain.num_blocks) * one_b_block_bytes()
        assert abs(gained - plan.freed_bytes) < 128 * MIB
        (output,) = llm.generate(
            prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS, use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 16


def test_a_conservative_pool_is_no_larger(one_b: Path, plain: Plain) -> None:
    with start_one_b(one_b, conservative_dry_run=True) as llm:
        assert 0 < num_blocks(llm) <= plain.num_blocks + 64 * MIB // one_b_block_bytes()


def test_the_step_stays_within_the_utilization(plain: Plain) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    assert plain.peak_bytes < UTILIZATION * total


def test_the_cache_is_sized_from_free_memory() -> None:
    with LLM("demo", device="cuda", gpu_memory_utilization=0.5) as llm:
        total = torch.cuda.get_device_properties(0).total_memory
        assert 0.4 * total < torch.cuda.memory_allocated() < 0.55 * total
        assert len(results(llm)) == 6
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LLM("demo", device="cuda", gpu_memory_utilization=0.0001)


def test_the_profile_knows_of_the_draft_model() -> None:
    """Both caches fit into the share of the memory that may be used."""
    given: dict[str, Any] = {
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": 0.2,
        "max_num_seqs": 4,
    }
    with start(**given) as llm:
        alone = num_blocks(llm)
    with start(
        **given, speculative_model=str(demo_folder("demo-draft")), num_speculative_tokens=5
    ) as llm:
        drafter: Any = llm.engine.scheduler.drafter
        assert drafter.num_blocks == 4 * 32
        # Two profile runs differ by more than this small model takes.
        assert num_blocks(llm) < 1.01 * alone
        assert results(llm)


def test_an_fp8_pool_holds_twice_the_blocks() -> None:
    blocks = []
    for name in ("auto", "fp8"):
        with start(
            dtype="bfloat16",
            kv_cache_dtype=name,
            num_gpu_blocks_override=None,
            gpu_memory_utilization=0.05,
            enforce_eager=True,
        ) as llm:
            blocks.append(num_blocks(llm))
    assert 1.9 < blocks[1] / blocks[0] < 2.1


def test_a_pool_that_is_too_small(one_b: Path) -> None:
    with pytest.raises(ConfigError, match="^gpu_memory_utilization=.*raise gpu_memory_utiliz"):
        start_one_b(one_b, gpu_memory_utilization=0.02)


def test_too_many_fixed_blocks(one_b: Path) -> None:
    with pytest.raises(ConfigError, match="^num_gpu_blocks_override=.*GiB are free; lower it"):
        start_one_b(one_b, num_gpu_blocks_override=2_000_000)
    with start_one_b(one_b, num_gpu_blocks_override=200, enforce_eager=True) as llm:
        assert num_blocks(llm) == 200


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Tells torch's allocator to fail beyond 2.2 GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2.2 * GIB / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_weights_that_do_not_fit(one_b: Path, little_memory: None) -> None:
    with pytest.raises(
        ConfigError, match="^cpu_offload_gb=0.*: 2.30 GiB of weights do not fit .*raise it"
    ):
        start_one_b(one_b)
    with start_one_b(
        one_b, cpu_offload_gb=1.5, num_gpu_blocks_override=128, max_num_batched_tokens=512
    ) as llm:
        (output,) = llm.generate(
            prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS, use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 16


def test_a_profile_step_that_does_not_fit(one_b: Path, little_memory: None) -> None:
    with pytest.raises(
        ConfigError, match="^max_num_batched_tokens=65536: the largest step does not fit"
    ):
        start_one_b(one_b, cpu_offload_gb=1.5, max_num_batched_tokens=65536)
