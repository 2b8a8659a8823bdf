"""From a model folder to a `PoolingModel`: whether it pools, what it returns and how.

config.json names the class; files of sentence-transformers say how its hidden states are pooled;
the user's arguments come before both. Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetero_llm.config.engine_config import EngineConfig, LoadConfig, PoolingConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.core.pooling_params import CLASSIFY, EMBED, SCORE
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import LARGEST_SIZE, Reader, read_config, torch_dtype
from hetero_llm.models.configs.transformers import check_version, load_source
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import FAMILIES
from hetero_llm.pooling.sentence_transformers import (
    MODULES,
    DenseModule,
    SentenceModules,
    read_modules,
)

logger = logging.getLogger(__name__)

_CLASSIFIER = "ForSequenceClassification"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_GENERATES = (*_CAUSAL, "ForConditionalGeneration", "ChatModel")
_POOLS = (_CLASSIFIER, "ForMaskedLM", "ForTextEncoding", "EmbeddingModel", "Model")
"""Last parts of class names, as vLLM reads them."""
_POSITIONS_AFTER_PADDING = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "xmod",
     "data2vec-text", "mpnet", "longformer", "luke")
)  # fmt: skip
"""Model types whose first position is that of the padding token plus one."""
_TORCH_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "", "Softmax": "softmax"}


# large: one field for each thing that a model's files say about pooling.
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """A model that returns one vector for each input.

    Attributes:
        class_name: from `architectures`.
        decoder: its configuration if a class of `hetero_llm.models` computes it, with causal
            attention over a paged KV cache; None: transformers' class does.
        source: transformers' config object; None with `decoder`.
        longest: tokens that the model can take; `max_model_len` is how many are served.
        pooling: "CLS", "MEAN" or "LAST": which hidden states become the vector.
        normalize: embeddings are scaled to length 1 unless a request says otherwise.
        use_activation: `activation` is applied unless a request says otherwise.
        labels: names of the classes; empty for an embedding model.
        activation, score_activation: "sigmoid", "softmax" or "", of classes and of scores.
        label_tokens: tokens whose logits are the classes (Qwen3-Reranker), else empty.
        two_way: the only class is the second of `label_tokens` against the first.
        dense: layers behind the pooling.
        prompts, default_prompt, lower_case: see `SentenceModules`.
        matryoshka: embeddings may be cut; `matryoshka_dimensions`: to these lengths, if any are
            named.
        dimensions: length of embeddings for requests that do not ask for one; 0: all.
        has_segments: it tells the texts of a pair apart by segment (BERT).
    """

    class_name: str
    decoder: ModelConfig | None
    source: Any
    vocab_size: int
    hidden_size: int
    longest: int
    max_model_len: int
    torch_dtype: str
    pooling: str
    normalize: bool
    use_activation: bool = True
    labels: tuple[str, ...] = ()
    activation: str = ""
    score_activation: str = ""
    label_tokens: tuple[str, ...] = ()
    two_way: bool = False
    dense: tuple[DenseModule, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    dimensions: int = 0
    has_segments: bool = False
    trust_remote_code: bool = False

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None end an input: nothing is generated."""
        return ()

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def embedding_size(self) -> int:
        """Entries of an embedding that is not cut."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of `PoolingParams` that it serves; embeddings are scored by their cosine."""
        if not self.is_classifier:
            return (EMBED, SCORE)
        return (CLASSIFY, SCORE) if len(self.labels) == 1 else (CLASSIFY,)


def read_pooling_model(folder: Path, config: EngineConfig) -> PoolingModel | None:
    """Reads how a model pools; None if it generates.

    Raises:
        ModelLoadError: a file cannot be read, or names what is not supported.
        ConfigError: an argument does not fit the model.
    """
    load, wanted = config.load, config.pooling
    if wanted.runner == "generate":
        return None
    reader = read_config(folder, load.hf_overrides)
    names = reader.class_names()
    if not wanted.runner and not _pools(folder, names[0] if names else ""):
        return None
    if not names:
        raise reader.bad("architectures", "the name of the model's class is needed")
    if reader.raw.get("quantization_config"):
        raise reader.bad("quantization_config", "not supported with a pooling model")
    modules = read_modules(folder)
    classifies = wanted.convert == CLASSIFY or (
        not wanted.convert and modules is None and names[0].endswith(_CLASSIFIER)
    )
    if not classifies and modules is None and not wanted.pooling_type:
        _refuse_other_modules(folder)
    model = _decoder_model(folder, reader, names[0], load)
    if model is None:
        model = _encoder_model(reader, names[0], load)
    if classifies:
        model = _with_labels(model, reader)
    model = _with_modules(model, modules)
    return _with_arguments(model, reader, wanted, config.max_model_len)


