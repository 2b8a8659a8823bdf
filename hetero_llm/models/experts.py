"""Mixture of experts: routers, and the gated MLPs of which each token uses a few.

Each expert's output is rounded as a matrix product rounds it; then the outputs are weighted and
summed in float32, and the sum is rounded once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_llm.models.collectives import same
from hetero_llm.models.config import Gate
from hetero_llm.models.layers import Float32Linear, GatedActivation, Linear, Product, Reduce
from hetero_llm.quantization.matrix import QuantizedMatrix, QuantizedStack, dequantize

# logits [T, experts] -> experts of each token [T, k] int, those it prefers first, and their weights
# [T, k] float32
Route = Callable[[Tensor], tuple[Tensor, Tensor]]
# (x [T, hidden], ids [T, k] int, weights [T, k] float32, gate_up [experts, 2 * inner, hidden], down
# [experts, hidden, inner]) -> [T, hidden]
ExpertsFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# (x [T, hidden], ids [T, k] int, weights [T, k] float32)
StartExperts = Callable[[Tensor, Tensor, Tensor], None]
# (shape, dtype) -> an empty tensor in host memory, contiguous
HostMemory = Callable[[tuple[int, ...], torch.dtype], Tensor]
# (name of a weight of `Experts`, expert, which tokens, x [N, in], y [N, out]) adds to y
AdaptExpert = Callable[[str, int, Tensor | slice, Tensor, Tensor], None]
# Called with a layer and the name of a weight whose numbers are complete
Settle = Callable[["Experts", str], None]


@runtime_checkable
class SettlingMemory(Protocol):
    """A `HostMemory` in which weights are only while they are read."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `HostMemory`."""
        ...

    def settle(self, index: int, layer: Experts, name: str) -> None:
        """Takes a weight that is complete to where it stays, and its memory back.

        Args:
            index: of the layer among those that have experts.
        """
        ...

    def give_back(self, tensor: Tensor) -> None:
        """Takes the memory of a tensor back, all of which it has given; the tensor is not read
        any more."""
        ...


SMALLEST_SUM = 1e-20
"""Added to the sum that `sigmoid_top_k` divides by."""


