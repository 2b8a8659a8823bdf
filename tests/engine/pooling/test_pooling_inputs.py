"""Tokens of texts and pairs as transformers makes them, cut as transformers cuts; exact errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import PoolingError, PromptError, RequestError
from hetero_llm.core.pooling import Finish
from hetero_llm.core.pooling_params import PoolingParams
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.pooling.pooling_inputs import PoolingInputs
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.pooling.pooling_model import read_pooling_model
from tests.pooling.tiny_pooling import make_pooling_checkpoint, text_of

PROMPTS = {"prompts": {"query": "w7 w8 ", "document": ""}, "default_prompt_name": None}


def inputs_of(folder: Path, **given: Any) -> PoolingInputs:
    config = EngineConfig.from_args(resolve_engine_args({"model": str(folder), **given}))
    model = read_pooling_model(folder, config)
    assert model is not None
    return PoolingInputs(load_tokenizer(folder, mode="auto", trust_remote_code=False), model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_pooling_checkpoint(folder, "BertModel", pooling="mean", prompts=PROMPTS)


@pytest.fixture(scope="module")
def made(folder: Path) -> PoolingInputs:
    return inputs_of(folder)


def tokens(made: PoolingInputs, text: str | list[int], **fields: Any) -> list[int]:
    prompt = Prompt(text) if isinstance(text, str) else Prompt(token_ids=text)
    (one,) = made.prompts([prompt], [PoolingParams(**fields)], name_index=False)
    found: list[int] = one.token_ids.tolist()
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [3, 7, 12, 40])
def test_texts_are_cut_as_transformers_cuts_them(
    folder: Path, made: PoolingInputs, limit: int, side: str
) -> None:
    own = load_tokenizer(folder, mode="auto", trust_remote_code=False).hf
    own.truncation_side = side
    texts = [text_of(length, length) for length in (1, 5, 10, 60)]
    for text in texts:
        wanted = own(text, truncation=True, max_length=limit)["input_ids"]
        found = tokens(made, text, truncate_prompt_tokens=limit, truncation_side=side)
        assert found == wanted
    params = PoolingParams(truncate_prompt_tokens=limit + 2, truncation_side=side)
    for first in texts:
        for second in texts:
            wanted = own(first, second, truncation=True, max_length=limit + 2)
            (pair,) = made.pairs([(first, second)], params, name_index=False)
            assert pair.token_ids.tolist() == wanted["input_ids"], (first, second)
            types = [0] * len(pair) if pair.types is None else pair.types.tolist()
            assert types == wanted["token_type_ids"]


def test_what_the_tokenizers_file_asks_for_is_not_done(made: PoolingInputs) -> None:
    """Its tokenizer.json cuts to 16 tokens and pads to 16."""
    assert len(tokens(made, text_of(60))) == 62
    assert tokens(made, "w0") == [2, 6, 3]


def test_token_ids_are_taken_as_they_are(made: PoolingInputs) -> None:
    assert tokens(made, [5, 6, 7, 8]) == [5, 6, 7, 8]
    assert tokens(made, [5, 6, 7, 8], truncate_prompt_tokens=3) == [5, 6, 7]
    left = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    assert tokens(made, [5, 6, 7, 8], **left) == [6, 7, 8]
    assert len(tokens(made, [5] * 500, truncate_prompt_tokens=-1)) == 128


def test_prompts_go_before_texts(folder: Path, made: PoolingInputs, tmp_path: Path) -> None:
    assert tokens(made, "w0", prompt_name="query") == [2, 13, 14, 6, 3]
    assert tokens(made, "w0", prompt_name="document") == tokens(made, "w0") == [2, 6, 3]
    assert tokens(made, [6], prompt_name="query") == [6]
    default = {**PROMPTS, "default_prompt_name": "query"}
    make_pooling_checkpoint(tmp_path, "BertModel", pooling="mean", prompts=default)
    prompted = inputs_of(tmp_path)
    assert tokens(prompted, "w0") == [2, 13, 14, 6, 3]
    assert tokens(prompted, "w0", prompt_name="") == [2, 6, 3]


def test_a_huge_text_is_cut_before_it_is_tokenized(made: PoolingInputs) -> None:
    text = text_of(40_000)
    found = tokens(made, text, truncate_prompt_tokens=-1)
    assert found == tokens(made, text[:5000], truncate_prompt_tokens=-1)


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        (["w0", ""], {}, "prompt 1: prompt='': is empty"),
        (["w0", "\ud800"], {}, "prompt 1: prompt='\\ud800': holds half a surrogate pair"),
        (
            [text_of(127)],
            {},
            "prompt 0: prompt='129 tokens': exceeds max_model_len (128); "
            "truncate_prompt_tokens=-1 cuts it",
        ),
        ([[]], {}, "prompt 0: prompt_token_ids=[]: is empty (no tokens)"),
        ([[3, 96]], {}, "prompt 0: prompt_token_ids=96: is outside the vocabulary (0 to 95)"),
        ([[True]], {}, "prompt 0: prompt_token_ids=True: must be integers"),
        (
            ["w0"],
            {"truncate_prompt_tokens": 129},
            "prompt 0: truncate_prompt_tokens=129: must be at most max_model_len (128)",
        ),
        (
            [text_of(9)],
            {"truncate_prompt_tokens": 2},
            "prompt 0: truncate_prompt_tokens=2: leaves no room for a text beside 2 special tokens",
        ),
        (
            ["w0"],
            {"prompt_name": "none"},
            "prompt 0: prompt_name='none': the model's prompts are 'query', 'document'",
        ),
    ],
)
def test_wrong_inputs(
    made: PoolingInputs, prompts: list[Any], fields: dict[str, Any], message: str
) -> None:
    each = [Prompt(one) if isinstance(one, str) else Prompt(token_ids=one) for one in prompts]
    params = [PoolingParams(**fields)] * len(each)
    with pytest.raises(RequestError) as caught:
        made.prompts(each, params, name_index=True)
    assert str(caught.value).startswith(message)
    assert type(caught.value) in (PromptError, PoolingError)


def test_what_becomes_of_the_values(folder: Path) -> None:
    lengths = {"matryoshka_dimensions": [4, 8]}
    made = inputs_of(folder, hf_overrides=lengths)
    assert made.finish_of(PoolingParams(), "embed") == Finish(normalize=True)
    wanted = PoolingParams(dimensions=8, normalize=False)
    assert made.finish_of(wanted, "embed") == Finish(8, False)
    for fields, task, message in (
        ({"dimensions": 5}, "embed", "dimensions=5: must be one of 4, 8"),
        ({"use_activation": True}, "embed", "use_activation=True: is for classifiers"),
        ({"task": "score"}, "embed", "task='score': this call is for the task 'embed'"),
        ({}, "classify", "task='classify': this model serves 'embed' and 'score'; a model for"),
    ):
        with pytest.raises(PoolingError) as caught:
            made.finish_of(PoolingParams(**fields), task)
        assert str(caught.value).startswith(message)
    with pytest.raises(PoolingError, match="this model's embeddings cannot be cut"):
        inputs_of(folder).finish_of(PoolingParams(dimensions=4), "embed")
    any_length = inputs_of(folder, hf_overrides={"is_matryoshka": True})
    with pytest.raises(PoolingError, match="the model's embeddings have 32 entries"):
        any_length.finish_of(PoolingParams(dimensions=33), "embed")