def _refuse_other_modules(folder: Path) -> None:
    """Raises ModelLoadError: sentence-transformers' files name modules, but none that pools."""
    path = folder / MODULES
    if path.is_file():
        raise ModelLoadError(
            f"{path}: has no module that pools as an embedding model does; if there is a way, name "
            'it, as pooler_config={"pooling_type": "MEAN"}'
        )


def _pools(folder: Path, name: str) -> bool:
    """Whether the files of a model say that it pools."""
    if name in FAMILIES or name.endswith(_GENERATES):
        return read_modules(folder) is not None
    return name.endswith(_POOLS)


def _decoder_model(
    folder: Path, reader: Reader, name: str, load: LoadConfig
) -> PoolingModel | None:
    """A model that a decoder of `hetero_llm.models` computes; None if none does."""
    stem = name
    for ending in (_CLASSIFIER, *_CAUSAL, "Model"):
        stem = stem.removesuffix(ending)
    causal = next((stem + end for end in _CAUSAL if stem + end in FAMILIES), None)
    if causal is None or load.model_impl == "transformers":
        return None
    if reader.raw.get("is_causal") is False or reader.raw.get("use_bidirectional_attention"):
        return None
    decoder = load_model_config(
        folder,
        rope_scaling=load.rope_scaling,
        rope_theta=load.rope_theta,
        disable_sliding_window=load.disable_sliding_window,
        hf_overrides={**load.hf_overrides, "architectures": [causal]},
    )
    return PoolingModel(
        class_name=name,
        decoder=decoder,
        source=None,
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        longest=decoder.max_model_len,
        max_model_len=decoder.max_model_len,
        torch_dtype=decoder.torch_dtype,
        pooling="LAST",
        normalize=True,
    )


def _encoder_model(reader: Reader, name: str, load: LoadConfig) -> PoolingModel:
    """A model that transformers' class computes."""
    load.refuse_native_options(name, "rope_scaling", "rope_theta", "cpu_offload_gb")
    if load.model_impl == "native":
        reason = f"{name} has no native implementation; use auto or transformers"
        raise ConfigError("model_impl", load.model_impl, reason)
    check_version(reader.where, name)
    source = load_source(reader, trust_remote_code=load.trust_remote_code)
    if getattr(source, "is_encoder_decoder", False):
        raise reader.bad("architectures", f"{name} is an encoder with a decoder, not supported")
    text = source.get_text_config()
    longest = _size(reader, text, "max_position_embeddings")
    if getattr(source, "model_type", "") in _POSITIONS_AFTER_PADDING:
        longest -= (getattr(source, "pad_token_id", None) or 0) + 1
    if longest < 1:
        raise reader.bad("max_position_embeddings", "leaves no position for a token")
    return PoolingModel(
        class_name=name,
        decoder=None,
        source=source,
        vocab_size=_size(reader, text, "vocab_size"),
        hidden_size=_size(reader, text, "hidden_size"),
        longest=longest,
        max_model_len=longest,
        torch_dtype=torch_dtype(reader),
        pooling="CLS",
        normalize=True,
        has_segments=(getattr(text, "type_vocab_size", None) or 0) > 1,
        trust_remote_code=load.trust_remote_code,
    )


def _size(reader: Reader, text: Any, key: str) -> int:
    value = getattr(text, key, None)
    if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
        raise ModelLoadError(
            f"{reader.where}: {key}={shown(value)}: a pooling model needs an integer from 1 to "
            f"{LARGEST_SIZE}"
        )
    return value


