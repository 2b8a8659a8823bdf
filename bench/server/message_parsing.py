"""CPU time of the parser of tool calls and reasoning, a generated token.

Each message has reasoning, text and one long call, in equal parts, as far as its format has them.
It comes token by token, as a stream does, with markers that are tokens of the model and with
markers that are plain text. The first row is the parser of requests without tools. Times are the
least of some rounds, in which all parsers take turns, and include making the words of OpenAI's
chunks. Time a token should not depend on the length: the last column is the longest message's over
the shortest one's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from bench.common import Rows, bench_parser, numbers, report
from hetero_llm.demo_models import demo_folder
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.server.message_events import MessageParser, PlainParser
from hetero_llm.server.regions.formats import TOOL_PARSER_NAMES, MessageFormat, named_format
from hetero_llm.server.regions.region_parser import RegionParser
from hetero_llm.server.regions.special_tokens import NO_TOKENS, SpecialTokens, Start

LENGTHS = (1000, 4000, 16000)
ROUNDS = 5
_PROSE = "The weather in Cologne depends on the wind from the west, and so on. "
_SCHEMAS = {"f": {"properties": {"text": {"type": "string"}, "items": {"type": "array"}}}}
_ENCODED_AT_ONCE = 1024
"""Characters; transformers warns of texts longer than the model's context."""
Pieces = list[tuple[str, list[int]]]


class Message:
    """One message in a format, cut into tokens."""

    def __init__(self, name: str, num_tokens: int, *, marked: bool) -> None:
        self.format = named_format(None if name == "plain" else name, None)
        if self.format.tools is not None:
            self.format = named_format(name, "qwen3")
        self.start: Start = "header" if self.format.channels is not None else "content"
        markers = list(dict.fromkeys(markers_in(self.format)))
        ids = {one: -1 - index for index, one in enumerate(markers)} if marked else {}
        tokenizer = load_tokenizer(demo_folder("demo"), mode="auto", trust_remote_code=False)
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        self.tokens = SpecialTokens(ids, {}, decode) if marked else NO_TOKENS
        self.pieces: Pieces = []
        for text in written(self.format, num_tokens):
            if text in ids:
                self.pieces.append((text, [ids[text]]))
                continue
            stream = tokenizer.decode_stream([], skip_special_tokens=False)
            for at in range(0, len(text), _ENCODED_AT_ONCE):
                part = text[at : at + _ENCODED_AT_ONCE]
                for token in tokenizer.encode(part, add_special_tokens=False):
                    self.pieces.append((stream.push(token), [token]))

    def parser(self) -> MessageParser:
        if self.format == MessageFormat():
            return PlainParser()
        return RegionParser(self.format, self.start, schemas=_SCHEMAS, tokens=self.tokens)

    def seconds(self) -> float:
        """The time of one reading."""
        from hetero_llm.server.endpoints.chat import MessageWords  # needs more than the engine does

        words = MessageWords(self.parser())
        begun = time.thread_time()
        for text, token_ids in self.pieces:
            words.add(text, token_ids, last=False)
            words.delta()
        words.add("", [], last=True)
        words.delta()
        return time.thread_time() - begun


def written(message_format: MessageFormat, num_tokens: int) -> Iterable[str]:
    """A message of about `num_tokens` tokens; markers that may be tokens are texts of their own."""
    each = num_tokens // 3
    prose = _PROSE * (each // 16)
    if message_format == MessageFormat():
        return [prose * 3]
    if message_format.channels is not None:
        parts = [f"<|channel|>analysis<|message|>{prose}<|end|>"]
        parts += [f"<|start|>assistant<|channel|>commentary<|message|>{prose}<|end|>"]
        parts += ["<|start|>assistant<|channel|>commentary to=functions.f <|message|>"]
        parts += ['{"text": "' + prose + '", "items": []}']
        return split("".join(parts), message_format)
    assert message_format.tools is not None
    call = message_format.tools.example
    for given in ('{"a": 1}', "a=1", ">1<", "\n1\n"):
        value = {
            '{"a": 1}': '{"text": "' + prose + '", "items": [' + "1, " * (each // 8) + "2]}",
            "a=1": 'text="' + prose + '", items=[' + "1, " * (each // 8) + "2]",
            ">1<": f">{prose}<",
            "\n1\n": f"\n{prose}\n",
        }[given]
        if given in call:
            call = call.replace(given, value, 1)
            break
    call = call.replace("parameter=a>", "parameter=text>").replace('"a">', '"text">')
    call = call.replace("<arg_key>a<", "<arg_key>text<")
    if message_format.tools.bare:
        return split(f"<think>{prose * 2}</think>{call}", message_format)
    return split(f"<think>{prose}</think>{prose}{call}", message_format)


def markers_in(message_format: MessageFormat) -> Iterable[str]:
    from hetero_llm.server.message_parsers import markers_of

    return markers_of(message_format)


def split(text: str, message_format: MessageFormat) -> Iterable[str]:
    for marker in markers_in(message_format):
        text = text.replace(marker, f"\0{marker}\0")
    return [piece for piece in text.split("\0") if piece]


def measure(names: list[str], lengths: list[int], rounds: int) -> Rows:
    kinds = [("plain", False)] + [(name, marked) for name in names for marked in (True, False)]
    messages = {
        (kind, length): Message(kind[0], length, marked=kind[1])
        for kind in kinds
        for length in lengths
    }
    least = dict.fromkeys(messages, float("inf"))
    for _ in range(rounds):
        for key, message in messages.items():
            least[key] = min(least[key], message.seconds() / len(message.pieces))
    rows = []
    for kind in kinds:
        row: dict[str, Any] = {
            "format": kind[0],
            "markers": "-" if kind[0] == "plain" else "tokens" if kind[1] else "text",
        }
        row |= {f"us at {length}": round(least[kind, length] * 1e6, 2) for length in lengths}
        row["growth"] = round(least[kind, lengths[-1]] / least[kind, lengths[0]], 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--lengths", type=numbers, default=list(LENGTHS), help="in tokens")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--formats", default=",".join(TOOL_PARSER_NAMES))
    args = parser.parse_args()
    rows = measure(args.formats.split(","), args.lengths, args.rounds)
    report("message_parsing", {"rounds": args.rounds}, rows, args.out)


if __name__ == "__main__":
    main()
