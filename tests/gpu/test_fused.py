"""Which parts of a model `speed_up` replaces, and which tiles attention is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.gpu import fused
from hetero_llm.gpu.attention_context import AttentionContext, check_supported
from hetero_llm.gpu.kernels import quantized_product
from hetero_llm.gpu.kernels.activation import activation
from hetero_llm.gpu.kernels.norm import (
    MAX_NORM_SIZE,
    add_gemma_rms_norm,
    add_layer_norm,
    add_rms_norm,
)
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows, quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix
from hetero_llm.models import layers
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.transformers_modules import FlatActivation
from hetero_llm.quantization.matrix import QuantizedWeight
from tests.models.tiny import DenseAttend, make_tiny_checkpoint


class Blocks(nn.Module):
    """One of each block whose arithmetic may be replaced."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=hidden_size)
        self.norms = nn.ModuleList(
            [
                layers.RMSNorm(64, 1e-5),
                layers.GemmaRMSNorm(64, 1e-5),
                layers.AddLayerNorm(64, 1e-5),
                layers.AddLayerNorm(64, 1e-5, affine=False),
            ]
        )
        self.gate = layers.GatedActivation("relu2")
        self.activation = layers.Activation("gelu")


def test_every_norm_has_a_kernel(device: torch.device) -> None:
    torch.manual_seed(0)
    model: Any = Blocks(64).to(device)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x, gate_up = torch.randn(3, 64, device=device), torch.randn(3, 128, device=device)
    expected = [norm(x, x.clone()) for norm in model.norms] + [
        (model.gate(gate_up), model.activation(x))
    ]
    fused.speed_up(model)
    functions = [norm.function for norm in model.norms]
    assert functions == [add_rms_norm, add_gemma_rms_norm, add_layer_norm, add_layer_norm]
    assert model.gate.function != model.gate.plain
    assert model.activation.function is not torch.nn.functional.gelu
    found = [norm(x, x.clone()) for norm in model.norms] + [
        (model.gate(gate_up), model.activation(x))
    ]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "variant", "norms"),
    [("gpt_neox", "parallel", 2), ("falcon", "grouped", 2), ("gptj", "partial", 1)],
)
def test_parallel_layers_take_one_norm_kernel_each(
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    variant: str,
    norms: int,
) -> None:
    made: list[tuple[bool, int]] = []

    def counted(x: Any, residual: Any, extra: Any, affines: Any, eps: float) -> Any:
        made.append((extra is not None, len(affines)))
        return add_layer_norm(x, residual, extra, affines, eps)

    monkeypatch.setattr(fused, "add_layer_norm", counted)
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    model.to(device)
    ids, positions = torch.arange(3, 12, device=device), torch.arange(9, device=device)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model.logits(model(ids, positions, DenseAttend(config, [9])))

    expected = logits()
    fused.speed_up(model)
    torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-5)
    between = [(True, norms)] * (config.num_layers - 1)
    assert made == [(False, norms), *between, (True, 1)]


def test_activations_the_kernel_does_not_serve_stay_on_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []

    def counted(x: torch.Tensor, name: str) -> torch.Tensor:
        calls.append(x.shape)
        return activation(x, name)

    monkeypatch.setattr(fused, "activation", counted)
    torch.manual_seed(0)
    model: Any = Blocks(64).to(device)
    model.unnamed = FlatActivation(nn.GELU())
    before = model.unnamed.function
    fused.speed_up(model)
    assert model.unnamed.function == before
    x = torch.randn(4, 6, device=device)
    for rows in (x, x.t(), x.view(2, 2, 6)):
        expected = torch.nn.functional.gelu(rows)
        torch.testing.assert_close(model.activation(rows), expected, rtol=1e-5, atol=1e-6)
    assert calls == [(4, 6)]


