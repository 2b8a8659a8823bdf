"""Model folders that somebody made to do harm: one line that names the file, exit code 2, and
neither a long wait nor much memory. Weights, names and shapes: tests/test_cli_checkpoints.py."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import cli
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEP = '{"a":' * 10_000 + "1" + "}" * 10_000
LONG = "9" * 5000
LINKED_ROPE = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return make_tiny_checkpoint(folder, "llama", with_tokenizer=True)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def generate(folder: Path, *words: str) -> int:
    return cli.main(
        ["generate", str(folder), "--prompt", "x", "--max-tokens", "2", "--device", "cpu",
         "--dtype", "float32", *words]
    )  # fmt: skip


def check_refused(folder: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a folder, or file, that is refused."""
    assert generate(folder, *words) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("hetero-llm: error: ") and len(line) < 1000 and out == ""
    return line


Harm = Callable[[Path], Any]


def text(name: str, content: str) -> Harm:
    return lambda folder: (folder / name).write_text(content)


def link(name: str, target: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return harm


def pipe(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return harm


def unix_socket(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        before = os.getcwd()
        os.chdir(folder)  # the path of a socket may have 107 bytes
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(name)
        finally:
            os.chdir(before)

    return harm


def sparse(name: str, size: int) -> Harm:
    """A file that is long and takes no room on the disk."""

    def harm(folder: Path) -> None:
        with (folder / name).open("r+b" if (folder / name).exists() else "wb") as file:
            file.truncate(size)

    return harm


def config(**changes: Any) -> Harm:
    return lambda folder: rewrite_config(folder, **changes)


def header(**entry: Any) -> Harm:
    """A weight file whose header says this of its only tensor, with 64 bytes of data."""

    def harm(folder: Path) -> None:
        told = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **entry}
        data = json.dumps({"model.norm.weight": told}).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(data)) + data + bytes(64))

    return harm


def not_utf8(name: str) -> Harm:
    return lambda folder: (folder / name).write_bytes(b"{\xff\xfe\x00}")


FILES = [
    (f"{name}-{kind}", name, harm)
    for name in (CONFIG, GENERATION, TOKENIZER, "tokenizer.json", "special_tokens_map.json",
                 "chat_template.jinja", "chat_template.json", WEIGHTS, INDEX)
    for kind, harm in (
        ("endless", link(name, "/dev/zero")), ("pipe", pipe(name)), ("socket", unix_socket(name)),
    )
] + [
    (f"{name}-deep", name, text(name, DEEP)) for name in (CONFIG, GENERATION, TOKENIZER, INDEX)
] + [
    (f"{name}-long", name, text(name, f'{{"vocab_size": {LONG}}}'))
    for name in (CONFIG, GENERATION, TOKENIZER, INDEX)
] + [
    (f"{name}-bytes", name, not_utf8(name)) for name in (CONFIG, GENERATION, TOKENIZER, INDEX)
] + [
    (f"{name}-size", name, sparse(name, 1 << 40))
    for name in (CONFIG, GENERATION, TOKENIZER, INDEX, "tokenizer.json", "chat_template.jinja")
] + [
    ("template-list", "chat_template.json", text("chat_template.json", '{"chat_template": [1]}')),
    ("index-list", INDEX, text(INDEX, '{"weight_map": [1]}')),
    ("index-empty", INDEX, text(INDEX, '{"weight_map": {}}')),
    ("index-nul", INDEX, text(INDEX, '{"weight_map": {"a": "a\\u0000b"}}')),
    ("index-itself", INDEX, text(INDEX, '{"weight_map": {"a": 1, "b": "c"}}')),
    ("header-huge", WEIGHTS, header(shape=[1 << 62, 1 << 62])),
    ("header-negative", WEIGHTS, header(shape=[-16])),
    ("header-overlap", WEIGHTS, header(data_offsets=[64, 0])),
    ("weights-sparse", WEIGHTS, sparse(WEIGHTS, 1 << 40)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "harm"), [one[1:] for one in FILES], ids=[f[0] for f in FILES])
