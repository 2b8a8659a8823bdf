"""Prompt adapters through `LLM`: log-probabilities are those that transformers computes of the
virtual embeddings and the prompt's, whatever way the scheduler took the tokens."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import (
    LLM,
    AdapterError,
    ConfigError,
    LoRARequest,
    PromptAdapterRequest,
    PromptError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from tests.helpers.adapters import merge, write_adapter
from tests.helpers.prompt_adapters import (
    TinyPromptAdapter,
    reference_logits,
    write_prompt_adapter,
)
from tests.models import tiny_moe
from tests.models.tiny import VARIANTS, VOCAB_SIZE, make_tiny_checkpoint, reference_attention

pytestmark = pytest.mark.usefixtures("free_drafts")

FAMILIES = dict(reversed(VARIANTS))
"""The first variant of each family."""
LENGTHS = (5, 11, 1)
"""Virtual tokens of the adapters."""
PARAMS = SamplingParams(
    temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, logprobs=20, prompt_logprobs=20,
    detokenize=False,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    """Nothing here is large enough for a second thread."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Base:
    """A checkpoint, the same model of transformers, and its prompt adapters; the first is none."""

    folder: Path
    reference: Any
    adapters: list[TinyPromptAdapter | None]
    tolerance: float = 1e-4

    @property
    def requests(self) -> list[PromptAdapterRequest | None]:
        return [
            None
            if one is None
            else PromptAdapterRequest(f"p{number}", number, str(one.folder), len(one.embeddings))
            for number, one in enumerate(self.adapters)
        ]

    def start(self, **options: Any) -> LLM:
        options = {"max_prompt_adapters": 2, "block_size": 8, **options}
        return LLM(
            str(self.folder), dtype="float32", device="cpu", skip_tokenizer_init=True,
            enable_prompt_adapter=True, max_prompt_adapter_token=16, **options,
        )  # fmt: skip

    def check(self, output: RequestOutput, which: int) -> None:
        """Log-probabilities of an output, teacher-forced on its own tokens."""
        for one in output.outputs:
            tokens = [*output.prompt_token_ids, *one.token_ids]
            logits = reference_logits(self.reference, tokens, self.adapters[which])
            expected = logits.log_softmax(-1)
            entries = list(enumerate(one.logprobs or [], len(output.prompt_token_ids)))
            if output.prompt_logprobs is not None:
                assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
                assert output.prompt_logprobs[0] is None
                entries += list(enumerate(output.prompt_logprobs))[1:]
            rows = [position - 1 for position, entry in entries for _ in entry]
            columns = [token for _, entry in entries for token in entry]
            ours = torch.tensor([e.logprob for _, entry in entries for e in entry.values()])
            assert len(ours) > 0
            torch.testing.assert_close(ours, expected[rows, columns], atol=self.tolerance, rtol=0)


