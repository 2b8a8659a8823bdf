"""Quantizes a model layer by layer, with the inputs that its products have for some texts.

Each layer exists twice while it is quantized, and runs over all texts twice: plain behind plain
layers, and with those of its products rounded that have been, behind rounded layers. A product is
rounded so that it returns for the inputs behind rounded weights what the plain one returns for the
plain ones (Li et al. 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
Calibration"): by least squares its best weight is W + W C^T, where C = H^-1 mean(r (p - r)^T),
H = mean(r r^T), and r and p are rounded and plain inputs. That weight is quantized with H.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM, Linear
from hetero_llm.models.quantized_weights import MatrixPlan
from hetero_llm.models.rotary import StepRotary
from hetero_llm.quantization.calibrated import DAMPING
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize

_TOKENS_AT_ONCE = 4096

# (weight [N, K], mean of x x^T over its inputs x, [K, K] float32) -> the quantized matrix
Quantizer = Callable[[Tensor, Tensor], QuantizedMatrix]


class WholeTexts(Attend):
    """`Attend` without a cache, for texts of one length: every token of a text is in the step.

    Args:
        length: tokens of a text.
    """

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config = config
        self._length = length

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        """See `Attend`; T is a multiple of the length."""
        config = self._config
        query, key, value = (
            x.view(-1, self._length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        places = torch.arange(self._length, device=q.device)
        back = places.unsqueeze(1) - places  # [queries, keys]
        seen = back >= 0
        window = config.sliding_windows[layer]
        if window is not None:
            seen &= back < window
        if config.attn_softcap is None and sinks is None:
            bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            if config.alibi_slopes is not None:
                slopes = torch.tensor(config.alibi_slopes, device=q.device)
                bias = (-slopes[:, None, None] * back).to(q.dtype)
            bias = bias.masked_fill(~seen, -torch.inf)
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, scale=config.attn_scale
            )
        else:
            scores = (query @ key.transpose(2, 3)).float() * config.attn_scale
            if config.attn_softcap is not None:
                scores = config.attn_softcap * torch.tanh(scores / config.attn_softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                own = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, own), -1)
            weights = scores.softmax(-1)[..., : self._length]
            attended = weights.to(value.dtype) @ value
        return attended.transpose(1, 2).reshape(q.shape)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some texts between two layers: what the next layer is called with."""

    rotary: StepRotary
    terms: tuple[Tensor | None, ...]


class _Recorder(nn.Module):
    """In the place of the layers: keeps what the first one is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[_Batch] = []

    def forward(self, rotary: StepRotary, attend: Any, *terms: Tensor | None) -> Any:
        self.batches.append(_Batch(rotary, _own(terms)))
        return terms


class _Reached(Exception):
    """A layer has run up to the product that was asked for."""


class _Tap:
    """In the place of a product: keeps its input [T, K], and ends the layer's run."""

    def __init__(self) -> None:
        self.x: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        self.x = x
        raise _Reached


@torch.no_grad()
def quantize_with_texts(
    model: CausalLM,
    matrices: Sequence[tuple[Linear, MatrixPlan]],
    texts: Tensor,
    *,
    quantize: Quantizer,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, QuantizedMatrix]:
    """Quantizes the matrices of all layers.

    Memory on the device: embeddings and head, two copies of one layer, some matrices [K, K] of
    one product, and the hidden states of all texts twice.

    Args:
        model: plain, of a native family. Its weights become those that quantized ones stand for.
        matrices: the stored matrices that become quantized, each with the product that has it.
        texts: [S, L] int64 token ids.
        quantize: what quantizes one matrix.
        progress: called with the number of parameters after each matrix.

    Returns:
        Quantized matrices on the host by `MatrixPlan.module`, rows as checkpoints store them. Those
        outside layers (OPT-350m has two) are left out.

    Raises:
        ModelLoadError: the model is none of a native family.
    """
    if not isinstance(model, DecoderLM):
        raise ModelLoadError(
            f"{model.config.architecture}: calibration needs a model of a native family; "
            "without it (--calibration none) it can be quantized"
        )
    attend = WholeTexts(model.config, texts.shape[1])
    batches = _first_terms(model, texts, attend, device)
    exact = rounded = batches
    by_linear: dict[int, list[MatrixPlan]] = {}
    for owner, plan in matrices:
        by_linear.setdefault(id(owner), []).append(plan)
    found: dict[str, QuantizedMatrix] = {}
    for layer in model.layers:
        layer.to(device)
        plain = copy.deepcopy(layer)
        for path in _in_order(layer, attend, rounded[0]):
            linear = _product_at(layer, path)
            if id(linear) not in by_linear:
                continue
            moment, target = _moment_and_target(layer, plain, path, attend, rounded, exact)
            for plan in by_linear[id(linear)]:
                found[plan.module] = _quantize_part(linear.weight, target, plan, moment, quantize)
                progress(plan.rows * plan.columns)
        exact = [_after(plain, attend, batch) for batch in exact]
        rounded = [_after(layer, attend, batch) for batch in rounded]
        layer.to("cpu")
    model.to("cpu")
    return found