def test_rows_too_long_for_one_program_stay_on_torch() -> None:
    model: Any = Blocks(MAX_NORM_SIZE + 8)
    before = [norm.function for norm in model.norms]
    fused.speed_up(model)
    assert [norm.function for norm in model.norms] == before


def context_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> AttentionContext:
    config: Any = SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        num_layers=0,
        sliding_windows=(),
        alibi_slopes=None,
    )
    cache: Any = SimpleNamespace(scales=None, inverses=None)
    return AttentionContext(config, cache, torch.zeros(1, 1), dtype)


@pytest.mark.parametrize("group", [1, 3, 8, 12, 16, 24, 48, 71, 128])
def test_a_tile_holds_whole_groups(group: int) -> None:
    context = context_of(2 * group, 2, 64, torch.bfloat16)
    for rows in (1, 8, 64, 512):
        tiles = [context.chunk_tile(rows)]
        tiles += [context.decode_tile(rows, short=short) for short in (False, True)]
        tiles += [context.tree_tile(rows, short=short) for short in (False, True)]
        for tile in tiles:
            assert tile.rows >= group and tile.rows & (tile.rows - 1) == 0
            assert context.limits(tile).tile_rows == tile.rows // group
            # What was seen to spill registers: so many values of a tile on so few threads.
            assert tile.rows * tile.keys <= 1536 * tile.num_warps


@pytest.mark.parametrize(
    ("heads", "dim", "message"),
    [(129, 64, "129 query heads on each KV head"), (4, 12, "head size 12"), (4, 264, "head size")],
)
def test_what_the_kernels_do_not_serve_is_said(heads: int, dim: int, message: str) -> None:
    config: Any = SimpleNamespace(num_heads=heads, num_kv_heads=1, head_dim=dim)
    with pytest.raises(ConfigError, match=message):
        check_supported(config)


