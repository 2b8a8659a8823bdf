"""Modules that all model families share: products, norms, activations, and what `Attend` promises.

The tokens of all sequences are flattened: a hidden state is [T, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_llm.models.collectives import ONE_RANK, Collectives, same
from hetero_llm.models.config import ClampedSwish, Gate, ModelConfig
from hetero_llm.models.rotary import StepRotary, apply_rotary
from hetero_llm.quantization.matrix import QuantizedMatrix, QuantizedWeight, quantized_product

# (x [T, in], weight [out, in], bias [out] or None) -> [T, out]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# A rank's part of a product, [T, out] -> the sum over all ranks, the same shape; may overwrite
Reduce = Callable[[Tensor], Tensor]
# (x [T, size], residual [T, size] or None, weight [size], eps) -> norm, sum
AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
# Weight and bias of a layer norm, [size] or None each
Affine = tuple[Tensor | None, Tensor | None]
# (x [T, size], residual and extra alike or None, affines, eps) -> a norm for each affine, sum
AddLayerNormFunction = Callable[
    [Tensor, Tensor | None, Tensor | None, Sequence[Affine], float], tuple[list[Tensor], Tensor]
]


class Attend(Protocol):
    """Attention over the KV cache, supplied by the runner that owns the cache.

    Stores `k` and `v` of the step's tokens, then attends each token to its sequence: causal, within
    `config.sliding_windows[layer]` (a query at position p sees keys in (p - window, p]), scores
    multiplied by `config.attn_scale`, then `config.attn_softcap` and `config.alibi_slopes` applied.
    The inputs may be strided views (last dim contiguous).

    `sinks` [heads], of any float type, are given by all layers or by none (`config.attn_sinks`):
    one more score for each head's softmax, whose weight multiplies nothing.
    """

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, heads, head_dim]
        k: Tensor,  # [T, kv_heads, head_dim]
        v: Tensor,  # [T, kv_heads, head_dim]
        *,
        sinks: Tensor | None = None,  # [heads]
    ) -> Tensor:  # [T, heads, head_dim]
        ...

    def rotary(
        self,
        layer: int,
        qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
        heads: RotaryHeads,
        rows: StepRotary,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, heads, head_dim]
        """Norms and rotates the queries and keys of a fused projection, then does the same:
        what is written here, perhaps in fewer kernels."""
        return self(layer, *heads(qkv, rows), sinks=sinks)

    def select(self, layer: int, x: Tensor) -> Tensor:
        """The rows of x [T, size] for which this layer's attention returns a result: all, but in
        the last layer, where only rows that are sampled after may be left."""
        return x


class QKNorm(nn.Module):
    """RMS norm of every query and key head, with one weight for all of each kind (Qwen3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.q_weight = nn.Parameter(torch.empty(config.head_dim))
        self.k_weight = nn.Parameter(torch.empty(config.head_dim))
        self.num_heads = config.num_heads
        self.eps = config.norm_eps

    def forward(self, qk: Tensor) -> Tensor:
        """[T, heads + kv_heads, head_dim] -> the same shape."""
        normed = F.rms_norm(qk, self.q_weight.shape, None, self.eps)
        normed[:, : self.num_heads].mul_(self.q_weight)
        normed[:, self.num_heads :].mul_(self.k_weight)
        return normed


def norm_projections(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """RMS norm of a fused projection's queries, all heads together, and of its keys; in place.

    Args:
        qkv: [T, queries + 2 * keys], queries first.
        q_weight, k_weight: [queries] and [keys].

    Returns:
        `qkv`.
    """
    queries, keys = len(q_weight), len(k_weight)
    for first, weight in ((0, q_weight), (queries, k_weight)):
        part = qkv[:, first : first + len(weight)]
        part.copy_(rms_norm(part, weight, eps))
    assert qkv.shape[1] == queries + 2 * keys
    return qkv


def norm_projections_of_ranks(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    *,
    sizes: tuple[int, int],
    collectives: Collectives,
) -> Tensor:
    """`norm_projections` where each rank has some of the heads; the means are those of all.

    Args:
        weights: [queries] and [keys] of this rank.
        sizes: Queries and keys of all ranks, keys as often as ranks have them.
    """
    parts = qkv.split([len(weights[0]), len(weights[1]), len(weights[1])], dim=1)[:2]
    squares = torch.stack([part.float().square().sum(-1) for part in parts], dim=1)
    means = collectives.all_reduce(squares) / squares.new_tensor(sizes)
    factors = (means + eps).rsqrt().split(1, dim=1)
    for part, factor, weight in zip(parts, factors, weights, strict=True):
        part.copy_((part.float() * factor).to(part.dtype).mul_(weight))
    return qkv


class ProjectionNorm(nn.Module):
    """RMS norm of all query heads together, and of all key heads, where `QKNorm` norms each head
    (MiniMax-M2).

    `function` may be replaced on the instance by a fused one, which serves one rank alone.
    """

    collectives: Collectives = ONE_RANK

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.q_weight = nn.Parameter(torch.empty(config.num_heads * config.head_dim))
        self.k_weight = nn.Parameter(torch.empty(config.num_kv_heads * config.head_dim))
        self.eps = config.norm_eps
        self.function: Callable[[Tensor, Tensor, Tensor, float], Tensor] = norm_projections

    def forward(self, qkv: Tensor) -> Tensor:
        """Norms queries and keys of a fused projection [T, rows] in place and returns it."""
        weights = (self.q_weight, self.k_weight)
        ranks = self.collectives.rank.size
        if ranks == 1:
            return self.function(qkv, *weights, self.eps)
        sizes = (ranks * len(self.q_weight), ranks * len(self.k_weight))
        return norm_projections_of_ranks(
            qkv, weights, self.eps, sizes=sizes, collectives=self.collectives
        )


class RotaryHeads(nn.Module):
    """Splits a fused projection into heads, norms them if the model does, and rotates them.

    The first `rope.rotary_dim` entries of a head are rotated, entry i with entry i + half. The
    projections of families that rotate neighbours (GPT-J, ChatGLM) are reordered when they are
    loaded: scores do not depend on the order of a head's entries.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.qk_norm = QKNorm(config) if config.qk_norm else None

    def forward(self, qkv: Tensor, rows: StepRotary) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (heads + 2 * kv_heads) * head_dim] -> q [T, heads, head_dim], k and v alike."""
        queries, keys = self.num_heads, self.num_kv_heads
        heads = qkv.view(-1, queries + 2 * keys, self.head_dim)
        qk, v = heads.split((queries + keys, keys), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        rotated = rows.table.shape[1]
        if rotated < self.head_dim:
            turned, rest = qk.split((rotated, self.head_dim - rotated), dim=-1)
            qk = torch.cat((apply_rotary(turned, *rows.factors), rest), dim=-1)
        else:
            qk = apply_rotary(qk, *rows.factors)
        q, k = qk.split((queries, keys), dim=1)
        return q, k, v


@dataclass(frozen=True, slots=True)
class RearrangedView:
    """Where a stored tensor goes if its shape is not that of the view.

    Attributes:
        view: Of our parameter.
        shape: The stored tensor's.
        arrange: Stored tensor, already in the parameter's dtype, on its own device -> tensor of the
            view's shape, perhaps a view of it; None: `reshape`.
        by_row: `arrange` changes the numbers of each row and leaves the rows in their places; else
            one of the stored tensor's own shape takes all rows to other places, and leaves numbers.
    """

    view: Tensor
    shape: tuple[int, ...]
    arrange: Callable[[Tensor], Tensor] | None = None
    by_row: bool = False

    @staticmethod
    def of(
        view: Tensor, arrange: Callable[[Tensor], Tensor], *, by_row: bool = False
    ) -> RearrangedView:
        """For a stored tensor of the view's own shape."""
        return RearrangedView(view, tuple(view.shape), arrange, by_row)

    def fill(self, stored: Tensor) -> None:
        """Copies a tensor of `shape` into the view."""
        stored = stored.to(self.view.dtype)
        arranged = stored.reshape(self.view.shape) if self.arrange is None else self.arrange(stored)
        self.view.copy_(arranged)


@dataclass(frozen=True, slots=True)
class BankView(RearrangedView):
    """Where the matrices of all experts go that the files hold as one tensor: plain, each
    transposed, or quantized, with rows below each other (`formats.mxfp4`).

    Attributes:
        view: [experts * rows, columns] of our parameter; `shape`: [experts, columns, rows].
        order: The file's rows of all matrices, [experts * rows, anything] -> ours; None: as stored.
    """

    order: Callable[[Tensor], Tensor] | None = None

    @staticmethod
    def of_experts(weights: Tensor, arrange: Callable[[Tensor], Tensor] | None = None) -> BankView:
        """For a parameter [experts, rows, columns]; `arrange`: the file's [experts, rows, anything]
        -> ours, [experts * rows, anything]."""
        experts, rows, columns = weights.shape

        def order(stored: Tensor) -> Tensor:
            matrices = stored.unflatten(0, (experts, rows))
            return matrices.flatten(0, 1) if arrange is None else arrange(matrices)

        def transposed(stored: Tensor) -> Tensor:
            matrices = stored.transpose(1, 2)
            return matrices.flatten(0, 1) if arrange is None else arrange(matrices)

        ordered = None if arrange is None else order
        shape = (experts, columns, rows)
        return BankView(weights.view(-1, columns), shape, transposed, order=ordered)


class CausalLM(nn.Module):
    """What the engine and the loader need of a model. Parameters are created in torch's default
    dtype and on its default device."""

    config: ModelConfig
    selects_rows = False
    """Whether `forward` returns the rows that `Attend.select` leaves in the last layer, rather than
    need all of them."""
    kv_scales: Tensor | None = None
    """The checkpoint's scales of an e4m3 KV cache, see `kv_scales.py`; None: it has none."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, or of a stage before the last one those that the next
        stage takes.

        Args:
            input_ids: [T] int64, tokens of all sequences; of a stage behind the first one what the
                stage before has returned, [T, hidden], overwritten.
            positions: [T] int64, each token's position in its sequence.
            attend: Called once per layer, layers in order.

        Returns:
            [T, hidden] in the parameters' dtype, or fewer rows: see `selects_rows`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab], in the parameters' dtype."""
        raise NotImplementedError

    def parameters_per_token(self) -> int:
        """Approximate number of parameters that one token is multiplied with."""
        quantized = (m.shape for m in self.modules() if isinstance(m, QuantizedWeight))
        plain = sum(p.numel() for p in self.parameters())
        return plain + sum(math.prod(shape) for shape in quantized)

    def input_embedding(self) -> nn.Module:
        """The module whose result, [T, size] or [1, T, size], transformers' class of this model
        takes as `inputs_embeds`."""
        raise NotImplementedError

    def head_modules(self) -> tuple[nn.Module, ...]:
        """The modules that `logits` calls, with other rows than the tokens of a step."""
        head = getattr(self, "lm_head", None)
        return (head,) if isinstance(head, nn.Module) else ()

    def checkpoint_tensors(self) -> Mapping[str, Tensor | RearrangedView]:
        """Checkpoint name -> view of our parameter to copy the tensor into.

        Fused projections appear as one view per checkpoint tensor, transposed ones as `.t()`,
        anything else as a `RearrangedView`.
        """
        raise NotImplementedError

    def checkpoint_name(self, name: str) -> str | None:
        """The name in `checkpoint_tensors` of a stored tensor; None if the loader skips it."""
        raise NotImplementedError

    def in_stage(self, name: str) -> bool:
        """Whether the model has a stored tensor of this name (`checkpoint_name`) or leaves it to
        another stage."""
        return True

    def whole_name(self, parameter: str) -> str:
        """The name in the whole model of one of its parameters or modules."""
        return parameter

    def finish_loading(self, *, batch_invariant: bool) -> None:
        """Called once before serving, when weights are loaded and fused parts are in place.

        Args:
            batch_invariant: The model's products and activations are those of `invariant.py`.

        Raises:
            ModelLoadError, ConfigError: The model cannot be served, or not with this option.
        """


class Linear(nn.Module):
    """Every matrix product of every family, the head included; `dtype` None: torch's default.

    `product` may be replaced on the instance (native and row-independent products). A quantized
    layer's `weight` is a `QuantizedWeight`, and its product one that takes it (`set_quantized`).

    Attributes:
        on_host: `set_quantized` moves the matrix to host memory: see `gpu.weight_offload`.
        keeps_plain: a matrix that the checkpoint has quantized is dequantized when it is loaded.
        reduce: makes the sum over all ranks of what `product` returns, where ranks have a part of
            the inputs each; the product itself with one rank.
    """

    on_host = False
    keeps_plain = False

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self.product: Product = F.linear
        self.reduce: Reduce = same

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.reduce(self.product(x, self.weight, self.bias))

    @property
    def quantized(self) -> QuantizedMatrix | None:
        """The weight if it is a quantized one."""
        weight: object = self.weight
        return weight.matrix if isinstance(weight, QuantizedWeight) else None

    def set_quantized(self, matrix: QuantizedMatrix) -> None:
        """Puts a quantized matrix into the place of the weight, and its product into that of
        the plain one."""
        if self.on_host:
            matrix = matrix.to("cpu")
        del self.weight
        # The parameter's type stays for the readers of plain weights, who are nearly all.
        self.weight = cast(nn.Parameter, QuantizedWeight(matrix))
        self.product = _multiply_quantized

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}, bias={self.bias is not None}"


class Head(Linear):
    """The language model's head. A rank has some rows of it and returns the logits of all.

    Args:
        first, rows: The rank's rows; `weight` has these alone, unless it is that of the embedding.

    Attributes:
        gather: [R, rows] of this rank -> [R, vocab]; the same with one rank.
    """

    def __init__(self, in_features: int, first: int, rows: int, *, bias: bool) -> None:
        super().__init__(in_features, rows, bias=bias)
        self.first, self.rows = first, rows
        self.gather: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, vocab]."""
        weight: Tensor = self.weight
        if weight.shape[0] != self.rows:  # the embedding's, of all tokens
            weight = weight[self.first : self.first + self.rows]
        return self.gather(self.product(x, weight, self.bias))


class Float32Linear(Linear):
    """A product in float32, whatever the model's type; never quantized, and without adapters.

    `function` may be set on the instance: (x, weight) -> the same, without a copy of x in float32.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=torch.float32)
        self.function: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] float32."""
        if self.function is not None:
            return self.function(x, self.weight)
        return super().forward(x.float())


def _multiply_quantized(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`Product` of a `QuantizedWeight`."""
    return quantized_product(x, cast(QuantizedWeight, weight).matrix, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., size] normed over the last dim."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # transformers rounds to the low precision before it multiplies by the weight.
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `RMSNorm`."""
    total = x if residual is None else residual.add_(x)
    return rms_norm(total, weight, eps), total


def add_gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `GemmaRMSNorm`."""
    total = x if residual is None else residual.add_(x)
    norm = F.rms_norm(total.float(), weight.shape, None, eps)
    return norm.mul_(1.0 + weight.float()).to(x.dtype), total