def _first_terms(
    model: DecoderLM, texts: Tensor, attend: WholeTexts, device: torch.device
) -> list[_Batch]:
    """What the first layer is called with for all texts."""
    count, length = texts.shape
    recorder = _Recorder()
    layers, model.layers = model.layers, nn.ModuleList([recorder])
    try:
        model.to(device)
        at_once = max(1, _TOKENS_AT_ONCE // length)
        for some in texts.to(device).split(at_once):
            positions = torch.arange(length, device=device).repeat(len(some))
            model(some.flatten(), positions, attend)
    finally:
        model.layers = layers
    return recorder.batches


def _own(terms: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Copies: layers overwrite what they are called with."""
    return tuple(None if term is None else term.clone() for term in terms)


def _after(layer: nn.Module, attend: WholeTexts, batch: _Batch) -> _Batch:
    """What the next layer is called with; `batch` stays."""
    return _Batch(batch.rotary, layer(batch.rotary, attend, *_own(batch.terms)))


def _in_order(layer: nn.Module, attend: WholeTexts, batch: _Batch) -> list[str]:
    """Names of the products of a layer in the order in which they run."""
    names: list[str] = []

    def note(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        names.append(name)
        return F.linear(x, weight, bias)

    products = {name: m for name, m in layer.named_modules() if isinstance(m, Linear)}
    for name, linear in products.items():
        linear.product = partial(note, name)
    _after(layer, attend, batch)
    for linear in products.values():
        linear.product = F.linear
    return names


def _inputs(layer: nn.Module, path: str, attend: WholeTexts, batch: _Batch) -> Tensor:
    """[T, K] float32: inputs of one product of a layer."""
    linear = _product_at(layer, path)
    linear.product = tap = _Tap()
    with contextlib.suppress(_Reached):
        _after(layer, attend, batch)
    linear.product = F.linear
    assert tap.x is not None
    return tap.x.float()


def _product_at(layer: nn.Module, path: str) -> Linear:
    linear = layer.get_submodule(path)
    assert isinstance(linear, Linear)
    return linear


def _moment_and_target(
    layer: nn.Module,
    plain: nn.Module,
    path: str,
    attend: WholeTexts,
    rounded: Sequence[_Batch],
    exact: Sequence[_Batch],
) -> tuple[Tensor, Tensor]:
    """H [K, K] and the weight [N, K] to be rounded, float32 both: see the head of this file."""
    weight = _product_at(plain, path).weight.float()
    moment = weight.new_zeros(weight.shape[1], weight.shape[1])
    shift = torch.zeros_like(moment)
    count = 0
    for behind_rounded, behind_plain in zip(rounded, exact, strict=True):
        x = _inputs(layer, path, attend, behind_rounded)
        moment.addmm_(x.t(), x)
        shift.addmm_(x.t(), _inputs(plain, path, attend, behind_plain).sub_(x))
        count += len(x)
    moment /= count
    damped = moment.clone()
    mean = moment.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0.0, DAMPING * mean, 1.0))
    correction = torch.linalg.solve(damped, shift / count)
    return moment, weight + weight @ correction.t()


def _quantize_part(
    weight: Tensor, target: Tensor, plan: MatrixPlan, moment: Tensor, quantize: Quantizer
) -> QuantizedMatrix:
    """Quantizes those rows of `target` that are one stored matrix, and puts what it stands for in
    their place in the weight."""
    rows = slice(plan.first_row, plan.first_row + plan.rows)
    stored = target[rows]
    if plan.arrange is not None:
        # Row i of the part is row origin[i] of the stored matrix.
        origin = plan.arrange(torch.arange(plan.rows, device=weight.device).unsqueeze(1)).flatten()
        stored = torch.empty_like(stored)
        stored[origin] = target[rows]
    matrix = quantize(stored, moment)
    values = dequantize(matrix, weight.dtype)
    weight[rows] = values if plan.arrange is None else plan.arrange(values)
    return matrix.to("cpu")
