"""Several processes that run one model on a CPU: the tokens of one process that runs it alone.

In float32 the sums of the ranks' parts differ from those of one process in the last bits only,
which changes no token here. There is one engine with ranks at a time: they are the default group of
torch.distributed.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from hetero_llm import (
    LLM,
    ConfigError,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PromptAdapterRequest,
    RequestOutput,
    SamplingError,
    SamplingParams,
)
from hetero_llm.core.errors import RankDeadError
from hetero_llm.distributed import rank_processes
from hetero_llm.engine.builders import build_ranks
from hetero_llm.models.read_config import load_model_config
from tests.helpers.adapters import write_adapter
from tests.helpers.prompt_adapters import write_prompt_adapter
from tests.models.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("forked_engines", "free_drafts")

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)
SHARED = "the same words in front of several prompts, "  # more than one block of tokens
REQUESTS: list[tuple[str | list[int], SamplingParams]] = [
    ("one prompt", GREEDY),
    ("another prompt", SAMPLED),
    ([7, 8, 9], replace(SAMPLED, top_k=20, min_p=0.02, n=3)),
    ("abcabcabc", replace(GREEDY, logprobs=3, prompt_logprobs=2)),
    (SHARED + "one", replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.4)),
    (SHARED + "two", replace(SAMPLED, bad_words=["e"], logit_bias={70: 3.0}, min_tokens=4)),
    (SHARED + "three", replace(GREEDY, no_repeat_ngram_size=2, logprobs=1)),
    ("a number: ", replace(GREEDY, structured_outputs={"regex": "[0-9]{12}"}, max_tokens=16)),
    ("json: ", replace(SAMPLED, structured_outputs={"choice": ["yes", "perhaps"]})),
    ("beams", SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8)),
    ("x" * 150, replace(GREEDY, max_tokens=48)),
    ("y" * 130, replace(SAMPLED, max_tokens=48)),
]
TIGHT: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "cpu_backend": "torch", "block_size": 8,
    "max_num_batched_tokens": 48, "max_num_seqs": 6, "max_model_len": 256,
}  # fmt: skip
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}


def make_model(folder: Path, kv_heads: int) -> Path:
    changes = {
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 256,
    }  # fmt: skip
    return make_tiny_checkpoint(folder, "llama", with_tokenizer=True, changes=changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tp") / "llama", 2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    with LLM(str(folder), **TIGHT) as llm:
        return run(llm)


def run(llm: LLM) -> list[RequestOutput]:
    prompts, params = zip(*REQUESTS, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.token_ids == other.token_ids, theirs.prompt
            assert (mine.text, mine.finish_reason) == (other.text, other.finish_reason)
            check_same_logprobs(mine.logprobs, other.logprobs)
        check_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def check_same_logprobs(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        for token, entry in (other or {}).items():
            assert mine[token].rank == entry.rank
            assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


@pytest.fixture(scope="class")
def llm(folder: Path) -> Iterator[LLM]:
    """Two ranks, with few KV blocks, drafts of the lookahead cache, and slots for adapters."""
    drafts = {"use_lookahead": True, "num_speculative_tokens": 5}
    with LLM(
        str(folder), **TIGHT, **drafts, **ADAPTERS, tensor_parallel_size=2,
        num_gpu_blocks_override=40,
    ) as llm:  # fmt: skip
        yield llm


class TestTwoRanks:
    def test_tokens_of_one_process(self, llm: LLM, expected: list[RequestOutput]) -> None:
        check_same(run(llm), expected)
        assert llm.metrics()["num_preemptions"] > 0

    def test_again_with_cached_prefixes_and_drafts(
        self, llm: LLM, expected: list[RequestOutput]
    ) -> None:
        before = llm.metrics()
        check_same(run(llm), expected)
        after = llm.metrics()
        for name in ("prefix_cache_hits", "spec_decode_num_accepted_tokens"):
            assert after[name] > before[name], name

    def test_functions_of_the_user_are_refused(self, llm: LLM) -> None:
        params = replace(GREEDY, logits_processors=[lambda _, logits: logits])
        with pytest.raises(SamplingError, match=r"^logits_processors=.*tensor_parallel_size"):
            llm.generate("x", params)

    def test_a_second_engine_with_ranks_is_refused(self, llm: LLM, folder: Path) -> None:
        with pytest.raises(ConfigError, match="^tensor_parallel_size=2: torch.distributed is in"):
            LLM(str(folder), **TIGHT, tensor_parallel_size=2)
        assert len(llm.generate("x", GREEDY, use_tqdm=False)) == 1, "the first one goes on"

    def test_adapters(
        self, llm: LLM, folder: Path, adapters: list[LoRARequest | None], adapted: list[list[int]]
    ) -> None:
        assert with_adapters(llm, adapters) == adapted


def adapters_of(folder: Path, base: Path) -> list[LoRARequest | None]:
    """None, and three adapters on all modules."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    for number in (1, 2, 3):
        model = load(base, dtype=torch.float32)
        write_adapter(folder / f"a{number}", model, rank=2 * number, strength=0.1, seed=number)
    return [None] + [LoRARequest(f"a{n}", n, str(folder / f"a{n}")) for n in (1, 2, 3)]


