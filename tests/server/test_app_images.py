"""Images in chats: as data URIs and in no other way, bounded, and computed as `LLM` does."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.errors import PromptError
from hetero_llm.core.images import PromptImage, PromptImages
from hetero_llm.engine.async_engine import AsyncLLMEngine
from hetero_llm.engine.inputs.image_uri import picture_of_uri
from hetero_llm.engine.inputs.images import open_images
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.processes import messages
from hetero_llm.models.read_config import load_model_config
from hetero_llm.server.settings import Limits, ServerSettings
from tests.models.tiny_images import IMAGE_TOKEN_ID, make_tiny_vision, picture
from tests.server.serving import Served, serving

pytestmark = pytest.mark.usefixtures("forked_engines")

CHAT = "/v1/chat/completions"
ARGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "limit_mm_per_prompt": "image=2"}
SETTINGS = ServerSettings(limits=Limits(image_bytes=20_000, image_pixels=10_000))


def uri(image: Image.Image, kind: str = "png") -> str:
    data = io.BytesIO()
    image.save(data, kind)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def body(*parts: Any, **rest: Any) -> dict[str, Any]:
    """A conversation with these texts and URIs of images."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **rest,
    }


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("images") / "qwen2_vl", "qwen2_vl")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(AsyncLLMEngine({"model": str(folder), **ARGS}), SETTINGS) as server:
        yield server
        server.engine.process.kill()


def test_a_chat_with_images_is_that_of_llm(served: Served, folder: Path) -> None:
    """What a user writes is text, even if it looks like the place of an image."""
    first, second = picture(0, 30, 22), picture(1, 20, 40)
    asked = body("Look: ", image_part(uri(first)), " and ", image_part(uri(second)), "<image>!")
    answer = served.post(CHAT, {**asked, "return_token_ids": True}).json()
    with LLM(str(folder), **ARGS) as llm:
        encode = llm.get_tokenizer().encode
        written = [one for character in "<image>!\n" for one in encode(character)]
        ids = [*encode("user: Look: "), IMAGE_TOKEN_ID, *encode(" and "), IMAGE_TOKEN_ID, *written]
        (output,) = llm.generate(
            {"prompt_token_ids": ids, "multi_modal_data": {"image": [first, second]}},
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            use_tqdm=False,
        )
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids) > len(ids)
    counted = served.post("/tokenize", {"messages": asked["messages"]}).json()
    assert counted["tokens"] == output.prompt_token_ids


def test_the_status_page_is_told_that_images_are_taken(served: Served) -> None:
    model = served.http.get("/status.json").json()["model"]
    assert (model["images"], model["image_bytes"]) == (2, 20_000)


