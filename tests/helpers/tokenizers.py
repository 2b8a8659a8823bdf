"""Small tokenizers of each kind: bytes as text, sentencepiece with byte fallback, metaspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hetero_llm.engine.text.tokenizer import Tokenizer

SPECIALS = ["<pad>", "<s>", "</s>"]
SPACE = "\u2581"
WORDS = (*(SPACE + "abcdwxyz"), SPACE + "a", SPACE + "w")
"""Pieces of `sentencepiece`, ids 259 and up, and of `metaspace`, ids 3 and up."""
LONGER = (b" w", b" \xe4", b"\xb8\xad", b"a\xf0\x9f", b"\x98\x80b", b"ab\xe2", b"\x80\x8dab")
"""Pieces of `byte_level`, ids 259 and up; only the first one is ever made from text."""


def wrapped(tokenizer: FastTokenizer) -> Tokenizer:
    pad, bos, eos = SPECIALS
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos
        )
    )


def byte_level() -> Tokenizer:
    """As GPT-2's: id 3 + b is byte b, shown as a printable character; the pieces of `LONGER` are
    tokens as well."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    longer = ["".join(alphabet[byte] for byte in piece) for piece in LONGER]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet, *longer])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: a space is part of the word, it is stripped at the start of a text, unknown
    characters are byte tokens, and a run of those is decoded as one."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = FastTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[(SPACE, "a"), (SPACE, "w")],
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(tokenizer)


def metaspace() -> Tokenizer:
    pieces = [*SPECIALS, *WORDS]
    tokenizer = FastTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[(SPACE, "a"), (SPACE, "w")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return wrapped(tokenizer)


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
}


class WithoutFastCore:
    """A tokenizer of transformers as one that is written in Python looks."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf_tokenizer = hf_tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self._hf_tokenizer, name)


def get(kind: str, stream: str) -> Tokenizer:
    tokenizer = MAKERS[kind]()
    return tokenizer if stream == "fast" else Tokenizer(WithoutFastCore(tokenizer.hf))


TOKENIZERS = {(kind, stream): get(kind, stream) for kind in MAKERS for stream in ("fast", "slow")}

BYTES = {
    "byte_level": [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *LONGER],
    "sentencepiece": [
        *(b"", b"", b""),
        *(bytes([byte]) for byte in range(256)),
        *(piece.replace(SPACE, " ").encode() for piece in WORDS),
    ],
}
"""The bytes that each token adds to the text, special tokens skipped, by kind and token id."""
