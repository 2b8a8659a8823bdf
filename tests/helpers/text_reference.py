"""What `engine/text/` says of stop strings and detokenization, on the bytes of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def text_reference(
    prompt: bytes,
    pieces: Sequence[bytes],
    stops: Sequence[str] = (),
    *,
    min_tokens: int = 0,
    include: bool = False,
) -> tuple[str, int, str | None]:
    """The text of the output tokens `pieces`, how many of them come up to the end of the first stop
    string, and that stop string."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(prompt)
    begun = decoder.getstate()[0]  # a character that the prompt leaves incomplete

    def text(count: int, ended: bool) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = decoder.decode(begun + b"".join(pieces[:count]), ended)
        return shown.removeprefix("\ufffd") if begun else shown

    before = ""
    for count in [*range(1, len(pieces) + 1), None]:
        now = text(len(pieces) if count is None else count, count is None)
        num_tokens = len(pieces) if count is None else count
        for end in range(len(before) + 1, len(now) + 1):
            for stop in stops if num_tokens > min_tokens else ():
                if now[:end].endswith(stop):
                    return now[: end if include else end - len(stop)], num_tokens, stop
        before = now
    return before, len(pieces), None
