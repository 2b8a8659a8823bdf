"""Text to token ids and back, with transformers and tokenizers: typed errors, incremental decoding,
the facts about a tokenizer that the engine needs, and threads to tokenize in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from hetero_llm.core.errors import ModelLoadError, RequestError, shown
from hetero_llm.engine.text.detokenizer import (
    REPLACEMENT,
    ByteFallbackStream,
    ByteStream,
    TextStream,
    WindowStream,
    decoder_steps,
    piece_bytes,
)
from hetero_llm.models.config_reader import read_json, short_reason
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.models.gguf.tokenizer import read_gguf_tokenizer
from hetero_llm.structured_output.compiler import GrammarCompiler, Vocabulary

T = TypeVar("T")

_PROCESSOR_TEMPLATE = "chat_template.json"
_NUM_THREADS = 2
_SHORT_TEXT = 512  # characters
_CONTEXT_TOKENS = 8
"""Tokens before one that is part of a character: enough to complete it."""


class Tokenizer:
    """A Hugging Face tokenizer, fast or slow.

    Attributes:
        hf: the wrapped tokenizer, for users who need more than this class offers.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf = hf_tokenizer
        self._fast = getattr(hf_tokenizer, "backend_tokenizer", None)
        steps = decoder_steps(self._fast)
        self._byte_level = "ByteLevel" in steps
        self._text_is_bytes = steps == ["ByteLevel"]
        self.special_ids = frozenset(hf_tokenizer.all_special_ids)
        self.added_tokens: dict[int, str] = {
            index: str(token) for index, token in hf_tokenizer.added_tokens_decoder.items()
        }
        self._special = frozenset(
            index for index, token in hf_tokenizer.added_tokens_decoder.items() if token.special
        )
        self.decode_token = lru_cache(maxsize=65536)(
            lambda token_id: self.decode([token_id], skip_special_tokens=False)
        )
        self._decode_one = lru_cache(maxsize=65536)(
            lambda token_id, skip: self._decode_uncached([token_id], skip)
        )
        self._bytes = lru_cache(maxsize=None)(self._byte_level_bytes)
        self._byte_tokens = {} if self._byte_level else self._find_byte_tokens()

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary, added tokens included: equal for tokenizers whose ids stand
        for the same texts. Takes a fifth of a second for 150,000 tokens."""
        vocabulary = sorted((index, token) for token, index in self.hf.get_vocab().items())
        return sha256(json.dumps(vocabulary, default=repr).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Not verbose: the library would log that a text beyond the context "will result in indexing
        # errors", and it is refused here.
        return self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """The text of tokens that follow `prompt_ids`."""
        skipped = self._special if skip_special_tokens else frozenset()
        if self._text_is_bytes:
            return ByteStream(self._bytes, skipped, prompt_ids)
        decode = partial(self._decode_some, skip=skip_special_tokens)
        if self._byte_tokens:
            return ByteFallbackStream(decode, self._byte_tokens, skipped, prompt_ids)
        return WindowStream(decode, prompt_ids)

    def decode_token_at(self, token_ids: Sequence[int], position: int, token_id: int) -> str:
        """The text of one token behind the first `position` of `token_ids`. One that is part of a
        character has that of the whole character if it completes it there, else "" or U+FFFD."""
        text = self.decode_token(token_id)
        if REPLACEMENT not in text:
            return text
        context = token_ids[max(0, position - _CONTEXT_TOKENS) : position]
        return self.decode_stream(context, skip_special_tokens=False).push(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The exact bytes of a token, None where only decoding in a text would tell."""
        if token_id in self.added_tokens:
            return self.decode_token(token_id).encode()
        piece = self.hf.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return None
        return piece_bytes(piece, byte_level=self._byte_level)

    def vocabulary(self, size: int, eos_ids: tuple[int, ...]) -> Vocabulary:
        """The tokenizer as grammars see it, for a model with `size` logits."""
        special = {
            text: index for index, text in self.added_tokens.items() if index in self._special
        }
        return Vocabulary(self._fast, self._bytes_in_text, special, size, eos_ids)

    def _bytes_in_text(self, token_id: int) -> bytes | None:
        """What a token adds to a text: nothing if there is no such token, None if that depends on
        others."""
        if self.hf.convert_ids_to_tokens(token_id) is None:
            return b""
        exact = self.token_bytes(token_id)
        text = self.decode_token(token_id)
        return exact if exact is not None or REPLACEMENT in text else text.encode()

    def template_text(self, chat_template: str | None, tools: Sequence[Any] | None) -> str:
        """The template of a conversation: the given one, that of the given name, or the
        tokenizer's own, which may have one for conversations with tools.

        Raises:
            RequestError: there is none.
        """
        if chat_template is None and not getattr(self.hf, "chat_template", None):
            raise RequestError("chat_template", None, "the tokenizer has none; pass chat_template=")
        try:
            found: str = self.hf.get_chat_template(chat_template, list(tools) if tools else None)
        except ValueError as error:
            raise RequestError("chat_template", chat_template, str(error)) from None
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Renders a conversation (sandboxed by transformers) and tokenizes it.

        Args:
            options: more arguments of transformers' method, and variables of the template.

        Raises:
            RequestError: there is no template, or it refuses the conversation.
        """
        self.template_text(chat_template, (options or {}).get("tools"))
        try:
            text = self.hf.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(options or {}),
            )
        except Exception as error:
            raise RequestError(
                "messages", messages, f"the chat template failed: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False)

    def _decode_some(self, token_ids: list[int], skip: bool) -> str:
        """The text of a few tokens, without transformers' cleaning, which would change text before
        the last token."""
        if len(token_ids) == 1:  # as in every second call of a stream
            return self._decode_one(token_ids[0], skip)
        return self._decode_uncached(token_ids, skip)

    def _decode_uncached(self, token_ids: list[int], skip: bool) -> str:
        if self._fast is not None:
            return self._fast.decode(token_ids, skip_special_tokens=skip)
        return self.hf.decode(
            token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )

    def _find_byte_tokens(self) -> dict[int, bytes]:
        """The byte of each of the 256 byte tokens ("<0x61>"), if it has them and decodes them."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self.hf.convert_tokens_to_ids(names)
        if None in ids or self.hf.convert_ids_to_tokens(ids) != names:
            return {}
        sample = self.decode([ids[byte] for byte in "中".encode()], skip_special_tokens=False)
        return {ids[byte]: bytes([byte]) for byte in range(256)} if sample == "中" else {}

    def _byte_level_bytes(self, token_id: int) -> bytes:
        """A byte-level tokenizer's bytes of a token, added tokens and unknown ids included, as the
        tokenizers library decodes them."""
        assert self._fast is not None
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        exact = piece_bytes(piece, byte_level=True)
        return piece.encode() if exact is None else exact


