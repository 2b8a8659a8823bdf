"""Fused kernels for a model on a CUDA device: norms, activations, products of few rows, experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from torch import Tensor, nn

from hetero_llm.gpu.collectives import PeerCollectives
from hetero_llm.gpu.kernels.activation import activation, gated_activation
from hetero_llm.gpu.kernels.block_product import find_block_product
from hetero_llm.gpu.kernels.expert_adapters import ExpertKernels
from hetero_llm.gpu.kernels.experts import serves
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.norm import (
    MAX_NORM_SIZE,
    add_gemma_rms_norm,
    add_layer_norm,
    add_rms_norm,
    norm_projections,
    quantized_rms_norm,
    quantizes_norms,
)
from hetero_llm.gpu.kernels.quantize_rows import LARGEST, quantize_gated
from hetero_llm.gpu.kernels.quantized_gemm import prepare, prepares
from hetero_llm.gpu.kernels.quantized_product import QuantizedProduct, product_of
from hetero_llm.gpu.kernels.routing import (
    gate_product,
    route_sigmoid,
    route_sparse_mixer,
    route_top_k,
)
from hetero_llm.gpu.kernels.skinny_gemm import linear
from hetero_llm.gpu.switch_points import (
    AgreeOnNumbers,
    agree_on_switch_points,
    measure_switch_points,
)
from hetero_llm.models.blocks import (
    Attention,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    PlainMLP,
    SandwichLayer,
)
from hetero_llm.models.collectives import same
from hetero_llm.models.experts import (
    Experts,
    ExpertsFunction,
    SigmoidRouter,
    SparseMixerRouter,
    TopKRouter,
)
from hetero_llm.models.gpt_oss import GptOssAttention
from hetero_llm.models.layers import (
    Activation,
    AddLayerNorm,
    AddNorm,
    CausalLM,
    Float32Linear,
    GatedActivation,
    GemmaRMSNorm,
    Linear,
    ProjectionNorm,
    Reduce,
    RMSNorm,
)
from hetero_llm.models.mixtral import MixtralBlock
from hetero_llm.quantization.matrix import QuantizedMatrix, QuantizedWeight


def speed_up(model: CausalLM, *, few_rows: int | None = None, agree: AgreeOnNumbers = list) -> None:
    """Replaces functions of the model's layers by kernels, in place. Weights in host memory keep
    their product, which stages them, and rows too long for one program keep their norms.

    Args:
        few_rows: up to which quantized products multiply weights as they are stored; None: on a GPU
            it is measured, see `switch_points`.
        agree: makes of what was measured what all ranks of the model use.
    """
    fused_norms = model.config.hidden_size <= MAX_NORM_SIZE
    for module in model.modules():
        if isinstance(module, RMSNorm) and fused_norms:
            module.function = add_rms_norm
        elif isinstance(module, GemmaRMSNorm) and fused_norms:
            module.function = add_gemma_rms_norm
        elif isinstance(module, AddLayerNorm) and fused_norms:
            module.function = add_layer_norm
        elif isinstance(module, ProjectionNorm) and len(module.q_weight) <= MAX_NORM_SIZE:
            module.function = norm_projections
        elif isinstance(module, GatedActivation):
            module.function = partial(gated_activation, name=module.name)
        elif isinstance(module, Activation) and module.name is not None:
            module.function = partial(_activation, name=module.name, plain=module.function)
        elif isinstance(module, Linear) and module.quantized is not None:
            if not module.on_host:
                _multiply_by_kernels(module, module.quantized)
        elif isinstance(module, Float32Linear):
            if module.weight.device.type == "cuda" or INTERPRETED:
                module.function = gate_product
        elif isinstance(module, Linear) and module.weight.device.type == "cuda":
            module.product = linear
    speed_up_experts(model)
    quantize_where_rows_are_made(model)
    products = [
        module.product
        for module in model.modules()
        if isinstance(module, Linear) and isinstance(module.product, QuantizedProduct)
    ]
    if few_rows is not None:
        for product in products:
            product.few_rows = few_rows
    elif products and products[0].matrix.device.type == "cuda":
        measure_switch_points(products, next(model.parameters()).dtype)
        agree_on_switch_points(products, agree)


def speed_up_experts(model: CausalLM) -> None:
    """Replaces routers and experts by kernels, in place; not experts in host memory, whose bank
    `hybrid_experts` makes."""
    for module in model.modules():
        if isinstance(module, Experts) and module.host_memory is not None:
            continue
        if isinstance(module, Experts) and serves(module.activation.name):
            module.function = _function_of(module)
        elif isinstance(module, TopKRouter):
            module.function = partial(
                route_top_k,
                k=module.k,
                renormalize=module.renormalize,
                rounded=module.rounded,
            )
        elif isinstance(module, SigmoidRouter):
            module.function = partial(
                route_sigmoid,
                correction=module.correction,
                k=module.k,
                groups=module.groups,
                kept_groups=module.kept_groups,
                renormalize=module.renormalize,
                scale=module.scale,
            )
        elif isinstance(module, SparseMixerRouter):
            module.function = partial(route_sparse_mixer, jitter=module.jitter)


def _function_of(module: Experts) -> ExpertsFunction:
    """The kernels for the weights that it has. Quantized ones are kept in the order of the kernels
    alone; those that have no such order stay with torch."""
    quantized, activation, biases = module.quantized, module.activation.name, module.biases
    if not quantized:
        return ExpertKernels(activation, biases)
    if not all(prepares(stack.matrix) for stack in quantized.values()):
        return module.function
    prepared = {}
    for name, stack in quantized.items():
        prepared[name] = prepare(stack.matrix)
        stack.release()
    return ExpertKernels(activation, biases, prepared.get("gate_up"), prepared.get("down"))


def quantize_where_rows_are_made(model: CausalLM) -> None:
    """Lets norms and gates write rows in 8 bits for the product that follows, when that quantizes
    as many. Only where nothing else reads them; rows that attention makes are quantized by the
    product itself, and so are those of layer norms and of layers whose two parts are parallel."""
    for module in model.modules():
        if isinstance(module, DecoderLayer) and not module.parallel:
            _quantize_in_norm(module.attention_norm, module.attention.qkv_proj)
            if isinstance(module.mlp, GatedMLP):
                _quantize_in_norm(module.mlp_norm, module.mlp.gate_up_proj)
        elif isinstance(module, GatedMLP) and _may_quantize(module.down_proj):
            cast(QuantizedProduct, module.down_proj.product).comes_quantized = True
            gate = module.activation
            gate.function = partial(
                _gate_rows, name=cast(str, gate.name), linear=module.down_proj, plain=gate.function
            )


def _quantize_in_norm(norm: nn.Module | None, linear: Linear) -> None:
    if not isinstance(norm, RMSNorm | GemmaRMSNorm) or not _may_quantize(linear):
        return
    product = cast(QuantizedProduct, linear.product)
    if quantizes_norms(product.matrix):
        product.comes_quantized = True
        norm.function = partial(
            _norm_rows, gemma=isinstance(norm, GemmaRMSNorm), linear=linear, plain=norm.function
        )


def _may_quantize(linear: Linear) -> bool:
    product = linear.product
    return isinstance(product, QuantizedProduct) and product.matrix.kind in LARGEST


def _norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float,
    *, gemma: bool, linear: Linear, plain: AddNorm,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`plain`, or with `QuantizedRows` for a norm: `linear`'s product takes them."""
    product = linear.product  # something else may stand in its place by now
    if not isinstance(product, QuantizedProduct) or not product.quantizes(x):
        return plain(x, residual, weight, eps)
    rows, total = quantized_rms_norm(
        *(x, residual, weight, eps),
        matrix=product.matrix,
        gemma=gemma,
        parts=product.parts(x),
    )
    return cast(Tensor, rows), total


