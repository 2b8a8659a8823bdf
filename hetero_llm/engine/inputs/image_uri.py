"""Pictures out of URIs, which may be hostile: data URIs, and what a `Fetcher` allows."""

from __future__ import annotations

import binascii
import io
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hetero_llm.core.errors import PromptError, RequestError, shown
from hetero_llm.engine.inputs.images import NO_PILLOW
from hetero_llm.engine.inputs.media_fetch import NoFetcher

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The only formats that are read: Pillow knows many more, some of which are programs."""
MOST_BYTES, MOST_PIXELS = 20 << 20, 1 << 25
"""Default limits of one image."""
_SHOWN = 48

Fetch = Callable[[str, str, int], bytes]
_NO_FETCHER = NoFetcher()


def picture_of_uri(
    uri: str, where: str, *, most_bytes: int, most_pixels: int, fetch: Fetch = _NO_FETCHER.fetch
) -> Image:
    """The picture of a URI such as `data:image/png;base64,...`, upright; an animation's first one.

    Args:
        where: The URI's place in the request, for messages.
        most_bytes: Of the encoded picture.
        most_pixels: Checked before they are decoded.
        fetch: `Fetcher.fetch`, for URIs that are no data URIs.

    Raises:
        PromptError: with `where` as its field: the URI is of another kind, holds no base64 or no
            picture, or is too large.
    """
    rest = uri.partition(":")[2]
    if not is_data_uri(uri):
        return _decoded(fetch(uri, where, most_bytes), where, most_pixels)
    head, _, body = rest.partition(",")
    kind, *parameters = head.split(";")
    if not kind.lower().startswith("image/") or "base64" not in parameters:
        raise PromptError(where, uri[:_SHOWN], "must begin like data:image/png;base64,")
    if len(body) // 4 * 3 > most_bytes:
        reason = f"the image is larger than {most_bytes} bytes"
        raise PromptError(where, f"{len(body)} characters", reason)
    try:
        data = b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(where, uri[:_SHOWN], f"is not base64: {error}") from None
    return _decoded(data, where, most_pixels)


def is_data_uri(uri: str) -> bool:
    return uri.partition(":")[0].lower() == "data"


def chat_images(
    messages: Any, fetch: Fetch = _NO_FETCHER.fetch
) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """Converts a conversation for templates that handle images, which take contents as lists of
    parts; returns it with its images.

    Args:
        messages: of `LLM.chat`.
        fetch: `Fetcher.fetch`.

    Raises:
        RequestError: a part is of an unknown type, or its image cannot be read.
    """
    changed: list[dict[str, Any]] = []
    images: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif content is None and message.get("tool_calls"):
            content = [{"type": "text", "text": ""}]  # such a message says nothing else
        if not isinstance(content, (list, tuple)):
            raise RequestError(f"messages[{index}]", message, "needs a content of text or of parts")
        parts: list[dict[str, Any]] = []
        for number, part in enumerate(content):
            where = f"messages[{index}].content[{number}]"
            if isinstance(part, str):
                part = {"type": "text", "text": part}
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                parts.append(dict(part))
                continue
            if kind == "image" and part.get("image") is not None:
                images.append(part["image"])
            elif kind == "image_url":
                images.append(_image_of_part(part, f"{where}.image_url", fetch))
            else:
                raise RequestError(where, part, "must be a part of type text, image or image_url")
            parts.append({"type": "image"})
        changed.append({**message, "content": parts})
    return changed, tuple(images)


def _image_of_part(part: Mapping[str, Any], where: str, fetch: Fetch) -> Image:
    given = part.get("image_url")
    uri = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(uri, str):
        raise PromptError(where, given, "needs a url")
    return picture_of_uri(uri, where, most_bytes=MOST_BYTES, most_pixels=MOST_PIXELS, fetch=fetch)


def _decoded(data: bytes, where: str, most_pixels: int) -> Image:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise PromptError(where, "an image", NO_PILLOW) from None
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > most_pixels:
            raise PromptError(
                where, f"{width} x {height} pixels", f"has more than {most_pixels} pixels"
            )
        picture.load()
        return ImageOps.exif_transpose(picture)
    except PromptError:
        raise
    except UnidentifiedImageError:  # whose text is an address in memory
        reason = f"is no readable image ({', '.join(FORMATS)})"
        raise PromptError(where, f"{len(data)} bytes", reason) from None
    except Exception as error:  # on damaged data the decoders raise exceptions of any type
        raise PromptError(
            where,
            f"{len(data)} bytes",
            f"is no readable image ({', '.join(FORMATS)}): {shown(str(error))}",
        ) from None
