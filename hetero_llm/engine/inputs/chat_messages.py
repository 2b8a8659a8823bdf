"""The conversations of `LLM.chat` as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_llm.core.errors import RequestError
from hetero_llm.engine.inputs.image_uri import Fetch, chat_images

FORMATS = ("auto", "string", "openai")


def for_template(
    messages: Any, content_format: str, fetch: Fetch | None
) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """A conversation with each content in the one form that the template sees, and its images.

    Args:
        messages: of `LLM.chat`; contents are strings or lists of parts. None and no content stay
            as they are, since messages with tool calls have none.
        content_format: "string" joins the texts of parts with newlines, "openai" makes each content
            a list of parts; "auto" is "openai" if the model takes images, else "string".
        fetch: gets an image by its URL; None: the model takes no images.

    Raises:
        RequestError: an unknown format, or a part that this model does not take.
    """
    if content_format not in FORMATS:
        reason = "must be auto, string or openai"
        raise RequestError("chat_template_content_format", content_format, reason)
    if fetch is not None and content_format != "string":
        return chat_images(messages, fetch)
    changed = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, message, "must be a dict with role and content")
        content = message.get("content")
        if content is None:
            changed.append(dict(message))
            continue
        texts = [content] if isinstance(content, str) else _texts_of(content, where)
        parts = [{"type": "text", "text": text} for text in texts]
        changed.append(
            {**message, "content": parts if content_format == "openai" else "\n".join(texts)}
        )
    return changed, ()


def _texts_of(content: Any, where: str) -> list[str]:
    if not isinstance(content, (list, tuple)):
        raise RequestError(where, content, "needs a content of text or of parts")
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            text = None
        if not isinstance(text, str):
            reason = "must be a text: other parts are not taken here"
            raise RequestError(f"{where}.content[{number}]", part, reason)
        texts.append(text)
    return texts
