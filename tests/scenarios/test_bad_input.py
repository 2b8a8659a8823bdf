"""Every mistake a user can make is a typed error that names field, value and prompt, before any
work starts; the engine answers the next request as if nothing had happened."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import (
    LLM,
    AdapterError,
    ConfigError,
    EngineDeadError,
    HeteroLLMError,
    LoRARequest,
    ModelLoadError,
    PromptAdapterRequest,
    PromptError,
    RequestError,
    SamplingError,
    SamplingParams,
)
from tests.models.tiny import rewrite_config

VOCAB = 259
CONTEXT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def answer(llm: LLM) -> list[int]:
    return llm.generate("ok", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@contextmanager
def refused(
    llm: LLM, kind: type[HeteroLLMError], field: str, value: Any, index: int | None = None
) -> Iterator[None]:
    """Expects an error about `field` = `value`, no work at all, and a usable engine."""
    expected = answer(llm)
    before = llm.metrics()
    with pytest.raises(kind) as caught:
        yield
    assert llm.metrics() == before
    where = "" if index is None else f"prompt {index}: "
    assert str(caught.value).startswith(f"{where}{field}={value!r}: ")
    if isinstance(caught.value, RequestError):
        assert caught.value.prompt_index == index
    assert answer(llm) == expected


# -- prompts --------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str, Any]] = {
    "empty": ("", "prompt", ""),
    "none": (None, "prompt", None),
    "number": (7, "prompt", 7),
    "empty dict": ({}, "prompt", None),
    "text that is none": ({"prompt": 5}, "prompt", 5),
    "unknown key": ({"prompt": "x", "multi_modal_data": 1}, "multi_modal_data", 1),
    "unknown keys": ({"prompt": "x", 3: 1, "4": 2}, "3", 1),
    "no token ids": ({"prompt_token_ids": []}, "prompt_token_ids", []),
    "ids in a string": ({"prompt_token_ids": "12"}, "prompt_token_ids", "12"),
    "one id": ({"prompt_token_ids": 12}, "prompt_token_ids", 12),
    "bool id": ({"prompt_token_ids": [5, True]}, "prompt_token_ids", True),
    "float id": ({"prompt_token_ids": [5, 6.0]}, "prompt_token_ids", 6.0),
    "text id": ({"prompt_token_ids": ["5"]}, "prompt_token_ids", "5"),
    "negative id": ({"prompt_token_ids": [5, -1]}, "prompt_token_ids", -1),
    "id too large": ({"prompt_token_ids": [5, VOCAB]}, "prompt_token_ids", VOCAB),
    "huge id": ({"prompt_token_ids": [2**70]}, "prompt_token_ids", 2**70),
    "too long": ("x" * CONTEXT, "prompt", f"{CONTEXT} tokens"),
    "empty salt": ({"prompt": "x", "cache_salt": ""}, "cache_salt", ""),
    "salt of bytes": ({"prompt": "x", "cache_salt": b"a"}, "cache_salt", b"a"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_in_a_list_is_refused_by_its_index(tiny: LLM, case: str) -> None:
    prompt, field, value = BAD_PROMPTS[case]
    with refused(tiny, PromptError, field, value, index=1):
        tiny.generate(["fine", prompt, "fine"], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("case", [c for c in BAD_PROMPTS if c not in ("none", "number")])
def test_a_bad_prompt_alone_has_no_index(tiny: LLM, case: str) -> None:
    prompt, field, value = BAD_PROMPTS[case]
    with refused(tiny, PromptError, field, value):
        tiny.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("ids", "field", "value", "index"),
    [
        ([], "prompt_token_ids", [], None),
        ([5, VOCAB], "prompt_token_ids", VOCAB, None),
        ([True, 5], "prompt_token_ids", True, None),
        ([[5], [-3]], "prompt_token_ids", -3, 1),
        ([[5], []], "prompt_token_ids", [], 1),
        ([[5], 6], "prompt_token_ids", 6, 1),
        ("12", "prompt_token_ids", "12", None),
        (12, "prompt_token_ids", 12, None),
    ],
)
def test_bad_prompt_token_ids_argument(
    tiny: LLM, ids: Any, field: str, value: Any, index: int | None
) -> None:
    with refused(tiny, PromptError, field, value, index):
        tiny.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)


def test_prompts_and_token_ids_must_pair_up(tiny: LLM) -> None:
    with refused(tiny, PromptError, "prompt_token_ids", "2 lists"):
        tiny.generate(["a"], GREEDY, prompt_token_ids=[[5], [6]], use_tqdm=False)


@pytest.mark.parametrize("prompts", [None, 7])
def test_neither_prompt_nor_list(tiny: LLM, prompts: Any) -> None:
    with refused(tiny, PromptError, "prompts", prompts):
        tiny.generate(prompts, GREEDY, use_tqdm=False)


def test_the_longest_prompt_is_one_below_the_context(tiny: LLM) -> None:
    (output,) = tiny.generate("x" * (CONTEXT - 1), GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_an_empty_list_of_prompts_gives_no_outputs(tiny: LLM) -> None:
    assert tiny.generate([], GREEDY, use_tqdm=False) == []


# -- sampling parameters --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 1.1),
        ("n", 0),
        ("n", True),
        ("best_of", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("stop", ""),
        ("logprobs", -2),
        ("seed", -2),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("truncate_prompt_tokens", 0),
        ("skip_special_tokens", 2),
    ],
)
def test_a_bad_value_is_refused_where_the_parameters_are_made(field: str, value: Any) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"n": 257}, "n", 257),
        ({"best_of": 300}, "best_of", 300),
        ({"logprobs": 21}, "logprobs", 21),
        ({"prompt_logprobs": 21}, "prompt_logprobs", 21),
        ({"logprobs": -1}, "logprobs", -1),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids", VOCAB),
        ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids", VOCAB),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias", VOCAB),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_index(
    tiny: LLM, fields: dict[str, Any], field: str, value: Any
) -> None:
    params = SamplingParams(**fields)
    with refused(tiny, SamplingError, field, value, index=2):
        tiny.generate(["a", "b", "c"], [GREEDY, GREEDY, params], use_tqdm=False)
    with refused(tiny, SamplingError, field, value):
        tiny.generate("a", params, use_tqdm=False)


def test_parameters_of_another_type(tiny: LLM) -> None:
    with refused(tiny, SamplingError, "sampling_params", None, index=1):
        tiny.generate(["a", "b"], [GREEDY, None], use_tqdm=False)
    with refused(tiny, RequestError, "sampling_params", {"n": 1}):
        tiny.generate("a", {"n": 1}, use_tqdm=False)


def test_as_many_parameters_as_prompts(tiny: LLM) -> None:
    with pytest.raises(RequestError, match=r"^sampling_params=\[.*a list of 2$"):
        tiny.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)


def test_a_prompt_adapter_without_enable_prompt_adapter(tiny: LLM) -> None:
    with refused(tiny, RequestError, "prompt_adapter_request", "adapter"):
        tiny.generate("a", GREEDY, use_tqdm=False, prompt_adapter_request="adapter")
    with refused(tiny, AdapterError, "prompt_adapter_request", "polite", index=0):
        tiny.generate(
            ["a"], GREEDY, use_tqdm=False,
            prompt_adapter_request=PromptAdapterRequest("polite", 1, "/adapters/polite", 8),
        )  # fmt: skip


def test_an_adapter_without_enable_lora(tiny: LLM) -> None:
    with refused(tiny, RequestError, "lora_request", "adapter"):
        tiny.generate("a", GREEDY, use_tqdm=False, lora_request="adapter")
    with refused(tiny, AdapterError, "lora_request", "sql", index=0):
        tiny.generate(["a"], GREEDY, use_tqdm=False, lora_request=LoRARequest("sql", 1, "/sql"))


def test_a_request_larger_than_the_pool_is_refused(tiny_folder: Path) -> None:
    with start(tiny_folder, max_model_len=32, num_gpu_blocks_override=4) as llm:
        beams = SamplingParams(use_beam_search=True, best_of=3, temperature=0, max_tokens=20)
        with refused(llm, PromptError, "prompt", "3 tokens", index=1):
            llm.generate(["a", "abc"], [GREEDY, beams], use_tqdm=False)


def test_text_without_a_tokenizer(tiny_folder: Path) -> None:
    ids_only = SamplingParams(max_tokens=1, detokenize=False)
    with start(tiny_folder, skip_tokenizer_init=True) as llm:
        with pytest.raises(PromptError, match="^prompt 1: prompt='text': .*skip_tokenizer_init"):
            llm.generate([{"prompt_token_ids": [5]}, "text"], ids_only, use_tqdm=False)
        stopped = SamplingParams(stop="x")
        with pytest.raises(SamplingError, match=r"^prompt 0: stop=\['x'\]: needs a tokenizer"):
            llm.generate([{"prompt_token_ids": [5]}], stopped, use_tqdm=False)
        with pytest.raises(RequestError, match="^messages=.*tokenizer"):
            llm.chat([{"role": "user", "content": "x"}], ids_only, use_tqdm=False)
        assert llm.metrics()["prompt_tokens"] == 0
        assert llm.generate(prompt_token_ids=[[5]], sampling_params=ids_only, use_tqdm=False)


def test_a_closed_engine_says_so(tiny_folder: Path) -> None:
    llm = start(tiny_folder)
    answer(llm)
    llm.close()
    llm.close()
    for call in (lambda: answer(llm), llm.metrics, lambda: list(llm.stream("a"))):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


# -- starting an engine ---------------------------------------------------------------------


def start(folder: Path | str, **engine_args: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "device": "cpu", "block_size": 8, **engine_args})


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("dtype", "float8", "'bfloat16'"),
        ("max_model_len", CONTEXT + 1, f"context length is {CONTEXT}"),
        ("max_model_len", 0, "at least 1"),
        ("num_gpu_blocks_override", 7, "needs 8; lower max_model_len"),
        ("num_gpu_blocks_override", 0, "at least 1"),
        ("block_size", 12, "8, 16, 32, 64 or 128"),
        ("max_num_seqs", 0, "at least 1"),
        ("gpu_memory_utilization", 1.5, "at most 1"),
        ("device", "tpu", "'cpu'"),
        ("load_format", "pickle", "'safetensors'"),
        ("max_num_seq", 5, "did you mean 'max_num_seqs'"),
        ("temprature", 5, "unknown argument"),
        ("quantization", "awq", "weights are plain"),
        ("batch_invariant", "yes", "True or False"),
    ],
)
def test_a_wrong_engine_argument(tiny_folder: Path, field: str, value: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(tiny_folder, **{field: value})
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert hint in str(caught.value)


def test_arguments_that_contradict_each_other(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="^max_num_seqs=16: .*max_num_batched_tokens .8"):
        start(tiny_folder, max_num_seqs=16, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="^max_num_batched_tokens=32: .*max_model_len .64"):
        start(tiny_folder, max_num_batched_tokens=32, max_num_seqs=4, enable_chunked_prefill=False)


@pytest.fixture
def copied(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["no/such/folder", "../nowhere", "/nowhere/at/all"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^model='{name}': no such folder"):
        start(name)


def test_a_file_instead_of_a_folder(copied: Path) -> None:
    with pytest.raises(ModelLoadError, match="a file, where a model folder is needed"):
        start(copied / "config.json")


@pytest.mark.parametrize("keep", [0, 4, 100, 20000])
def test_truncated_weights(copied: Path, keep: int) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="model.safetensors"):
        start(copied)


def test_missing_weights(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no .*safetensors"):
        start(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architectures=\['Mamba.*no decoder-only model"),
        ({"architectures": None}, "architectures=None"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "missing: .*q_norm"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"hidden_size": 64}, "of wrong shape"),
        ({"num_hidden_layers": 4}, "tensors missing: .*layers.3"),
        ({"num_hidden_layers": 2}, "tensors unexpected: .*layers.2"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_a_wrong_config_json(copied: Path, changes: dict[str, Any], message: str) -> None:
    rewrite_config(copied, **changes)
    with pytest.raises(ModelLoadError, match=message):
        start(copied)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"architectures": 5})])
def test_a_damaged_config_json(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="config.json"):
        start(copied)


def test_a_damaged_tokenizer(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
        start(copied)
