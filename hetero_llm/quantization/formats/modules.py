"""Names of modules, as lists of modules that are stored as plain weights have them; and the formats
that store all other modules alike."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hetero_llm.quantization.formats.options import pattern
from hetero_llm.quantization.formats.scheme import Scheme

_HEADS = ("lm_head", "embed_out", "output_layer", "output")
_EMBEDDINGS = (
    *("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embedding"),
    *("embeddings", "embed"),
)


def is_head(module: str) -> bool:
    """Whether a module is the output head, by the names that families store it under. Most tools
    leave it as it is unless they are asked for it, and then do not list it."""
    last = module.rpartition(".")[2]
    return last in _HEADS and not (last == "output" and ".layers." in f".{module}.")


def is_embedding(module: str) -> bool:
    """Whether a module is the embedding of tokens, which a tied head multiplies with. Tools that
    quantize `Linear` layers leave it as it is."""
    return module.rpartition(".")[2] in _EMBEDDINGS


class PlainModules:
    """Modules that a checkpoint stores as plain weights.

    An entry is a part of the name between dots ("mlp.gate" of "model.layers.0.mlp.gate", not of
    "model.layers.0.mlp.gate_proj"), or a regular expression that the name begins with, up to a dot
    ("re:" before it is left out), after transformers' `should_convert_module`. Some writers take an
    entry that stands anywhere in the name, "gate" for "gate_proj" (AutoAWQ): the
    loader finds such a matrix plain in the files.

    Raises:
        ValueError: an entry is no regular expression.
    """

    def __init__(self, key: str, entries: Iterable[str]) -> None:
        self._parts: set[str] = set()
        self._patterns: list[re.Pattern[str]] = []
        for entry in entries:
            text = entry.removeprefix("re:")
            if entry == text and not set(text) & set("*+?^$()[]{}|\\"):
                self._parts.add(text)
            else:
                self._patterns.append(pattern(key, f"(?:{text})(?:(?<=\\.)|(?=\\.|$))"))

    def __contains__(self, module: str) -> bool:
        dotted = f".{module}."
        return any(f".{part.strip('.')}." in dotted for part in self._parts) or any(
            one.match(module) for one in self._patterns
        )


@dataclass(frozen=True, slots=True)
class UniformFormat:
    """A `CheckpointFormat` that stores all matrices alike, but for the embedding and some others.

    Attributes:
        matrix: how it stores them.
        plain: modules with plain weights.
        head: the output head is stored so, too, unless it is one of `plain`.
    """

    name: str
    matrix: Scheme
    plain: PlainModules
    head: bool = False

    def scheme(self, module: str) -> Scheme | None:
        if module in self.plain or is_embedding(module) or (is_head(module) and not self.head):
            return None
        return self.matrix