def make_base(folder: Path, family: str, *, tokenizer: bool = False) -> Base:
    base = make_tiny_checkpoint(folder / "base", family, FAMILIES[family], with_tokenizer=tokenizer)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation=reference_attention(base)
    )
    size = reference.get_input_embeddings().weight.shape[1]
    adapters = [
        write_prompt_adapter(folder / f"p{number}", length, size, seed=number)
        for number, length in enumerate(LENGTHS, 1)
    ]
    tolerance = 1e-3 if family in tiny_moe.FAMILIES else 1e-4
    return Base(base, reference, [None, *adapters], tolerance)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (11, 1, 17, 6, 9, 3)
    return [
        torch.randint(3, VOCAB_SIZE, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(count)
    ]


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, adapters: Any
) -> list[RequestOutput]:
    return llm.generate(
        prompt_token_ids=prompts, sampling_params=params, use_tqdm=False,
        prompt_adapter_request=adapters,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Two adapters and none in one batch, prompts and virtual tokens cut at odd places."""
    number = list(FAMILIES).index(family)
    base = make_base(tmp_path, family)
    which = [1, 0, 2, 1]
    prompts = prompts_of(4, number)
    with base.start(max_num_batched_tokens=7, max_num_seqs=6) as llm:
        assert llm.backend == "torch"
        outputs = run(llm, prompts, PARAMS, [base.requests[w] for w in which])
    for output, w, prompt in zip(outputs, which, prompts, strict=True):
        assert output.prompt_token_ids == prompt
        base.check(output, w)
    if number == 0:
        with pytest.raises(AssertionError):
            base.check(outputs[0], 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("llama"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def llm(llama: Base) -> Iterator[LLM]:
    """Rows of a batch do not influence each other: tokens can be compared exactly."""
    with llama.start(batch_invariant=True, max_num_batched_tokens=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llama: Base, llm: LLM) -> dict[int, list[list[int]]]:
    """Greedy tokens of six prompts with each adapter, each request alone."""
    return {
        which: [
            run(llm, [p], GREEDY, request)[0].outputs[0].token_ids for p in prompts_of(6)
        ]
        for which, request in enumerate(llama.requests)
    }  # fmt: skip


def test_adapters_change_the_tokens(alone: dict[int, list[list[int]]]) -> None:
    assert len({tuple(tokens[1]) for tokens in alone.values()}) == len(alone)


def test_more_adapters_than_are_kept(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    """Those of a request stay with it, however many others are read meanwhile."""
    which = [(i * 3) % 4 for i in range(18)]
    prompts = [prompts_of(6)[i % 6] for i in range(18)]
    outputs = run(llm, prompts, GREEDY, [llama.requests[w] for w in which])
    for index, (output, w) in enumerate(zip(outputs, which, strict=True)):
        assert output.outputs[0].token_ids == alone[w][index % 6]
    assert llm.engine.input_processor.prompt_adapters.num_loaded == 2
    llm.engine.scheduler.check_integrity()


def test_prefixes_are_found_with_the_same_adapter_only(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    """The virtual tokens are the beginning of the prefix, and are not counted."""
    prompt = prompts_of(3)[2]
    llm.reset_prefix_cache()
    cold = [run(llm, [prompt], GREEDY, request)[0] for request in llama.requests]
    warm = [run(llm, [prompt], GREEDY, request)[0] for request in llama.requests]
    assert [output.num_cached_tokens for output in cold] == [0] * 4
    expected = [(len(prompt) - 1 + n) // 8 * 8 - n for n in (0, *LENGTHS)]
    assert [output.num_cached_tokens for output in warm] == expected
    assert min(expected) > 0
    for outputs in (cold, warm):
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert tokens == [alone[which][2] for which in range(4)]


def test_one_content_by_two_names_shares_prefixes(llama: Base, llm: LLM, tmp_path: Path) -> None:
    shutil.copytree(llama.adapters[1].folder, tmp_path / "copy")
    prompt = prompts_of(3, seed=7)[2]
    run(llm, [prompt], GREEDY, llama.requests[1])
    copy = PromptAdapterRequest("copy", 90, str(tmp_path / "copy"), LENGTHS[0])
    assert run(llm, [prompt], GREEDY, copy)[0].num_cached_tokens > 0


def test_a_salt_cannot_imitate_a_prompt_adapter(llama: Base, llm: LLM) -> None:
    """Nor do zeros in the place of virtual tokens."""
    prompt = prompts_of(3, seed=8)[2]
    run(llm, [prompt], GREEDY, llama.requests[2])
    key = llm.engine.input_processor.prompt_adapters.open(llama.requests[2]).content_hash
    zeros = [0] * LENGTHS[1] + prompt
    for salt in (f"prompt_adapter\0{key}", f"x\0prompt_adapter\0{key}"):
        given = {"prompt_token_ids": zeros, "cache_salt": salt}
        (output,) = llm.generate(given, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 0
    assert run(llm, [zeros], GREEDY, None)[0].num_cached_tokens == 0


def test_preemption(llama: Base, alone: dict[int, list[list[int]]]) -> None:
    which = [1, 2, 0, 3, 1, 2]
    with llama.start(
        batch_invariant=True, num_gpu_blocks_override=8, max_model_len=48
    ) as llm:  # fmt: skip
        outputs = run(llm, prompts_of(6), GREEDY, [llama.requests[w] for w in which])
        assert llm.metrics()["num_preemptions"] > 0
    for index, (output, w) in enumerate(zip(outputs, which, strict=True)):
        assert output.outputs[0].token_ids == alone[w][index]


@pytest.mark.parametrize(
    "options",
    [
        {"use_lookahead": True},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3},
        {"speculative_model": "itself", "num_speculative_tokens": 3, "cpu_draft_worker": False},
    ],
    ids=["lookahead", "ngram", "draft_model"],
)
def test_speculation(
    llama: Base, alone: dict[int, list[list[int]]], options: dict[str, Any]
) -> None:
    if options.get("speculative_model") == "itself":
        options = {**options, "speculative_model": str(llama.folder)}
    which = [0, 1, 2, 3, 1, 2]
    with llama.start(batch_invariant=True, **options) as llm:
        for _ in range(2):  # the second time lookahead caches know the answers
            outputs = run(llm, prompts_of(6), GREEDY, [llama.requests[w] for w in which])
            for index, (output, w) in enumerate(zip(outputs, which, strict=True)):
                assert output.outputs[0].token_ids == alone[w][index]
        assert llm.metrics()["spec_decode_num_draft_tokens"] > 0


def test_forks_and_beams(llama: Base, llm: LLM) -> None:
    forks = dataclasses.replace(PARAMS, n=3)
    beams = SamplingParams(
        use_beam_search=True, best_of=3, temperature=0, max_tokens=6, ignore_eos=True, logprobs=1,
        detokenize=False,
    )  # fmt: skip
    for params, count in ((forks, 3), (beams, 1)):
        for which, output in enumerate(run(llm, prompts_of(4), params, llama.requests)):
            assert len(output.outputs) == count
            llama.check(output, which)


def test_processors_of_logits_see_no_virtual_tokens(llama: Base, llm: LLM) -> None:
    """The id that stands for them is neither in a user's processor's prompt nor penalized."""
    prompts: list[list[int]] = []

    def note(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        prompts.append(list(prompt_ids))
        return logits

    params = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, detokenize=False, logits_processors=[note],
        logit_bias={0: 50.0}, repetition_penalty=1000.0, no_repeat_ngram_size=1,
    )  # fmt: skip
    prompt = prompts_of(1)[0]
    (output,) = run(llm, [prompt], params, llama.requests[1])
    assert prompts == [prompt, prompt]
    first, second = output.outputs[0].token_ids
    assert first == 0 != second


def test_prompt_adapters_beside_lora(llama: Base, tmp_path: Path) -> None:
    """Both at once are both applied."""
    merged = transformers.AutoModelForCausalLM.from_pretrained(llama.folder, dtype=torch.float32)
    adapter = write_adapter(tmp_path / "lora", merged, strength=0.1)
    merge(merged, adapter)
    both = dataclasses.replace(llama, reference=merged)
    lora = LoRARequest("lora", 1, str(adapter.folder))
    with llama.start(enable_lora=True) as llm:
        outputs = llm.generate(
            prompt_token_ids=prompts_of(2) * 2, sampling_params=PARAMS, use_tqdm=False,
            lora_request=[lora, lora, None, None],
            prompt_adapter_request=[llama.requests[1], None, llama.requests[1], None],
        )  # fmt: skip
    for output, base, which in zip(outputs, (both, both, llama, llama), (1, 0, 1, 0), strict=True):
        base.check(output, which)


def test_quantized_weights(llama: Base) -> None:
    """The embedding is plain beside them."""
    with llama.start(quantization="ifq") as llm:
        outputs = run(llm, prompts_of(3), PARAMS, llama.requests[:3])
    coarse = dataclasses.replace(llama, tolerance=0.6)
    for which, output in enumerate(outputs):
        coarse.check(output, which)
        with pytest.raises(AssertionError):
            coarse.check(output, (which + 1) % 3)


def test_a_class_of_transformers(llama: Base) -> None:
    with llama.start(model_impl="transformers") as llm:
        outputs = run(llm, prompts_of(4), PARAMS, llama.requests)
    for which, output in enumerate(outputs):
        llama.check(output, which)


def test_chats_and_streams(llama: Base) -> None:
    options: dict[str, Any] = {"use_tqdm": False, "chat_template": "{{ messages[0].content }}"}
    chat = [{"role": "user", "content": "hi"}]
    virtual = llama.requests[1]
    with LLM(
        str(llama.folder), dtype="float32", device="cpu", enable_prompt_adapter=True,
        max_prompt_adapter_token=5,
    ) as llm:  # fmt: skip
        params = dataclasses.replace(GREEDY, detokenize=True)
        plain, adapted = llm.chat(
            [chat, chat], params, prompt_adapter_request=[None, virtual], **options
        )
        assert plain.prompt_token_ids == adapted.prompt_token_ids
        assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids
        *_, last = llm.stream("hi", params, prompt_adapter_request=virtual)
        assert last.prompt_token_ids == adapted.prompt_token_ids
        assert last.outputs == adapted.outputs


def test_the_context_holds_virtual_tokens_too(llama: Base) -> None:
    with llama.start(max_model_len=24) as llm:
        prompt = prompts_of(6)[2]  # of 17 tokens
        params = dataclasses.replace(GREEDY, max_tokens=100)
        assert len(run(llm, [prompt], params, None)[0].outputs[0].token_ids) == 7
        assert len(run(llm, [prompt], params, llama.requests[1])[0].outputs[0].token_ids) == 2
        with pytest.raises(PromptError, match="prompt='17 tokens': with 11 virtual tokens before"):
            run(llm, [prompt], params, llama.requests[2])
        cut = dataclasses.replace(params, truncate_prompt_tokens=-1)
        (output,) = run(llm, [prompt], cut, llama.requests[2])
        assert output.prompt_token_ids == prompt[-12:]
        assert len(output.outputs[0].token_ids) == 1


def test_bad_prompt_adapters_are_errors_of_their_requests(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    prompts = prompts_of(2)
    good, folder = llama.requests[1], str(llama.adapters[1].folder)
    for bad, reason in (
        (
            PromptAdapterRequest("x", 50, folder, 6),
            r"num_virtual_tokens=6: the adapter at .* has 5",
        ),
        (PromptAdapterRequest("x", 50, "/none", 5), r"local_path='/none': no such folder"),
        (PromptAdapterRequest("x", 1, folder, 5), r"adapter_id=1: is that of prompt adapter 'p1'"),
        (PromptAdapterRequest("p1", 9, folder, 5), r"adapter_id=9: prompt adapter 'p1' is known"),
        ("p1", r"prompt_adapter_request='p1': must be a PromptAdapterRequest"),
    ):
        with pytest.raises(AdapterError, match=reason):
            run(llm, prompts, GREEDY, [good, bad])
    with pytest.raises(RequestError, match="one PromptAdapterRequest or a list of 2"):
        run(llm, prompts, GREEDY, [good])
    outputs = run(llm, prompts, GREEDY, good)
    assert [output.outputs[0].token_ids for output in outputs] == alone[1][:2]


def test_an_adapter_whose_files_change(llama: Base, llm: LLM, tmp_path: Path) -> None:
    """It is read again when others have taken its place."""
    write_prompt_adapter(tmp_path, 2, 64 // 2, seed=1)
    size = llama.adapters[1].embeddings.shape[1]
    write_prompt_adapter(tmp_path, 2, size, seed=1)
    changing = PromptAdapterRequest("changing", 60, str(tmp_path), 2)
    run(llm, prompts_of(1), GREEDY, changing)
    write_prompt_adapter(tmp_path, 2, size, seed=2)
    run(llm, prompts_of(1), GREEDY, changing)  # in memory
    run(llm, prompts_of(4), GREEDY, llama.requests)
    with pytest.raises(AdapterError, match="the files of prompt adapter 'changing' have changed"):
        run(llm, prompts_of(1), GREEDY, changing)


def test_where_prompt_adapters_cannot_be_served(
    llama: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}
    with (
        LLM(str(llama.folder), **options) as llm,
        pytest.raises(AdapterError, match="start with enable_prompt_adapter=True"),
    ):
        run(llm, prompts_of(1), GREEDY, llama.requests[1])
    options |= {"enable_prompt_adapter": True}
    with pytest.raises(ConfigError, match="max_prompt_adapter_token=0: must be given"):
        LLM(str(llama.folder), **options)
    options |= {"max_prompt_adapter_token": 8}
    with pytest.raises(ConfigError, match=r"enable_prompt_adapter=True: a model that pools"):
        LLM(str(llama.folder), runner="pooling", **options)
    with pytest.raises(ConfigError, match=r"cpu_weight_dtype='int8': needs the native backend"):
        LLM(str(llama.folder), cpu_weight_dtype="int8", **options)
    device = torch.device("cuda")
    monkeypatch.setattr("hetero_llm.engine.factory.resolve_device", lambda _: device)
    monkeypatch.setattr("hetero_llm.engine.factory.read_pooling_model", lambda *_: None)
    with pytest.raises(ConfigError, match="cannot be combined with enable_prompt_adapter on a GPU"):
        LLM(str(llama.folder), enable_lora=True, **options)
