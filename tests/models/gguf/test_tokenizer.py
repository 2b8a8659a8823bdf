"""Tokenizers from GGUF files give the ids of the models' own tokenizers of the same kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.models.gguf.tokenizer import read_gguf_tokenizer
from tests.helpers.gguf_files import ARRAY, FLOAT32, STRING, GgufWriter, Typed

TEXTS = (
    "", " ", "a", "Hello world! 123", "  multiple   spaces ", "Café déjà vu.\n\n\tx",
    "we'll SEE'S it's I'D", "١٢٣ 中文字 🎉 naïve e\u0301 ½ Ⅷ", "def f(x):\n    return x+12345\r\n",
    "<|im_start|>user\nhi<|im_end|>\n", "a<tool>b <tool> c", "HTTPServer camelCase ÀÉ ßeta",
    " word \n \n  end",
)  # fmt: skip
CORPUS = [*TEXTS, "the cat sat on the mat with the other cats 1990 2024 it's we'll" * 3]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool>"

# The splits as the models' tokenizer.json have them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


SPLITS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": split_by(_LLAMA3),
    "qwen2": split_by(_LLAMA3.replace("{1,3}", "")),
}


def byte_level(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A trained tokenizer and the metadata that describes it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*CONTROL, USER_DEFINED], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    kinds = [
        3 if token in CONTROL else 4 if token == USER_DEFINED else 1 for token, _ in vocabulary
    ]
    return tokenizer, {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def written(folder: Path, metadata: dict[str, Any]) -> Path:
    return GgufWriter(metadata).write(folder / "model.gguf")


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_byte_level(tmp_path: Path, pre: str) -> None:
    reference, metadata = byte_level(pre)
    path = written(tmp_path, metadata)
    found = load_tokenizer(path, mode="auto", trust_remote_code=False)
    rng = random.Random(0)
    alphabet = "abcXYZ '’\n\r\t 0123456789.,!_/éßЖ中🎉½e\u0301"
    mixed = ["".join(rng.choices(alphabet, k=40)) for _ in range(100)]
    for text in (*TEXTS, *mixed):
        ids = found.encode(text)
        assert ids == reference.encode(text).ids, text
        if pre != "qwen2":  # which composes characters
            assert found.decode(ids, skip_special_tokens=False) == text
    assert found.decode([1, 2], skip_special_tokens=True) == ""
    assert found.hf.bos_token == "<|im_start|>" and found.hf.eos_token == "<|im_end|>"
    assert found.token_bytes(reference.encode("the").ids[0]) is not None


def test_words_that_are_tokens(tmp_path: Path) -> None:
    """Llama 3's BPE takes a whole word if it is a token, GPT-2's only what merges make."""
    _, metadata = byte_level("gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    for name in ("tokens", "token_type"):
        metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], 1]
    metadata["tokenizer.ggml.tokens"][-1] = "zq"
    found = read_gguf_tokenizer(written(tmp_path, metadata))
    assert found.encode("zq") == [tokens.index("z"), tokens.index("q")]
    found = read_gguf_tokenizer(written(tmp_path, {**metadata, "tokenizer.ggml.pre": "llama-bpe"}))
    assert found.encode("zq") == [len(tokens)]


def sentencepiece_like() -> dict[str, Any]:
    """Pieces with scores, as Llama 2's file has them."""
    words = ["▁", "a", "b", "c", "t", "h", "e", "▁t", "he", "▁the", "▁a", "ab", "▁c", "bc", "th"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, USER_DEFINED]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    scores = (
        [0.0] * 259 + [-20.0] * 7 + [-1.0, -2.0, -3.0, -4.0, -6.0, -5.0, -5.5, -9.0] + [-1000.0]
    )
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": Typed(ARRAY, scores, FLOAT32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def merged_by_score(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's BPE: again and again the pair that makes the piece with the best score, the
    first one of several; what is no piece becomes bytes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"].value, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
                 if a + b in scores and a + b != USER_DEFINED]  # fmt: skip
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    found: list[str] = []
    for part in parts:
        found += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    return found


