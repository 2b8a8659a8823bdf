"""Text that grows token by token equals the text decoded at once, for both kinds of tokenizers
(byte-level BPE, sentencepiece with byte fallback) and both streams."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from hetero_llm.core.request import FinishReason, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads
from tests.helpers.harness import make_request
from tests.helpers.tokenizers import MAKERS, SPECIALS, TOKENIZERS, byte_level, wrapped

REPLACEMENT = "\ufffd"
EVERYTHING = SamplingParams(max_tokens=999, skip_special_tokens=False)
SKIPPING = SamplingParams(max_tokens=999)


BOTH_STREAMS = pytest.mark.parametrize("stream", ["fast", "slow"])
WITH_BYTES = pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])


def text_of(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], params: SamplingParams
) -> str:
    """What a user sees of `output`, decoded token by token."""
    processor = OutputProcessor(tokenizer, lambda sequence, reason, num_tokens: None)
    request = make_request("a", prompt, params, max_model_len=999)
    sequence = Sequence(request, 0, array("i", prompt), len(prompt))
    request.sequences, request.num_unfinished = [sequence], 1
    for token in output:
        sequence.token_ids.append(token)
        if len(sequence.token_ids) == len(prompt) + len(output):
            sequence.finish_reason, request.num_unfinished = FinishReason.LENGTH, 0
        (shown,) = processor.process([sequence])
    return shown.outputs[0].text


def bytes_of(data: bytes) -> list[int]:
    """One byte token for each byte, with either tokenizer that has them."""
    return [3 + byte for byte in data]


# -- whole characters -----------------------------------------------------------------------

TEXTS = {
    "emoji": "a😀😃 👩‍👩‍👧 w",
    "chinese": "中文字 符w 中",
    "combining": "e\u0301a\u0308 n\u0303w\u200d",
    "spaces": "a  w   a w ",
    "ascii": "a w a",
}


@BOTH_STREAMS
@WITH_BYTES
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_in_byte_tokens_comes_out_as_it_was(kind: str, stream: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    output = tokenizer.encode(text)
    assert len(output) > len(text) or text.isascii()
    assert tokenizer.decode(output, skip_special_tokens=True) == text
    assert text_of(tokenizer, [1], output, SKIPPING) == text


CHARACTERS = st.text(st.sampled_from("aw bé中字😀\u0301\u200d"), min_size=1, max_size=12)


@BOTH_STREAMS
@WITH_BYTES
@settings(max_examples=120, deadline=None, derandomize=True)
@given(prompt=CHARACTERS, text=CHARACTERS)
def test_any_continuation_equals_the_text_decoded_at_once(
    kind: str, stream: str, prompt: str, text: str
) -> None:
    """The prompt may end in characters of several byte tokens as well."""
    tokenizer = TOKENIZERS[kind, stream]
    prompt_ids, output = tokenizer.encode(prompt), tokenizer.encode(text)
    whole = tokenizer.decode(prompt_ids + output, skip_special_tokens=False)
    assert whole.startswith(prompt)
    assert text_of(tokenizer, prompt_ids, output, EVERYTHING) == whole[len(prompt) :]


@BOTH_STREAMS
@WITH_BYTES
def test_no_part_of_a_character_is_shown(kind: str, stream: str) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    growing = tokenizer.decode_stream(tokenizer.encode("a"), skip_special_tokens=True)
    shown = [growing.push(token) for token in bytes_of("中😀".encode())]
    assert shown == ["", "", "中", "", "", "", "😀"]


# -- spaces ---------------------------------------------------------------------------------


@BOTH_STREAMS
@pytest.mark.parametrize("kind", MAKERS)
def test_a_leading_space_of_the_continuation_is_kept(kind: str, stream: str) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    prompt = tokenizer.encode("a w")
    output = tokenizer.encode("a w a w")[len(prompt) :]
    assert text_of(tokenizer, prompt, output, EVERYTHING) == " a w"


@BOTH_STREAMS
@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_the_space_before_the_first_word_of_all_is_not_text(kind: str, stream: str) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    assert text_of(tokenizer, [1], tokenizer.encode("a w"), SKIPPING) == "a w"


@BOTH_STREAMS
def test_the_stream_starts_at_a_whole_character_of_the_prompt(stream: str) -> None:
    """A byte-fallback decoder takes a run of bytes that starts inside a character for garbage."""
    tokenizer = TOKENIZERS["sentencepiece", stream]
    for prompt in ("字字", "😀é", "é字", "字😀字", "😀😀😀"):
        prompt_ids, output = tokenizer.encode(prompt), tokenizer.encode("a")
        assert text_of(tokenizer, prompt_ids, output, EVERYTHING) == " a"


# -- special tokens -------------------------------------------------------------------------


def words() -> Tokenizer:
    """A tokenizer without a decoder, which puts a space between any two tokens."""
    tokens = [*SPECIALS, "one", "two"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return wrapped(FastTokenizer(models.WordLevel(vocab, unk_token="<pad>")))


@pytest.mark.parametrize(("spaces", "text"), [(True, "one <s> </s> <s> two"), (False, None)])
def test_spaces_between_special_tokens(spaces: bool, text: str | None) -> None:
    params = SamplingParams(
        max_tokens=9, skip_special_tokens=False, spaces_between_special_tokens=spaces
    )
    shown = text_of(words(), [3], [3, 1, 2, 1, 4], params).lstrip()
    assert shown == (text or "one <s></s><s> two")


def test_skipped_special_tokens_leave_no_trace() -> None:
    for spaces in (True, False):
        params = SamplingParams(max_tokens=9, spaces_between_special_tokens=spaces)
        assert text_of(words(), [3], [3, 1, 2, 4], params).lstrip() == "one two"


@BOTH_STREAMS
@WITH_BYTES
def test_special_tokens_inside_text(kind: str, stream: str) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    prompt, word = tokenizer.encode("a"), bytes_of("é".encode())
    output = [1, *word, 2, *word]
    assert text_of(tokenizer, prompt, output, EVERYTHING) == "<s>é</s>é"
    assert text_of(tokenizer, prompt, output, SKIPPING) == "éé"


# -- what is no text ------------------------------------------------------------------------


@BOTH_STREAMS
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_unfinished_character_at_the_end_is_one_replacement(stream: str, cut: int) -> None:
    tokenizer = TOKENIZERS["byte_level", stream]
    output = tokenizer.encode("w") + bytes_of("😀".encode()[:cut])
    shown = text_of(tokenizer, tokenizer.encode("a"), output, EVERYTHING)
    assert shown == "w" + REPLACEMENT


@BOTH_STREAMS
@WITH_BYTES
def test_nothing_but_an_unfinished_character_still_shows(kind: str, stream: str) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    output = bytes_of("😀".encode()[:1])
    assert text_of(tokenizer, tokenizer.encode("a"), output, EVERYTHING) == REPLACEMENT


BYTES = st.binary(min_size=1, max_size=10)


@BOTH_STREAMS
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=BYTES, tail=st.sampled_from(["", "w", "字"]))
def test_invalid_bytes_are_shown_as_python_shows_them(stream: str, data: bytes, tail: str) -> None:
    tokenizer = TOKENIZERS["byte_level", stream]
    data += tail.encode()
    output = bytes_of(data)
    shown = text_of(tokenizer, tokenizer.encode("a"), output, EVERYTHING)
    assert shown == data.decode(errors="replace")


@BOTH_STREAMS
@WITH_BYTES
@settings(max_examples=150, deadline=None, derandomize=True)
@given(prompt=BYTES, data=BYTES)
def test_invalid_bytes_never_raise_and_text_goes_on_after_them(
    kind: str, stream: str, prompt: bytes, data: bytes
) -> None:
    tokenizer = TOKENIZERS[kind, stream]
    output = bytes_of(data) + tokenizer.encode("xyz")
    assert text_of(tokenizer, bytes_of(prompt), output, EVERYTHING).endswith("xyz")


def test_long_texts_and_images_have_threads_until_these_are_closed() -> None:
    async def run() -> list[bool]:
        threads, here = TokenizerThreads(), threading.current_thread()
        found = [await threads.run(threading.current_thread, size=5)]
        found.append(await threads.run(threading.current_thread, size=10_000))
        found.append(await threads.run_on_images(threading.current_thread))
        threads.close()
        found.append(await threads.run(threading.current_thread, size=10_000))
        found.append(await threads.run_on_images(threading.current_thread))
        return [thread is here for thread in found]

    assert asyncio.run(run()) == [True, False, False, True, True]


def test_a_text_beyond_the_context_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "warning", lambda message, *_: said.append(message))
    tokenizer = byte_level()
    tokenizer.hf.model_max_length = 4
    assert len(tokenizer.encode("abcdefgh")) == 8
    assert not said
    tokenizer.hf.encode("abcdefgh")
    assert "indexing errors" in said[0]
