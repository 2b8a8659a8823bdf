"""Checkpoints whose matrices are stored quantized: every format through the loader, against the
same model with the plain weights that its matrices stand for. The formats' own packing is tested
in tests/quantization/formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.formats.scheme import StoredPart
from hetero_llm.quantization.matrix import dequantize
from tests.models.test_loader_online import FAMILIES, MIXTURES, chooses, greedy, mixtures
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

INT4_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def tensors_of(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "float-quantized": tensors_of(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}
    ),
    "int-quantized": tensors_of(
        "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}
    ),
    "pack-quantized": tensors_of("pack-quantized", INT4_GROUPS),
    "pack-quantized asymmetric": tensors_of("pack-quantized", {**INT4_GROUPS, "symmetric": False}),
    "nvfp4": tensors_of(
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    ),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq ordered": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False,
    },
    "gptq 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
            "version": "gemm"},
}  # fmt: skip


def random_part(
    part: StoredPart, rows: int, columns: int, rng: np.random.Generator, expert: int = 0
) -> Tensor:
    """A stored tensor with values that a checkpoint may have."""
    shape = part.shapes[0]
    if part.suffix == "weight_shape":
        return torch.tensor([rows, columns])
    if part.suffix in ("g_idx", "weight_g_idx"):  # modules that are fused read alike
        places = np.random.default_rng((columns, expert)).permutation(columns) // 32
        return torch.from_numpy(places.astype(np.int32))
    if "F32" in part.types:
        low = 1.0 if "global" in part.suffix else 0.01
        return torch.from_numpy(rng.uniform(low, 2 * low, shape)).float()
    if part.types[0] == "F8_E4M3":
        return torch.from_numpy(0.5 * rng.standard_normal(shape)).to(torch.float8_e4m3fn)
    if part.types[0] == "I8":
        return torch.from_numpy(rng.integers(-20, 20, shape)).to(torch.int8)
    if part.types[0] == "U8":
        return torch.from_numpy(rng.integers(0, 256, shape)).to(torch.uint8)
    assert part.types[0] == "I32"
    if part.suffix == "qzeros" and shape[1] * 4 == rows:  # of 8 bits and symmetric: 127, one less
        return torch.full(shape, 0x7F7F7F7F, dtype=torch.int32)
    words = rng.integers(-(2**31), 2**31, shape)
    return torch.from_numpy(words.astype(np.int32))


def quantize_folder(
    folder: Path, config: dict[str, Any], plain: Path, *, left: tuple[str, ...] = ("lm_head",)
) -> None:
    """Replaces the matrices of a checkpoint by random quantized ones, and those of `plain`, the
    same checkpoint, by what they stand for."""
    rng = np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    dense = load_file(plain / "model.safetensors")
    form = read_format(config)
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", ".w1", ".w2", ".w3", "lm_head")) or module in left:
            continue
        scheme = form.scheme(module)
        assert scheme is not None
        rows, columns = weight.shape
        _, _, expert = module.partition(".experts.")
        number = int(expert.partition(".")[0] or 0)
        parts = {
            part.suffix: random_part(part, rows, columns, rng, number)
            for part in scheme.parts(rows, columns)
            if not part.optional or part.suffix in ("g_idx", "weight_scale_inv")
        }
        del tensors[name]
        tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        dense[name] = dequantize(scheme.convert(parts, rows, columns), torch.float32)
    save_file(tensors, folder / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    rewrite_config(folder, quantization_config=config)


def load(folder: Path) -> CausalLM:
    return load_model(
        folder, load_model_config(folder), dtype=torch.float32, device="cpu", show_progress=False
    )


def both(
    tmp_path: Path, config: dict[str, Any], family: str = "llama", **options: Any
) -> tuple[Path, Path]:
    """A quantized checkpoint and the plain one that it stands for."""
    changes = {"hidden_size": 64, "intermediate_size": 128, **(FAMILIES | MIXTURES)[family]}
    folders = tmp_path / "quantized", tmp_path / "plain"
    for folder in folders:
        make_tiny_checkpoint(folder, family, changes=changes, layers=2)
    quantize_folder(folders[0], config, folders[1], **options)
    return folders


def matrices(model: CausalLM) -> dict[str, Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.quantized is not None
    }


@pytest.mark.parametrize("form", FORMATS)
def test_formats(tmp_path: Path, form: str) -> None:
    quantized, plain = both(tmp_path, FORMATS[form])
    model = load(quantized)
    assert len(matrices(model)) == 8
    assert greedy(model, 32) == greedy(load(plain), 32)


@pytest.mark.parametrize("family", ["qwen2_moe", "phimoe", "minimax_m2"])
@pytest.mark.parametrize("form", ["fp8 blocks", "gptq ordered"])
def test_mixtures(tmp_path: Path, family: str, form: str) -> None:
    """Those that test_quantized_weights_families leaves out."""
    quantized, plain = both(tmp_path, FORMATS[form], family)
    model = load(quantized)
    for experts in mixtures(model).values():
        assert experts.quantized.keys() == {"gate_up", "down"}
    assert chooses(load(plain), greedy(model, 32))


def test_a_quantized_head(tmp_path: Path) -> None:
    config = {**FORMATS["pack-quantized"], "ignore": []}
    quantized, plain = both(tmp_path, config, left=())
    assert "lm_head" in matrices(load(quantized))
    assert greedy(load(quantized), 32) == greedy(load(plain), 32)


def test_parts_in_different_orders_become_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = both(tmp_path, FORMATS["gptq ordered"])
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, path)
    model = load(quantized)
    assert len(matrices(model)) == 7
    assert "columns are in different orders" in caplog.text
    assert model.get_parameter("layers.0.attention.qkv_proj.weight").dtype == torch.float32


def test_the_files_of_older_tools(tmp_path: Path) -> None:
    """What they say beside config.json is what config.json would say."""
    quantized, plain = both(tmp_path, FORMATS["gptq"])
    rewrite_config(quantized, remove=("quantization_config",))
    content = {key: value for key, value in FORMATS["gptq"].items() if key != "quant_method"}
    (quantized / "quantize_config.json").write_text(json.dumps(content))
    assert greedy(load(quantized), 8) == greedy(load(plain), 8)


def test_scales_of_a_kv_cache_are_no_mistake(tmp_path: Path) -> None:
    quantized, plain = both(tmp_path, FORMATS["fp8"])
    path = quantized / "model.safetensors"
    scales = {
        f"model.layers.{i}.self_attn.{kind}_scale": torch.ones(1) for i in (0, 1) for kind in "kv"
    }
    save_file({**load_file(path), **scales}, path)
    assert greedy(load(quantized), 8) == greedy(load(plain), 8)


def test_scales_beside_plain_weights(tmp_path: Path) -> None:
    """transformers writes them for matrices that blocks of 128 do not divide, and leaves these
    plain. Beside a quantized one, or of another method, they are a mistake."""
    folder = make_tiny_checkpoint(tmp_path, "llama", changes=FAMILIES["llama"], layers=2)
    expected = greedy(load(folder), 8)
    path = folder / "model.safetensors"
    name = "model.layers.0.self_attn.k_proj.weight_scale_inv"
    save_file({**load_file(path), name: torch.full((1, 1), 7.0)}, path)
    rewrite_config(folder, quantization_config=FORMATS["fp8 blocks"])
    assert greedy(load(folder), 8) == expected
    rewrite_config(folder, quantization_config=FORMATS["fbgemm"])
    with pytest.raises(ModelLoadError, match=f"unexpected: {name}"):
        load(folder)


def test_scales_of_all_experts_as_one_tensor(tmp_path: Path) -> None:
    """What transformers 5.23 writes of a mixture that it quantizes itself."""
    quantized, _ = both(tmp_path, FORMATS["fp8 blocks"], "qwen3_moe")
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name and "scale_inv" in name]:
        del tensors[name]
    tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"] = torch.ones(6, 1, 1)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match="gate_up_proj_scale_inv has the scales of all exp"):
        load(quantized)


def test_biases_that_no_layer_has(tmp_path: Path) -> None:
    """AutoGPTQ writes zeros for them, beside those of queries, keys and values."""
    quantized, plain = both(tmp_path, FORMATS["gptq"], "qwen2_moe")
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    modules = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    names = {f"{module}.bias" for module in modules} - set(tensors)
    assert len(names) < len(modules)
    biases = {name: torch.zeros(tensors[f"{name[:-5]}.scales"].shape[1]).half() for name in names}
    save_file({**tensors, **biases}, path)
    assert chooses(load(plain), greedy(load(quantized), 8))
    name = "model.layers.0.mlp.experts.1.up_proj.bias"
    save_file({**tensors, **biases, name: torch.ones(64).half()}, path)
    with pytest.raises(ModelLoadError, match="experts.1.up_proj: bias: it is not zero"):
        load(quantized)


def test_experts_whose_gates_are_in_another_order_become_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = both(tmp_path, FORMATS["gptq ordered"], "mixtral")
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    parts = {suffix: tensors[f"{name}.{suffix}"] for suffix in ("qweight", "qzeros", "scales")}
    parts["g_idx"] = tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"].flip(0)
    save_file(tensors, path)
    scheme = read_format(FORMATS["gptq ordered"]).scheme(name)
    assert scheme is not None
    dense = load_file(plain / "model.safetensors")
    rows, columns = dense[f"{name}.weight"].shape
    dense[f"{name}.weight"] = dequantize(scheme.convert(parts, rows, columns), torch.float32)
    save_file(dense, plain / "model.safetensors")
    model = load(quantized)
    assert [set(experts.quantized) for experts in mixtures(model).values()] == [
        {"down"},
        {"gate_up", "down"},
    ]
    assert "columns are in different orders" in caplog.text
    assert greedy(model, 8) == greedy(load(plain), 8)


Change = Callable[[dict[str, Tensor]], None]


def without(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def with_tensor(name: str, tensor: Tensor) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensor

    return change


def half_plain(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj"
    del tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"], tensors[f"{name}.scales"]
    tensors[f"{name}.weight"] = torch.zeros(128, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.layers.0.mlp.down_proj.scales"), "down_proj.scales is missing"),
        (
            with_tensor("model.layers.0.mlp.down_proj.scales", torch.ones(2, 64).half()),
            r"down_proj.scales is \[2, 64\], its matrix needs \[4, 64\]",
        ),
        (
            with_tensor("model.layers.0.mlp.down_proj.qweight", torch.zeros(16, 64).half()),
            "down_proj.qweight has type F16, not I32",
        ),
        (
            with_tensor("model.layers.1.self_attn.o_proj.scales", torch.full((2, 64), torch.nan)),
            "o_proj: .*scales.*finite",
        ),
        (half_plain, "quantized and model.layers.1.mlp.up_proj.weight is not"),
        (with_tensor("model.layers.0.mlp.odd.qweight", torch.ones(1)), "unexpected: .*odd.qweight"),
    ],
)  # fmt: skip
def test_broken_checkpoints(tmp_path: Path, change: Change, message: str) -> None:
    quantized, _ = both(tmp_path, FORMATS["gptq"])
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message):
        load(quantized)


EXPERT = "model.layers.1.block_sparse_moe.experts.2"


def plain_expert(tensors: dict[str, Tensor]) -> None:
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{EXPERT}.w2.{suffix}"]
    tensors[f"{EXPERT}.w2.weight"] = torch.zeros(64, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{EXPERT}.w3.scales"), "experts.2.w3.scales is missing"),
        (
            plain_expert,
            r"experts.0.w2 is quantized and \S*experts.2.w2.weight is not, though the model",
        ),
        (
            with_tensor(f"{EXPERT}.w1.scales", torch.full((2, 128), torch.inf)),
            "experts.2.w1: .*scales.*finite",
        ),
    ],
)
def test_broken_mixtures(tmp_path: Path, change: Change, message: str) -> None:
    quantized, _ = both(tmp_path, FORMATS["gptq"], "mixtral")
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message):
        load(quantized)


def test_a_group_that_does_not_divide(tmp_path: Path) -> None:
    """Before any weight is read."""
    quantized, _ = both(tmp_path, FORMATS["gptq"])
    rewrite_config(quantized, quantization_config={**FORMATS["gptq"], "group_size": 48})
    with pytest.raises(ModelLoadError, match="q_proj: .*64.*48|q_proj: .*48.*64"):
        load(quantized)
