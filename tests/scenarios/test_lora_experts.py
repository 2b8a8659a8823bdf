"""Adapters of experts through `LLM`: log-probabilities are those of merged weights, computed in
float32 by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hetero_llm import LLM, AdapterError, ConfigError, SamplingParams
from tests.helpers.adapters import TinyAdapter, merge, write_expert_adapter
from tests.models import tiny_moe
from tests.models.tiny import VARIANTS, make_tiny_checkpoint, reference_attention
from tests.scenarios.test_lora import PARAMS, Base, prompts_of, run

NAMED_AS_MLPS = ("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
OF_MODULES = {
    "mixtral": MIXTRAL, "phimoe": MIXTRAL, "minimax_m2": MIXTRAL, "qwen2_moe": NAMED_AS_MLPS,
    "qwen3_moe": NAMED_AS_MLPS, "glm4_moe": NAMED_AS_MLPS,
}  # fmt: skip
FIRST_VARIANT = dict(reversed(VARIANTS))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    """Nothing here is large enough for a second thread."""
    torch.set_num_threads(1)


def make_base(folder: Path, family: str) -> Base:
    """With an adapter in each of the two forms, where a family has both."""
    base = make_tiny_checkpoint(folder / "base", family, FIRST_VARIANT[family])
    references, adapters = [], list[TinyAdapter]()
    for number in range(3):
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation=reference_attention(base)
        )
        if number:
            adapter = write_expert_adapter(
                folder / f"a{number}",
                reference,
                modules=OF_MODULES.get(family) if number == 1 else None,
                rank=(5, 16)[number - 1],
                seed=number,
                strength=0.1,
            )
            merge(reference, adapter)
            adapters.append(adapter)
        references.append(reference)
    return Base(base, adapters, references, 1e-3)


@pytest.mark.parametrize("family", tiny_moe.FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Two adapters and the base in one batch, prompts cut at odd places."""
    base = make_base(tmp_path, family)
    which = [1, 0, 2, 1, 2, 0]
    with base.start(lora_experts=True, max_num_batched_tokens=7, max_num_seqs=6) as llm:
        assert llm.backend == "torch"
        outputs = run(llm, prompts_of(6), PARAMS, [base.requests[w] for w in which])
    for output, w in zip(outputs, which, strict=True):
        base.check(output, w)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("mixtral"), "mixtral")


def test_tokens_do_not_depend_on_the_batch(mixtral: Base) -> None:
    with mixtral.start(lora_experts=True, batch_invariant=True) as llm:
        alone = [
            run(llm, [prompt], GREEDY, request)[0].outputs[0].token_ids
            for prompt, request in zip(prompts_of(3), mixtral.requests, strict=True)
        ]
        together = run(llm, prompts_of(3), GREEDY, mixtral.requests)
    assert [output.outputs[0].token_ids for output in together] == alone


def test_merged_at_the_start(mixtral: Base) -> None:
    folder = str(mixtral.adapters[1].folder)
    with LLM(
        str(mixtral.folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        lora_merge=folder,
    ) as llm:  # fmt: skip
        for output in run(llm, prompts_of(2), PARAMS, None):
            mixtral.check(output, 2)


def test_without_the_argument_they_are_refused(mixtral: Base) -> None:
    with (
        mixtral.start() as llm,
        pytest.raises(AdapterError, match="experts needs lora_experts"),
    ):
        run(llm, prompts_of(1), GREEDY, mixtral.requests[1])


def test_a_model_without_experts(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="lora_experts=True: the model has no experts"):
        LLM(
            str(tiny_folder), device="cpu", skip_tokenizer_init=True, enable_lora=True,
            lora_experts=True,
        )  # fmt: skip
