"""A mixture of quantized experts through `LLM`: drafts, prefix hits and chunks do not change the
tokens, which are those of the weights that the quantized ones stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, SamplingParams
from tests.models.test_quantized_weights import FORMATS, both

pytestmark = pytest.mark.usefixtures("free_drafts")

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)


@pytest.fixture(params=[("qwen2_moe", "awq"), ("glm4_moe", "fp8 blocks")], ids=" ".join)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with quantized matrices, and the plain one that it stands for."""
    family, form = request.param
    return both(tmp_path, FORMATS[form], family)


def serve(folder: Path, rounds: int = 1, **engine_args: Any) -> tuple[list[Any], dict[str, Any]]:
    """The tokens of each round, and the engine's figures."""
    torch.set_num_threads(1)
    phrase = [5, 17, 40, 9, 33, 8]
    prompts = [phrase * 4, [7, 60, 2], phrase * 3 + [50]]
    with LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **engine_args
    ) as llm:
        found = []
        for _ in range(rounds):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        return found, llm.metrics()


def test_what_the_engine_does_with_steps_changes_no_token(folders: tuple[Path, Path]) -> None:
    quantized, plain = folders
    (expected,), _ = serve(plain)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    found, figures = serve(quantized, rounds=2, speculative_config=ngram, block_size=8)
    assert found == [expected] * 2
    assert figures["spec_decode_num_accepted_tokens"] > 0
    found, figures = serve(
        quantized, rounds=2, max_num_batched_tokens=16, block_size=8, batch_invariant=True
    )
    assert found == [expected] * 2
    assert figures["prefix_cache_hits"] > 0
