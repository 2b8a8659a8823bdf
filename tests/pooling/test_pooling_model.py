"""What the files of a folder and the arguments say about pooling; no weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.pooling.pooling_model import PoolingModel, read_pooling_model
from tests.pooling.tiny_pooling import make_pooling_checkpoint, write_modules


def read(folder: Path, **given: Any) -> PoolingModel | None:
    config = EngineConfig.from_args(resolve_engine_args({"model": str(folder), **given}))
    return read_pooling_model(folder, config)


def config_of(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pooling_checkpoint(tmp_path_factory.mktemp("bert"), "BertModel")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pooling_checkpoint(tmp_path_factory.mktemp("qwen"), "Qwen3ForCausalLM")


def test_a_causal_model_pools_only_if_something_says_so(qwen: Path, tmp_path: Path) -> None:
    assert read(qwen) is None and read(qwen, task="generate") is None
    asked = read(qwen, runner="pooling")
    assert asked is not None and asked.pooling == "LAST" and asked.normalize
    assert asked.decoder is not None and asked.tasks == ("embed", "score")
    make_pooling_checkpoint(tmp_path, "Qwen3ForCausalLM", pooling="lasttoken")
    assert read(tmp_path) is not None
    assert read(tmp_path, runner="generate") is None


def test_encoders(bert: Path, tmp_path: Path) -> None:
    model = read(bert)
    assert model is not None and model.decoder is None and model.pooling == "CLS"
    assert (model.hidden_size, model.embedding_size, model.max_model_len) == (32, 32, 128)
    mean = read(bert, pooler_config={"pooling_type": "MEAN", "normalize": False})
    assert mean is not None and mean.pooling == "MEAN" and not mean.normalize
    make_pooling_checkpoint(tmp_path, "RobertaModel")
    roberta = read(tmp_path)  # 129 positions, of which the first follows the padding token's
    assert roberta is not None and roberta.max_model_len == 128


def test_bidirectional_decoders_run_on_transformers(qwen: Path) -> None:
    model = read(qwen, runner="pooling", hf_overrides={"is_causal": False})
    assert model is not None and model.decoder is None


def test_max_seq_length_is_a_default(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "BertModel", pooling="mean", max_seq_length=24)
    model, longer = read(tmp_path), read(tmp_path, max_model_len=100)
    assert model is not None and model.max_model_len == 24
    assert longer is not None and longer.max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len=129: the model's context length is 128"):
        read(tmp_path, max_model_len=129)


def test_classes(tmp_path: Path) -> None:
    name = "BertForSequenceClassification"
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    make_pooling_checkpoint(tmp_path, name, changes=labels)
    model = read(tmp_path)
    assert model is not None and model.labels == ("bad", "good") and model.tasks == ("classify",)
    assert model.activation == "softmax"
    config_of(tmp_path, problem_type="multi_label_classification")
    several = read(tmp_path)
    assert several is not None and several.activation == "sigmoid"
    config_of(tmp_path, id2label={"0": "fits"}, sentence_transformers={
        "activation_fn": "torch.nn.modules.linear.Identity"})  # fmt: skip
    one = read(tmp_path)
    assert one is not None and one.tasks == ("classify", "score") and one.score_activation == ""
    embeds = read(tmp_path, convert="embed")
    assert embeds is not None and embeds.tasks == ("embed", "score")


def test_prompts_and_dense_layers(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}
    make_pooling_checkpoint(tmp_path, "BertModel", pooling="mean", prompts=prompts)
    modules = json.loads((tmp_path / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([*modules[:2], dense, modules[2]]))
    (tmp_path / "2_Dense").mkdir()
    settings = {"in_features": 32, "out_features": 8, "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    model = read(tmp_path)
    assert model is not None and model.prompts == {"query": "Q: "}
    assert model.default_prompt == "query"
    assert model.embedding_size == 8 and model.dense[0].activation == "tanh"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "{}", "a list of modules is needed"),
        (
            "modules.json",
            '[{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.CNN", "path": ""}]',
            "the module 'a.CNN' is not supported",
        ),
        (
            "modules.json",
            '[{"type": "a.MLMTransformer"}, {"type": "a.SpladePooling"}]',
            "modules.json: has no module that pools as an embedding model does",
        ),
        (
            "modules.json",
            '[{"path": "../x", "type": "sentence_transformers.models.Pooling"}]',
            "path='../x': must be inside the model's folder",
        ),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            "the pooling mode is max; supported is one of cls, mean, lasttoken",
        ),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}',
            "the pooling mode is cls and mean; supported is one of",
        ),
        (
            "1_Pooling/config.json",
            '{"pooling_mode": "mean", "include_prompt": false}',
            "include_prompt=false is not supported",
        ),
        (
            "config_sentence_transformers.json",
            '{"prompts": {}, "default_prompt_name": "q"}',
            "default_prompt_name='q': is not among the prompts",
        ),
    ],
)
def test_files_that_cannot_be_followed(
    bert: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    write_modules(tmp_path, "mean", normalize=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"convert": "classify"}, "convert='classify': BertModel has no classifier"),
        ({"model_impl": "native"}, "model_impl='native': BertModel has no native implementation"),
        ({"rope_theta": 2.0}, "rope_theta=2.0: needs a native implementation"),
        ({"pooler_config": {"dimensions": 4}}, "pooler_config.dimensions=4: the model's config"),
    ],
)
def test_arguments_that_do_not_fit(bert: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(bert, **given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "not supported with a pooling model"),
        ({"matryoshka_dimensions": "4"}, "a list of integers is needed"),
        ({"classifier_from_token": [1, 2]}, ""),
        ({"is_encoder_decoder": True}, "is an encoder with a decoder"),
    ],
)
def test_configs_that_cannot_be_followed(
    bert: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    config_of(tmp_path, **changes)
    if not message:  # means something to a classifier alone
        assert read(tmp_path) is not None
        return
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path)
    assert message in str(caught.value)
