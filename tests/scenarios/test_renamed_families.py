"""Families of remote code through `LLM`: chunked, with prefix hits, by the native executor where it
runs them, and batch-invariant; transformers' models or the definitions have the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.cpu.executor import unsupported_reason
from hetero_llm.models.read_config import load_model_config
from tests.models import renamed
from tests.models.definition import by_definition, plain_frequencies

TOLERANCE = 1e-4
PARAMS = SamplingParams(
    temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, logprobs=20, detokenize=False
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
LogProbs = Callable[[list[int]], torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    """Nothing here is large enough for a second thread."""
    torch.set_num_threads(1)


def by_transformers(model: Any) -> LogProbs:
    def log_probs(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return log_probs


def alibi(folder: Path) -> tuple[Path, LogProbs]:
    folder, model = renamed.baichuan(folder, alibi=True)
    slopes = [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    return folder, lambda tokens: by_definition(model, torch.tensor(tokens), slopes=slopes)


def long_qwen(folder: Path) -> tuple[Path, LogProbs]:
    """Its context of 64 is 4 times the trained one."""
    folder, model = renamed.qwen(
        folder,
        seq_length=16,
        max_position_embeddings=64,
        use_logn_attn=True,
        use_dynamic_ntk=True,
    )
    frequencies = plain_frequencies(10000.0 * 7 ** (8 / 6))

    def log_probs(tokens: list[int]) -> torch.Tensor:
        scales = [max(1.0, math.log(n + 1) / math.log(16)) for n in range(len(tokens))]
        ids = torch.tensor(tokens)
        return by_definition(model, ids, frequencies=frequencies, query_scales=scales)

    return folder, log_probs


def internlm2(folder: Path) -> tuple[Path, LogProbs]:
    folder, model = renamed.internlm2(folder)
    return folder, by_transformers(model)


def chatglm(folder: Path) -> tuple[Path, LogProbs]:
    folder, model = renamed.chatglm(folder)
    return folder, by_transformers(model)


FAMILIES = {"internlm2": internlm2, "chatglm": chatglm, "alibi": alibi, "long_qwen": long_qwen}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (20, 1, 32, 9)]


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_prefix_hits(tmp_path: Path, name: str) -> None:
    folder, log_probs = FAMILIES[name](tmp_path / "model")
    is_native = unsupported_reason(load_model_config(folder), torch.float32) is None
    assert is_native == (name in ("internlm2", "chatglm"))
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        block_size=8,
        max_num_batched_tokens=7,
        max_num_seqs=5,
    ) as llm:
        outputs = [
            llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS, use_tqdm=False)
            for _ in range(2)
        ]
    assert [o.num_cached_tokens for o in outputs[1]] == [16, 0, 31, 8]
    for output in outputs[0] + outputs[1]:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        expected = log_probs(tokens)
        for i, entry in enumerate(output.outputs[0].logprobs):
            row = expected[len(output.prompt_token_ids) + i - 1]
            assert len(entry) >= 20
            for token, found in entry.items():
                assert abs(found.logprob - row[token].item()) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_texts_of_a_batch(tmp_path: Path, name: str) -> None:
    folder, log_probs = FAMILIES[name](tmp_path / "model")
    with LLM(
        str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, batch_invariant=True
    ) as llm:
        outputs = llm.generate(prompt_token_ids=prompts(), sampling_params=GREEDY, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        expected = log_probs(output.prompt_token_ids + tokens)
        assert expected[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == tokens
        assert len(tokens) == GREEDY.max_tokens
