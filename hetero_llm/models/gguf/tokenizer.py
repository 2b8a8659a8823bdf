"""The tokenizer of a GGUF file as one of transformers: vocabulary, merges or scores, special tokens
and chat template are in the metadata (`tokenizer.ggml.*`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.gguf.container import GgufHeader, Strings, read_header

logger = logging.getLogger(__name__)

# Kinds of tokens (`llama_token_type` of llama.h).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_KINDS = range(7)  # with 0, undefined, and 5, unused
_SPACE = "\u2581"
_MOST_TOKENS = 1 << 20  # of the known ones, Gemma's are the most: 262,144
_LONGEST_PIECE = 1 << 10  # characters; SentencePiece's trainer makes pieces of 16
_MERGES_A_TOKEN, _LEAST_LIMIT, _MOST_MERGES = 16, 1 << 16, 4 << 20
"""Of pairs of tokens that make one: Gemma's vocabulary has 580,000, 2.2 a token."""
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How byte-level BPE splits a text into words.

    Attributes:
        patterns: each splits what the ones before it left, at its matches.
        nfc: the text is brought into Unicode's form C first.
        whole_words: a word that is a token is that token, whatever the merges say.
        adds_bos: where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_SPLITS: Mapping[str, _Split] = MappingProxyType(
    {
        "gpt-2": _Split((_WORDS,)),
        "smollm": _Split((r"\p{N}", _WORDS)),
        "llama-bpe": _Split((_LLAMA3,), whole_words=True, adds_bos=True),
        "qwen2": _Split((_QWEN2,), nfc=True),
        "tekken": _Split((_TEKKEN,), whole_words=True, adds_bos=True),
    }
)
"""By `tokenizer.ggml.pre`. The patterns are those of the models' own tokenizer.json, which
llama-vocab.cpp rewrites for its engine."""
_SAME_SPLIT = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2",
    "phi-2": "gpt-2", "starcoder": "smollm", "refact": "smollm",
}  # fmt: skip
_OF_ARCHITECTURE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


def read_gguf_tokenizer(path: Path) -> Any:
    """A `transformers.PreTrainedTokenizerFast`.

    Raises:
        ModelLoadError: the file has no tokenizer, or one that is damaged or of a kind that is not
            supported.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(read_header(path))
    model = vocabulary.header.text("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in makers:
        reason = "supported are " + ", ".join(makers)
        raise vocabulary.header.bad("tokenizer.ggml.model", reason)
    names = {
        "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    }  # fmt: skip
    special = {name: vocabulary.special(key) for name, key in names.items()}
    try:
        fast, adds_bos = makers[model](vocabulary)
        _add_tokens(fast, vocabulary)
        _add_template(fast, vocabulary, adds_bos)
        hf = PreTrainedTokenizerFast(
            tokenizer_object=fast,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in special.items() if token is not None},
        )
    except ModelLoadError:
        raise
    except Exception as error:  # the library's own, of several kinds
        raise ModelLoadError(f"{path}: no usable tokenizer: {error}") from error
    template = vocabulary.header.metadata.get("tokenizer.chat_template")
    if template is not None:
        hf.chat_template = vocabulary.header.text("tokenizer.chat_template")
    return hf


class _Vocabulary:
    """Tokens of the file and what it says of them.

    Attributes:
        tokens: by id.
        kinds: by id.
        ids: by token; of several equal ones the first.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        tokens = self._array("tokens", Strings)
        if not 1 <= len(tokens) <= _MOST_TOKENS:
            raise self.bad("tokens", f"{len(tokens)} tokens, and 1 to {_MOST_TOKENS} are read")
        self.tokens: list[str] = list(tokens)
        kinds = header.metadata.get("tokenizer.ggml.token_type")
        self.kinds = [_NORMAL] * len(self.tokens)
        if kinds is not None:
            self.kinds = list(self._numbers("token_type"))
            for kind in set(self.kinds).difference(_KINDS):
                raise self.bad("token_type", f"holds {kind}, and 0 to 6 are known")
        self.ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self.ids.setdefault(token, index)
        if len(self.ids) < len(self.tokens):
            logger.warning(
                "%s: %d tokens of the vocabulary are there twice; texts use the first ones",
                header.path, len(self.tokens) - len(self.ids),
            )  # fmt: skip

    def special(self, name: str) -> str | None:
        """The token of `tokenizer.ggml.{name}_token_id`; None if the file names none."""
        index = self.header.token_id(name)
        if index is None:
            return None
        if index >= len(self.tokens):
            key, size = f"tokenizer.ggml.{name}_token_id", len(self.tokens)
            raise self.header.bad(key, f"the vocabulary has {size} tokens")
        return self.tokens[index]

    def merges(self) -> list[tuple[str, str]]:
        """Pairs, the first to be merged first."""
        found = []
        for line in self._array("merges", Strings):
            at = line.find(" ", 1)
            if at < 0:
                raise self.bad("merges", f"{shown(line)} is no pair of tokens")
            found.append((line[:at], line[at + 1 :]))
        return found

    def scores(self) -> Sequence[float]:
        scores = self._numbers("scores")
        if not all(map(math.isfinite, scores)):
            raise self.bad("scores", "finite numbers are needed")
        return scores

    def of_kind(self, *kinds: int) -> Iterable[str]:
        wanted = set(kinds)
        return (t for t, kind in zip(self.tokens, self.kinds, strict=True) if kind in wanted)

    def _numbers(self, name: str) -> Sequence[Any]:
        values = self._array(name, list)
        if len(values) != len(self.tokens):
            raise self.bad(name, f"{len(values)} entries for {len(self.tokens)} tokens")
        if isinstance(values[0], bool) or not isinstance(values[0], (int, float)):
            raise self.bad(name, "numbers are needed")
        return values

    def _array(self, name: str, kind: type) -> Any:
        value = self.header.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            raise ModelLoadError(
                f"{self.header.path}: no usable tokenizer: the key 'tokenizer.ggml.{name}' is "
                "missing; name one with --tokenizer, or serve token ids alone with "
                "--skip-tokenizer-init"
            )
        if not isinstance(value, kind):
            raise self.bad(name, "an array of another type is needed")
        return value

    def bad(self, name: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.header.path}: tokenizer.ggml.{name}: {reason}")


