"""Broken checkpoints on the command line: one line that says what is wrong, and exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_llm import cli
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return make_tiny_checkpoint(folder, "llama", with_tokenizer=True, max_shard_size="60KB")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def shard_of(folder: Path, name: str) -> Path:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / weight_map[name]


def edit_norm(folder: Path, change: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Replaces the final norm in its shard."""
    path = shard_of(folder, NORM)
    tensors = load_file(path)
    save_file({**tensors, **change(tensors.pop(NORM))}, path)


def missing_shard(folder: Path) -> None:
    shard_of(folder, NORM).unlink()


def truncated_shard(folder: Path) -> None:
    path = shard_of(folder, NORM)
    path.write_bytes(path.read_bytes()[:-4])


def wrong_shape(folder: Path) -> None:
    edit_norm(folder, lambda norm: {NORM: norm[:31].clone()})


def extra_tensors(folder: Path) -> None:
    edit_norm(
        folder, lambda norm: {NORM: norm, **{f"extra.{i}": norm[i:].clone() for i in range(9)}}
    )


def path_in_the_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = "../../model.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def larger_vocabulary(folder: Path) -> None:
    rewrite_config(folder, vocab_size=320)


def no_architectures(folder: Path) -> None:
    rewrite_config(folder, remove=("architectures",))


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def only_pickled(folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors*"):
        if path.suffix == ".safetensors":
            tensors.update(load_file(path))
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def generate(folder: Path, *words: str) -> int:
    return cli.main(
        ["generate", str(folder), "--prompt", "x", "--max-tokens", "2", "--device", "cpu",
         "--dtype", "float32", "--num-gpu-blocks-override", "64", *words]
    )  # fmt: skip


BROKEN = [
    (missing_shard, "names the shard model-", "which is missing"),
    (truncated_shard, ".safetensors: not a readable safetensors file", "download it again"),
    (wrong_shape, f"of wrong shape: {NORM} is [31]", "config.json says [32]"),
    (extra_tensors, "tensors unexpected: extra.0, extra.1", "and 4 more"),
    (path_in_the_index, f"{INDEX}: '../../model.safetensors' is not a file name", ""),
    (larger_vocabulary, "embed_tokens.weight has 259 rows", "vocab_size=320"),
    (no_architectures, "config.json: architectures=None", "supported are"),
    (no_tokenizer, "no tokenizer's files", "--skip-tokenizer-init"),
    (nothing, "config.json: no such file", ""),
    (only_pickled, "only pickled weights (pytorch_model.bin)", "--allow-pickle-weights"),
]


@pytest.mark.parametrize(
    ("damage", "what", "more"), BROKEN, ids=[damage.__name__ for damage, *_ in BROKEN]
)
def test_one_clear_line(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    what: str,
    more: str,
) -> None:
    damage(folder)
    assert generate(folder) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"hetero-llm: error: {folder}")
    assert what in line and more in line
    assert out == ""


def test_the_server_says_it_too(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights are loaded by the engine's process, which has its own standard error."""
    truncated_shard(folder)
    words = ("--port", "0", "--device", "cpu", "--skip-tokenizer-init")
    assert cli.main(["serve", str(folder), *words]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if " INFO " not in line]
    assert line.startswith(f"hetero-llm: error: {folder}")
    assert "not a readable safetensors file" in line


def test_weights_that_are_no_numbers_are_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_norm(folder, lambda norm: {NORM: torch.full_like(norm, torch.nan)})
    assert generate(folder) == 0
    (said,) = [r.getMessage() for r in caplog.records if "finite" in r.getMessage()]
    assert said.endswith(f": {NORM}")


def test_pickled_weights_behind_the_flag(
    folder: Path, sound: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompt", "def f(", "--max-tokens", "8", "--temperature", "0")
    assert generate(sound, *words) == 0
    expected = capfd.readouterr().out
    only_pickled(folder)
    assert generate(folder, *words, "--allow-pickle-weights", "--load-format", "pt") == 0
    assert capfd.readouterr().out == expected


def test_manifest(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest", str(folder)]) == 0
    digest = capfd.readouterr().out.split()[-1]
    pinned = ("--model-sha256", digest)
    assert generate(folder, *pinned) == 0
    capfd.readouterr()
    edit_norm(folder, lambda norm: {NORM: norm + 1})
    assert generate(folder, *pinned) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"says: {shard_of(folder, NORM).name}")
    assert generate(folder, *pinned, "--load-format", "dummy") == 0
    (folder / "config.json").write_text("{}")
    assert generate(folder, *pinned, "--load-format", "dummy") == 2
    assert "says: config.json" in capfd.readouterr().err.splitlines()[-1]
