"""What a user gets from a pooling model. Fields have vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

O = TypeVar("O")  # noqa: E741  as in vLLM


@dataclass(slots=True)
class PoolingOutput:
    """The pooled values of one input: `data` is a float32 tensor, an embedding [D] or the
    probabilities of classes [C]."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding, D numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of the classes, in the order of the model's `id2label`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well a pair fits: the cross-encoder's score, or the cosine of two embeddings."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[O]):
    """The result of one input, or of one pair."""

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `LLM.embed`."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `LLM.classify`."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `LLM.score`."""

    __slots__ = ()