def _gate_rows(
    gate_up: Tensor, *, name: str, linear: Linear, plain: Callable[[Tensor], Tensor]
) -> Tensor:
    """`plain`, or `QuantizedRows` as above."""
    product = linear.product
    if not isinstance(product, QuantizedProduct) or not product.quantizes(gate_up):
        return plain(gate_up)
    parts = product.parts(gate_up)
    return cast(Tensor, quantize_gated(gate_up, name, product.matrix, parts=parts))


class Summing(Protocol):
    """A module whose result ranks sum."""

    reduce: Reduce


def fuse_sums(model: CausalLM, collectives: PeerCollectives) -> int:
    """Lets norms add up the ranks' parts of the product before them, in one launch with the
    residual. Called after `speed_up`, on a model that `join_ranks` has given these collectives.

    Sums whose result something other than one RMS norm of ours reads stay where they are: those in
    front of layer norms, of layers whose two parts are parallel, and of norms that torch computes.

    Returns:
        How many sums norms have taken over.
    """
    if not isinstance(model, DecoderLM):
        return 0
    pairs = _sums_before_norms(model)
    fused = 0
    for summing, norm in pairs:
        if summing is None or summing.reduce != collectives.all_reduce:
            continue
        if isinstance(norm, RMSNorm | GemmaRMSNorm) and _norms_by_kernel(norm.function):
            norm.function = partial(
                _norm_of_sum,
                gemma=isinstance(norm, GemmaRMSNorm),
                collectives=collectives,
                plain=norm.function,
            )
            summing.reduce = same
            fused += 1
    return fused


