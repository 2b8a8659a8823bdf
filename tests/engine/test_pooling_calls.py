"""`LLM.embed`, `encode`, `classify` and `score` as vLLM's users call them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import (
    LLM,
    ConfigError,
    EmbeddingRequestOutput,
    EngineDeadError,
    PoolingParams,
    PoolingRequestOutput,
    RequestError,
    ScoringRequestOutput,
)
from tests.pooling.tiny_pooling import make_pooling_checkpoint, reference, text_of

TEXTS = [text_of(length, length) for length in (2, 30, 7)]
CLOSE = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    return make_pooling_checkpoint(
        made, "BertModel", pooling="mean", changes={"is_matryoshka": True}
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu") as made:
        yield made


def test_outputs_have_vllms_fields(llm: LLM, folder: Path) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    wanted = reference(folder, TEXTS, "mean")
    assert all(type(one) is EmbeddingRequestOutput and one.finished for one in outputs)
    assert [one.request_id for one in outputs] == ["0", "1", "2"]
    assert outputs[0].outputs.hidden_size == 32 and outputs[0].prompt_token_ids[0] == 2
    np.testing.assert_allclose([one.outputs.embedding for one in outputs], wanted, atol=CLOSE)
    tensors = llm.encode(TEXTS, use_tqdm=False)
    assert all(type(one) is PoolingRequestOutput for one in tensors)
    assert all(isinstance(one.outputs.data, torch.Tensor) for one in tensors)
    np.testing.assert_allclose(
        torch.stack([one.outputs.data for one in tensors]), wanted, atol=CLOSE
    )
    scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    assert all(type(one) is ScoringRequestOutput for one in scores)
    np.testing.assert_allclose(
        [one.outputs.score for one in scores], wanted @ wanted[0], atol=CLOSE
    )
    assert len(scores[1].prompt_token_ids) == 4 + 32


def test_forms_of_prompts_and_one_params_each(llm: LLM) -> None:
    ids = llm.embed(TEXTS[0], use_tqdm=False)[0].prompt_token_ids
    forms: list[Any] = [ids, {"prompt_token_ids": ids}, {"prompt": TEXTS[0]}, TEXTS[0]]
    found = [llm.embed(form, use_tqdm=False)[0].outputs.embedding for form in forms]
    np.testing.assert_allclose(found, [found[0]] * 4, atol=CLOSE)
    each = [PoolingParams(dimensions=4), PoolingParams(truncate_prompt_tokens=5)]
    short, cut = llm.embed(TEXTS[:2], pooling_params=each, use_tqdm=False)
    assert short.outputs.hidden_size == 4 and len(cut.prompt_token_ids) == 5
    assert len(llm.embed(TEXTS[1], truncate_prompt_tokens=7)[0].prompt_token_ids) == 7
    assert each[1].truncate_prompt_tokens == 5  # the user's own object stays


def test_a_bar_of_the_users_own(llm: LLM) -> None:
    seen: list[Any] = []

    class Bar:
        def __init__(self, **settings: Any) -> None:
            seen.append((settings["total"], settings["desc"]))

        def update(self, count: int) -> None:
            seen.append(count)

        def close(self) -> None:
            seen.append("closed")

    llm.embed(TEXTS, use_tqdm=Bar)
    assert seen == [(3, "Processed prompts"), 1, 1, 1, "closed"]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("embed", (["w0", ""],), "prompt 1: prompt='': is empty"),
        ("embed", ("",), "prompt='': is empty"),
        ("classify", ("w0",), "task='classify': this model serves 'embed' and 'score'"),
        ("score", (["w0", "w1"], ["w0"]), "data_2='1 texts': must be 2, as many as data_1 has"),
        ("score", ("w0", ["w0", ""]), "prompt 1: data_2='': is empty"),
        ("score", ("", "w0"), "prompt 0: data_1='': is empty"),
        ("score", ({"content": []}, "w0"), "data_1={'content': []}: input other than text"),
        ("generate", ("w0",), "task='generate': BertModel pools and generates no text; it serves"),
        ("chat", ([{"role": "user", "content": "a"}],), "task='generate': BertModel pools"),
    ],
)
def test_wrong_calls(llm: LLM, call: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(llm, call)(*arguments)
    assert str(caught.value).startswith(message)


def test_wrong_parameters(llm: LLM) -> None:
    for params in ({}, [PoolingParams()], "x"):
        with pytest.raises(RequestError, match=r"^pooling_params="):
            llm.embed(TEXTS, pooling_params=params)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lora_request=1: LoRA is not available yet"):
        llm.embed("w0", lora_request=1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="task='ask': must be 'embed', 'classify' or 'score'"):
        llm.encode("w0", pooling_task="ask")
    assert llm.metrics()["num_requests_running"] == 0


def test_metrics_and_the_end(folder: Path) -> None:
    with LLM(str(folder), device="cpu") as llm:
        llm.embed(TEXTS, use_tqdm=False)
        named = {one.name: one for one in llm.get_metrics()}
        assert named["vllm:prompt_tokens"].value == 4 + 32 + 9
        llm.reset_prefix_cache()  # there is none
        assert llm.embed([], use_tqdm=False) == []
        assert llm.backend == "torch" and llm.get_tokenizer() is not None
    with pytest.raises(EngineDeadError, match="closed"):
        llm.embed("w0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_lookahead": True}, "speculation='lookahead': BertModel pools, which runs without"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': BertModel pools"),
        ({"cpu_weight_dtype": "int8"}, "cpu_weight_dtype='int8': BertModel pools"),
        ({"quantization": "fp8"}, "quantization='fp8': BertModel pools"),
        ({"cpu_backend": "ipex"}, "cpu_backend='ipex': a pooling model runs on torch"),
        ({"max_model_len": 129}, "max_model_len=129: the model's context length is 128"),
        ({"cpu_threads": 10_000}, "cpu_threads=10000: this process may use"),
    ],
)
def test_arguments_that_a_pooling_model_cannot_follow(
    folder: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), device="cpu", **arguments)
    assert str(caught.value).startswith(message)


def test_arguments_of_vllm(llm: LLM) -> None:
    empty: dict[str, Any] = {"use_tqdm": False, "tokenization_kwargs": {}}
    assert len(llm.embed(TEXTS, **empty)) == len(llm.encode(TEXTS, **empty)) == 3
    assert len(llm.score(TEXTS[0], TEXTS, chat_template=None, **empty)) == 3
    for call in (llm.embed, llm.encode, llm.classify):
        with pytest.raises(ConfigError, match="^tokenization_kwargs=.*truncate_prompt_tokens"):
            call(TEXTS, tokenization_kwargs={"truncation": True})
    with pytest.raises(ConfigError, match="^tokenization_kwargs="):
        llm.score("a", "b", tokenization_kwargs={"truncation": True})
    with pytest.raises(ConfigError, match="^chat_template=.*not available yet"):
        llm.score("a", "b", chat_template="x")
    assert llm.supported_tasks == ("embed", "score")
