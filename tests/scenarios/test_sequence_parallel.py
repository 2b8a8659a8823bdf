"""Several processes that share the tokens of long prompts on a CPU: the tokens of one process.

There is one engine with ranks at a time: they are the default group of torch.distributed. Rank 0
is this process, so the tests count here which of its steps were shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, ConfigError, LoRARequest, RequestOutput, SamplingError, SamplingParams
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.runner.sequence_parallel import SequenceParallel
from hetero_llm.runner.split_step import SplitStep
from tests.helpers.adapters import write_adapter
from tests.models.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("forked_engines", "free_drafts")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)
SHARED = "the same words in front of several prompts, and some more of them for good measure, "
REQUESTS: list[tuple[str | list[int], SamplingParams]] = [
    ("x" * 150, replace(GREEDY, max_tokens=20)),
    ("abcabcabc" * 12, replace(GREEDY, logprobs=3, prompt_logprobs=2)),
    ("short", replace(SAMPLED, max_tokens=12)),
    (SHARED + "two", replace(SAMPLED, n=3)),
    (SHARED + "a number: ", replace(GREEDY, structured_outputs={"regex": "[0-9]{12}"})),
    (SHARED + "beams", SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=4)),
    ("y" * 130, replace(SAMPLED, max_tokens=20, repetition_penalty=1.2)),
]
WITH_LOGPROBS = 1
TIGHT: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "cpu_backend": "torch", "block_size": 8,
    "max_num_batched_tokens": 96, "max_num_seqs": 6, "max_model_len": 256,
}  # fmt: skip
EVERYTHING: dict[str, Any] = {
    **TIGHT, "use_lookahead": True, "num_speculative_tokens": 5, "enable_lora": True,
    "max_lora_rank": 8, "num_gpu_blocks_override": 40,
}  # fmt: skip
CHANGES = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """The steps that rank 0 has shared with others."""
    steps: list[SchedulerOutput] = []
    split = SequenceParallel.split

    def counted(self: SequenceParallel, step: SchedulerOutput) -> SplitStep | None:
        found = split(self, step)
        if found is not None:
            steps.append(step)
        return found

    monkeypatch.setattr(SequenceParallel, "split", counted)
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "llama"
    return make_tiny_checkpoint(path, "llama", with_tokenizer=True, changes=CHANGES)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> LoRARequest:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    path = folder.parent / "adapter"
    write_adapter(path, model, rank=4, strength=0.1, seed=1)
    return LoRARequest("a", 1, str(path))


@pytest.fixture(scope="module")
def expected(folder: Path, adapter: LoRARequest) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Without and with the adapter; the first one's last entry is `behind` the last request."""
    with LLM(str(folder), **EVERYTHING) as llm:
        found = run(llm, REQUESTS)
        return found + behind(llm, found[-1]), run(llm, REQUESTS[:1], lora_request=adapter)


@pytest.fixture(scope="class")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **EVERYTHING, sequence_parallel_size=2) as llm:
        yield llm


def run(llm: LLM, requests: list[tuple[Any, SamplingParams]], **more: Any) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False, **more)


def behind(llm: LLM, before: RequestOutput) -> list[RequestOutput]:
    """A prompt of that one's tokens, those that it has sampled, and as many new ones that a shared
    step takes: it reads the keys and values of what each rank has decoded."""
    sampled = list(before.outputs[0].token_ids)
    return run(llm, [([*(before.prompt_token_ids or ()), *sampled, *[9] * 80], GREEDY)])


def tokens(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Of the request that asks for them, of its output and its prompt."""
    output = outputs[WITH_LOGPROBS]
    entries = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]]
    assert len(entries) > 100
    return [entry.logprob for one in entries for _, entry in sorted(one.items())]


class TestTwoRanks:
    def test_tokens_of_one_process(
        self,
        llm: LLM,
        expected: tuple[list[RequestOutput], list[RequestOutput]],
        shared: list[SchedulerOutput],
    ) -> None:
        found = run(llm, REQUESTS)
        found += behind(llm, found[-1])
        assert tokens(found) == tokens(expected[0])
        assert logprobs(found) == pytest.approx(logprobs(expected[0]), abs=1e-4)
        assert llm.metrics()["num_preemptions"] > 0
        assert len(shared) > 3
        assert any(1 in step.num_scheduled_tokens for step in shared), "beside what decodes"
        assert any(step.num_computed_tokens.any() for step in shared), "chunks behind others"

    def test_again_with_cached_prefixes_and_drafts(
        self, llm: LLM, expected: tuple[list[RequestOutput], list[RequestOutput]]
    ) -> None:
        before = llm.metrics()
        assert tokens(run(llm, REQUESTS[:4])) == tokens(expected[0][:4])
        after = llm.metrics()
        for name in ("prefix_cache_hits", "spec_decode_num_accepted_tokens"):
            assert after[name] > before[name], name

    def test_adapters(
        self,
        llm: LLM,
        adapter: LoRARequest,
        expected: tuple[list[RequestOutput], list[RequestOutput]],
        shared: list[SchedulerOutput],
    ) -> None:
        found = tokens(run(llm, REQUESTS[:1], lora_request=adapter))
        assert found == tokens(expected[1]) != tokens(expected[0][:1])
        assert shared

    def test_what_is_refused(self, llm: LLM, folder: Path) -> None:
        params = replace(GREEDY, logits_processors=[lambda _, logits: logits])
        with pytest.raises(SamplingError, match=r"^logits_processors=.*sequence_parallel_size"):
            llm.generate("x", params)
        with pytest.raises(ConfigError, match="^sequence_parallel_size=2: torch.distributed is in"):
            LLM(str(folder), **TIGHT, sequence_parallel_size=2)


def test_two_times_two_ranks_of_a_mixture(tmp_path: Path, shared: list[SchedulerOutput]) -> None:
    """Layers shared by two processes, tokens by two such pairs; experts, norms of heads."""
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe", with_tokenizer=True, changes=CHANGES)
    requests = [
        (prompt, replace(GREEDY, max_tokens=3)) for prompt in ("x" * 150, "short", "y" * 80)
    ]
    with LLM(str(folder), **TIGHT) as llm:
        expected = tokens(run(llm, requests))
    with LLM(str(folder), **TIGHT, tensor_parallel_size=2, sequence_parallel_size=2) as llm:
        assert tokens(run(llm, requests)) == expected
    assert len(shared) >= 2
