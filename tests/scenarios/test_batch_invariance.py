"""With `batch_invariant=True` a request's output does not depend, to the last bit, on what runs
beside it or on how its tokens were cut into steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, RequestOutput, SamplingParams

VOCAB = 512
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 21, 24, 31, 32, 33, 40, 47, 55, 60]
SETTINGS = (("float32", 2), ("bfloat16", 1))  # and the number of threads
GREEDY = SamplingParams(
    temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=2
)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.95, seed=11)
FORKED = dataclasses.replace(SAMPLED, n=2)
PARAMS = [(GREEDY, SAMPLED, GREEDY, FORKED)[i % 4] for i in range(len(LENGTHS))]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for libraries to choose among kernels by the number of rows."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=608,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=96,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)
    path = tmp_path_factory.mktemp("mid") / "llama"
    model.save_pretrained(path)
    return path


def start(folder: Path, dtype: str, **engine_args: Any) -> LLM:
    defaults = {"batch_invariant": True, "enable_prefix_caching": False, "block_size": 16}
    return LLM(
        str(folder),
        dtype=dtype,
        device="cpu",
        skip_tokenizer_init=True,
        **{**defaults, **engine_args},
    )


def generate(llm: LLM, which: list[int], **changes: Any) -> list[RequestOutput]:
    everything = prompts()
    return llm.generate(
        prompt_token_ids=[everything[i] for i in which],
        sampling_params=[dataclasses.replace(PARAMS[i], **changes) for i in which],
        use_tqdm=False,
    )


def seen(output: RequestOutput) -> tuple[Any, Any]:
    """Everything a user sees but times; floats compare to the last bit."""
    return output.prompt_logprobs, [(c.token_ids, c.logprobs) for c in output.outputs]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting[0])
def alone(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[Any]]:
    """The dtype, and each request's output when nothing else runs."""
    dtype, threads = request.param
    torch.set_num_threads(threads)
    with start(folder, dtype) as llm:
        return dtype, [seen(generate(llm, [i])[0]) for i in range(len(LENGTHS))]


@pytest.fixture(autouse=True)
def same_threads(two_threads: None, alone: tuple[str, list[Any]]) -> None:
    torch.set_num_threads(dict(SETTINGS)[alone[0]])


EVERYONE = list(range(len(LENGTHS)))


@pytest.mark.parametrize("which", [EVERYONE[1::3], EVERYONE, EVERYONE[::-1]])
def test_in_a_batch(folder: Path, alone: tuple[str, list[Any]], which: list[int]) -> None:
    dtype, expected = alone
    with start(folder, dtype) as llm:
        outputs = generate(llm, which)
    assert [seen(o) for o in outputs] == [expected[i] for i in which]


@pytest.mark.parametrize(("budget", "block_size"), [(13, 8), (50, 32)])
def test_chunked(folder: Path, alone: tuple[str, list[Any]], budget: int, block_size: int) -> None:
    dtype, expected = alone
    with start(
        folder, dtype, max_num_batched_tokens=budget, max_num_seqs=10, block_size=block_size
    ) as llm:
        outputs = generate(llm, EVERYONE)
        assert llm.metrics()["num_steps"] > sum(LENGTHS) / budget
    assert [seen(o) for o in outputs] == expected


def test_with_prefix_hits(folder: Path, alone: tuple[str, list[Any]]) -> None:
    dtype, expected = alone
    with start(folder, dtype, enable_prefix_caching=True) as llm:
        generate(llm, EVERYONE)
        outputs = generate(llm, EVERYONE, prompt_logprobs=None)
    assert sum(o.num_cached_tokens > 0 for o in outputs) == sum(n >= 16 for n in LENGTHS)
    assert [seen(o)[1] for o in outputs] == [completions for _, completions in expected]


@pytest.mark.parametrize("caching", [False, True])
def test_after_preemption(folder: Path, alone: tuple[str, list[Any]], caching: bool) -> None:
    dtype, expected = alone
    with start(
        folder,
        dtype,
        max_model_len=80,
        block_size=8,
        num_gpu_blocks_override=11,
        enable_prefix_caching=caching,
    ) as llm:
        outputs = generate(llm, EVERYONE)
        assert llm.metrics()["num_preemptions"] > 0
    assert [seen(o) for o in outputs] == expected


@pytest.mark.parametrize(
    "alone", [s for s in SETTINGS if s[0] == "float32"], indirect=True, ids=lambda s: s[0]
)
def test_without_it_float32_differs_in_rounding_only(
    folder: Path, alone: tuple[str, list[Any]]
) -> None:
    dtype, expected = alone
    with start(folder, dtype, batch_invariant=False) as llm:
        outputs = [seen(output) for output in generate(llm, EVERYONE)]
    assert outputs != expected  # otherwise this file would show nothing
    compared = 0
    for (prompt, completions), (prompt_alone, completions_alone) in zip(outputs, expected):
        pairs = list(zip(prompt[1:], prompt_alone[1:], strict=True))
        for (tokens, entries), (tokens_alone, entries_alone) in zip(completions, completions_alone):
            same = [a == b for a, b in zip(tokens, tokens_alone)]
            until = same.index(False) if False in same else len(same)
            pairs += list(zip(entries[:until], entries_alone[:until], strict=True))
        for ours, theirs in pairs:
            for token in ours.keys() & theirs.keys():
                assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
                compared += 1
    assert compared > 1000
