"""Texts to token ids, within the context length, and token ids to the texts and bytes of
responses."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from hetero_llm.server.errors import context_exceeded, empty, wrong
from hetero_llm.server.templates import ChatTemplate

if TYPE_CHECKING:
    from hetero_llm.engine.inputs.images import ImageInputs
    from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads

logger = logging.getLogger(__name__)

_TRUNCATED_CONTEXTS = 8
"""A text that is cut to its last tokens may be this many contexts long before."""


class ApiTokenizer:
    """The engine's tokenizer with what the API needs besides: limits on lengths, the chat template,
    and exact bytes of single tokens.

    Args:
        tokenizer: None if the engine was started without one.
        threads: of the engine client; long texts are encoded in them.
        max_model_len: in tokens.
        chat_template: Jinja text instead of the tokenizer's own template.
        template_seconds: what rendering one conversation may take.
        images: prepares those of conversations; None if the model takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        threads: TokenizerThreads,
        *,
        max_model_len: int,
        chat_template: str | None = None,
        template_seconds: float = 5.0,
        images: ImageInputs | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.threads = threads
        self.images = images
        self.max_model_len = max_model_len
        self.chat_template = None
        if tokenizer is not None:
            self.chat_template = _template(tokenizer.hf, chat_template, template_seconds)

    def start(self) -> None:
        """Starts a process of the chat template, so that the first conversation finds it ready."""
        if self.chat_template is not None:
            self.chat_template.start()

    def close(self) -> None:
        """Ends the processes of the chat template."""
        if self.chat_template is not None:
            self.chat_template.close()

    def require(self, param: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: the engine was started without one.
        """
        if self._tokenizer is None:
            raise wrong(param, "the server runs without a tokenizer; send a prompt of token ids")
        return self._tokenizer

    async def encode(
        self, text: str, *, add_special_tokens: bool, truncated: bool, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text. `truncated`: only its last tokens will be used.

        Raises:
            ApiError: the text is empty, or longer than any text that fits.
        """
        tokenizer = self.require(param)
        if not text:
            raise empty(param)
        self.check_length(len(text), truncated=truncated, param=param)
        return await self.threads.run(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), size=len(text)
        )

    def check_length(self, chars: int, *, truncated: bool, param: str) -> None:
        """Checks a text before it is encoded.

        Raises:
            ApiError: a text of this length would not fit if all its tokens were the longest one.
        """
        contexts = _TRUNCATED_CONTEXTS if truncated else 1
        if chars > contexts * self.max_model_len * self._longest_token:
            at_least = chars // self._longest_token
            raise context_exceeded(self.max_model_len, at_least, 1, param)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        tokenizer = self.require("tokens")
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_ids(self, markers: str) -> tuple[int, ...]:
        """Token ids of a text of markers, special tokens in it included."""
        return tuple(self.require("messages").encode(markers, add_special_tokens=False))

    def encode_rendered(self, text: str, guard: SpecialGuard | None) -> list[int]:
        """Token ids of a rendered conversation; `guard` is the one that hid users' texts."""
        tokenizer = self.require("messages")
        if guard is None:
            return tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for piece in guard.pieces(text):
            ids += [piece] if isinstance(piece, int) else self._encode_as_text(piece)
        return ids

    def with_special_tokens(self, token_ids: list[int]) -> list[int]:
        """The ids with those special tokens around them that the tokenizer adds to every text."""
        tokenizer = self.require("add_special_tokens")
        bare = tokenizer.encode("a", add_special_tokens=False)
        around = tokenizer.encode("a")
        at = next(i for i in range(len(around)) if around[i : i + len(bare)] == bare)
        return around[:at] + token_ids + around[at + len(bare) :]

    @property
    def response_template(self) -> Any:
        """What transformers' tokenizer says about the form of answers; None if nothing."""
        return getattr(self._tokenizer and self._tokenizer.hf, "response_template", None)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the vocabulary, special ones included, by text."""
        if self._tokenizer is None:
            return {}
        return {text: index for index, text in self._tokenizer.added_tokens.items()}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that control the model, by their text."""
        if self._tokenizer is None:
            return {}
        added = self._tokenizer.added_tokens
        ids = self._tokenizer.special_ids | ({self.images.token_id} if self.images else set())
        return {added[index]: index for index in ids if index in added}

    def guard(self, user_texts: Sequence[str]) -> SpecialGuard | None:
        """A guard for texts of users, or None if none of them holds the text of a special token,
        which is the usual case."""
        first_letters = self._first_letters
        if not any(letter in text for text in user_texts for letter in first_letters):
            return None
        return guard_for(self.special_tokens, user_texts)

    @cached_property
    def _first_letters(self) -> frozenset[str]:
        """Of the texts of special tokens, of which a model may have hundreds."""
        return frozenset(text[0] for text in self.special_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """In characters. Byte-level pieces have one per byte, so this is an upper bound."""
        assert self._tokenizer is not None
        return max(map(len, self._tokenizer.hf.get_vocab()), default=1)

    @cached_property
    def _encode_as_text(self) -> Callable[[str], list[int]]:
        """Encodes the text of a special token like any other text. It uses a copy of the tokenizer:
        the switch for this is one of the whole tokenizer, which other threads are using."""
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
        """A token's text and bytes. Bytes that are no whole character are written as "\\xe4", as
        OpenAI's servers do."""
        if self._tokenizer is None:
            return f"token_id:{token_id}", b""
        text = self._tokenizer.decode_token(token_id)
        exact = self._tokenizer.token_bytes(token_id)
        if exact is None:
            return text, text.encode()
        return exact.decode(errors="backslashreplace"), exact

    def is_whole(self, token_id: int) -> bool:
        """Whether a token's bytes are whole characters."""
        text, data = self.token(token_id)
        return not data or text.encode() == data


class TextOffsets:
    """Computes where each token of a text begins, in characters; a token may end inside one."""

    def __init__(self, tokenizer: ApiTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]()
        if skip_special_tokens:
            self._skipped = tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0

    def next(self, token_id: int, shown_in: str | None = None) -> int:
        """The offset of the token after those of earlier calls. A special token takes no place
        unless `shown_in`, the text, holds it there, as a prompt may."""
        here = self._position
        text, data = self._tokenizer.token(token_id)
        shown = shown_in is not None and shown_in.startswith(text, here)
        if shown or token_id not in self._skipped:
            self._position += len(self._decoder.decode(data))
        return here


class SpecialGuard:
    """Tells text of users that looks like a special token from the special tokens of a template.

    `hide` replaces the text of each special token in users' texts by a private character before
    they are rendered. `pieces` then turns the template's own special tokens into ids, and the
    private characters back into text.
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
        """A rendered text with the private characters turned back."""
        return self._private.sub(lambda match: self._original[match[0]], text)


def guard_for(special_tokens: dict[str, int], texts: Sequence[str]) -> SpecialGuard | None:
    """A guard, or None if no text holds that of a special token, which is the usual case."""
    if any(name in text for name in special_tokens for text in texts):
        return SpecialGuard(special_tokens, texts)
    return None


@dataclass(frozen=True, slots=True)
class Cut:
    """Which tokens of a prompt are kept: the last `count`, or the first; None keeps all."""

    count: int | None = None
    keep_first: bool = False

    def apply(self, token_ids: list[int]) -> list[int]:
        if self.count is None:
            return token_ids
        return token_ids[: self.count] if self.keep_first else token_ids[-self.count :]


WHOLE = Cut()
"""Keeps all tokens."""


def _template(hf: Any, given: str | None, seconds: float) -> ChatTemplate | None:
    """The template that writes conversations, if there is one."""
    text = given
    if text is None and getattr(hf, "chat_template", None):
        try:
            text = hf.get_chat_template()
        except ValueError as error:  # several, none of which is the default
            logger.warning("conversations are refused: %s", error)
    return ChatTemplate(text, hf.special_tokens_map, seconds=seconds) if text else None


def token_label(tokenizer: ApiTokenizer, token_id: int, *, as_id: bool) -> str:
    """How a token is shown in log-probabilities."""
    return f"token_id:{token_id}" if as_id else tokenizer.token(token_id)[0]


def plain_ids(value: Any) -> bool:
    return isinstance(value, list) and list(map(type, value)).count(int) == len(value)
