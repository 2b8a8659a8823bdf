"""Token ids to text, token by token, in whole characters.

The text of an output is what its tokens add to the text of the prompt:

- A character that the prompt begins and the output completes belongs to the output. If the output
  does not complete it, its replacement character (U+FFFD) belongs to the prompt.
- A token whose bytes end inside a character adds that character with the token that completes it.
- When the output ends, `flush` adds the replacement character of bytes that stayed incomplete.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

REPLACEMENT = "\ufffd"

_LONGEST_CHARACTER = 4
"""Most bytes of one character in UTF-8, so most byte tokens of one."""
_CONTEXT_TOKENS = 4
"""Prompt tokens decoded along with the output: a text's first token may lose its space."""
_MOST_CONTEXT_TOKENS = 16
_MOST_HELD = 32
"""Tokens without a whole character after which no character is expected: they are shown as they
are, and a window does not grow for ever."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """The text that the tokens of one output add to that of its prompt."""

    def push(self, token_id: int) -> str:
        """Takes the next token. Returns the text that is now certain, maybe ""."""

    def flush(self) -> str:
        """Ends the text. Returns what `push` held back."""


class _Bytes:
    """Decodes the bytes of an output into whole characters.

    Args:
        prompt: the last bytes of the prompt, four if it has as many.
    """

    def __init__(self, prompt: bytes) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(prompt)
        self._prompt_is_open = bool(self._decoder.getstate()[0])

    def add(self, data: bytes, *, last: bool = False) -> str:
        text = self._decoder.decode(data, last)
        if text and self._prompt_is_open:
            self._prompt_is_open = False
            return text.removeprefix(REPLACEMENT)
        return text


class ByteStream:
    """For tokenizers whose text is the bytes of their tokens, one after another.

    Args:
        bytes_of: a token's bytes.
        skipped: tokens that are left out of the text.
        prompt_ids: the tokens before.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        skipped: Collection[int],
        prompt_ids: Sequence[int],
    ) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        tail = b""
        for token in reversed(prompt_ids):
            if token not in skipped:
                tail = bytes_of(token) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        self._bytes = _Bytes(tail)

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._bytes.add(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._bytes.add(b"", last=True)


class ByteFallbackStream:
    """For tokenizers that have tokens of one byte for characters that are no token.

    Runs of byte tokens are decoded here: where one byte of a run is wrong, the tokenizer would show
    each byte of it as U+FFFD, that of whole characters, too.

    Args:
        decode: token ids to text.
        byte_tokens: the byte of each byte token.
        skipped: tokens that are left out of the text.
        prompt_ids: the tokens before.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_tokens: Mapping[int, bytes],
        skipped: Collection[int],
        prompt_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens
        self._skipped = skipped
        self._some_text = [next(token for token, byte in byte_tokens.items() if byte == b"a")]
        tail = b""
        for token in reversed(prompt_ids):
            if token not in skipped:
                if token not in byte_tokens or len(tail) == _LONGEST_CHARACTER:
                    break
                tail = byte_tokens[token] + tail
        self._bytes = _Bytes(tail)
        self._in_bytes = bool(tail)
        self._tokens = WindowStream(decode, self._some_text if tail else prompt_ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        byte = self._byte_tokens.get(token_id)
        if byte is not None:
            before = "" if self._in_bytes else self._tokens.flush()
            self._in_bytes = True
            return before + self._bytes.add(byte)
        before = ""
        if self._in_bytes:
            before = self._bytes.add(b"", last=True)
            self._in_bytes = False
            # To the other tokens, any text before them is the same.
            self._tokens = WindowStream(self._decode, self._some_text)
        return before + self._tokens.push(token_id)

    def flush(self) -> str:
        return self._bytes.add(b"", last=True) if self._in_bytes else self._tokens.flush()


class WindowStream:
    """For all other tokenizers: decodes a short window of tokens with and without the new ones.

    The window holds tokens whose text has been returned, then those held back.

    Args:
        decode: token ids to text.
        prompt_ids: the tokens before.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        context, unfinished = _context(decode, prompt_ids)
        self._restart([*context, *unfinished], whole=decode(context))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        held = self._window[self._num_returned :]
        new = self._added(held)
        if (not new or new.endswith(REPLACEMENT)) and len(held) < _MOST_HELD:
            return ""
        self._restart(held)
        return new

    def flush(self) -> str:
        return self._added(self._window[self._num_returned :])

    def _restart(self, returned: list[int], whole: str = "") -> None:
        """Makes `returned`, tokens whose text has been returned, the window. `whole`: their text
        without an incomplete character at the end, if that is known."""
        self._window = returned
        self._num_returned = len(returned)
        self._before = self._decode(returned)
        self._whole = max(whole, self._before.rstrip(REPLACEMENT), key=len)

    def _added(self, held: list[int]) -> str:
        """The text of the tokens held back."""
        if not held:
            return ""
        text = self._decode(self._window)
        for before in (self._before, self._whole):
            if text.startswith(before):
                return text[len(before) :]
        return self._decode(held)  # they changed the text before them: take theirs alone


def _context(
    decode: Callable[[list[int]], str], prompt_ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Last tokens of the prompt: some in whole characters, and those of an incomplete one after
    them."""
    last = list(prompt_ids[-_MOST_CONTEXT_TOKENS:])
    for count in range(_LONGEST_CHARACTER):
        end = len(last) - count
        context = _whole_tail(decode, last[:end])
        if not decode(context).endswith(REPLACEMENT):
            return context, last[end:]
    return _whole_tail(decode, last), []


def _whole_tail(decode: Callable[[list[int]], str], token_ids: list[int]) -> list[int]:
    """A few last tokens with text that start with a whole character, if there are such."""
    best: list[int] = []
    fewest = None
    for length in range(_CONTEXT_TOKENS, _MOST_CONTEXT_TOKENS + 1):
        tail = token_ids[-length:]
        text = decode(tail)
        damaged = text.count(REPLACEMENT)
        if fewest is None or damaged < fewest or not damaged:
            best, fewest = tail, damaged
        inside = damaged and length < _CONTEXT_TOKENS + _LONGEST_CHARACTER - 1
        if length >= len(token_ids) or (text and not inside):
            break
    return best


# -- bytes of tokens ------------------------------------------------------------------------


def decoder_steps(backend: Any) -> list[str]:
    """What a fast tokenizer's decoder does, by the types of its steps."""
    if backend is None or backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", []) if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]


def piece_bytes(piece: str, *, byte_level: bool) -> bytes | None:
    """Exact bytes of a vocabulary entry, None where only the tokenizer knows."""
    if byte_level:
        alphabet = _byte_level_alphabet()
        try:
            return bytes(alphabet[character] for character in piece)
        except KeyError:
            return None
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    if "\u2581" in piece:  # SentencePiece's space, which decoding drops at a text's beginning
        return piece.replace("\u2581", " ").encode()
    return None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for characters above U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
