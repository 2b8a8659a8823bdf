"""Quantizing layer by layer with texts: the inputs that products have, where rows of stored
matrices lie, and what the quantized model returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.calibration import WholeTexts, quantize_with_texts
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.quantized_weights import MatrixPlan
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize
from hetero_llm.quantization.names import OnlineName
from hetero_llm.quantization.online import OnlineScheme, quantize_int8
from tests.models.test_loader_online import FAMILIES, WIDE, linears, load
from tests.models.tiny import DenseAttend, make_tiny_checkpoint

LENGTH = 12


def texts(count: int, seed: int) -> Tensor:
    return torch.randint(3, 60, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def logits(model: CausalLM, ids: Tensor, attend: Any = None) -> Tensor:
    """[S, L, vocab]."""
    count, length = ids.shape
    attend = attend or WholeTexts(model.config, length)
    hidden = model(ids.flatten(), torch.arange(length).repeat(count), attend)
    return model.logits(hidden).view(count, length, -1)


def whole_matrices(model: CausalLM) -> list[tuple[Linear, MatrixPlan]]:
    """Every product in a layer as one stored matrix."""
    scheme = OnlineScheme("ifq")
    return [
        (linear, MatrixPlan(name, 0, 0, *linear.weight.shape, None, False, scheme, ()))
        for name, linear in linears(model).items()
        if "layers" in name
    ]


@pytest.mark.parametrize("family", ["mistral", "gemma2", "bloom", "gpt_oss"])
def test_attention_is_that_of_the_model(tmp_path: Path, family: str) -> None:
    """Shared heads, a window, a cap of scores, ALiBi, sinks."""
    model = load(make_tiny_checkpoint(tmp_path, family), None)
    ids = texts(3, 0)
    expected = logits(model, ids, DenseAttend(model.config, [LENGTH] * 3))
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "gptj", "opt"])
def test_rows_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    """Fused and reordered projections, and OPT's outside its layers: in 8 bits what is written is
    nearly what was stored."""
    folder = make_tiny_checkpoint(tmp_path / "plain", family, changes=FAMILIES.get(family, {}))
    write_quantized(folder, tmp_path / "out", "ifq", device="cpu", texts=texts(4, 1))
    plain, found = load(folder, None), load(tmp_path / "out", None)
    for name, linear in linears(found).items():
        weight = linears(plain)[name].weight
        if linear.quantized is None:
            assert name == "lm_head"
            continue
        error = (dequantize(linear.quantized, torch.float32) - weight).norm() / weight.norm()
        assert error < 0.05, name
    change = (logits(found, texts(4, 1)) - logits(plain, texts(4, 1))).norm()
    assert 0.0 < change / logits(plain, texts(4, 1)).norm() < 0.1


def test_products_are_given_their_inputs(tmp_path: Path) -> None:
    """The first product has norms of embeddings. A product behind rounded ones has what they
    return: where those doubled its inputs, half of its weight is what is rounded."""
    model = load(make_tiny_checkpoint(tmp_path, "llama", changes=WIDE, layers=1), None)
    ids, given = texts(64, 2), []

    def quantize(weight: Tensor, moment: Tensor) -> QuantizedMatrix:
        given.append((weight.clone(), moment))
        if len(weight) == 2 * WIDE["intermediate_size"]:  # gates, then what they multiply
            weight = torch.cat((weight[: len(weight) // 2], 2 * weight[len(weight) // 2 :]))
        return quantize_int8(weight)

    layer: Any = model.layers[0]  # type: ignore[index]
    tokens, positions = ids.flatten(), torch.arange(LENGTH).repeat(len(ids))
    x = layer.attention_norm(model.embed(tokens, positions))[0]  # type: ignore[operator]
    fused, down = layer.attention.qkv_proj.weight.clone(), layer.mlp.down_proj.weight.clone()
    matrices = whole_matrices(model)
    found = quantize_with_texts(model, matrices, ids, quantize=quantize, device=torch.device("cpu"))
    assert list(found) == [plan.module for _, plan in matrices]
    weight, moment = given[0]
    torch.testing.assert_close(weight, fused)
    torch.testing.assert_close(moment, x.t() @ x / len(x))
    weight, moment = given[-1]

    def size_of_outputs(change: Tensor) -> float:
        return ((change @ moment) * change).sum().item()

    assert size_of_outputs(weight - down / 2) < 0.01 * size_of_outputs(down / 2)


@pytest.mark.parametrize("name", ["int4", "ifq_nf4"])
def test_a_calibrated_copy_is_nearer_to_the_model(tmp_path: Path, name: OnlineName) -> None:
    folder = make_tiny_checkpoint(tmp_path / "plain", "llama", changes=WIDE, layers=2)
    for out, given in (("nearest", None), ("calibrated", texts(64, 3))):
        write_quantized(folder, tmp_path / out, name, device="cpu", texts=given)
    plain, nearest, calibrated = (
        load(tmp_path / one, None) for one in ("plain", "nearest", "calibrated")
    )
    for ids in (texts(64, 3), texts(64, 4)):
        expected = logits(plain, ids)
        errors = [(logits(one, ids) - expected).square().mean() for one in (calibrated, nearest)]
        assert errors[0] < 0.8 * errors[1]


def test_classes_of_transformers_are_refused(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, "llama", layers=1), None)
    other: Any = torch.nn.Module()
    other.config = model.config
    with pytest.raises(ModelLoadError, match="calibration needs a model of a native family"):
        quantize_with_texts(
            other,
            [],
            texts(1, 0),
            quantize=lambda w, _: quantize_int8(w),
            device=torch.device("cpu"),
        )