def _byte_level(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """Byte-level BPE, as GPT-2's. Returns whether texts begin with the BOS token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _split_of(vocabulary.header)
    fast = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=split.whole_words
        )
    )
    if split.nfc:
        fast.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    return fast, split.adds_bos


def _split_of(header: GgufHeader) -> _Split:
    """Files of early 2024 and before do not name their split: then it is that of the family."""
    key = "tokenizer.ggml.pre"
    name = header.text(key, "default")
    if name == "default":
        family = header.text("general.architecture")
        if family not in _OF_ARCHITECTURE:
            raise header.bad(key, f"not known for {family}")
        name = _OF_ARCHITECTURE[family]
        logger.warning(
            "%s: %s does not say how texts are split into words: taken as %s",
            header.path,
            key,
            name,
        )
    name = _SAME_SPLIT.get(name, name)
    if name not in _SPLITS:
        raise header.bad(key, "supported are " + ", ".join((*_SPLITS, *_SAME_SPLIT)))
    return _SPLITS[name]


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """SentencePiece's BPE: of two merges the one with the better score goes first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    prefix = vocabulary.header.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = vocabulary.special("unknown") or next(iter(vocabulary.of_kind(_UNKNOWN)), None)
    has_bytes = _BYTE in vocabulary.kinds
    if unknown is None and not has_bytes:
        reason = "needed in a vocabulary without tokens of single bytes"
        raise vocabulary.header.bad("tokenizer.ggml.unknown_token_id", reason)
    fast = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_of_scores(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    fast.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    fast.decoder = decoders.Sequence(steps)
    return fast, True


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, best first: score of the result, then as
    transformers' converter of SentencePiece models orders them.

    Raises:
        ModelLoadError: a token, or the list of merges, is longer than that of any vocabulary.
    """
    scores, ids = vocabulary.scores(), vocabulary.ids
    pairs: list[tuple[float, int, int, str, str]] = []
    most = min(_MOST_MERGES, max(_LEAST_LIMIT, _MERGES_A_TOKEN * len(ids)))
    for token in {*vocabulary.of_kind(_NORMAL, _USER_DEFINED)}:
        if len(token) > _LONGEST_PIECE:
            reason = f"{shown(token)} has {len(token)} characters, and {_LONGEST_PIECE} are read"
            raise vocabulary.bad("tokens", reason)
        pairs += (
            (-scores[ids[token]], ids[token[:at]], ids[token[at:]], token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in ids and token[at:] in ids
        )
        if len(pairs) > most:
            raise vocabulary.bad("tokens", f"more than {most} pairs of them make a token")
    pairs.sort(key=lambda pair: (pair[0], -len(pair[3]), -len(pair[4]), pair[1], pair[2]))
    return [(left, right) for *_, left, right in pairs]


def _add_tokens(fast: Any, vocabulary: _Vocabulary) -> None:
    """Tokens that are never parts of words: control tokens, which decoding may skip, and those
    that the model's authors added."""
    from tokenizers import AddedToken

    def added(kinds: tuple[int, ...], *, special: bool) -> list[Any]:
        found = dict.fromkeys(vocabulary.of_kind(*kinds))
        return [AddedToken(t, normalized=False, special=special) for t in found if t]

    fast.add_special_tokens(added((_CONTROL, _UNKNOWN), special=True))
    fast.add_tokens(added((_USER_DEFINED,), special=False))


def _add_template(fast: Any, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Sets which tokens go around a text."""
    from tokenizers import processors

    header = vocabulary.header
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    for name, token in (("bos", bos), ("eos", eos)):
        flag = f"tokenizer.ggml.add_{name}_token"
        if token is None and header.flag(flag, False):
            raise header.bad(flag, f"the file has no tokenizer.ggml.{name}_token_id")
    before = ["bos"] if header.flag("tokenizer.ggml.add_bos_token", adds_bos) and bos else []
    after = ["eos"] if header.flag("tokenizer.ggml.add_eos_token", False) and eos else []
    if not before and not after:
        return
    # Names of our own: a token with a colon or a dollar sign would mean something in a template.
    fast.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{name}:1" for name in before), "$B:1",
              *(f"{name}:1" for name in after)],
        special_tokens=[
            {"id": name, "ids": [vocabulary.ids[token]], "tokens": [token]}
            for name, token in (("bos", bos), ("eos", eos))
            if name in (*before, *after) and token is not None
        ],
    )  # fmt: skip