class _ScaleNorm(nn.Module):
    """A norm with a weight and no bias. `function`, at first the class's, may be replaced on the
    instance by a fused one."""

    function: AddNorm

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of `x + residual`, and that sum for the next residual.

        Args:
            x: [T, size].
            residual: [T, size], overwritten with the sum; None for the first layer.

        Returns:
            The norm and the sum, both [T, size].
        """
        return self.function(x, residual, self.weight, self.eps)


class RMSNorm(_ScaleNorm):
    """Root-mean-square norm; computed in float32 for every dtype, as in transformers."""

    function = staticmethod(add_rms_norm)


class GemmaRMSNorm(_ScaleNorm):
    """Gemma's RMS norm: the weight is stored less one and multiplied in float32, and only the
    product is rounded."""

    function = staticmethod(add_gemma_rms_norm)


class AddLayerNorm(nn.Module):
    """Layer norm of a sum, which is also the next residual, as in `RMSNorm`.

    `function` may be replaced on the instance by a fused one.
    """

    def __init__(self, size: int, eps: float, *, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if affine else None
        self.bias = nn.Parameter(torch.empty(size)) if affine else None
        self.eps = eps
        self.function: AddLayerNormFunction = add_layer_norm

    def forward(
        self, x: Tensor, residual: Tensor | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Norm of `x + extra + residual`, and that sum, rounded after each addition.

        Args:
            x: [T, size].
            residual: [T, size], overwritten with the sum; None for the first layer.
            extra: [T, size], or None; only with a residual.

        Returns:
            The norm and the sum, both [T, size].
        """
        assert extra is None or residual is not None
        (norm,), total = self.function(x, residual, extra, [(self.weight, self.bias)], self.eps)
        return norm, total

    def with_second(
        self,
        second: AddLayerNorm,
        x: Tensor,
        residual: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This norm, `second`'s of the same sum, and the sum; arguments as of `forward`."""
        assert extra is None or residual is not None
        assert second.eps == self.eps, (self.eps, second.eps)
        affines = [(norm.weight, norm.bias) for norm in (self, second)]
        norms, total = self.function(x, residual, extra, affines, self.eps)
        return norms[0], norms[1], total


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    extra: Tensor | None,
    affines: Sequence[Affine],
    eps: float,
) -> tuple[list[Tensor], Tensor]:
    """See `AddLayerNorm`."""
    if extra is not None:
        x = x + extra
    total = x if residual is None else residual.add_(x)
    return [F.layer_norm(total, total.shape[-1:], *affine, eps) for affine in affines], total