def _with_labels(model: PoolingModel, reader: Reader) -> PoolingModel:
    raw = reader.raw
    tokens = raw.get("classifier_from_token") or ()
    if tokens:
        return _with_label_tokens(model, reader, tuple(tokens))
    if not model.class_name.endswith(_CLASSIFIER):
        raise ConfigError(
            "convert", CLASSIFY,
            f"{model.class_name} has no classifier; a class that ends in {_CLASSIFIER} has, or "
            "name tokens in hf_overrides: classifier_from_token",
        )  # fmt: skip
    named = raw.get("id2label")
    count = raw.get("num_labels", 2)
    if isinstance(named, Mapping):
        labels = tuple(str(named[key]) for key in sorted(named, key=lambda key: int(key)))
    elif type(count) is int and 1 <= count <= LARGEST_SIZE:
        labels = tuple(f"LABEL_{index}" for index in range(count))
    else:
        raise reader.bad("num_labels", "a positive integer is needed")
    if not labels:
        raise reader.bad("id2label", "is empty")
    usual = "sigmoid" if len(labels) == 1 else "softmax"
    kinds = {"regression": "", "multi_label_classification": "sigmoid"}
    score = _score_activation(reader)
    return replace(
        model,
        labels=labels,
        activation=kinds.get(str(raw.get("problem_type")), usual),
        score_activation=usual if score is None else score,
    )


def _with_label_tokens(
    model: PoolingModel, reader: Reader, tokens: tuple[Any, ...]
) -> PoolingModel:
    """A causal model that answers with one of these tokens, as Qwen3-Reranker does."""
    if not all(isinstance(token, str) for token in tokens) or model.decoder is None:
        raise reader.bad("classifier_from_token", "texts of tokens and a causal model are needed")
    method = "from_2_way_softmax" if reader.raw.get("is_original_qwen3_reranker") else None
    method = reader.raw.get("method", method)
    two_way = method == "from_2_way_softmax"
    if two_way and len(tokens) != 2:
        raise reader.bad("classifier_from_token", "from_2_way_softmax needs two tokens")
    labels = tokens[1:] if two_way else tokens
    usual = "sigmoid" if len(labels) == 1 else "softmax"
    return replace(
        model, labels=labels, label_tokens=tokens, two_way=two_way, activation=usual,
        score_activation=usual,
    )  # fmt: skip


def _score_activation(reader: Reader) -> str | None:
    """The function that a cross-encoder of sentence-transformers names for its scores."""
    own = reader.raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    key = "sentence_transformers" if name else "sbert_ce_default_activation_function"
    name = name or reader.raw.get(key)
    if name is None:
        return None
    function = str(name).rpartition(".")[2]
    if function not in _TORCH_ACTIVATIONS:
        raise reader.bad(key, f"supported are {', '.join(_TORCH_ACTIVATIONS)}")
    return _TORCH_ACTIVATIONS[function]


def _with_modules(model: PoolingModel, modules: SentenceModules | None) -> PoolingModel:
    if modules is None:
        return model
    length = model.longest
    if modules.max_seq_length is not None:
        length = min(length, modules.max_seq_length)
    return replace(
        model,
        pooling=modules.pooling,
        normalize=modules.normalize,
        max_model_len=length,
        dense=modules.dense,
        prompts=modules.prompts,
        default_prompt=modules.default_prompt,
        lower_case=modules.lower_case,
    )


def _with_arguments(
    model: PoolingModel, reader: Reader, wanted: PoolingConfig, max_model_len: int | None
) -> PoolingModel:
    if max_model_len is not None and max_model_len > model.longest:
        reason = f"the model's context length is {model.longest}"
        raise ConfigError("max_model_len", max_model_len, reason)
    lengths = reader.raw.get("matryoshka_dimensions") or ()
    if not isinstance(lengths, list | tuple) or not all(type(one) is int for one in lengths):
        raise reader.bad("matryoshka_dimensions", "a list of integers is needed")
    if wanted.pooling_type and model.is_classifier and model.decoder is None:
        reason = f"{model.class_name} has a head that pools by itself"
        raise ConfigError("pooler_config", wanted.pooling_type, reason)
    matryoshka = reader.flag("is_matryoshka", False) or bool(lengths)
    cut = wanted.dimensions
    if cut and (not matryoshka or (lengths and cut not in lengths) or cut > model.embedding_size):
        reason = "the model's config.json does not allow this length of embeddings"
        raise ConfigError("pooler_config.dimensions", cut, reason)
    return replace(
        model,
        max_model_len=max_model_len or model.max_model_len,
        pooling=wanted.pooling_type or model.pooling,
        normalize=model.normalize if wanted.normalize is None else wanted.normalize,
        use_activation=wanted.use_activation is not False,
        matryoshka=matryoshka,
        matryoshka_dimensions=tuple(lengths),
        dimensions=cut,
    )
