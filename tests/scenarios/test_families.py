"""Every model family through `LLM`: log-probabilities equal transformers' in float32, whatever way
the scheduler took the tokens through the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, RequestError, RequestOutput, SamplingParams
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from tests.models import tiny_moe
from tests.models.tiny import (
    VARIANTS,
    VOCAB_SIZE,
    make_tiny_checkpoint,
    reference_attention,
)

TOLERANCE = 1e-4  # of log-probabilities
EXPERTS_TOLERANCE = 1e-3
GREEDY_TOKENS = 32
BLOCK_SIZES = (8, 16, 32)
NEW_TOKENS = 8
PARAMS = SamplingParams(
    temperature=1.0,
    seed=1,
    max_tokens=NEW_TOKENS,
    ignore_eos=True,
    logprobs=20,
    prompt_logprobs=20,
    detokenize=False,
)
WITHOUT_PROMPT = dataclasses.replace(PARAMS, prompt_logprobs=None)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    """Nothing here is large enough for a second thread."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Family:
    """A checkpoint, transformers' model of it, and what of its context the tests use."""

    folder: Path
    reference: Any
    number: int
    tolerance: float
    max_model_len: int | None
    longest_prompt: int
    known: dict[tuple[int, ...], torch.Tensor] = dataclasses.field(default_factory=dict)

    def block_size(self, shift: int) -> int:
        """Each variant meets all block sizes, each path different ones over the variants."""
        return BLOCK_SIZES[(self.number + shift) % len(BLOCK_SIZES)]

    def prompts(self) -> list[list[int]]:
        """Six prompts of mixed lengths, one token to the longest."""
        generator = torch.Generator().manual_seed(self.number)
        longest = self.longest_prompt
        return [
            torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
            for length in (longest // 2, 1, longest, 9, 3, longest - 5)
        ]

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab] by transformers; kept, as most paths generate the same tokens."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.no_grad():
                logits = self.reference(torch.tensor([tokens])).logits[0]
            self.known[key] = logits.float().log_softmax(-1)
        return self.known[key]

    def llm(self, **engine_args: Any) -> LLM:
        engine_args = {"max_model_len": self.max_model_len, **engine_args}
        return LLM(
            str(self.folder),
            dtype="float32",
            device="cpu",
            skip_tokenizer_init=True,
            **engine_args,
        )


def _id(number: int) -> str:
    return "-".join(VARIANTS[number])


@pytest.fixture(scope="module", params=range(len(VARIANTS)), ids=_id)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name, variant = VARIANTS[request.param]
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("family") / "model", name, variant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=reference_attention(folder)
    )
    # transformers changes dynamic frequencies when a sequence outgrows the original context (24).
    limit, longest = (24, 16) if variant == "dynamic" else (None, 40)
    tolerance = EXPERTS_TOLERANCE if name in tiny_moe.FAMILIES else TOLERANCE
    return Family(folder, reference, request.param, tolerance, limit, longest)


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def assert_equals_transformers(family: Family, outputs: list[RequestOutput]) -> None:
    """Teacher-forced on the engine's own tokens, so sampling cannot hide a difference."""
    for output in outputs:
        (completion,) = output.outputs
        tokens = output.prompt_token_ids + completion.token_ids
        expected = family.log_probs(tokens)
        assert len(completion.logprobs) == len(completion.token_ids)
        entries = list(zip(range(len(output.prompt_token_ids), len(tokens)), completion.logprobs))
        if output.prompt_logprobs is not None:
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            assert output.prompt_logprobs[0] is None
            entries += list(enumerate(output.prompt_logprobs))[1:]
        rows = [position - 1 for position, entry in entries for _ in entry]
        columns = [token for _, entry in entries for token in entry]
        ours = torch.tensor([e.logprob for _, entry in entries for e in entry.values()])
        assert all(tokens[position] in entry for position, entry in entries)
        assert all(len(entry) >= 20 for _, entry in entries)
        torch.testing.assert_close(ours, expected[rows, columns], atol=family.tolerance, rtol=0)


PATHS = ("native", "torch", "row_by_row")
"""Of attention: compiled code where it can be built, torch, or with batch invariance torch for each
row alone."""


