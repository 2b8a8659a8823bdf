"""Weights of GGUF files as transformers has them: order of rows, norms, dequantized blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.gguf.container import read_header
from hetero_llm.models.gguf.rows import TensorRows
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.quantization_config import with_plain_weights
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.weight_files import GgufFile, find_weight_files
from hetero_llm.quantization.matrix import dequantize
from tests.helpers.gguf_blocks import NUMBERS
from tests.helpers.gguf_files import GgufWriter, TinyGguf, make_tiny_gguf, sizes_for
from tests.models.loading import load, same_parameters

FAMILIES = [
    ("llama", "biases", {}),
    ("llama", "tied", {}),
    ("qwen2", "full", {}),
    ("qwen3", "full", {}),
    ("qwen3_moe", "full", {"mlp_only_layers": [], "moe_intermediate_size": 32}),
    ("gemma", "tied_biases", {"attention_bias": False}),
    ("gemma2", "soft_caps", {}),
]


def expected(tiny: TinyGguf) -> CausalLM:
    """What our loader makes of transformers' own copy."""
    tiny.model.save_pretrained(tiny.folder)
    return load(tiny.folder)


def load_plain(path: Path) -> CausalLM:
    return load_model(
        path, with_plain_weights(load_model_config(path)), dtype=torch.float32, device="cpu",
        show_progress=False,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "variant", "changes"), FAMILIES)
def test_families(tmp_path: Path, family: str, variant: str, changes: dict[str, Any]) -> None:
    changes = {**changes, "intermediate_size": 64}
    tiny = make_tiny_gguf(tmp_path, family, variant, changes=changes)
    assert same_parameters(load_plain(tiny.path), expected(tiny))


@pytest.mark.parametrize("kind", sorted(NUMBERS))
def test_types(tmp_path: Path, kind: str) -> None:
    tiny = make_tiny_gguf(tmp_path, "llama", types=lambda _: kind, changes=sizes_for(kind))
    assert same_parameters(load_plain(tiny.path), expected(tiny))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_matrices_that_stay_quantized(tmp_path: Path, kind: str) -> None:
    tiny = make_tiny_gguf(tmp_path, "llama", types=lambda _: kind, changes=sizes_for(kind))
    found, plain = load(tiny.path), expected(tiny)
    linears = {name: m for name, m in found.named_modules() if isinstance(m, Linear)}
    assert len(linears) == 9 and all(m.quantized is not None for m in linears.values())
    for name, module in linears.items():
        assert module.quantized is not None
        weight = plain.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        values = dequantize(module.quantized, torch.float32)
        bound = 0.0 if not kind.endswith("_K") else 2**-9 * weight.abs().max()
        assert (values - weight).abs().max() <= bound
    assert torch.equal(found.get_submodule("embed_tokens").weight,  # type: ignore[arg-type]
                       plain.get_submodule("embed_tokens").weight)  # type: ignore[arg-type]  # fmt: skip


def test_parts_of_several_kinds_become_plain(tmp_path: Path) -> None:
    """As in files of Q4_K_M, whose values are in Q6_K in some layers."""
    kinds = {"blk.0.attn_v.weight": "Q6_K", "token_embd.weight": "Q6_K"}
    tiny = make_tiny_gguf(
        tmp_path, "llama", types=lambda name: kinds.get(name, "Q4_K"), changes=sizes_for("Q4_K")
    )
    found, plain = load(tiny.path), expected(tiny)
    qkv = [found.get_submodule(f"layers.{i}.attention.qkv_proj") for i in range(2)]
    assert [isinstance(m, Linear) and m.quantized is not None for m in qkv] == [False, True]
    weight = plain.get_submodule("layers.0.attention.qkv_proj").weight
    assert torch.equal(qkv[0].weight, weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.ffn_up.weight"])
@pytest.mark.parametrize("as_stored", [False, True])
def test_any_part_of_a_tensor(tmp_path: Path, name: str, as_stored: bool) -> None:
    """Readers cut tensors anywhere."""
    tiny = make_tiny_gguf(tmp_path, "llama", changes={"intermediate_size": 64})
    header, rows = read_header(tiny.path), TensorRows(read_header(tiny.path))
    tensor, contents = header.tensors[name], tiny.path.read_bytes()

    def fetch(at: int, out: np.ndarray) -> None:
        out[:] = np.frombuffer(contents, np.uint8, out.size, at)

    def part(offset: int, size: int) -> bytes:
        out = np.empty(size, np.uint8)
        rows.fill(tensor, offset, out, fetch, as_stored=as_stored)
        return out.tobytes()

    whole = part(0, tensor.nbytes if as_stored else 4 * int(np.prod(tensor.shape)))
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, last = sorted(rng.integers(0, len(whole), 2).tolist())
        assert part(first, last - first + 1) == whole[first : last + 1]


def test_errors(tmp_path: Path) -> None:
    tiny = make_tiny_gguf(tmp_path, "llama", changes={"intermediate_size": 64})
    with pytest.raises(ConfigError, match=r"load_format='pt': .* is a GGUF file"):
        find_weight_files(tiny.path, "pt", allow_pickle=True)
    with pytest.raises(ConfigError, match=r"load_format='gguf': .* is no \*\.gguf file"):
        find_weight_files(tiny.folder, "gguf", allow_pickle=False)
    file = GgufFile(tiny.path, keep_blocks=False)
    file.open()
    contents = tiny.path.read_bytes()
    tiny.path.write_bytes(contents[:1000])
    tensor = file.tensors[-1]
    with pytest.raises(ModelLoadError, match=f"{tensor.name}: the file ends inside of it"):
        file.read(tensor, 0, np.empty(64, np.uint8))
    file.close()
    tiny.path.write_bytes(contents.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_plain(tiny.path)


def test_shapes_that_the_metadata_contradict(tmp_path: Path) -> None:
    tiny = make_tiny_gguf(
        tmp_path, "llama", changes={"intermediate_size": 64},
        metadata={"llama.feed_forward_length": 96},
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"its metadata says \[.*96.*\]"):
        load_plain(tiny.path)


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    """A file may have a tensor under the name that another one gets."""
    tiny = make_tiny_gguf(tmp_path, "llama", changes={"intermediate_size": 64})
    header = read_header(tiny.path)
    writer = GgufWriter(dict(header.metadata))
    writer.add("output_norm.weight", "F32", np.zeros(32, np.float32), (32,))
    writer.add("model.norm.weight", "F32", np.zeros(32, np.float32), (32,))
    path = writer.write(tmp_path / "two.gguf")
    message = "the tensors 'output_norm.weight' and 'model.norm.weight' are both model.norm.weight"
    with pytest.raises(ModelLoadError, match=message):
        GgufFile(path, keep_blocks=False)


def test_heads_that_are_no_whole_number_of_rows(tmp_path: Path) -> None:
    tiny = make_tiny_gguf(
        tmp_path, "llama", changes={"intermediate_size": 64},
        metadata={"llama.attention.key_length": 12, "llama.attention.value_length": 12},
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"attn_q\.weight is Q8_0 \[32, 32\]: no whole heads"):
        GgufFile(tiny.path, keep_blocks=False)
