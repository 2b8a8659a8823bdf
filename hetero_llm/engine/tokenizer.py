"""Text to token ids and back, with transformers and tokenizers: typed errors, incremental decoding,
the facts about a tokenizer that the engine needs, and threads to tokenize in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers.decoders import DecodeStream

from hetero_llm.core.errors import ModelLoadError, RequestError

T = TypeVar("T")

_PRIMING_TOKENS = 4
"""Prompt tokens fed to a decode stream first, so that a leading space of the continuation is kept
by tokenizers that strip it at the start of a text."""
_PROCESSOR_TEMPLATE = "chat_template.json"
_NUM_THREADS = 2
_SHORT_TEXT = 512  # characters
_LONGEST_CHARACTER = 4
"""Most byte tokens of one character, in UTF-8."""


def _streams_take_a_prompt() -> bool:
    """Since tokenizers 0.22; with older versions `_SlowStream` is used."""
    try:
        DecodeStream(ids=[], skip_special_tokens=True)
    except TypeError:
        return False
    return True


_STREAMS_TAKE_A_PROMPT = _streams_take_a_prompt()


class Tokenizer:
    """A Hugging Face tokenizer, fast or slow.

    Args:
        hf_tokenizer: to be wrapped.
        fast_streams: let a fast tokenizer's own library decode streams; False: decode as for a
            slow one.
    """

    def __init__(self, hf_tokenizer: Any, *, fast_streams: bool = _STREAMS_TAKE_A_PROMPT) -> None:
        self._hf = hf_tokenizer
        self._fast = getattr(hf_tokenizer, "_tokenizer", None) if fast_streams else None
        self.special_ids = frozenset(hf_tokenizer.all_special_ids)
        self.added_tokens: dict[int, str] = {
            index: str(token) for index, token in hf_tokenizer.added_tokens_decoder.items()
        }
        self.decode_token = lru_cache(maxsize=65536)(self._decode_token)

    @property
    def hf(self) -> Any:
        """The wrapped tokenizer, for users who need more than this class offers."""
        return self._hf

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary, added tokens included: equal for tokenizers whose ids stand
        for the same texts. Takes a fifth of a second for 150,000 tokens."""
        vocabulary = sorted((index, token) for token, index in self._hf.get_vocab().items())
        return sha256(json.dumps(vocabulary, default=repr).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Stream:
        """A decoder of tokens that follow `prompt_ids`."""
        prompt_tail = self._priming_tail(prompt_ids)
        if self._fast is not None:
            return _FastStream(self._fast, prompt_tail, skip_special_tokens)
        return _SlowStream(self, prompt_tail, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Renders a conversation (sandboxed by transformers) and tokenizes it.

        Raises:
            RequestError: there is no template, or it refuses the conversation.
        """
        if chat_template is None and not getattr(self._hf, "chat_template", None):
            raise RequestError("chat_template", None, "the tokenizer has none; pass chat_template=")
        try:
            text = self._hf.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            raise RequestError(
                "messages", messages, f"the chat template failed: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False)

    def _priming_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """A few last tokens that start with a whole character: from byte tokens that start inside a
        character, byte-fallback decoders make only replacement characters."""
        best: list[int] = []
        fewest = None
        for length in range(_PRIMING_TOKENS, _PRIMING_TOKENS + _LONGEST_CHARACTER):
            tail = list(prompt_ids[-length:])
            damaged = self.decode(tail, skip_special_tokens=False).count("\ufffd")
            if fewest is None or damaged < fewest:
                best, fewest = tail, damaged
            if damaged == 0 or length >= len(prompt_ids):
                break
        return best

    def _decode_token(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)


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


class Stream(Protocol):
    """Decodes one token at a time; `push` returns the text that is now certain, maybe ""."""

    def push(self, token_id: int) -> str: ...


class _FastStream:
    def __init__(self, tokenizer: Any, prompt_tail: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(ids=prompt_tail, skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # The library fails on bytes with which no text can start; a new stream continues with
            # this token.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token_id) or ""


class _SlowStream:
    """Compares the decoded text with and without the new token, on a short window of tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._window = prompt_tail
        self._read = len(prompt_tail)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._read], skip_special_tokens=self._skip)
        after = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]


def load_tokenizer(folder: Path, *, mode: str, trust_remote_code: bool) -> Tokenizer:
    """Loads the tokenizer of a model folder.

    Raises:
        ModelLoadError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            use_fast=mode != "slow",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
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
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: no usable chat template: {error!r}") from error
    if not isinstance(template, str):
        raise ModelLoadError(f"{path}: chat_template must be a text")
    return template