class Embedding(nn.Module):
    """Rows of a table by index: [T] int64 -> [T, size].

    Attributes:
        scale: multiplies the rows (Gemma); 1 does nothing.
    """

    scale = 1.0

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, index: Tensor) -> Tensor:
        rows = F.embedding(index, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Activation(nn.Module):
    """An elementwise function by its name in config.json.

    `function` may be replaced on the instance by a fused or a batch-invariant one (`invariant.py`).
    `name` is None if the function is a module of transformers.
    """

    name: str | None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "silu": F.silu,
            "relu": F.relu,
            "relu2": _relu_squared,
            "gelu": F.gelu,
            "gelu_new": _gelu_tanh,
            "gelu_fast": _gelu_tanh,
            "gelu_pytorch_tanh": _gelu_tanh,
            "sigmoid": torch.sigmoid,  # gates of shared experts; no name of config.json
            "tanh": torch.tanh,  # soft caps of logits; no name of config.json
        }
        self.function = functions[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class GatedActivation(nn.Module):
    """activation(gate) * up, of a fused projection's output; or what a `ClampedSwish` says.

    `function` may be replaced on the instance by a fused one.
    """

    def __init__(self, name: Gate) -> None:
        super().__init__()
        self.name = name
        self.activation = Activation("sigmoid" if isinstance(name, ClampedSwish) else name)
        self.function: Callable[[Tensor], Tensor] = self.plain

    def forward(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * inner], gate first -> [T, inner]."""
        return self.function(gate_up)

    def plain(self, gate_up: Tensor) -> Tensor:
        if isinstance(self.name, ClampedSwish):
            gate, up = gate_up.float().chunk(2, dim=-1)
            gate, up = gate.clamp(max=self.name.limit), up.clamp(-self.name.limit, self.name.limit)
            swish = self.activation(self.name.alpha * gate).mul_(gate)
            return swish.mul_(up.add_(1.0)).to(gate_up.dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


def checkpoint_views(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module (not of its children), named below `prefix`."""
    return {f"{prefix}.{name}": p for name, p in module.named_parameters(recurse=False)}


def split_views(linear: Linear, names: list[str], sizes: list[int]) -> dict[str, Tensor]:
    """Row ranges of a fused projection, one for each separately stored projection."""
    views = dict(zip((f"{n}.weight" for n in names), linear.weight.split(sizes), strict=True))
    if linear.bias is not None:
        views.update(zip((f"{n}.bias" for n in names), linear.bias.split(sizes), strict=True))
    return views