def test_quantized_layers_get_kernels_and_let_go_of_their_matrices(
    tmp_path: Path, device: torch.device
) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder = make_tiny_checkpoint(tmp_path, "llama", changes=changes, layers=1)
    ids = torch.tensor([5, 17, 40, 9], device=device)
    positions = torch.arange(4, device=device)
    for name in ("fp8", "int4"):
        model = load_model(
            folder, load_model_config(folder, quantization=name), dtype=torch.bfloat16,
            device=device, show_progress=False,
        )  # fmt: skip
        tokens = model.parameters_per_token()
        expected = model.logits(model(ids, positions, DenseAttend(model.config, [4])))
        fused.speed_up(model)
        found = model.logits(model(ids, positions, DenseAttend(model.config, [4])))
        assert (found - expected).norm() < 0.03 * expected.norm()
        weights = [m for m in model.modules() if isinstance(m, QuantizedWeight)]
        assert len(weights) == 4 and all(weight.device.type == "meta" for weight in weights)
        assert model.parameters_per_token() == tokens


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_norms_and_gates_write_rows_in_8_bits(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Many rows, and few in two parts: only those of attention are quantized by a pass of their
    own, and no bit changes; few rows stay as they are."""
    passes: list[int] = []

    def counted(x: torch.Tensor, matrix: PreparedMatrix, *, parts: int = 1) -> QuantizedRows:
        passes.append(len(x))
        return quantize_rows(x, matrix, parts=parts)

    monkeypatch.setattr(quantized_product, "quantize_rows", counted)
    changes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder = make_tiny_checkpoint(tmp_path, family, changes=changes, layers=1)
    config, rows = load_model_config(folder, quantization="fp8"), 3
    ids, positions = torch.arange(3, 3 + rows, device=device), torch.arange(rows, device=device)
    results = []
    for fused_rows in (True, False):
        model = load_model(folder, config, dtype=torch.bfloat16, device=device, show_progress=False)
        if not fused_rows:
            monkeypatch.setattr(fused, "quantize_where_rows_are_made", lambda _: None)
        fused.speed_up(model, few_rows=0)
        made = 1 if fused_rows else 4
        for few_rows, fp8_rows, expected in (
            *((0, range(0), made), (rows, range(0), 0), (rows, range(2, 4), made)),
        ):
            for module in model.modules():
                if isinstance(module, layers.Linear) and module.quantized is not None:
                    product = module.product
                    assert isinstance(product, quantized_product.QuantizedProduct)
                    assert product.few_rows in (0, few_rows)
                    product.few_rows, product.fp8_rows = few_rows, fp8_rows
            passes.clear()
            with torch.no_grad():
                hidden = model(ids, positions, DenseAttend(config, [rows]))
            assert passes == [rows] * expected
            results.append(hidden)
    for fused_result, plain_result in zip(results[:3], results[3:], strict=True):
        assert torch.equal(fused_result, plain_result)
    many, few, in_two_parts = results[:3]
    assert 0 < (many - few).norm() < 0.3 * few.norm()
    assert (in_two_parts - few).norm() < 0.03 * few.norm()


class OneSum:
    """Collectives of one rank that count what they are asked for."""

    def __init__(self) -> None:
        self.sums = self.norms_of_sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return x

    def norms(self, x: torch.Tensor) -> bool:
        return True

    def sum_norm(
        self, x: Any, residual: Any, weight: Any, eps: float, *, gemma: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.norms_of_sums += 1
        return (add_gemma_rms_norm if gemma else add_rms_norm)(x, residual, weight, eps)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_norm_that_quantizes_rows_leaves_the_sum_alone(
    tmp_path: Path, device: torch.device, family: str
) -> None:
    """Many rows: norms in front of quantizing products read a sum; few rows: they make it."""
    changes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder = make_tiny_checkpoint(tmp_path, family, changes=changes, layers=2)
    config, rows = load_model_config(folder, quantization="fp8"), 3
    model = load_model(folder, config, dtype=torch.bfloat16, device=device, show_progress=False)
    collectives: Any = OneSum()
    for name, module in model.named_modules():
        if name.endswith((".out_proj", ".down_proj")):
            assert isinstance(module, layers.Linear)
            module.reduce = collectives.all_reduce
    fused.speed_up(model, few_rows=0)
    ids, positions = torch.arange(3, 3 + rows, device=device), torch.arange(rows, device=device)

    def hidden(few_rows: int) -> tuple[torch.Tensor, tuple[int, int]]:
        for module in model.modules():
            if isinstance(module, layers.Linear) and module.quantized is not None:
                module.product.few_rows = few_rows  # type: ignore[attr-defined]
        collectives.sums = collectives.norms_of_sums = 0
        with torch.no_grad():
            found = model(ids, positions, DenseAttend(config, [rows]))
        return found, (collectives.sums, collectives.norms_of_sums)

    before = [hidden(few_rows) for few_rows in (0, rows)]
    assert [counts for _, counts in before] == [(4, 0)] * 2
    assert fused.fuse_sums(model, collectives) == 4
    after = [hidden(few_rows) for few_rows in (0, rows)]
    # Of a sandwich's norms those behind products make rows for nothing else; of Llama's the last.
    of_many = (0, 4) if family == "gemma2" else (3, 1)
    assert [counts for _, counts in after] == [of_many, (0, 4)]
    for (expected, _), (found, _) in zip(before, after, strict=True):
        assert torch.equal(found, expected)


def test_sums_that_others_read_stay(tmp_path: Path) -> None:
    """Layers whose two parts are parallel, and layer norms."""
    for family, variant in (("gpt_neox", "parallel"), ("gptj", "partial")):
        folder = make_tiny_checkpoint(tmp_path / family, family, variant)
        config = load_model_config(folder)
        model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
        collectives: Any = OneSum()
        summing = [m for m in model.modules() if isinstance(m, layers.Linear)]
        for module in summing:
            module.reduce = collectives.all_reduce
        fused.speed_up(model)
        assert fused.fuse_sums(model, collectives) == 0
        assert all(module.reduce == collectives.all_reduce for module in summing)
