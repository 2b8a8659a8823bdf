"""Contents of a conversation in the form that a template sees; what models do with them is tested
in tests/scenarios/test_families.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import RequestError
from hetero_llm.engine.inputs.chat_messages import for_template
from hetero_llm.engine.inputs.image_uri import Fetch
from hetero_llm.engine.inputs.media_fetch import NoFetcher

PICTURE = np.zeros((4, 4, 3), np.uint8)

FETCH = NoFetcher().fetch


def of(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, "name": "me"}]


def texts(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


@pytest.mark.parametrize(
    ("content", "content_format", "expected"),
    [
        ("a", "auto", "a"),
        (texts("a", "b"), "auto", "a\nb"),
        (["a", {"text": "b"}], "string", "a\nb"),
        ([], "auto", ""),
        (None, "auto", None),
        ("a", "openai", texts("a")),
        (("a", "b"), "openai", texts("a", "b")),
    ],
)
def test_contents_of_a_model_of_texts(content: Any, content_format: str, expected: Any) -> None:
    given = of(content)
    messages, images = for_template(given, content_format, None)
    assert (messages, images) == (of(expected), ())
    assert given == of(content)  # the user's own messages stay


def test_contents_of_a_model_that_takes_images() -> None:
    content = ["see", {"type": "image", "image": PICTURE}, *texts("it")]
    messages, images = for_template(of(content), "auto", FETCH)
    assert messages == of([*texts("see"), {"type": "image"}, *texts("it")])
    assert len(images) == 1 and images[0] is PICTURE
    assert for_template(of("a"), "auto", FETCH) == (of(texts("a")), ())
    assert for_template(of("a"), "string", FETCH) == (of("a"), ())
    with pytest.raises(RequestError, match=r"content\[1\]=(?s:.*)must be a text"):
        for_template(of(content), "string", FETCH)


@pytest.mark.parametrize("fetch", [None, FETCH])
@pytest.mark.parametrize("messages", [["a"], of(5), of([5])])
def test_what_is_no_message(messages: Any, fetch: Fetch | None) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]"):
        for_template(messages, "auto", fetch)
    with pytest.raises(RequestError, match="^chat_template_content_format='html'"):
        for_template(messages, "html", fetch)
