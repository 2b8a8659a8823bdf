"""Single tokens as text and bytes, offsets, and special tokens kept apart from users' text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads
from hetero_llm.server.errors import ApiError, as_api_error, without_paths
from hetero_llm.server.protocol import CompletionRequest
from hetero_llm.server.request_parsing import decode
from hetero_llm.server.settings import Limits
from hetero_llm.server.tokenization import ApiTokenizer, SpecialGuard, TextOffsets, guard_for

SPECIAL = {"<s>": 0, "</s>": 1, "<s>x": 2}


def spiece_tokenizer() -> Tokenizer:
    """A SentencePiece-like tokenizer: "\u2581" for spaces, bytes for what it does not know."""
    vocab = {"<s>": 0, "<unk>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for piece in ("\u2581", "a", "b", "\u2581a", "ab"):
        vocab[piece] = len(vocab)
    backend = Backend(
        BPE(vocab, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("never"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer) -> ApiTokenizer:
    return ApiTokenizer(tokenizer, TokenizerThreads(), max_model_len=100)


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_bytes_of_the_tokens_are_the_texts(
    api: ApiTokenizer, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(api.token(token)[1] for token in ids)
    assert joined == text.encode()
    offsets = TextOffsets(api, skip_special_tokens=False)
    for token in ids:
        at = offsets.next(token)
        shown = api.token(token)[0]
        if api.is_whole(token):
            assert text[at : at + len(shown)] == shown


def test_tokens_of_a_sentencepiece_vocabulary() -> None:
    tokenizer = spiece_tokenizer()
    api = ApiTokenizer(tokenizer, TokenizerThreads(), max_model_len=100)
    ids = tokenizer.encode("a ab é", add_special_tokens=False)
    assert b"".join(api.token(token)[1] for token in ids) == " a ab é".encode()
    pieces = tokenizer.hf.convert_ids_to_tokens(ids)
    assert "<0xC3>" in pieces and "\u2581a" in pieces
    assert api.token(ids[pieces.index("<0xC3>")])[1] == b"\xc3"
    assert api.token(ids[pieces.index("\u2581a")]) == (" a", b" a")
    assert api.token(0) == ("<s>", b"<s>")


def test_special_tokens_of_users_and_templates(tokenizer: Tokenizer) -> None:
    for one in (tokenizer, spiece_tokenizer()):
        api = ApiTokenizer(one, TokenizerThreads(), max_model_len=100)
        special = next(iter(api.special_tokens))
        user = f"a{special} b"
        guard = guard_for(api.special_tokens, [user])
        assert guard is not None
        rendered = f"{special}{guard.hide(user)}{special}"
        ids = api.encode_rendered(rendered, guard)
        number = api.special_tokens[special]
        assert ids[0] == number == ids[-1] and ids.count(number) == 2
        assert b"".join(api.token(i)[1] for i in ids[1:-1]).decode().strip() == user
    assert guard_for({"<s>": 0}, ["a", "< s>"]) is None
    api = ApiTokenizer(tokenizer, TokenizerThreads(), max_model_len=64)
    special = next(iter(api.special_tokens))
    assert api.guard(["a", f"b{special}"]) is not None
    assert api.guard(["a", "b", special[:-1]]) is None


@given(text=st.text(alphabet="<s>/x a\U000f0000\U000f0001", max_size=30))
@settings(max_examples=200, deadline=None)
def test_what_is_hidden_comes_back(text: str) -> None:
    guard = SpecialGuard(SPECIAL, [text])
    hidden = guard.hide(text)
    assert not any(name in hidden for name in SPECIAL)
    assert guard.restored(hidden) == text
    pieces = guard.pieces(f"</s>{hidden}<s>x")
    assert pieces[0] == 1 and pieces[-1] == 2
    assert "".join(str(piece) for piece in pieces[1:-1]) == text


def test_texts_that_cannot_fit_are_not_encoded(tokenizer: Tokenizer) -> None:
    class Forbidden:
        hf = tokenizer.hf
        special_ids: frozenset[int] = frozenset()
        added_tokens: dict[int, str] = {}

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("encoded")

    unused: Any = Forbidden()
    guarded = ApiTokenizer(unused, TokenizerThreads(), max_model_len=100)
    for truncated, length in ((False, 1_000_000), (True, 2_000_000)):
        with pytest.raises(ApiError) as raised:
            asyncio.run(guarded.encode("a" * length, add_special_tokens=True, truncated=truncated))
        assert raised.value.code == "context_length_exceeded"


@given(data=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_body_is_an_error_of_ours(data: bytes) -> None:
    for body in (data, b'{"prompt":' + data + b"}", b'{"prompt":"' + data + b'"}'):
        try:
            decode(body, CompletionRequest, Limits(), strict_fields=True)
        except ApiError as error:
            assert error.status == 400 and len(error.body()) <= 4096


@given(text=st.text(max_size=600), param=st.text(max_size=100))
def test_error_bodies_are_small(text: str, param: str) -> None:
    error = ApiError(400, "x", text * 20, param=param)
    assert len(error.body()) <= 4096


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 1000])
def test_depth_is_counted_exactly(depth: int) -> None:
    inner = b"[" * (depth - 1) + b"]" * (depth - 1) if depth > 1 else b"1"
    bodies = [
        b'{"metadata":' + inner + b"}",
        b'{"user":"[[[[' + b'\\"[' * 100 + b'","metadata":' + inner + b"}",
        b'{"metadata":[' + b"[]," * 100 + b"1]," + b'"store":' + inner + b"}",
    ]
    for body in bodies[: 2 if depth < 2 else 3]:
        if depth <= 64:
            decode(body, CompletionRequest, Limits(), strict_fields=False)
        else:
            with pytest.raises(ApiError, match="64 levels"):
                decode(body, CompletionRequest, Limits(), strict_fields=False)


def test_a_body_of_many_small_parts_is_refused() -> None:
    for body in (b'{"a":[' + b"[]," * 70_000 + b"1]}",
                 b"{" + b",".join(b'"k%d":1' % i for i in range(70_000)) + b"}"):  # fmt: skip
        with pytest.raises(ApiError, match="more than 65536"):
            decode(body, CompletionRequest, Limits(), strict_fields=False)
    text = b'{"prompt":"' + b"[x: {y}] " * 70_000 + b'"}'
    decode(text, CompletionRequest, Limits(), strict_fields=False)


def test_paths_and_addresses_are_taken_out() -> None:
    text = "failed in /srv/models/a.json at 0x7f00deadbeef, see a/b"
    assert without_paths(text) == "failed in (path) at (address), see a/b"


def test_unknown_exceptions_tell_nothing() -> None:
    error = as_api_error(KeyError("secret"), "id-1")
    assert error.status == 500 and "secret" not in error.message and "id-1" in error.message