def _sums_before_norms(model: DecoderLM) -> list[tuple[Summing | None, nn.Module | None]]:
    """The products of a model whose results go into a norm and nowhere else, with that norm; None
    for those that we do not know."""
    pairs: list[tuple[Summing | None, nn.Module | None]] = []
    before: Summing | None = None  # what the layer before ends with
    for layer in model.layers:
        forward = type(layer).forward
        if forward is DecoderLayer.forward and not layer.parallel:
            pairs.append((before, layer.attention_norm))
            pairs.append((_last_sum(layer.attention), layer.mlp_norm))
            before = _last_sum(layer.mlp)
        elif forward is SandwichLayer.forward:
            pairs.append((before, layer.attention_norm))
            pairs.append((_last_sum(layer.attention), layer.post_attention_norm))
            pairs.append((_last_sum(layer.mlp), layer.post_mlp_norm))
            before = None
        else:
            before = None
    if type(model).forward is DecoderLM.forward and model.config.rank.is_last:
        pairs.append((before, model.norm))
    return pairs


def _last_sum(module: nn.Module) -> Summing | None:
    """The part of an attention or MLP whose result is the module's own."""
    if hasattr(module, "reduce"):
        return cast(Summing, module)
    forward = type(module).forward
    if forward in (Attention.forward, GptOssAttention.forward):
        return cast(Attention, module).out_proj
    if forward is GatedMLP.forward:
        return cast(GatedMLP, module).down_proj
    if forward is PlainMLP.forward:
        return cast(PlainMLP, module).fc2
    if forward is MixtralBlock.forward:
        return cast(MixtralBlock, module).experts
    return None


def _norms_by_kernel(function: AddNorm) -> bool:
    kernels = (add_rms_norm, add_gemma_rms_norm)
    return function in kernels or _quantizing(function) is not None


def _quantizing(function: AddNorm) -> Linear | None:
    """The product that a norm quantizes rows for, see `quantize_where_rows_are_made`."""
    if isinstance(function, partial) and function.func is _norm_rows:
        return cast(Linear, function.keywords["linear"])
    return None


def _norm_of_sum(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float,
    *, gemma: bool, collectives: PeerCollectives, plain: AddNorm,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`plain` of the sum over all ranks, in one launch where there is one."""
    linear = _quantizing(plain)
    product = None if linear is None else linear.product
    # Two parts are left to the product's own pass: it takes less than a launch for the sum.
    quantizes = (
        isinstance(product, QuantizedProduct) and product.quantizes(x) and product.parts(x) == 1
    )
    if quantizes or not collectives.norms(x):
        return plain(collectives.all_reduce(x), residual, weight, eps)
    return collectives.sum_norm(x, residual, weight, eps, gemma=gemma)


def _multiply_by_kernels(linear: Linear, matrix: QuantizedMatrix) -> None:
    """The kernels have the matrix in an order of their own, so the layer's is not kept as well."""
    blocks = find_block_product(matrix.device) if matrix.rows > 1 else None
    linear.product = product_of(matrix, block_product=blocks)
    if prepares(matrix):
        cast(QuantizedWeight, linear.weight).release()


def _activation(x: Tensor, name: str, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """The kernel for tensors that it serves, `plain` for others."""
    if x.dim() == 2 and x.is_contiguous() and (x.is_cuda or INTERPRETED):
        return activation(x, name)
    return plain(x)
