"""Filling a model from files, and the message for each kind of damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.read_config import load_model_config
from tests.models.loading import edit_weights, load, same_parameters
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

INDEX = "model.safetensors.index.json"


def head_and_embedding(model: CausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_parameter("lm_head.weight"), model.get_parameter("embed_tokens.weight")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt", "gpt2"])
def test_shards_equal_one_file(tmp_path: Path, family: str) -> None:
    one = make_tiny_checkpoint(tmp_path / "one", family)
    many = make_tiny_checkpoint(tmp_path / "many", family, max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert same_parameters(load(one), load(many))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_conversion(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    model, exact = load(folder, dtype=dtype), load(folder)
    assert not model.training
    for parameter, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert parameter.dtype == dtype
        assert not parameter.requires_grad
        assert torch.equal(parameter, reference.to(dtype))
    assert model.get_buffer("rotary.table").dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("family", "tied", "untied"),
    [("llama", "tied", "gqa"), ("gpt2", "tied", "untied_inner"), ("opt", "bare", "untied_gelu")],
)
def test_tied_head_shares_storage(tmp_path: Path, family: str, tied: str, untied: str) -> None:
    shared = load(make_tiny_checkpoint(tmp_path / "tied", family, tied))
    assert head_and_embedding(shared)[0] is head_and_embedding(shared)[1]
    apart = load(make_tiny_checkpoint(tmp_path / "untied", family, untied))
    head, embedding = head_and_embedding(apart)
    assert head.data_ptr() != embedding.data_ptr()


def test_harmless_extras_are_skipped(tmp_path: Path) -> None:
    llama = make_tiny_checkpoint(tmp_path / "llama", "llama", "tied")
    expected = load(llama)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(96, 32),
    }
    edit_weights(llama, lambda tensors: {**tensors, **extras})
    assert same_parameters(load(llama), expected)
    gpt2 = make_tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    expected = load(gpt2)
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "transformer.h.1.attn.masked_bias": torch.ones(1),
    }
    edit_weights(gpt2, lambda tensors: {**tensors, **masks})
    assert same_parameters(load(gpt2), expected)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_checkpoints_without_prefix(tmp_path: Path, family: str, prefix: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    expected = load(folder)
    assert all(name.startswith(prefix) for name in load_file(folder / "model.safetensors"))
    edit_weights(folder, lambda t: {k.removeprefix(prefix): v for k, v in t.items()})
    assert same_parameters(load(folder), expected)


def test_missing_unexpected_and_wrong_shape_are_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.9.mlp.extra.weight"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(31)
        return tensors

    edit_weights(folder, change)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    message = str(caught.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight" in message
    assert "unexpected: model.layers.9.mlp.extra.weight" in message
    assert "model.norm.weight is [31], config.json says [32]" in message


def test_config_of_another_size(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    rewrite_config(folder, num_hidden_layers=5)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3\..* and \d+ more"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1000])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(folder)


def test_corrupt_header(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(folder)


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": "../x.safetensors"}}'])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelLoadError, match=INDEX):
        load(folder)


def test_tensor_stored_twice(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    save_file({"model.norm.weight": torch.ones(32)}, folder / "other.safetensors")
    with pytest.raises(ModelLoadError, match="stored twice"):
        load(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file$"):
        load(folder)


def test_consolidated_copy_is_not_read(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "mistral")
    save_file({"layers.0.wq": torch.ones(2)}, folder / "consolidated.safetensors")
    load(folder)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_dummy_weights_follow_the_seed(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    (folder / "model.safetensors").unlink()
    first = load(folder, load_format="dummy", seed=1)
    assert same_parameters(first, load(folder, load_format="dummy", seed=1))
    assert not same_parameters(first, load(folder, load_format="dummy", seed=2))
    for parameter in first.parameters():
        assert parameter.isfinite().all()
        assert parameter.abs().max() > 0


def test_unknown_load_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format='gguf'"):
        load(make_tiny_checkpoint(tmp_path, "llama"), load_format="gguf")


def test_progress_bar_counts_all_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    capsys.readouterr()
    load(folder)
    assert capsys.readouterr().err == ""
    load(folder, show_progress=True)
    assert "100%" in capsys.readouterr().err


def test_model_can_be_built_on_meta(tmp_path: Path) -> None:
    from hetero_llm.models.registry import model_class

    config = load_model_config(make_tiny_checkpoint(tmp_path, "llama"))
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    assert all(p.is_meta for p in model.parameters())
