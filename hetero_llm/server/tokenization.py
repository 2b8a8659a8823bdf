"""Prompts to token ids, off the event loop, and token ids to what answers show."""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from hetero_llm.server.errors import context_exceeded, invalid
from hetero_llm.server.templates import ChatTemplate

if TYPE_CHECKING:
    from hetero_llm.engine.images import ImageInputs
    from hetero_llm.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_THREADS = 2
_SHORT = 512
_TRUNCATED_CONTEXTS = 8
"""A text that is cut to its last tokens may be this many contexts long before."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Texts:
    """The tokenizer as the API needs it.

    Long texts are encoded in two threads: the tokenizers library lets go of the GIL, and a long
    prompt must not keep other requests waiting.

    Args:
        max_model_len: in tokens.
        chat_template: Jinja text instead of the tokenizer's own template.
        template_seconds: what rendering one conversation may take.
        images: prepares those of conversations; None if the model takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        chat_template: str | None = None,
        template_seconds: float = 5.0,
        images: ImageInputs | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.images = images
        self.max_model_len = max_model_len
        self.chat_template = None
        if tokenizer is not None:
            self.chat_template = _template(tokenizer.hf, chat_template, template_seconds)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._image_pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")

    def begin(self) -> None:
        """Starts what the first conversation would have to wait for."""
        if self.chat_template is not None:
            self.chat_template.begin()

    def close(self) -> None:
        """Ends the threads and processes; nothing more can be asked."""
        self._pool.shutdown(wait=False)
        self._image_pool.shutdown(wait=False)
        if self.chat_template is not None:
            self.chat_template.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def need(self, param: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: the engine was started without one.
        """
        if self._tokenizer is None:
            raise invalid(
                param, f"{param}: the server runs without a tokenizer; send a prompt of token ids"
            )
        return self._tokenizer

    async def in_image_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` on images, apart from those of others' texts."""
        return await asyncio.get_running_loop().run_in_executor(self._image_pool, work)

    async def in_thread(self, work: Callable[[], T], *, size: int) -> T:
        """Runs `work` on `size` characters or tokens; on few of them here, since a thread would
        have to wait for the event loop longer than the work takes."""
        if size <= _SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def encode(
        self, text: str, *, add_special_tokens: bool, truncated: bool, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text. `truncated`: only its last tokens will be used.

        Raises:
            ApiError: the text is empty, or longer than any text that fits.
        """
        tokenizer = self.need(param)
        if not text:
            raise invalid(param, f"{param}='': is empty")
        self.check_length(len(text), truncated=truncated, param=param)
        return await self.in_thread(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), size=len(text)
        )

    def check_length(self, chars: int, *, truncated: bool, param: str) -> None:
        """Refuses a text of this length if it cannot fit even when made of the longest tokens.

        Raises:
            ApiError: it cannot.
        """
        contexts = _TRUNCATED_CONTEXTS if truncated else 1
        if chars > contexts * self.max_model_len * self._longest_token:
            at_least = chars // self._longest_token
            raise context_exceeded(self.max_model_len, at_least, 1, param)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        tokenizer = self.need("tokens")
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def encode_rendered(self, text: str, guard: SpecialGuard | None) -> list[int]:
        """Token ids of a rendered conversation; call it in a thread."""
        tokenizer = self.need("messages")
        if guard is None:
            return tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for piece in guard.pieces(text):
            ids += [piece] if isinstance(piece, int) else self._encode_as_text(piece)
        return ids

    def with_special_tokens(self, token_ids: list[int]) -> list[int]:
        """What the tokenizer puts around every text, around these."""
        tokenizer = self.need("add_special_tokens")
        bare = tokenizer.encode("a", add_special_tokens=False)
        around = tokenizer.encode("a")
        at = next(i for i in range(len(around)) if around[i : i + len(bare)] == bare)
        return around[:at] + token_ids + around[at + len(bare) :]

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that control the model, by their text."""
        if self._tokenizer is None:
            return {}
        added = self._tokenizer.added_tokens
        ids = self._tokenizer.special_ids | ({self.images.token_id} if self.images else set())
        return {added[index]: index for index in ids if index in added}

    @cached_property
    def _longest_token(self) -> int:
        """In characters. Byte-level pieces have one per byte, so this is an upper bound."""
        assert self._tokenizer is not None
        return max(map(len, self._tokenizer.hf.get_vocab()), default=1)

    @cached_property
    def _encode_as_text(self) -> Callable[[str], list[int]]:
        """Encodes special tokens' texts like any other text, with a tokenizer of its own: the
        switch is a property of the tokenizer, and other threads use the first one."""
        assert self._tokenizer is not None
        hf = self._tokenizer.hf
        fast = getattr(hf, "backend_tokenizer", None)
        if fast is None:
            return lambda text: hf.encode(text, add_special_tokens=False, split_special_tokens=True)
        copy = type(fast).from_str(fast.to_str())
        copy.encode_special_tokens = True
        return lambda text: copy.encode(text, add_special_tokens=False).ids

    # -- single tokens ------------------------------------------------------------------------

    @lru_cache(maxsize=65536)  # noqa: B019  one object per process
    def token(self, token_id: int) -> tuple[str, bytes]:
        """A token's text, and its bytes: those of part of a character have the text U+FFFD."""
        if self._tokenizer is None:
            return f"token_id:{token_id}", b""
        text = self._tokenizer.decode_token(token_id)
        data = text.encode()
        if token_id in self._tokenizer.added_tokens:
            return text, data
        piece = self._tokenizer.hf.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return text, data
        exact = _piece_bytes(piece, self._byte_alphabet)
        if exact is None:
            return text, data
        try:
            return exact.decode(), exact
        except UnicodeDecodeError:
            return text, exact

    @cached_property
    def _byte_alphabet(self) -> dict[str, int] | None:
        """What each character of a byte-level piece stands for; None for other tokenizers."""
        assert self._tokenizer is not None
        fast = getattr(self._tokenizer.hf, "backend_tokenizer", None)
        if fast is None or "ByteLevel" not in repr(fast.decoder):
            return None
        return _byte_level_alphabet()


class TextOffsets:
    """Where each token of a text begins, in characters, though tokens may end inside one."""

    def __init__(self, texts: Texts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skipped = frozenset[int]()
        if skip_special_tokens and texts.tokenizer is not None:
            self._skipped = texts.tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0

    def next(self, token_id: int, shown_in: str | None = None) -> int:
        """The offset of this token, which follows those of the calls before. Special tokens take
        no place unless `shown_in`, the text, has them there, as a prompt may."""
        here = self._position
        text, data = self._texts.token(token_id)
        shown = shown_in is not None and shown_in.startswith(text, here)
        if shown or token_id not in self._skipped:
            self._position += len(self._decoder.decode(data))
        return here


class SpecialGuard:
    """Keeps text that users wrote apart from the special tokens that a template writes.

    Inside users' text every special token's text is replaced by a private character before the
    template sees it. Later the template's own become ids, and the private characters text again.
    """

    def __init__(self, special_tokens: dict[str, int], texts: Sequence[str]) -> None:
        self._ids = special_tokens
        joined = set("".join(texts))
        names = sorted(special_tokens, key=len, reverse=True)
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in joined)
        self._stand_in = dict(zip(names, free, strict=False))
        self._original = {private: name for name, private in self._stand_in.items()}
        self._special = re.compile("|".join(map(re.escape, names)))
        self._private = re.compile("|".join(map(re.escape, self._original)))

    def hide(self, text: str) -> str:
        return self._special.sub(lambda match: self._stand_in[match[0]], text)

    def pieces(self, rendered: str) -> list[int | str]:
        """Ids of the template's special tokens, and the texts between them."""
        found: list[int | str] = []
        at = 0
        for match in self._special.finditer(rendered):
            found += [self.restored(rendered[at : match.start()]), self._ids[match[0]]]
            at = match.end()
        found.append(self.restored(rendered[at:]))
        return [piece for piece in found if piece != ""]

    def restored(self, text: str) -> str:
        """What the template wrote, with the users' own words."""
        return self._private.sub(lambda match: self._original[match[0]], text)


def guard_for(special_tokens: dict[str, int], texts: Sequence[str]) -> SpecialGuard | None:
    """None if no text holds a special token's, which is nearly always."""
    if any(name in text for name in special_tokens for text in texts):
        return SpecialGuard(special_tokens, texts)
    return None


def last_tokens(token_ids: list[int], count: int | None) -> list[int]:
    return token_ids if count is None else token_ids[-count:]


def _template(hf: Any, given: str | None, seconds: float) -> ChatTemplate | None:
    """The template that writes conversations, if there is one."""
    text = given
    if text is None and getattr(hf, "chat_template", None):
        try:
            text = hf.get_chat_template()
        except ValueError as error:  # several, and none of them is the default one
            logger.warning("conversations are refused: %s", error)
    return ChatTemplate(text, hf.special_tokens_map, seconds=seconds) if text else None


def _piece_bytes(piece: str, alphabet: dict[str, int] | None) -> bytes | None:
    """Exact bytes of a vocabulary entry, None where only the tokenizer knows."""
    if alphabet is not None:
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


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for characters above U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def token_label(texts: Texts, token_id: int, *, as_id: bool) -> str:
    """How a token is shown in log-probabilities."""
    return f"token_id:{token_id}" if as_id else texts.token(token_id)[0]


def plain_ids(value: Any) -> bool:
    return isinstance(value, list) and list(map(type, value)).count(int) == len(value)
