"""LoRA adapters through `LLM`: log-probabilities are those of merged weights, computed in float32
by transformers, whatever way the scheduler took the tokens through the model."""

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
    RequestError,
    RequestOutput,
    SamplingParams,
)
from hetero_llm.cpu import native
from hetero_llm.cpu.executor import unsupported_reason
from hetero_llm.models.read_config import load_model_config
from tests.helpers.adapters import (
    TinyAdapter,
    change_config,
    merge,
    write_adapter,
)
from tests.models import tiny_moe
from tests.models.tiny import VARIANTS, VOCAB_SIZE, make_tiny_checkpoint, reference_attention

pytestmark = pytest.mark.usefixtures("free_drafts")

ATTENTION = r".*(attn|attention|self_attention)\..*"
OF_MIXTURES = r".*(attn|shared_expert).*"
"""transformers' experts and routers are no linear layers."""
FAMILIES = dict(reversed(VARIANTS))
"""The first variant of each family."""
SUBSETS = (".*", ATTENTION, r"(?!.*(attn|attention)\.).*")
NATIVE = native.load() is not None
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
    """A checkpoint, its adapters, and models of transformers with each merged; the first has
    none."""

    folder: Path
    adapters: list[TinyAdapter]
    references: list[Any]
    tolerance: float = 1e-4

    @property
    def requests(self) -> list[LoRARequest | None]:
        return [None] + [
            LoRARequest(f"a{number}", number, str(adapter.folder))
            for number, adapter in enumerate(self.adapters, 1)
        ]

    def start(self, **options: Any) -> LLM:
        options = {
            "dtype": "float32", "max_loras": 2, "max_lora_rank": 64, "block_size": 8, **options,
        }  # fmt: skip
        return LLM(
            str(self.folder), device="cpu", skip_tokenizer_init=True, enable_lora=True, **options
        )  # fmt: skip

    def check(self, output: RequestOutput, which: int) -> None:
        """Log-probabilities of an output, teacher-forced on its own tokens."""
        for one in output.outputs:
            tokens = [*output.prompt_token_ids, *one.token_ids]
            with torch.no_grad():
                logits = self.references[which](torch.tensor([tokens])).logits[0]
            expected = logits.float().log_softmax(-1)
            entries = list(enumerate(one.logprobs or [], len(output.prompt_token_ids)))
            entries += list(enumerate(output.prompt_logprobs or []))[1:]
            rows = [position - 1 for position, entry in entries for _ in entry]
            columns = [token for _, entry in entries for token in entry]
            ours = torch.tensor([e.logprob for _, entry in entries for e in entry.values()])
            assert len(ours) > 0
            torch.testing.assert_close(ours, expected[rows, columns], atol=self.tolerance, rtol=0)