def test_other_forms_of_the_same_image(served: Served) -> None:
    """JPEG is lossy: here of one colour."""
    plain = Image.new("RGB", (24, 24), (255, 255, 255))
    turned = plain.copy()
    exif = turned.getexif()
    exif[0x0112] = 6
    data = io.BytesIO()
    turned.save(data, "jpeg", exif=exif)
    jpeg = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    urls = [uri(plain), uri(plain, "webp"), uri(plain, "bmp"), uri(plain, "gif"), jpeg]
    answers = [served.post(CHAT, body(image_part(url), "?")).json() for url in urls]
    bare = {"type": "image_url", "image_url": urls[0]}
    answers.append(served.post(CHAT, body(bare, "?")).json())
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert len(set(texts)) == 1
    assert answers[-1]["usage"]["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]


def test_an_image_by_url(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fetcher gets is treated as the content of a data URI."""
    contents = {"https://a.com/x.png": GOOD, "https://a.com/no": _HEAD + "QUJD"}

    class Fetcher:
        async def fetch_beside(self, url: str, where: str, most_bytes: int) -> bytes:
            assert (where, most_bytes) == ("messages[0].content[0].image_url", 20_000)
            return base64.b64decode(contents[url].removeprefix(_HEAD))

    monkeypatch.setattr(served.context.tokenizer.images, "fetcher", Fetcher())
    by_url = served.post(CHAT, body(image_part("https://a.com/x.png"), image_part(GOOD)))
    assert by_url.status_code == 200, by_url.text
    by_data = served.post(CHAT, body(image_part(GOOD), image_part(GOOD)))
    assert by_url.json()["choices"] == by_data.json()["choices"]
    damaged = served.post(CHAT, body(image_part("https://a.com/no")))
    assert damaged.status_code == 400 and "no readable image" in damaged.text


def test_text_alone_is_served_as_ever(served: Served) -> None:
    answer = served.post(CHAT, body("hello"))
    assert answer.status_code == 200, answer.text
    plain = {**body(), "messages": [{"role": "user", "content": "hello"}]}
    assert served.post(CHAT, plain).json()["choices"] == answer.json()["choices"]


GOOD = uri(picture(0))
WIDE = uri(Image.new("1", (50_000, 1_000)))  # few bytes, many pixels
_HEAD = "data:image/png;base64,"
TRUNCATED = _HEAD + uri(picture(0, 60, 60)).removeprefix(_HEAD)[:4000]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/cat.png", "nothing is fetched without allowed_media_domains"),
        ("file:///etc/passwd", "nothing is fetched without allowed_media_domains"),
        ("/etc/passwd", "nothing is fetched without allowed_media_domains"),
        ("data:text/plain;base64,QUJD", "must begin like data:image/png;base64,"),
        ("data:image/png,QUJD", "must begin like data:image/png;base64,"),
        ("data:image/png;base64,Q*JD", "is not base64"),
        ("data:image/png;base64,QUJDRA", "is not base64"),
        ("data:image/png;base64,QUJD", "is no readable image"),
        ("data:image/png;base64,", "is no readable image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "is no readable image"),
        (TRUNCATED, "is no readable image"),
        (WIDE, "has more than 10000 pixels"),
        ("data:image/png;base64," + "A" * 40_000, "the image is larger than 20000 bytes"),
    ],
)
def test_what_is_no_image_is_refused(served: Served, url: str, reason: str) -> None:
    answer = served.post(CHAT, body("a", image_part(url)))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[0].content[1].image_url"
    assert reason in error["message"], error["message"]
    assert " at 0x" not in error["message"]


@pytest.mark.parametrize(
    ("asked", "param", "reason"),
    [
        (body(*[image_part(GOOD)] * 3), "messages[0].content[2].image_url", "at most 2"),
        (body(image_part(None)), "messages[0].content[0].image_url.url", "is required"),
        (body({"type": "image_url"}), "messages[0].content[0].image_url.url", "is required"),
        (body({"type": "video_url"}), "messages[0].content[0]", "only 'text' and 'image_url'"),
        (body({"type": "text"}), "messages[0].content[0]", "text is required"),
        (
            body(image_part(GOOD), truncate_prompt_tokens=4),
            "truncate_prompt_tokens",
            "cannot be cut",
        ),
        (body(image_part(GOOD), max_tokens=250), "max_tokens", "maximum context length"),
    ],
)
def test_other_mistakes(served: Served, asked: Any, param: str, reason: str) -> None:
    answer = served.post(CHAT, asked)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert reason in error["message"]


def test_a_model_of_text_takes_none(server: Served) -> None:
    answer = server.post(CHAT, body(image_part(GOOD)))
    assert answer.status_code == 400
    assert "type 'image_url' is not available" in answer.json()["error"]["message"]


def test_spaces_in_base64_are_skipped() -> None:
    broken = "\n".join([GOOD[:100], GOOD[100:]])
    image = picture_of_uri(broken, "here", most_bytes=10_000, most_pixels=1000)
    assert np.array_equal(np.asarray(image), np.asarray(picture(0)))


def test_images_on_their_way_to_the_engine(folder: Path) -> None:
    inputs = open_images(folder, load_model_config(folder), 2)
    ids, prepared = inputs.prepare([3, IMAGE_TOKEN_ID], [picture(0, 30, 22)])
    params = SamplingParams(detokenize=False)
    processor = InputProcessor(
        None, vocab_size=300, max_model_len=99, eos_ids=(), max_logprobs=0, seed=0, images=inputs
    )
    request = processor.make_request("1", Prompt(None, ids, prepared=prepared), params)
    sent = messages.request_to_wire("1", request)
    received = messages.decode_to_engine(messages.encode(sent))
    found = messages.request_from_wire(received).images
    (one,), (other,) = prepared.items, found.items
    assert (one.start, one.count, one.grid) == (other.start, other.count, other.grid)
    assert found.key == prepared.key
    for name, array in one.arrays.items():
        assert np.array_equal(array, other.arrays[name]) and array.dtype == other.arrays[name].dtype
    doubles = PromptImages((PromptImage(0, 1, None, {"pixel_values": np.zeros(1)}),), "")
    with pytest.raises(PromptError, match="pixel_values='float64'"):
        messages.request_to_wire("1", replace(request, images=doubles))


def test_errors_name_the_part() -> None:
    with pytest.raises(PromptError, match=r"^messages\[3\]="):
        picture_of_uri("ftp://x", "messages[3]", most_bytes=1, most_pixels=1)
