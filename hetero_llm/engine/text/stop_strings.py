"""Where a stop string ends a sequence.

A stop string is looked for in the text that the user gets: the text of the output (see
`detokenizer`), without the prompt's, and without special tokens if these are skipped. The search
goes token by token, so it does not matter whether a step brought one token or a whole draft, nor
how the outputs are read.

1. After each token in the text so far. Bytes of a character that is not complete are no text yet.
2. When the sequence has ended by its length or an end token, in the text with the replacement
   character (U+FFFD) of such bytes.

A stop string counts if it ends in the text of a token after the first `min_tokens`; it may begin
before. The one that ends first counts; of several that end together, the one named first. The
token that brought its last character is the sequence's last one. The text ends before the stop
string, or behind it with `include_stop_str_in_output`.

An end token (end of sequence, or one of `stop_token_ids`) is no part of the text unless
`include_stop_str_in_output` is set, and even then not if it is a special token that is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.text.detokenizer import TextStream
from hetero_llm.engine.text.tokenizer import Tokenizer

_FEWEST_TOKENS = 16
_CONTEXT_TOKENS = 64


def find_stop(text: str, num_new: int, params: SamplingParams) -> tuple[str, int] | None:
    """Finds the stop string that ends first within the last `num_new` characters. Returns it and
    the length to which the text is cut."""
    best: tuple[int, str, int] | None = None
    for stop in params.stop or ():
        at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if at >= 0 and (best is None or at + len(stop) < best[0]):
            cut = at + len(stop) if params.include_stop_str_in_output else at
            best = (at + len(stop), stop, cut)
    return None if best is None else (best[1], best[2])


def num_undecided(text: str, stops: Iterable[str]) -> int:
    """How many last characters of a running sequence's text may be the beginning of a stop string:
    a stream holds them back."""
    longest = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and len(text) - at > longest:
            if stop.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(stop[0], at + 1)
    return longest


def holds_stop(tokenizer: Tokenizer, request: Request, output_ids: list[int]) -> bool:
    """Whether the last of `output_ids` completes one of the request's stop strings. Beam search
    asks this for each candidate, so only the end of the output is decoded."""
    params = request.params
    wanted = max(map(len, params.stop or ("",))) + 2  # a first character may be damaged
    num_tokens = max(_FEWEST_TOKENS, wanted)
    while True:
        start = max(0, len(output_ids) - num_tokens)
        before = request.shown_prompt_ids[-_CONTEXT_TOKENS:] + output_ids[:start]
        stream = tokenizer.decode_stream(before, skip_special_tokens=params.skip_special_tokens)
        text, num_new = _text(stream, output_ids[start:])
        if start == 0 or len(text) - num_new >= wanted:
            return find_stop(text, num_new, params) is not None
        num_tokens *= 2


def _text(stream: TextStream, token_ids: list[int]) -> tuple[str, int]:
    """The text of some tokens, and how many characters of it the last one brought."""
    parts = [stream.push(token) for token in token_ids]
    return "".join(parts), len(parts[-1])
