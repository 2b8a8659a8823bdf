"""Payloads that are encoded once but for a text."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.server import protocol as chat
from hetero_llm.server.response_builder import NUMBER_MARK, TEXT_MARK, Envelope
from hetero_llm.server.responses import RESPONSE_EVENTS, SERVER_SENT_EVENTS
from hetero_llm.server.responses_api import protocol as responses


def _chunk(request_id: str, text: str) -> chat.Chunk:
    choice = chat.ChunkChoice(3, chat.Delta(content=text), None, None)
    return chat.Chunk(request_id, "chat.completion.chunk", 7, "100%s%d", [choice], None)


def _event(item_id: str, number: int, text: str) -> responses.TextDelta:
    return responses.TextDelta(
        sequence_number=number, output_index=0, item_id=item_id, delta=text, logprobs=[]
    )


MARKS = st.sampled_from([TEXT_MARK, f'"{TEXT_MARK}"', str(NUMBER_MARK), "%d%b%%"])


@given(MARKS | st.text(), MARKS | st.text(), st.integers(0, 1 << 40))
def test_an_envelope_writes_what_the_encoder_does(name: str, text: str, number: int) -> None:
    request_id = f"chatcmpl-{name}"
    written = Envelope(_chunk(request_id, TEXT_MARK)).write(text)
    assert written.json == msgspec.json.encode(_chunk(request_id, text))
    assert SERVER_SENT_EVENTS.frame(written) == SERVER_SENT_EVENTS.frame(_chunk(request_id, text))

    envelope = Envelope(_event(f"msg_{name}", NUMBER_MARK, TEXT_MARK), numbered=True)
    event = _event(f"msg_{name}", number, text)
    assert RESPONSE_EVENTS.frame(envelope.write_numbered(number, text)) == (
        RESPONSE_EVENTS.frame(event)
    )