def softmax_top_k(
    logits: Tensor, k: int, *, renormalize: bool, rounded: bool
) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each token by a softmax in float32; see `Route`.

    Args:
        logits: [T, experts].
        k: Experts of a token.
        renormalize: The weights of a token are divided by their sum.
        rounded: Weights take the precision of `logits`, as Qwen2-MoE's do.
    """
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.to(logits.dtype).float() if rounded else weights


def sigmoid_top_k(
    logits: Tensor,
    correction: Tensor,
    k: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest corrected sigmoid; see `Route`.

    The correction decides which experts are chosen and is no part of their weights
    ("Auxiliary-Loss-Free Load Balancing", Wang et al. 2024). With groups, experts of the
    `kept_groups` groups alone are chosen whose two best experts have the largest sum
    ("DeepSeek-V3 Technical Report", 2024). All arithmetic in float32.

    Args:
        logits: [T, experts].
        correction: [experts] float32.
        k: Experts of a token; the kept groups have as many at least.
        groups: Of as many experts each, two at least; 1: every expert may be chosen.
        renormalize: The weights of a token are divided by their sum.
        scale: Multiplies the weights.
    """
    scores = logits.float().sigmoid()
    corrected = scores + correction
    if kept_groups < groups:
        grouped = corrected.unflatten(-1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept_groups, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0]).scatter(-1, best, 0).bool()
        corrected = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = corrected.topk(k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return ids, weights * scale


def sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts a token: the likeliest, then the likeliest of the others; see `Route`.

    An expert's weight is its softmax among the experts near it: those whose logit is less than
    2 * jitter (relative) below. "Sparse Backpropagation for MoE Training" (Liu et al.
    2023) and "GRIN: GRadient-INformed MoE" (Liu et al. 2024), at inference; all arithmetic in the
    precision of `logits`.

    Args:
        logits: [T, experts].
        jitter: `router_jitter_noise`.
    """
    best, first = logits.max(-1, keepdim=True)
    others = logits.scatter(-1, first, float("-inf"))
    next_best, second = others.max(-1, keepdim=True)
    weights = [
        _weight_among_near(logits, logits, best, first, jitter),
        _weight_among_near(logits, others, next_best, second, jitter),
    ]
    return torch.cat((first, second), dim=-1), torch.cat(weights, dim=-1).float()


def _weight_among_near(
    logits: Tensor, left: Tensor, best: Tensor, chosen: Tensor, jitter: float
) -> Tensor:
    """[T, 1]: softmax of the `chosen` expert among those of `left` whose logit is near `best`."""
    distance = (best - left) / torch.maximum(logits.abs(), best)
    near = left.masked_fill(distance > 2 * jitter, float("-inf"))
    return near.softmax(-1).gather(-1, chosen)


class Router(nn.Module):
    """Chooses experts by a projection; subclasses say how.

    `function` may be replaced on the instance by a fused one.
    """

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate = self.make_gate(hidden, num_experts)
        self.gate.keeps_plain = True  # least bytes, and a wrong expert is the largest error
        self.function: Route = self.plain

    def make_gate(self, hidden: int, num_experts: int) -> Linear:
        """The projection."""
        return Linear(hidden, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> see `Route`."""
        return self.function(self.gate(x))

    def plain(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Route`."""
        raise NotImplementedError


class TopKRouter(Router):
    """`softmax_top_k` of a projection."""

    def __init__(
        self, hidden: int, num_experts: int, k: int, *, renormalize: bool, rounded: bool
    ) -> None:
        super().__init__(hidden, num_experts)
        self.k = k
        self.renormalize = renormalize
        self.rounded = rounded

    def plain(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_top_k(logits, self.k, renormalize=self.renormalize, rounded=self.rounded)


class SigmoidRouter(Router):
    """`sigmoid_top_k` of a projection in float32; the arguments are those of the function.

    Attributes:
        correction: [experts] float32, whatever the model's type.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        k: int,
        *,
        groups: int = 1,
        kept_groups: int = 1,
        renormalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__(hidden, num_experts)
        self.correction = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))
        self.k = k
        self.groups, self.kept_groups = groups, kept_groups
        self.renormalize = renormalize
        self.scale = scale

    def make_gate(self, hidden: int, num_experts: int) -> Linear:
        return Float32Linear(hidden, num_experts)

    def plain(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid_top_k(
            logits,
            self.correction,
            self.k,
            groups=self.groups,
            kept_groups=self.kept_groups,
            renormalize=self.renormalize,
            scale=self.scale,
        )


class SparseMixerRouter(Router):
    """`sparse_mixer` of a projection."""

    def __init__(self, hidden: int, num_experts: int, jitter: float) -> None:
        super().__init__(hidden, num_experts)
        self.jitter = jitter

    def plain(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_mixer(logits, self.jitter)


class Experts(nn.Module):
    """Gated MLPs; each token uses those that its router chose.

    `function` may be replaced on the instance (grouped and row-independent products), and so may
    `start`, which is called with the same tokens before anything else that the layer computes: it
    may ask other processors for some of the experts, whose outputs `function` then adds. Quantized
    weights are a `QuantizedStack` each, and a function has to take them.

    `reduce`: As that of a `Linear`: ranks have a part of each expert's inner size. A block that
    adds more to the experts' output has a `reduce` of its own, for the sum of all.

    Attributes:
        host_memory: where the weights live that the layer's `function` does not read as they are;
            None: on the model's device, as all others.
        settle: called when one of those weights is complete; may be replaced on the instance.
        adapt: `plain` calls it behind each product; may be replaced on the instance.
    """

    host_memory: HostMemory | None = None

    def __init__(
        self, num_experts: int, hidden: int, inner: int, activation: Gate, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * inner)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.activation = GatedActivation(activation)
        self.use_own_functions()

    def use_own_functions(self) -> None:
        """Sets what may be replaced on the instance; for the initialisers of all classes."""
        self.function: ExpertsFunction = self.plain
        self.reduce: Reduce = same
        self.start: StartExperts = start_nothing
        self.settle: Settle = stay
        self.adapt: AdaptExpert = adapt_nothing

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Of gate_up [experts, 2 * inner] and of down [experts, hidden]."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        return self.gate_up_bias, self.down_bias

    @property
    def quantized(self) -> dict[str, QuantizedStack]:
        """Those of its weights that are quantized, by name."""
        stacks: dict[str, object] = {"gate_up": self.gate_up, "down": self.down}
        return {name: s for name, s in stacks.items() if isinstance(s, QuantizedStack)}

    def set_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Puts the `stack` of all experts' matrices into the place of a weight."""
        count = getattr(self, name).shape[0]
        if self.host_memory is not None:
            matrix = _moved(matrix, self.host_memory)
        delattr(self, name)
        setattr(self, name, QuantizedStack(matrix, count))
        if self.host_memory is not None:
            self.settle(self, name)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
            x: [T, hidden].
            ids: [T, k] int, all different for one token.
            weights: [T, k] float32.
            shared: an expert of all tokens, x -> [T, hidden], which is added; None: there is none.
                It runs beside those that `start` asks for.

        Returns:
            [T, hidden] in x's dtype.
        """
        self.start(x, ids, weights)
        more = None if shared is None else shared(x)
        total = self.function(x, ids, weights, self.gate_up, self.down)
        return self.reduce(total if more is None else total.add_(more))

    def plain(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        product: Product = F.linear,
    ) -> Tensor:
        """One expert after the other; quantized weights are dequantized for each call of one.

        On a CPU each expert computes its own tokens. On other devices each computes all tokens:
        asking which experts are used would make the host wait for the device, and cannot be
        captured in a CUDA graph.
        """

        biases = self.biases

        def mlp(which: Tensor | slice, expert: int) -> Tensor:
            first, second = (None, None) if biases is None else (b[expert] for b in biases)
            tokens = x[which]
            inner = product(tokens, expert_weight(gate_up, expert, x.dtype), first)
            self.adapt("gate_up", expert, which, tokens, inner)
            inner = self.activation(inner)
            out = product(inner, expert_weight(down, expert, x.dtype), second)
            self.adapt("down", expert, which, inner, out)
            return out.float()

        if x.device.type == "cpu":
            return sum_by_own_tokens(mlp, x, ids, weights)
        return sum_by_all_tokens(mlp, x, ids, weights, num_experts=gate_up.shape[0])

    def checkpoint_tensors(self, prefix: str, names: tuple[str, str, str]) -> dict[str, Tensor]:
        """See `CausalLM.checkpoint_tensors`; `names`: of an expert's gate, up and down."""
        gate, up, down = names
        inner = self.down.shape[2]
        tensors = {}
        for i in range(self.down.shape[0]):
            tensors[f"{prefix}.{i}.{gate}.weight"] = self.gate_up[i, :inner]
            tensors[f"{prefix}.{i}.{up}.weight"] = self.gate_up[i, inner:]
            tensors[f"{prefix}.{i}.{down}.weight"] = self.down[i]
        return tensors

    def extra_repr(self) -> str:
        num_experts, hidden, inner = self.down.shape
        return f"{num_experts} of {hidden} x {inner}"


def start_nothing(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """See `StartExperts`: all experts are the layer's own."""


def adapt_nothing(name: str, expert: int, which: Tensor | slice, x: Tensor, y: Tensor) -> None:
    """See `AdaptExpert`: the outputs are those of the weights."""


def stay(layer: Experts, name: str) -> None:
    """See `Settle`: weights stay where they were read to."""


def _moved(matrix: QuantizedMatrix, host_memory: HostMemory) -> QuantizedMatrix:
    """The matrix in host memory."""
    moved: dict[str, Any] = {}
    for name, tensor in matrix.tensors().items():
        moved[name] = host_memory(tuple(tensor.shape), tensor.dtype).copy_(tensor)
    return replace(matrix, **moved)


def expert_weight(weights: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] of one expert: a view of [experts, N, K], or what the one of a
    `QuantizedStack` stands for, in `dtype`."""
    matrix = cast(Tensor | QuantizedMatrix, weights[expert])
    return dequantize(matrix, dtype) if isinstance(matrix, QuantizedMatrix) else matrix


# (which N of the layer's tokens, expert) -> [N, hidden] float32
_MLP = Callable[[Tensor | slice, int], Tensor]


def sum_by_own_tokens(mlp: _MLP, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts; each expert computes its own tokens."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        total.index_add_(0, token, mlp(token, expert) * weights[token, choice].unsqueeze(1))
    return total.to(x.dtype)


def sum_by_all_tokens(
    mlp: _MLP, x: Tensor, ids: Tensor, weights: Tensor, *, num_experts: int
) -> Tensor:
    """The same; each expert computes all tokens."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(num_experts):
        chosen = ids == expert
        share = torch.where(chosen, weights, 0.0).sum(1, keepdim=True)
        used = chosen.any(1, keepdim=True)
        total += torch.where(used, mlp(slice(None), expert) * share, 0.0)
    return total.to(x.dtype)
