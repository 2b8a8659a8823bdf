"""LoRA adapters on the native executor, through `LLM`: merged weights say what is right, and the
torch runner gives the same tokens whatever the scheduler or a drafter asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.cpu import native
from tests.scenarios.test_lora import GREEDY, PARAMS, Base, make_base, prompts_of, run

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

WHICH = [(i * 3) % 5 for i in range(12)]
"""Four adapters and the base: which one each of twelve requests has."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch, whose own would get in the executor's way on a small machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("llama"), "llama", 4)


def start(base: Base, backend: str = "native", **options: Any) -> LLM:
    llm = base.start(cpu_backend=backend, **options)
    assert llm.backend == backend
    return llm


def twelve(llm: LLM, base: Base, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Tokens of the twelve requests."""
    prompts = [prompts_of(6)[i % 6] for i in range(len(WHICH))]
    outputs = run(llm, prompts, params, [base.requests[which] for which in WHICH])
    llm.engine.scheduler.check_integrity()
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def by_torch(llama: Base) -> dict[str, list[list[int]]]:
    """Greedy and sampled tokens of the twelve requests by the torch runner."""
    with start(llama, "torch", max_loras=4) as llm:
        return {"greedy": twelve(llm, llama), "sampled": twelve(llm, llama, SAMPLED)}


SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, seed=5, n=2)


@pytest.fixture(scope="module")
def served(llama: Base) -> Iterator[LLM]:
    """Two slots for four adapters, prompts cut at odd places: slots are refilled all the time."""
    with start(llama, max_loras=2, max_num_batched_tokens=7, max_num_seqs=6) as llm:
        yield llm


def test_the_tokens_of_the_torch_runner(
    llama: Base, served: LLM, by_torch: dict[str, list[list[int]]]
) -> None:
    assert twelve(served, llama) == by_torch["greedy"]
    assert twelve(served, llama, SAMPLED) == by_torch["sampled"]
    loads = served.metrics()["lora_loads"]
    assert loads > 4, "no slot was filled twice"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mixes_of_adapters_in_a_step(llama: Base, count: int) -> None:
    """`count` - 1 adapters and the base; log-probabilities of prompts and outputs."""
    which = [i % count for i in range(6)]
    with start(llama, max_loras=3, max_num_batched_tokens=16, max_num_seqs=6) as llm:
        outputs = run(llm, prompts_of(6), PARAMS, [llama.requests[w] for w in which])
    for output, w in zip(outputs, which, strict=True):
        llama.check(output, w)


def test_preemption(llama: Base, by_torch: dict[str, list[list[int]]]) -> None:
    options = {"num_gpu_blocks_override": 8, "max_model_len": 48, "max_loras": 2}
    with start(llama, **options) as llm:
        assert twelve(llm, llama) == by_torch["greedy"]
        assert llm.metrics()["num_preemptions"] > 0


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize(
    "options",
    [
        {"use_lookahead": True},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3},
        {"speculative_model": "itself", "num_speculative_tokens": 3, "cpu_draft_worker": True},
    ],
    ids=["lookahead", "ngram", "draft worker"],
)
def test_speculation(
    llama: Base, by_torch: dict[str, list[list[int]]], options: dict[str, Any]
) -> None:
    """Draft models are of the base; verification applies the adapters."""
    if options.get("speculative_model") == "itself":
        options = {**options, "speculative_model": str(llama.folder)}
    with start(llama, max_loras=3, **options) as llm:
        for turn in range(40):  # a worker of a busy machine may be late for the first ones
            assert twelve(llm, llama) == by_torch["greedy"]
            if turn > 0 and llm.metrics()["spec_decode_num_draft_tokens"] > 0:
                break
        else:
            raise AssertionError("there were no drafts")


def mean_error(base: Base, output: RequestOutput, which: int) -> float:
    """Of the log-probabilities of the prompt's tokens, against one adapter's merged weights."""
    with torch.no_grad():
        logits = base.references[which](torch.tensor([output.prompt_token_ids])).logits[0]
    expected = logits.log_softmax(-1)
    errors = [
        abs(entry.logprob - float(expected[position - 1, token]))
        for position, entries in enumerate(output.prompt_logprobs or [])
        for token, entry in (entries or {}).items()
    ]
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"cpu_weight_dtype": "int8"}, 0.08),
        ({"cpu_weight_dtype": "int4"}, 0.9),
        ({"quantization": "ifq"}, 0.2),
        ({"lora_dtype": "bfloat16"}, 0.02),
        ({"lora_dtype": "float16"}, 0.003),
        ({"dtype": "bfloat16"}, 0.04),
        ({"dtype": "bfloat16", "lora_dtype": "float32"}, 0.04),
    ],
    ids=["int8", "int4", "ifq", "lora bf16", "lora half", "bf16", "bf16 with lora float"],
)
def test_other_types(llama: Base, options: dict[str, Any], limit: float) -> None:
    """Bases in fewer bits, and adapters in other types than the base."""
    prompt = prompts_of(3)[2]
    with start(llama, max_loras=4, **options) as llm:
        outputs = run(llm, [prompt] * 5, PARAMS, llama.requests)
    for which, output in enumerate(outputs):
        errors = [mean_error(llama, output, other) for other in range(5)]
        assert errors[which] < limit, errors
        assert errors[which] < 0.8 * min(errors[:which] + errors[which + 1 :]), errors


def test_without_a_request_with_an_adapter_nothing_changes(llama: Base) -> None:
    """To the bit, behind requests with adapters, too."""
    params = dataclasses.replace(PARAMS, prompt_logprobs=None)
    options: dict[str, Any] = {"max_num_seqs": 1}  # alone: one sequence a step
    with start(llama, **options) as llm:
        run(llm, prompts_of(3), GREEDY, llama.requests[1])
        ours = run(llm, prompts_of(6), params, None)
    with LLM(
        str(llama.folder), dtype="float32", device="cpu", skip_tokenizer_init=True, block_size=8,
        **options,
    ) as plain:  # fmt: skip
        theirs = plain.generate(
            prompt_token_ids=prompts_of(6), sampling_params=params, use_tqdm=False
        )
    for one, other in zip(ours, theirs, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
