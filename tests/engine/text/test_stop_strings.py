"""Where stop strings end a sequence: any tokens, in any steps, read in any way, against a reference
that knows nothing but bytes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.request import FinishReason, Sequence
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.text.stop_strings import find_stop, holds_stop, num_undecided
from hetero_llm.engine.text.tokenizer import Tokenizer
from tests.helpers.harness import make_request
from tests.helpers.text_reference import text_reference
from tests.helpers.tokenizers import BYTES, TOKENIZERS

BYTE_LEVEL = TOKENIZERS["byte_level", "fast"]
FREQUENT = b"aab\xe2\x80\x8d\xf0\x9f\x98\x80\xff\xc3\xa9"
RAW = st.sampled_from([*range(266), *(3 + byte for byte in FREQUENT)])
WHOLE = st.sampled_from([[token] for token in (3 + ord("a"), 3 + ord("b"))] + [
    [3 + byte for byte in character.encode()] for character in "é中😀\u200d"
])  # fmt: skip
STOPS = st.lists(st.text("ab é中😀\u200d\ufffd", min_size=1, max_size=5), max_size=3)


def read(
    tokenizer: Tokenizer,
    prompt: list[int],
    output: list[int],
    cuts: list[int],
    params: SamplingParams,
) -> tuple[list[RequestOutput], Sequence]:
    """The outputs of a sequence of these tokens that ends by its length, and the sequence. `cuts`
    are the numbers of tokens of its steps, over and over."""
    request = make_request("a", prompt, params, max_model_len=999)
    sequence = Sequence(request, 0, array("i", prompt), len(prompt))
    request.sequences, request.num_unfinished = [sequence], 1

    def stop_sequence(sequence: Sequence, reason: Any, num_tokens: int) -> None:
        del sequence.token_ids[num_tokens:]
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, reason
        request.num_unfinished = 0

    processor = OutputProcessor(tokenizer, stop_sequence)
    outputs, steps, at = [], 0, 0
    while not sequence.finished:
        size = cuts[steps % len(cuts)]
        steps += 1
        sequence.token_ids.extend(output[at : at + size])
        at += size
        if at >= len(output):
            sequence.finish_reason, request.num_unfinished = FinishReason.LENGTH, 0
        outputs += processor.process([sequence])
    return outputs, sequence


def check(
    kind: str,
    stream: str,
    prompt: list[int],
    output: list[int],
    cuts: list[int],
    params: SamplingParams,
) -> None:
    text, num_tokens, stop = text_reference(
        b"".join(BYTES[kind][token] for token in prompt),
        [BYTES[kind][token] for token in output],
        params.stop,
        min_tokens=params.min_tokens,
        include=params.include_stop_str_in_output,
    )
    outputs, sequence = read(TOKENIZERS[kind, stream], prompt, output, cuts, params)
    texts = [one.outputs[0].text for one in outputs]
    if params.output_kind is RequestOutputKind.DELTA:
        texts = ["".join(texts)]
    assert texts[-1] == text
    assert all(text.startswith(earlier) for earlier in texts)
    assert len(sequence.token_ids) - len(prompt) == num_tokens
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("length" if stop is None else "stop", stop)


PARAMS = st.builds(
    SamplingParams,
    stop=STOPS,
    max_tokens=st.just(99),
    min_tokens=st.sampled_from([0, 0, 3]),
    include_stop_str_in_output=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompt=st.lists(RAW, min_size=1, max_size=6),
    output=st.lists(RAW, min_size=1, max_size=14),
    cuts=CUTS,
    params=PARAMS,
)
def test_any_bytes(
    kind: str, prompt: list[int], output: list[int], cuts: list[int], params: SamplingParams
) -> None:
    check(kind, "fast", [3 + ord("a"), *prompt], output, cuts, params)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("stream", ["fast", "slow"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    prompt=st.lists(WHOLE, min_size=1, max_size=6),
    begun=st.sampled_from([b"", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98"]),
    goes_on=st.booleans(),
    output=st.lists(WHOLE, min_size=1, max_size=10),
    rest=st.sampled_from([b"", b"\xc3", b"\xf0"]),
    cuts=CUTS,
    params=PARAMS.filter(lambda params: "\ufffd" not in "".join(params.stop)),
)
def test_whole_characters_between_incomplete_ones(
    kind: str,
    stream: str,
    prompt: list[list[int]],
    begun: bytes,
    goes_on: bool,
    output: list[list[int]],
    rest: bytes,
    cuts: list[int],
    params: SamplingParams,
) -> None:
    """The prompt ends, and the output may begin and end, inside a character."""
    missing = {b"\xc3": b"\xa9", b"\xe4\xb8": b"\xad", b"\xf0\x9f\x98": b"\x80"}.get(begun, b"")
    first = missing if goes_on else b""
    check(
        kind,
        stream,
        [3 + ord("a"), *(token for tokens in prompt for token in tokens)]
        + [3 + byte for byte in begun],
        [3 + byte for byte in first]
        + [token for tokens in output for token in tokens]
        + [3 + byte for byte in rest]
        or [3 + ord("a")],
        cuts,
        params,
    )


def test_a_prompt_that_ends_inside_a_character_adds_nothing() -> None:
    prompt = [3 + byte for byte in b"SECRET prompt text\xc3"]
    for kind in ("byte_level", "sentencepiece"):
        for stream in ("fast", "slow"):
            tokenizer = TOKENIZERS[kind, stream]
            for output, text in ((b"Xb", "Xb"), (b"\xa9X", "éX"), (b"\xc3\xa9X", "éX")):
                tokens = [3 + byte for byte in output]
                outputs, _ = read(tokenizer, prompt, tokens, [1], SamplingParams(max_tokens=99))
                assert outputs[-1].outputs[0].text == text
                assert all(text.startswith(one.outputs[0].text) for one in outputs)


def test_a_stop_string_in_the_replacement_of_a_last_character() -> None:
    params = SamplingParams(max_tokens=99, stop="b\ufffd")
    outputs, sequence = read(BYTE_LEVEL, [3], [100, 101, 3 + 0xE4], [1], params)
    assert outputs[-1].outputs[0].text == "a" and sequence.stop_reason == "b\ufffd"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    held = num_undecided(text, stops)
    ends = [text[at:] for at in range(len(text))]
    begun = [len(end) for end in ends for stop in stops if stop.startswith(end) and stop != end]
    assert held == max(begun, default=0)


def test_the_stop_string_that_ends_first_counts_then_the_first_named() -> None:
    params = SamplingParams(stop=["cde", "bc", "abc"])
    assert find_stop("xabcde", 5, params) == ("bc", 2)
    assert find_stop("xabcde", 1, params) == ("cde", 3)
    assert find_stop("xabcde", 0, params) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    prompt=st.lists(RAW, min_size=1, max_size=6),
    output=st.lists(RAW, min_size=1, max_size=120),
    stops=STOPS.filter(bool),
)
def test_a_beam_ends_where_a_sequence_does(
    prompt: list[int], output: list[int], stops: list[str]
) -> None:
    params = SamplingParams(stop=stops, max_tokens=999)
    request = make_request("a", prompt, params, max_model_len=999)
    pieces = [BYTES["byte_level"][token] for token in output]
    _, num_tokens, stop = text_reference(
        b"".join(BYTES["byte_level"][t] for t in prompt), [*pieces, b"a"], stops
    )
    found = [
        count
        for count in range(1, min(num_tokens, len(output)) + 1)
        if holds_stop(BYTE_LEVEL, request, output[:count])
    ]
    assert found == ([] if stop is None or num_tokens > len(output) else [num_tokens])


def test_only_the_end_of_a_long_output_is_decoded_for_a_beam() -> None:
    pushed: list[int] = []

    class Counting:
        def decode_stream(self, before: list[int], *, skip_special_tokens: bool) -> Counting:
            return self

        def push(self, token_id: int) -> str:
            pushed.append(token_id)
            return "x"

    request = make_request("a", [1], SamplingParams(stop=["abcd"]), max_model_len=9999)
    tokenizer: Any = Counting()
    assert not holds_stop(tokenizer, request, [7] * 3000)
    assert len(pushed) <= 64