def make_base(
    folder: Path, family: str, count: int, modules: str = ".*", tokenizer: bool = False
) -> Base:
    base = make_tiny_checkpoint(folder / "base", family, FAMILIES[family], with_tokenizer=tokenizer)

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation=reference_attention(base)
        )

    references = [load()]
    adapters = []
    for number in range(1, count + 1):
        reference = load()
        adapter = write_adapter(
            folder / f"a{number}",
            reference,
            modules=modules,
            rank=(1, 8, 3, 64)[number % 4],
            rslora=number % 2 == 0,
            strength=0.1,
            seed=number,
        )
        merge(reference, adapter)
        adapters.append(adapter)
        references.append(reference)
    tolerance = 1e-3 if family in tiny_moe.FAMILIES else 1e-4
    return Base(base, adapters, references, tolerance)


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
        prompt_token_ids=prompts, sampling_params=params, use_tqdm=False, lora_request=adapters
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Two adapters and the base in one batch, prompts cut at odd places; on the native executor
    where it runs the family."""
    number = list(FAMILIES).index(family)
    modules = OF_MIXTURES if family in tiny_moe.FAMILIES else SUBSETS[number % len(SUBSETS)]
    base = make_base(tmp_path, family, 2, modules)
    which = [1, 0, 2, 1, 2, 0]
    requests = base.requests
    config = load_model_config(base.folder)
    runs_native = NATIVE and unsupported_reason(config, torch.float32) is None
    with base.start(max_num_batched_tokens=7, max_num_seqs=6) as llm:
        assert llm.backend == ("native" if runs_native else "torch")
        outputs = run(llm, prompts_of(6, number), PARAMS, [requests[w] for w in which])
    for output, w in zip(outputs, which, strict=True):
        base.check(output, w)
        assert output.lora_request == requests[w]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("llama"), "llama", 4, tokenizer=True)


@pytest.fixture(scope="module")
def llm(llama: Base) -> Iterator[LLM]:
    """Rows of a batch do not influence each other: tokens can be compared exactly."""
    with llama.start(batch_invariant=True, max_loras=3, max_num_batched_tokens=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llama: Base, llm: LLM) -> dict[int, list[list[int]]]:
    """Greedy tokens of six prompts with each adapter, each request alone."""
    found = {}
    for which, request in enumerate(llama.requests):
        found[which] = [run(llm, [p], GREEDY, request)[0].outputs[0].token_ids
                        for p in prompts_of(6)]  # fmt: skip
    return found


def test_adapters_change_the_tokens(alone: dict[int, list[list[int]]]) -> None:
    longest = [tuple(tokens[2]) for tokens in alone.values()]
    assert len(set(longest)) == len(longest)


def test_the_base_of_an_engine_with_adapters_is_the_plain_engine(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    """To the bit: with no adapter in the step the model's own products run."""
    params = dataclasses.replace(PARAMS, prompt_logprobs=None)
    run(llm, prompts_of(2), GREEDY, llama.requests[1])
    ours = run(llm, prompts_of(6), params, None)
    with LLM(
        str(llama.folder), dtype="float32", device="cpu", skip_tokenizer_init=True, block_size=8,
        batch_invariant=True, max_num_batched_tokens=16,
    ) as plain:  # fmt: skip
        theirs = plain.generate(
            prompt_token_ids=prompts_of(6), sampling_params=params, use_tqdm=False
        )
    for one, other in zip(ours, theirs, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_batches_of_all_adapters_and_none(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    """Five kinds of requests over three slots: some are passed over, all get their own tokens."""
    which = [(i * 3) % 5 for i in range(18)]
    prompts = [prompts_of(6)[i % 6] for i in range(18)]
    outputs = run(llm, prompts, GREEDY, [llama.requests[w] for w in which])
    for index, (output, w) in enumerate(zip(outputs, which, strict=True)):
        assert output.outputs[0].token_ids == alone[w][index % 6]
    llm.engine.scheduler.check_integrity()


def test_forks_have_the_adapter_of_their_prompt(llama: Base, llm: LLM) -> None:
    params = dataclasses.replace(PARAMS, n=3, prompt_logprobs=None)
    for which, output in enumerate(run(llm, prompts_of(5), params, llama.requests)):
        assert len(output.outputs) == 3
        llama.check(output, which)


def test_beams_are_those_of_merged_weights(llama: Base, llm: LLM) -> None:
    params = SamplingParams(
        use_beam_search=True, best_of=3, temperature=0, max_tokens=6, ignore_eos=True, logprobs=1,
        detokenize=False,
    )  # fmt: skip
    for which, output in enumerate(run(llm, [prompts_of(3)[2]] * 3, params, llama.requests[:3])):
        llama.check(output, which)


def test_preemption(llama: Base, alone: dict[int, list[list[int]]]) -> None:
    which = [1, 2, 0, 3, 1, 4]
    with llama.start(
        batch_invariant=True, num_gpu_blocks_override=8, max_model_len=48, max_loras=2
    ) as llm:
        outputs = run(llm, prompts_of(6), GREEDY, [llama.requests[w] for w in which])
        assert llm.metrics()["num_preemptions"] > 0
    for index, (output, w) in enumerate(zip(outputs, which, strict=True)):
        assert output.outputs[0].token_ids == alone[w][index]


def test_prefixes_are_found_with_the_same_adapter_only(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    prompt = prompts_of(3)[2]
    llm.reset_prefix_cache()
    cold = [run(llm, [prompt], GREEDY, request)[0] for request in llama.requests]
    warm = [run(llm, [prompt], GREEDY, request)[0] for request in llama.requests]
    assert [output.num_cached_tokens for output in cold] == [0] * 5
    assert [output.num_cached_tokens for output in warm] == [16] * 5
    for outputs in (cold, warm):
        assert [output.outputs[0].token_ids for output in outputs] == [
            alone[which][2] for which in range(5)
        ]


def test_a_salt_cannot_imitate_an_adapter(llama: Base, llm: LLM) -> None:
    """Salts are users': one that spells an adapter's key finds none of its blocks."""
    prompt = prompts_of(3)[2]
    llm.reset_prefix_cache()
    run(llm, [prompt], GREEDY, llama.requests[1])
    ref = llm.engine.adapters.open(llama.requests[1])
    for salt in (f"adapter\0{ref.content_hash}", f"x\0adapter\0{ref.content_hash}"):
        (output,) = llm.generate(
            {"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY, use_tqdm=False
        )
        assert output.num_cached_tokens == 0


def test_streams_and_aborts(llama: Base, llm: LLM, alone: dict[int, list[list[int]]]) -> None:
    prompt = prompts_of(1)[0]
    stream = llm.stream({"prompt_token_ids": prompt}, GREEDY, llama.requests[2])
    next(stream)
    stream.close()  # aborts it
    *_, last = llm.stream({"prompt_token_ids": prompt}, GREEDY, llama.requests[3])
    assert last.outputs[0].token_ids == alone[3][0]
    assert last.lora_request == llama.requests[3]
    llm.engine.scheduler.check_integrity()


def test_chat_and_beam_search_take_adapters(llama: Base) -> None:
    with LLM(
        str(llama.folder), dtype="float32", device="cpu", enable_lora=True, max_lora_rank=64
    ) as llm:
        (base,) = llm.chat(
            [{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False,
            chat_template="{{ messages[0].content }}",
        )  # fmt: skip
        outputs = llm.chat(
            [[{"role": "user", "content": "hi"}]] * 2, GREEDY, use_tqdm=False,
            chat_template="{{ messages[0].content }}", lora_request=llama.requests[:2],
        )  # fmt: skip
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert tokens[0] == base.outputs[0].token_ids != tokens[1]


def test_a_name_that_is_forgotten_while_it_runs(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]]
) -> None:
    prompt = prompts_of(1)[0]
    stream = llm.stream({"prompt_token_ids": prompt}, GREEDY, llama.requests[1])
    next(stream)
    llm.engine.adapters.forget("a1")
    *_, last = stream
    assert last.outputs[0].token_ids == alone[1][0]


def test_bad_adapters_are_errors_of_their_requests(
    llama: Base, llm: LLM, alone: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(llama.adapters[0].folder, folder)
    bad = LoRARequest("bad", 99, str(folder))
    change_config(TinyAdapter(folder, {}), use_dora=True)
    prompts = prompts_of(2)
    with pytest.raises(AdapterError, match=r"^prompt 1: use_dora=True: DoRA is not available yet"):
        run(llm, prompts, GREEDY, [llama.requests[1], bad])
    with pytest.raises(AdapterError, match=r"lora_path='/none': no such folder"):
        run(llm, prompts, GREEDY, LoRARequest("none", 98, "/none"))
    with pytest.raises(
        RequestError, match=r"lora_request=.*must be one LoRARequest or a list of 2"
    ):
        run(llm, prompts, GREEDY, [llama.requests[1]])
    with pytest.raises(AdapterError, match="must be a LoRARequest"):
        run(llm, prompts, GREEDY, ["a1", None])
    outputs = run(llm, prompts, GREEDY, llama.requests[1])
    assert [output.outputs[0].token_ids for output in outputs] == alone[1][:2]


def test_an_adapter_whose_files_go_while_requests_wait(llama: Base, tmp_path: Path) -> None:
    """Its requests fail with its name; the others go on."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, adapter in zip(folders, llama.adapters, strict=False):
        shutil.copytree(adapter.folder, folder)
    one, two = (LoRARequest(f.name, i, str(f)) for i, f in enumerate(folders, 1))
    with llama.start(max_loras=1, max_cpu_loras=1) as llm:
        prompt = prompts_of(1)
        run(llm, prompt, GREEDY, one)
        run(llm, prompt, GREEDY, two)
        shutil.rmtree(folders[0])
        with pytest.raises(RequestError, match=r"^prompt 0: lora_request=None: .*no such folder"):
            run(llm, prompt, GREEDY, one)
        (output,) = run(llm, prompt, GREEDY, two)
        assert len(output.outputs[0].token_ids) == 12


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
    """Whoever drafts, the adapter verifies: the tokens are those of plain decoding with it."""
    if options.get("speculative_model") == "itself":
        options = {**options, "speculative_model": str(llama.folder)}
    which = [0, 1, 2, 3, 4, 1]
    with llama.start(batch_invariant=True, max_loras=3, **options) as llm:
        for _ in range(2):  # the second time lookahead caches know the answers
            outputs = run(llm, prompts_of(6), GREEDY, [llama.requests[w] for w in which])
            for index, (output, w) in enumerate(zip(outputs, which, strict=True)):
                assert output.outputs[0].token_ids == alone[w][index]
        metrics = llm.metrics()
        assert metrics["spec_decode_num_draft_tokens"] > 0
        if "use_lookahead" in options:
            assert metrics["spec_decode_num_accepted_tokens"] > 0


def test_merged_at_the_start(llama: Base) -> None:
    """`lora_merge` serves one adapter without naming it, by any backend."""
    for backend in ("native", "torch"):
        with LLM(
            str(llama.folder), dtype="float32", device="cpu", skip_tokenizer_init=True,
            lora_merge=str(llama.adapters[2].folder), cpu_backend=backend, block_size=8,
        ) as llm:  # fmt: skip
            outputs = llm.generate(
                prompt_token_ids=prompts_of(4), sampling_params=PARAMS, use_tqdm=False
            )
        for output in outputs:
            llama.check(output, 3)


def test_merging_what_cannot_be_merged(llama: Base, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=r"lora_merge='/none': .*no such folder"):
        LLM(str(llama.folder), lora_merge="/none", **options)
    with pytest.raises(ConfigError, match=r"lora_merge=.* is quantized; serve the adapter with"):
        LLM(
            str(llama.folder), lora_merge=str(llama.adapters[0].folder), quantization="ifq",
            **options,
        )  # fmt: skip


def test_adapters_of_a_quantized_base(llama: Base) -> None:
    """The adapter is added to the product of the quantized weight (QLoRA)."""
    with llama.start(quantization="ifq") as llm:
        outputs = run(llm, prompts_of(3), PARAMS, llama.requests[:3])
    coarse = dataclasses.replace(llama, tolerance=0.5)
    for which, output in enumerate(outputs):
        coarse.check(output, which)
        with pytest.raises(AssertionError):
            coarse.check(output, (which + 1) % 3)


def test_adapters_in_half_precision(llama: Base) -> None:
    with LLM(
        str(llama.folder), dtype="bfloat16", device="cpu", skip_tokenizer_init=True,
        enable_lora=True, max_loras=4, max_lora_rank=64, lora_dtype="bfloat16",
    ) as llm:  # fmt: skip
        outputs = run(llm, prompts_of(5), PARAMS, llama.requests)
    coarse = dataclasses.replace(llama, tolerance=1.0)
    for which, output in enumerate(outputs):
        coarse.check(output, which)
        with pytest.raises(AssertionError):
            coarse.check(output, (which + 1) % 5)


def test_a_class_of_transformers(tmp_path: Path) -> None:
    base = make_base(tmp_path, "llama", 2)
    with base.start(model_impl="transformers") as llm:
        outputs = run(llm, prompts_of(3), PARAMS, base.requests)
    for which, output in enumerate(outputs):
        base.check(output, which)


def test_where_adapters_cannot_be_served_yet(llama: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_lora": True}
    with pytest.raises(ConfigError, match=r"enable_lora=True: a model that pools"):
        LLM(str(llama.folder), runner="pooling", device="cpu", **options)
    device = torch.device("cuda")
    monkeypatch.setattr("hetero_llm.engine.factory.resolve_device", lambda _: device)
    monkeypatch.setattr("hetero_llm.engine.factory.read_pooling_model", lambda *_: None)
    with pytest.raises(ConfigError, match=r"enable_lora=True: cannot .* batch_invariant on a GPU"):
        LLM(str(llama.folder), batch_invariant=True, **options)
