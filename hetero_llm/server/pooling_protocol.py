"""The JSON objects of the routes for models that pool. Names are OpenAI's, Jina's, Cohere's and
vLLM's. Every field of a request may be null, which means that it was not given."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

# requests


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all these routes share."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    mm_processor_kwargs: Any = None
    lora_request: Any = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """`prompt_name` names a prompt of config_sentence_transformers.json to put before each text."""

    input: str | list[Any] | None = None
    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    messages: Any = None


class ClassifyRequest(PoolingFields, kw_only=True):
    input: str | list[Any] | None = None
    messages: Any = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: str | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """`top_n`: 0 or none for all; `max_tokens_per_doc` is Cohere's name of a limit on tokens."""

    query: str | None = None
    documents: list[Any] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    rank_fields: Any = None


class ScoreRequest(PoolingFields, kw_only=True):
    """Two texts or lists of texts, under one of three pairs of names."""

    text_1: str | list[Any] | None = None
    text_2: str | list[Any] | None = None
    data_1: str | list[Any] | None = None
    data_2: str | list[Any] | None = None
    queries: str | list[Any] | None = None
    documents: str | list[Any] | None = None


UNAVAILABLE = {
    "messages": "an embedding of a conversation",
    "mm_processor_kwargs": "input other than text",
    "lora_request": "an adapter beside the model (its name is the model's)",
    "rank_fields": "ranking by fields of a document",
    "max_tokens_per_doc": "a limit on each document (truncate_prompt_tokens limits query and "
    "document together)",
}
"""Request fields of features that are not available, and what messages call the feature."""


# responses


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class Embedding(msgspec.Struct):
    """`embedding` is JSON already: a list of numbers, or base64 of float32 in little endian."""

    index: int
    embedding: msgspec.Raw
    object: str = "embedding"


class Embeddings(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: str = "list"


class Pooling(msgspec.Struct):
    """`data`: as `Embedding.embedding`."""

    index: int
    data: msgspec.Raw
    object: str = "pooling"


class Poolings(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Pooling]
    usage: PoolingUsage
    object: str = "list"


class Classification(msgspec.Struct):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: str = "list"


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class Scores(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: str = "list"


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class Reranked(msgspec.Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