class TokenizerThreads:
    """Threads for work on prompts that would hold up an event loop; one object per process.

    Long texts have two threads: the tokenizers library releases the GIL meanwhile. Images have two
    of their own, so that texts do not wait for them.
    """

    def __init__(self) -> None:
        self._closed = False
        self._texts = ThreadPoolExecutor(_NUM_THREADS, "hetero-llm-tokenize")
        self._images = ThreadPoolExecutor(_NUM_THREADS, "hetero-llm-images")

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Runs `work` on a text of `size` characters. A short one is worked on in this thread:
        waking up the event loop would take longer than the work."""
        if size <= _SHORT_TEXT or self._closed:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def run_on_images(self, work: Callable[[], T]) -> T:
        if self._closed:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._images, work)

    def close(self) -> None:
        """Ends the threads when their work is done, without waiting for that. Later work, such as
        that of the last requests of a server that stops, is done in the caller's thread."""
        self._closed = True
        self._texts.shutdown(wait=False)
        self._images.shutdown(wait=False)


def open_grammars(
    tokenizer: Tokenizer | None, vocab_size: int, eos_ids: tuple[int, ...]
) -> GrammarCompiler | None:
    """What compiles grammars for a model with this tokenizer; None without one."""
    if tokenizer is None:
        return None
    return GrammarCompiler(tokenizer.vocabulary(vocab_size, eos_ids))


def load_tokenizer(folder: Path, *, mode: str, trust_remote_code: bool) -> Tokenizer:
    """Loads the tokenizer of a model folder, or of a GGUF file in its place.

    Raises:
        ModelLoadError: there is none, or transformers cannot read it.
    """
    if is_gguf(folder):
        return Tokenizer(read_gguf_tokenizer(folder))
    from transformers import AutoTokenizer

    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            use_fast=mode != "slow",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
        hf_tokenizer.decode(hf_tokenizer.encode("a"))  # some settings fail only in use
    except Exception as error:
        reason = short_reason(error)
        if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            reason = (
                "the folder has no tokenizer's files; name one with --tokenizer, or serve token "
                "ids alone with --skip-tokenizer-init"
            )
        raise ModelLoadError(f"{folder}: no usable tokenizer: {reason}") from error
    beside = folder / _PROCESSOR_TEMPLATE
    if not getattr(hf_tokenizer, "chat_template", None) and beside.is_file():
        hf_tokenizer.chat_template = _processor_template(beside)
    return Tokenizer(hf_tokenizer)


def _processor_template(path: Path) -> str:
    """The template of a folder that has it for its processor alone (LLaVA)."""
    template = read_json(path).get("chat_template")
    if not isinstance(template, str):
        raise ModelLoadError(f"{path}: chat_template={shown(template)}: a text is needed")
    return template