def take_path(path: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engine arguments."""
    if path == "torch":
        monkeypatch.setattr("hetero_llm.cpu.paged_attention.native_row_kernel", lambda *_: None)
    backend = {"cpu_backend": "torch"} if path == "torch" else {}
    return {"batch_invariant": path == "row_by_row", **backend}


def test_one_shot(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in torch; the chunks and prefixes below have the native one, the greedy batch has
    each row alone."""
    with family.llm(block_size=family.block_size(0), **take_path("torch", monkeypatch)) as llm:
        outputs = generate(llm, family.prompts(), PARAMS)
        assert llm.metrics()["num_steps"] == NEW_TOKENS  # the first one took all prompts
    assert_equals_transformers(family, outputs)


# A chunk behind others and one behind a cached prefix take the same way through a model, so each
# variant meets one of them.
@pytest.mark.parametrize("family", range(0, len(VARIANTS), 2), indirect=True, ids=_id)
def test_chunked_prefill(family: Family) -> None:
    with family.llm(
        block_size=family.block_size(1), max_num_batched_tokens=5, max_num_seqs=5
    ) as llm:
        outputs = generate(llm, family.prompts(), PARAMS)
        rows = sum(len(o.prompt_token_ids) + NEW_TOKENS - 1 for o in outputs)
        assert llm.metrics()["num_steps"] >= rows / 5
    assert_equals_transformers(family, outputs)


@pytest.mark.parametrize("family", range(1, len(VARIANTS), 2), indirect=True, ids=_id)
def test_prefix_hits(family: Family) -> None:
    block_size = min(family.block_size(2), family.longest_prompt // 2 // 8 * 8)
    prompts = family.prompts()
    with family.llm(block_size=block_size) as llm:
        cold = generate(llm, prompts, WITHOUT_PROMPT)
        warm = generate(llm, prompts, WITHOUT_PROMPT)
        longer = [p + [7, 11, 5] for p in prompts if len(p) == family.longest_prompt]
        extended = generate(llm, longer, WITHOUT_PROMPT)
    assert [o.num_cached_tokens for o in cold] == [0] * len(prompts)
    wanted = [
        len(p) - 1 if len(p) % block_size == 0 else len(p) // block_size * block_size
        for p in prompts
    ]
    assert [o.num_cached_tokens for o in warm] == wanted
    assert min(o.num_cached_tokens for o in extended) > 0
    assert_equals_transformers(family, cold + warm + extended)


def test_greedy_texts_of_a_batch_are_those_of_transformers(family: Family) -> None:
    context = family.max_model_len or 64
    prompts = [p[: context // 2] for p in family.prompts()[:4]]
    count = min(GREEDY_TOKENS, context - context // 2)
    params = dataclasses.replace(WITHOUT_PROMPT, temperature=0.0, max_tokens=count, logprobs=None)
    with family.llm(batch_invariant=True, block_size=8) as llm:
        outputs = generate(llm, prompts, params)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert len(tokens) == count
        # Each the likeliest after those before it: what transformers' own greedy search gives.
        expected = family.log_probs(output.prompt_token_ids + tokens)
        rows = expected[len(output.prompt_token_ids) - 1 : -1]
        assert rows.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("family", range(0, len(VARIANTS), 5), indirect=True, ids=_id)
def test_preemption(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth variant, as what is computed again is a chunk like others: each path, every block
    size, with a prefix cache and without."""
    attention = take_path(PATHS[family.number // len(BLOCK_SIZES) % len(PATHS)], monkeypatch)
    block_size = 8 if family.max_model_len else family.block_size(0)
    max_model_len = family.max_model_len or 48
    per_sequence = max_model_len // block_size
    with family.llm(
        block_size=block_size,
        max_model_len=max_model_len,
        num_gpu_blocks_override=per_sequence + 1,
        enable_prefix_caching=family.number % 2 == 0,
        **attention,
    ) as llm:
        params = dataclasses.replace(PARAMS, max_tokens=max_model_len - 17)
        # One after the other, as memory has room for little more than one.
        outputs = generate(llm, [p[:16] for p in family.prompts()[2:5]], params)
        assert llm.metrics()["num_preemptions"] > 0
    assert [len(o.outputs[0].token_ids) for o in outputs] == [params.max_tokens] * len(outputs)
    assert_equals_transformers(family, outputs)


@pytest.mark.parametrize(("name", "variant"), [("mistral", "window"), ("qwen2", "window_mix")])
def test_windows_are_shorter_than_the_contexts_here(
    tmp_path: Path, name: str, variant: str
) -> None:
    windows = load_model_config(make_tiny_checkpoint(tmp_path, name, variant)).sliding_windows
    assert set(windows) - {None} == {5}


def test_dynamic_rope_over_the_whole_context(tmp_path: Path) -> None:
    """Its frequencies are those that transformers has for a sequence of full length."""
    folder = make_tiny_checkpoint(tmp_path, "llama", "dynamic")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    family = Family(folder, reference, 0, TOLERANCE, None, 40)
    with family.llm(block_size=8, max_num_batched_tokens=9, max_num_seqs=4) as llm:
        params = dataclasses.replace(PARAMS, max_tokens=None)
        outputs = generate(llm, family.prompts()[:1] * 2, params)
    assert [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs] == [48, 48]
    assert_equals_transformers(family, outputs)


def test_cache_memory_starts_as_zeros() -> None:
    """Batched rows read past a sequence's end, where a weight of zero hides all but NaN."""
    shape = KVCacheShape(1, 2, 8, 8, torch.float32)
    dirty = torch.full((64, shape.block_bytes // 4), float("nan"))
    del dirty  # the allocator may hand the same memory out again
    cache = PagedKVCache(shape, 64, torch.device("cpu"))
    assert cache.data.shape == (64, 1, 2, 8, 2, 8)
    assert not cache.data.any()


# -- chat -----------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIRST = [{"role": "user", "content": "héllo"}]
SECOND = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]


@pytest.fixture
def chatty(tiny: LLM) -> Iterator[LLM]:
    """The tiny model with a template of its own."""
    tokenizer = tiny.get_tokenizer()
    tokenizer.chat_template = TEMPLATE
    yield tiny
    tokenizer.chat_template = None


def shown(outputs: list[RequestOutput]) -> list[tuple[str | None, list[int], str]]:
    return [(o.prompt, o.prompt_token_ids, o.outputs[0].text) for o in outputs]


def test_chat_of_one_conversation_is_generate_on_the_rendered_text(tiny: LLM) -> None:
    answers = tiny.chat(FIRST, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    rendered = tiny.generate("[user]héllo\n[assistant]", GREEDY, use_tqdm=False)
    assert shown(answers) == shown(rendered)
    assert len(answers[0].outputs[0].token_ids) == 6


def test_chat_of_a_list_of_conversations_answers_each(tiny: LLM) -> None:
    answers = tiny.chat([FIRST, SECOND], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    texts = ["[user]héllo\n[assistant]", "[system]x\n[user]y\n[assistant]"]
    assert shown(answers) == shown(tiny.generate(texts, GREEDY, use_tqdm=False))


def test_parts_of_a_content_are_joined(tiny: LLM) -> None:
    parts = [{"type": "text", "text": "x"}, "y", {"text": "z"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [], "tool_calls": []},
        {"role": "user", "content": "w"},
    ]
    (answer,) = tiny.chat(messages, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert answer.prompt == "[user]x\ny\nz\n[assistant]\n[user]w\n[assistant]"
    template = "{% for p in messages[0].content %}<{{ p.type }} {{ p.text }}>{% endfor %}"
    openai = {"chat_template": template, "chat_template_content_format": "openai"}
    (answer,) = tiny.chat(messages, GREEDY, use_tqdm=False, **openai)
    assert answer.prompt == "<text x><text y><text z>"
    (answer,) = tiny.chat(FIRST, GREEDY, use_tqdm=False, **openai)
    assert answer.prompt == "<text héllo>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:"}}], r"content\[0\].*must be a text"),
        ([{"type": "text"}], r"content\[0\]"),
        ([{"type": "text", "text": "a"}, 5], r"content\[1\]=5"),
        (5, r"messages\[0\]=5"),
    ],
)
def test_contents_that_are_no_text_are_refused(tiny: LLM, content: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        messages = [{"role": "user", "content": content}]
        tiny.chat(messages, GREEDY, use_tqdm=False, chat_template=TEMPLATE)


def test_chat_options_reach_the_template(tiny: LLM) -> None:
    template = TEMPLATE + "{{ mood }}{% for tool in tools or [] %}({{ tool.name }}){% endfor %}"
    (answer,) = tiny.chat(
        FIRST, GREEDY, use_tqdm=False, chat_template=template, tools=[{"name": "add"}],
        chat_template_kwargs={"mood": "!"},
    )  # fmt: skip
    assert answer.prompt == "[user]héllo\n[assistant]!(add)"
    opened = [*FIRST, {"role": "assistant", "content": "so"}]
    (answer,) = tiny.chat(
        opened, GREEDY, use_tqdm=False, chat_template=TEMPLATE, add_generation_prompt=False,
        continue_final_message=True,
    )  # fmt: skip
    assert answer.prompt == "[user]héllo\n[assistant]so"
    with pytest.raises(RequestError, match="chat_template_content_format='html'"):
        tiny.chat(FIRST, GREEDY, chat_template=TEMPLATE, chat_template_content_format="html")
    with pytest.raises(RequestError, match="^tools=.*no place for tools"):
        tiny.chat(FIRST, GREEDY, chat_template=TEMPLATE, tools=[{"name": "add"}])


def test_calls_of_tools_reach_the_template_as_objects(tiny: LLM) -> None:
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [*FIRST, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (answer,) = tiny.chat(talk, GREEDY, use_tqdm=False, chat_template=template)
    assert answer.prompt == '{"a": 1}'


def test_chat_uses_the_tokenizers_template_unless_one_is_given(chatty: LLM) -> None:
    own = chatty.chat(FIRST, GREEDY, use_tqdm=False)
    given = chatty.chat(FIRST, GREEDY, use_tqdm=False, chat_template="{{ messages[0].role }}")
    assert own[0].prompt == "[user]héllo\n[assistant]"
    assert given[0].prompt == "user"


def test_chat_without_generation_prompt(chatty: LLM) -> None:
    answers = chatty.chat(FIRST, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert answers[0].prompt == "[user]héllo\n"


def test_chat_without_a_template_is_a_request_error(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="chat_template=None"):
        tiny.chat(FIRST, GREEDY, use_tqdm=False)


def test_chat_with_a_template_that_refuses_is_a_request_error(tiny: LLM) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="prompt 1: messages=.*roles must alternate"):
        tiny.chat(
            [FIRST, SECOND],
            GREEDY,
            use_tqdm=False,
            chat_template="{% if messages|length > 1 %}" + template + "{% endif %}x",
        )


@pytest.mark.parametrize("messages", [[], [[]], {"role": "user", "content": "x"}, "hello", None])
def test_chat_of_what_is_no_conversation_is_a_request_error(tiny: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages="):
        tiny.chat(messages, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