def with_adapters(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    """Outputs of four prompts a adapter, of which two are on the device at a time."""
    count = 3 * len(adapters)
    outputs = llm.generate(
        [[5 + number, 6, 7] for number in range(count)], GREEDY, use_tqdm=False,
        lora_request=[adapters[number % len(adapters)] for number in range(count)],
    )  # fmt: skip
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    return adapters_of(tmp_path_factory.mktemp("adapters"), folder)


@pytest.fixture(scope="module")
def adapted(folder: Path, adapters: list[LoRARequest | None]) -> list[list[int]]:
    """What `with_adapters` gives with one process."""
    with LLM(str(folder), **TIGHT, **ADAPTERS) as llm:
        expected = with_adapters(llm, adapters)
    assert len(set(map(tuple, expected))) == len(expected)
    return expected


def test_a_merged_adapter(
    folder: Path, adapters: list[LoRARequest | None], adapted: list[list[int]]
) -> None:
    merged = adapters[1]
    assert merged is not None
    with LLM(str(folder), **TIGHT, lora_merge=merged.lora_path, tensor_parallel_size=2) as llm:
        (output,) = llm.generate([[6, 6, 7]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == adapted[1]


def with_virtual_tokens(llm: LLM, folders: list[Path]) -> list[list[int]]:
    """Outputs of two prompts an adapter and of two without, the second ones with cached prefixes;
    and of two samples that begin with one prompt."""
    requests = [None] + [
        PromptAdapterRequest(folder.name, number, str(folder), 11)
        for number, folder in enumerate(folders, 1)
    ]
    found = []
    for _ in range(2):
        outputs = llm.generate(
            [[5, 6, 7]] * len(requests), [replace(SAMPLED, n=2)] * len(requests), use_tqdm=False,
            prompt_adapter_request=requests,
        )  # fmt: skip
        found += [one.token_ids for output in outputs for one in output.outputs]
    return found


def test_prompt_adapters(folder: Path, tmp_path: Path) -> None:
    size = load_model_config(folder).hidden_size
    folders = [tmp_path / name for name in ("one", "two")]
    for seed, one in enumerate(folders):
        write_prompt_adapter(one, 11, size, seed=seed)
    options = {**TIGHT, "enable_prompt_adapter": True, "max_prompt_adapter_token": 16}
    with LLM(str(folder), **options) as llm:
        expected = with_virtual_tokens(llm, folders)
    assert len(set(map(tuple, expected))) == len(expected) // 2
    with LLM(str(folder), **options, tensor_parallel_size=2) as llm:
        assert with_virtual_tokens(llm, folders) == expected


def test_the_death_of_a_rank_that_joins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_ranks, "MODULE", "tests.helpers.dying_rank")
    with pytest.raises(RankDeadError, match=r"^rank 1 \(process \d+\) was ended by signal 9"):
        LLM(str(folder), **TIGHT, tensor_parallel_size=2)


def test_a_repeated_kv_head_step_by_step_with_an_abort(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks have the only KV head. (Four ranks run in `test_pipeline_parallel.py`.) The rank
    is a fresh interpreter, as users have it."""
    monkeypatch.setattr(rank_processes, "subprocess", subprocess)
    folder = make_model(tmp_path / "llama", 1)
    with LLM(str(folder), **TIGHT) as llm:
        expected = run(llm)
    args = EngineArgs(str(folder), **{**TIGHT, "cpu_backend": "native"}, tensor_parallel_size=2)
    with caplog.at_level(logging.INFO):
        engine = LLMEngine(args)
    ranks = [one for one in psutil.Process().children() if "rank_process" in str(one.cmdline())]
    lines = [line for line in caplog.messages if line.startswith("tensor parallel on 2 ranks: ")]
    pids = [os.getpid(), *(one.pid for one in ranks)]
    assert lines[0].endswith(", ".join(f"{n} is process {pid}" for n, pid in enumerate(pids)))
    assert any("the native executor does not share layers" in line for line in caplog.messages)

    chosen = range(0, len(REQUESTS) - 2, 2)
    for number in chosen:
        engine.add_request(str(number), *REQUESTS[number])
    for number in range(2):
        engine.add_request(f"aborted {number}", "some words", SAMPLED)
    found: dict[str, RequestOutput] = {}
    for count in range(10_000):
        found |= {one.request_id: one for one in engine.step() if one.finished}
        if count == 5:
            engine.abort_request(["aborted 0", "aborted 1"])
        if not engine.has_unfinished_requests():
            break
    assert set(found) == set(map(str, chosen))
    check_same([found[str(number)] for number in chosen], [expected[number] for number in chosen])
    engine.shutdown()
    assert psutil.wait_procs(ranks, 60)[1] == []
