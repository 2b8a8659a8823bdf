"""What the choice of a replica reads of a request: its text, in pieces, and its session.

The JSON is read as far as its top level: a conversation's messages are hashed as the client wrote
them. A client sends a growing conversation with the same beginning, so equal beginnings of this
text are equal beginnings of the prompt, whatever the chat template and the tokenizer make of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hetero_llm.engine.processes.replica_choice import PIECE_BYTES, piece_hashes

SESSION_HEADER = b"x-session-id"
_MOST_SESSION = 512
_NOTHING = msgspec.Raw(b"")


class _Fields(msgspec.Struct):
    """The fields of all APIs that become part of a prompt, and those that name who asks."""

    model: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    prompt_cache_key: msgspec.Raw = _NOTHING
    user: msgspec.Raw = _NOTHING


_decoder = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """
    Attributes:
        pieces: see `replica_choice.piece_hashes`.
        num_pieces: length of the request.
        session: its conversation or user; empty: unknown.
    """

    pieces: list[int]
    num_pieces: float = 0.0
    session: str = ""


def read_key(body: bytes, session: bytes = b"") -> RequestKey:
    """The key of a request. What is no JSON object has no pieces: a replica will answer that.

    Args:
        session: value of the header `x-session-id`, which comes before the fields
            `prompt_cache_key` and `user`.
    """
    name = session.decode("latin-1")[:_MOST_SESSION]
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return RequestKey([], len(body) / PIECE_BYTES, name)
    root = hash((bytes(fields.model), bytes(fields.tools)))
    text = b"".join(
        map(
            bytes,
            (fields.system, fields.instructions, fields.messages, fields.prompt, fields.input),
        )
    )
    if not name:
        for value in map(bytes, (fields.prompt_cache_key, fields.user)):
            if value[:1] == b'"' and len(value) > 2:
                name = value[1:-1].decode("utf-8", "replace")[:_MOST_SESSION]
                break
    return RequestKey(piece_hashes(text, root), len(text) / PIECE_BYTES, name)