def test_a_hostile_file(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, harm: Harm
) -> None:
    if name == "chat_template.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    harm(folder)
    assert name in check_refused(folder, capfd)


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {**LINKED_ROPE, "factor": float("inf")}}, "factor"),
    ({"rope_parameters": {**LINKED_ROPE, "factor": float("nan")}}, "factor"),
    ({"rope_parameters": {**LINKED_ROPE, "factor": 10**400}}, "factor"),
    ({"rope_parameters": {**LINKED_ROPE, "factor": 1e29}}, "max_position_embeddings"),
    ({"rope_parameters": {**LINKED_ROPE, "rope_theta": float("inf")}}, "rope_theta"),
    ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta"),
    ({"rope_parameters": {**YARN, "beta_fast": 1e300}}, "beta_fast"),
    ({"rope_parameters": {**YARN, "mscale": "x", "mscale_all_dim": 1.0}}, "mscale"),
    ({"rope_parameters": {**YARN, "original_max_position_embeddings": 1e300}}, "original_max"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
    ({"max_position_embeddings": (1 << 31) - 1}, "max_model_len"),
    ({"vocab_size": 10**300}, "vocab_size"),
    ({"vocab_size": (1 << 31) - 1}, "an embedding of"),
    ({"hidden_size": 1 << 24, "num_attention_heads": 1 << 16}, "an embedding of"),
    ({"num_hidden_layers": 1 << 30}, "num_hidden_layers"),
    ({"num_hidden_layers": 9999}, "9999 layers"),
    ({"num_hidden_layers": 12}, "missing"),
    ({"intermediate_size": (1 << 31) - 1}, "of wrong shape"),
    ({"num_attention_heads": 1 << 30, "hidden_size": 1 << 30}, "num_attention_heads"),
    ({"head_dim": 1 << 20}, "of wrong shape"),
    ({"eos_token_id": list(range(100_000))}, "eos_token_id"),
    ({"eos_token_id": 1 << 40}, "eos_token_id"),
    ({"architectures": [[["x"]]]}, "architectures"),
    ({"architectures": json.loads("[" * 900 + "]" * 900)}, "architectures"),
    ({"rope_scaling": json.loads("[" * 900 + "]" * 900)}, "recursion"),
]


@pytest.mark.parametrize(("changes", "said"), VALUES, ids=[f"{i}" for i in range(len(VALUES))])
def test_a_hostile_value(
    folder: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    config(**changes)(folder)
    assert said in check_refused(folder, capfd)


def test_a_tokenizer_that_names_an_endless_file(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((folder / TOKENIZER).read_text())
    (folder / TOKENIZER).write_text(json.dumps({**settings, "vocab_file": "/dev/zero"}))
    line = check_refused(folder, capfd)
    assert TOKENIZER in line and "vocab_file" in line and "device" in line


def test_an_end_token_beyond_the_vocabulary(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """min_tokens forbids end tokens by their ids: one that is none failed the step."""
    rewrite_config(folder, eos_token_id=[2, 1 << 20])
    (folder / GENERATION).write_text('{"eos_token_id": 1048577}')
    assert generate(folder, "--min-tokens", "2", "--num-gpu-blocks-override", "64") == 0
    said = [r.getMessage() for r in caplog.records if "beyond the vocabulary" in r.getMessage()]
    assert len(said) == 2 and "eos_token_id=1048576" in said[0] and GENERATION in said[1]


@pytest.mark.parametrize("value", [[], {}, ""])
def test_a_tokenizer_that_fails_only_in_use(
    folder: Path, capfd: pytest.CaptureFixture[str], value: Any
) -> None:
    settings = json.loads((folder / TOKENIZER).read_text())
    (folder / TOKENIZER).write_text(json.dumps({**settings, "model_max_length": value}))
    assert "no usable tokenizer" in check_refused(folder, capfd)


HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 1 << 31, 1 << 62, 10**400, 1e30, 1e308, float("inf"), float("nan"),
    "", "x" * 10_000, "\0", [], [[]], [1] * 1000, {}, {"rope_type": []}, {"": {}},
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_random_values_in_every_key(
    folder: Path, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    """Twelve folders a seed, one or two keys changed in each. What still serves may serve."""
    rng = random.Random(seed)
    raw = json.loads((folder / CONFIG).read_text())
    for _ in range(12):
        keys = rng.sample(sorted(raw), rng.randint(1, 2))
        changes = {key: rng.choice(HOSTILE) for key in keys}
        (folder / CONFIG).write_text(json.dumps({**raw, **changes}))
        code = generate(folder, "--num-gpu-blocks-override", "64")
        err = capfd.readouterr().err
        assert code == 0 or (code == 2 and len(err.splitlines()) == 1), (changes, err)