def test_sentencepiece(tmp_path: Path) -> None:
    metadata = sentencepiece_like()
    found = load_tokenizer(written(tmp_path, metadata), mode="auto", trust_remote_code=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    rng = random.Random(1)
    texts = [
        "the cab",
        "a  é",
        "中\n",
        *("".join(rng.choices("abcthe é", k=12)) for _ in range(100)),
    ]
    for text in texts:
        ids = found.encode(text)
        assert [tokens[i] for i in ids] == ["<s>", *merged_by_score(text, metadata)], text
        assert found.decode(ids, skip_special_tokens=True) == text
    assert found.encode("the", add_special_tokens=False) == [tokens.index("▁the")]
    assert tokens.index(USER_DEFINED) in found.encode("a<tool>b")
    stream = found.decode_stream([], skip_special_tokens=True)
    assert "".join(stream.push(i) for i in found.encode("the é t")[1:]) == "the é t"


def test_no_space_before_the_text(tmp_path: Path) -> None:
    """Gemma's files."""
    metadata = {**sentencepiece_like(), "tokenizer.ggml.add_space_prefix": False}
    found = read_gguf_tokenizer(written(tmp_path, metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in found.encode("the the")] == ["<s>", "t", "he", "▁the"]
    assert found.decode(found.encode(" a"), skip_special_tokens=True) == " a"


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_what_goes_around_a_text(
    tmp_path: Path, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    metadata = sentencepiece_like() | {f"tokenizer.ggml.{k}": v for k, v in flags.items()}
    found = read_gguf_tokenizer(written(tmp_path, metadata))
    ids = found.encode("a")
    assert ids == [*before, *found.encode("a", add_special_tokens=False), *after]


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_to_add_that_the_file_does_not_name(tmp_path: Path, name: str) -> None:
    metadata = sentencepiece_like() | {f"tokenizer.ggml.add_{name}_token": True}
    del metadata[f"tokenizer.ggml.{name}_token_id"]
    message = f"add_{name}_token=True: the file has no tokenizer.ggml.{name}_token_id"
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_tokenizer(written(tmp_path, metadata))


def test_tokens_that_a_template_could_misread(tmp_path: Path) -> None:
    """A colon or a dollar sign means something in the templates of the tokenizers library."""
    metadata = sentencepiece_like() | {"tokenizer.ggml.add_eos_token": True}
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[1], tokens[2] = "$A", "<eos:2>"
    found = read_gguf_tokenizer(written(tmp_path, metadata))
    assert found.encode("a") == [1, tokens.index("▁a"), 2]
    assert found.decode([1, tokens.index("▁a"), 2], skip_special_tokens=True) == "a"


def test_characters_that_no_token_has(tmp_path: Path) -> None:
    """They become the token of that kind, though the file does not name it."""
    metadata = sentencepiece_like()
    kinds = [1 if kind == 6 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    del metadata["tokenizer.ggml.unknown_token_id"]
    metadata["tokenizer.ggml.token_type"] = kinds
    found = read_gguf_tokenizer(written(tmp_path, metadata))
    assert found.encode("中", add_special_tokens=False)[-1] == 0
    metadata["tokenizer.ggml.token_type"] = [1, *kinds[1:]]
    with pytest.raises(ModelLoadError, match="unknown_token_id=None: needed in a vocabulary"):
        read_gguf_tokenizer(written(tmp_path, metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": Typed(ARRAY, [], STRING)}, "tokens: 0 tokens, and 1 to 1048576 are read"),
        ({"tokens": ["a"] * ((1 << 20) + 1)}, "tokens: 1048577 tokens, and 1 to 1048576 are read"),
        ({"tokens": ["<unk>", "<s>", "a" * 1025]}, "tokens: 'aaa.*aaa' has 1025 characters, and"),
        ({"scores": [0.0, float("nan"), 0.0]}, "scores: finite numbers are needed"),
        ({"scores": [True, True, False]}, "scores: numbers are needed"),
    ],
)
def test_absurd_vocabularies(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    small = {"tokens": ["<unk>", "<s>", "a"], "token_type": [2, 3, 1], "scores": [0.0, 0.0, 0.0]}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama"}
    path = written(
        tmp_path, metadata | {f"tokenizer.ggml.{k}": v for k, v in (small | change).items()}
    )
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_tokenizer(path)


def test_a_vocabulary_of_too_many_pairs(tmp_path: Path) -> None:
    """Of 400 tokens, each of which any two make whose lengths add up."""
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *("a" * size for size in range(1, 400))],
        "tokenizer.ggml.token_type": [2, *[1] * 399],
        "tokenizer.ggml.scores": Typed(ARRAY, [0.0] * 400, FLOAT32),
    }  # fmt: skip
    with pytest.raises(ModelLoadError, match="tokens: more than 65536 pairs of them make a token"):
        read_gguf_tokenizer(written(tmp_path, metadata))


def test_chat_template(tmp_path: Path) -> None:
    _, metadata = byte_level("smollm")
    found = load_tokenizer(written(tmp_path, metadata), mode="auto", trust_remote_code=False)
    assert not found.hf.chat_template
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    path = written(tmp_path, {**metadata, "tokenizer.chat_template": template})
    found = load_tokenizer(path, mode="auto", trust_remote_code=False)
    ids = found.apply_chat_template(
        [{"role": "user", "content": "a"}], chat_template=None, add_generation_prompt=True
    )
    assert ids == [1, *found.encode("a"), 2]


def test_a_file_that_does_not_name_its_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, metadata = byte_level("qwen2")
    del metadata["tokenizer.ggml.pre"]
    path = written(tmp_path, {**metadata, "general.architecture": "qwen2"})
    assert read_gguf_tokenizer(path).encode("Hello 123") == reference.encode("Hello 123").ids
    assert "does not say how texts are split into words: taken as qwen2" in caplog.text


def test_tokens_that_are_there_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = sentencepiece_like()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("th")] = "a"
    found = read_gguf_tokenizer(written(tmp_path, metadata))
    assert "1 tokens of the vocabulary are there twice" in caplog.text
    assert found.encode("ba", add_special_tokens=False)[-1] == tokens.index("a")


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.pop(f"tokenizer.ggml.{key}")


def with_value(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("tokens"), "the key 'tokenizer.ggml.tokens' is missing.*--tokenizer"),
        (without("model"), "the key 'tokenizer.ggml.model' is missing"),
        (without("merges"), "the key 'tokenizer.ggml.merges' is missing"),
        (with_value("model", "bert"), "model='bert': supported are gpt2, llama"),
        (with_value("pre", "viking"), "pre='viking': supported are gpt-2, smollm"),
        (with_value("merges", ["ab"]), "merges: 'ab' is no pair"),
        (with_value("merges", ["xyz abc"]), "no usable tokenizer: .*"),
        (with_value("merges", [1, 2]), "merges: an array of another type"),
        (with_value("token_type", [1]), "token_type: 1 entries for 404 tokens"),
        (with_value("tokens", "text"), "tokens: an array of another type"),
        (with_value("eos_token_id", 5000), "eos_token_id=5000: the vocabulary has 404 tokens"),
        (with_value("add_bos_token", 1), "add_bos_token=1: a bool is needed"),
        (with_value("token_type", [1] * 403 + [9]), "token_type: holds 9, and 0 to 6 are known"),
    ],
)
def test_errors(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    _, metadata = byte_level("smollm")
    change(metadata)
    path = written(tmp_path, metadata)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf_tokenizer(path)
    assert str(path) in str(caught.value)
