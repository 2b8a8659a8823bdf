"""Two GPUs that share the tokens of long prompts: tokens of one GPU, and the rows that they gather.

In float32, in which what differs from one GPU is the order of sums alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.runner.sequence_parallel import LEAST_TOKENS, SequenceParallel
from hetero_llm.runner.split_step import SplitStep
from tests.models.tiny import make_tiny_checkpoint
from tests.two_gpus.engines import DRAFTS

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)
LEAST = LEAST_TOKENS["cuda"]
CONTEXT = 4 * LEAST
LIMITS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_num_batched_tokens": LEAST + 1024,
    "max_num_seqs": 8, "num_gpu_blocks_override": 5 * CONTEXT // 16, "max_model_len": CONTEXT,
    "gpu_memory_utilization": 0.3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DRAFTS,
    "qwen3_moe": {"enforce_eager": True},
    "gemma2": {"disable_custom_all_reduce": True},
}
"""Plain, in graphs; experts and norms of heads; windows and soft caps, which no library attends,
through NCCL, so without graphs."""


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of several chunks and of one, with the same beginning; short ones that decode beside
    them."""
    rng = np.random.default_rng(2)
    same = rng.integers(5, 90, 100).tolist()
    lengths = (2 * LEAST + 77, LEAST + 900, 700, 5, 33)
    prompts = [same[: length // 2] + rng.integers(5, 90, length).tolist() for length in lengths]
    params = [GREEDY, replace(SAMPLED, n=2), replace(GREEDY, logprobs=2), SAMPLED,
              replace(GREEDY, max_tokens=60)]  # fmt: skip
    return list(zip(prompts, params, strict=True))


def run(llm: LLM) -> list[list[list[int]]]:
    """Tokens of the requests, then of a prompt that goes on behind the first one's output."""
    work = requests()
    prompts, params = zip(*work, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    longer = [*prompts[0], *outputs[0].outputs[0].token_ids, *prompts[1][:LEAST]]
    outputs += llm.generate([longer], GREEDY, use_tqdm=False)
    return tokens(outputs)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Heads of 64, as the kernels take them."""
    changes = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    folder = make_tiny_checkpoint(tmp_path, family, with_tokenizer=True, changes=changes)
    with LLM(str(folder), **LIMITS, enforce_eager=True) as llm:
        expected = run(llm)
    split, shared = SequenceParallel.split, []

    def counted(self: SequenceParallel, step: Any) -> SplitStep | None:
        shared.append(found := split(self, step))
        return found

    monkeypatch.setattr(SequenceParallel, "split", counted)
    with LLM(str(folder), **LIMITS, **FAMILIES[family], sequence_parallel_size=2) as llm:
        assert run(llm) == expected
        assert sum(one is not None for one in shared) >= 3
        assert run(llm) == expected, "with cached prefixes"
