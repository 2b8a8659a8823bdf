"""Tensor parallelism: which rows and columns of the parameters of a model, or of a stage of it, a
rank has, and where the ranks' parts meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.blocks import Attention, DecoderLM, GatedMLP, PlainMLP
from hetero_llm.models.collectives import Collectives, Rank, same
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import Head, ProjectionNorm, RearrangedView
from hetero_llm.models.mixtral import SharedExpertBlock
from hetero_llm.models.quantization_config import checkpoint_format
from hetero_llm.models.rank_config import (
    FIELD,
    STAGES_FIELD,
    check_sizes,
    check_stages,
    first_kv_head,
    sharded_config,
)
from hetero_llm.models.registry import model_class

__all__ = ["Cut", "RankParts", "check_ranks", "join_ranks", "rank_parts", "sharded_config"]

Run = tuple[int, int]
"""The first index, and how many follow one another."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a parameter.

    Attributes:
        dim: Which is cut.
        length: Of that dim in the whole parameter.
        runs: Indices in the whole parameter that the rank has, in order.
    """

    dim: int
    length: int
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        """Of the dim in the rank's parameter."""
        return sum(count for _, count in self.runs)

    def index(self) -> Tensor:
        """[size] int64 on the CPU: the whole parameter's index of each of the rank's."""
        device = torch.device("cpu")
        return torch.cat([torch.arange(at, at + n, device=device) for at, n in self.runs])


def runs_inside(cut: Cut, first_row: int, rows: int) -> list[Run]:
    """The runs of a cut in a range of rows, counted from its first one; the cut repeats itself, as
    the rows of experts do."""
    runs = []
    for begin in range(first_row // cut.length * cut.length, first_row + rows, cut.length):
        for at, count in cut.runs:
            first = max(begin + at, first_row)
            last = min(begin + at + count, first_row + rows)
            if first < last:
                runs.append((first - first_row, last - first))
    return runs


@dataclass(frozen=True, slots=True)
class RankParts:
    """By the names of `named_parameters`. A parameter that is in neither is whole on every rank.

    Attributes:
        cuts: The parameters of which ranks have parts.
        added: Biases of products that are summed over the ranks: rank 0 has them, others zeros.
    """

    cuts: Mapping[str, Cut]
    added: frozenset[str]


def rank_parts(model: DecoderLM, whole: ModelConfig) -> RankParts:
    """The parts of a rank.

    Args:
        model: Of the rank's `sharded_config`.
        whole: The configuration of the whole model.
    """
    cuts: dict[str, Cut] = {}
    added: set[str] = set()
    for path, module in model.named_modules():
        of_module, biases = _parts_of(module, whole, model.config)
        cuts |= {f"{path}.{name}": cut for name, cut in of_module.items()}
        added |= {f"{path}.{name}" for name in biases}
    if whole.tie_word_embeddings:
        cuts.pop("lm_head.weight", None)  # every rank has the embedding's
    parameters = dict(model.named_parameters())
    # What options of the model decide is not there in all of its layers.
    cuts = {name: cut for name, cut in cuts.items() if name in parameters}
    for name, cut in cuts.items():
        assert parameters[name].shape[cut.dim] == cut.size, (name, cut)
    return RankParts(cuts, frozenset(added & parameters.keys()))


def _parts_of(
    module: nn.Module, whole: ModelConfig, own: ModelConfig
) -> tuple[dict[str, Cut], tuple[str, ...]]:
    """Cuts of a module's parameters and names of added biases, below the module, of those that it
    may lack too."""
    rank = own.rank
    if isinstance(module, Attention):
        return _cuts_of_attention(whole, own), ("out_proj.bias",)
    if isinstance(module, PlainMLP):
        inner = module.fc2.weight.shape[1]
        row, column = _inner_cuts(rank, inner, products=1)
        return {"fc1.weight": row, "fc1.bias": row, "fc2.weight": column}, ("fc2.bias",)
    if isinstance(module, GatedMLP):
        inner = module.down_proj.weight.shape[1]
        row, column = _inner_cuts(rank, inner, products=2)
        cuts = {"gate_up_proj.weight": row, "gate_up_proj.bias": row, "down_proj.weight": column}
        return cuts, ("down_proj.bias",)
    if isinstance(module, Experts):
        row, column = _inner_cuts(rank, module.down.shape[2], products=2, first_dim=1)
        return {"gate_up": row, "gate_up_bias": row, "down": column}, ("down_bias",)
    if isinstance(module, Head):
        cut = Cut(0, whole.vocab_size, ((module.first, module.rows),))
        return {"weight": cut, "bias": cut}, ()
    return {}, ()


def _inner_cuts(rank: Rank, inner: int, *, products: int, first_dim: int = 0) -> tuple[Cut, Cut]:
    """Of the rows of `products` fused matrices, and of the columns of the one that follows.

    Args:
        inner: Size of the rank's part.
    """
    whole, first = inner * rank.size, inner * rank.index
    rows = tuple((place * whole + first, inner) for place in range(products))
    return Cut(first_dim, products * whole, rows), Cut(first_dim + 1, whole, ((first, inner),))


def _cuts_of_attention(whole: ModelConfig, own: ModelConfig) -> dict[str, Cut]:
    size = whole.head_dim
    heads, kv_heads = whole.num_heads, whole.num_kv_heads
    q_run = (own.rank.index * own.num_heads, own.num_heads)
    kv_first = first_kv_head(whole, own.rank)
    k_run = (heads + kv_first, own.num_kv_heads)
    v_run = (heads + kv_heads + kv_first, own.num_kv_heads)

    def rows(length: int, *runs: Run) -> Cut:
        return Cut(0, length * size, tuple((at * size, count * size) for at, count in runs))

    qkv = rows(heads + 2 * kv_heads, q_run, k_run, v_run)
    queries = rows(heads, q_run)
    norms = rows(heads + kv_heads, q_run, k_run)
    return {
        "qkv_proj.weight": qkv,
        "qkv_proj.bias": qkv,
        "out_proj.weight": Cut(1, queries.length, queries.runs),
        "head_norm.weight": norms,  # of a `HeadLayerNorm`
        "head_norm.bias": norms,
        "head_norm.q_weight": queries,  # of a `ProjectionNorm`
        "head_norm.k_weight": rows(kv_heads, (kv_first, own.num_kv_heads)),
        "sinks": Cut(0, heads, (q_run,)),
    }


def join_ranks(model: DecoderLM, collectives: Collectives) -> None:
    """Lets the products of a rank's model return the sums, and its head the logits, of all."""
    vocab_size, rank = model.config.vocab_size, collectives.rank
    add = collectives.all_reduce
    for module in model.modules():
        if isinstance(module, Attention):
            module.out_proj.reduce = add
        elif isinstance(module, PlainMLP):
            module.fc2.reduce = add
        elif isinstance(module, GatedMLP):
            module.down_proj.reduce = add
        elif isinstance(module, Experts):
            module.reduce = add
        elif isinstance(module, ProjectionNorm):
            module.collectives = collectives
    for module in model.modules():
        if isinstance(module, SharedExpertBlock):  # one sum of both
            module.experts.reduce = module.shared.down_proj.reduce = same
            module.reduce = add

    def gather(logits: Tensor) -> Tensor:
        missing = -(-vocab_size // rank.size) - logits.shape[1]
        if missing:
            logits = F.pad(logits, (0, missing))
        return collectives.gather_columns(logits)[:, :vocab_size].contiguous()

    if isinstance(model.lm_head, Head):  # else another stage has it
        model.lm_head.gather = gather


def check_ranks(config: ModelConfig, size: int, stages: int = 1) -> None:
    """Checks that `size` ranks can run a model, or each of its stages, together, before any weight
    is read.

    Args:
        config: Of the whole model.

    Raises:
        ConfigError: They cannot: of heads, KV heads or an inner size each rank would not have as
            many, groups of quantized columns would be cut, a stage would have no layer, or the
            model's class is no native one.
        ModelLoadError: The format of a quantized checkpoint is not supported.
    """
    if size < 1:
        raise ConfigError(FIELD, size, "must be 1 or more")
    if size == stages == 1:
        return
    if isinstance(config, TransformersConfig):
        reason = f"{config.class_name} runs by transformers' own code, which is not cut for ranks"
        raise ConfigError(*((FIELD, size) if size > 1 else (STAGES_FIELD, stages)), reason)
    check_stages(config, stages)
    if size == 1:
        return
    check_sizes(config, size)
    if config.quantization is not None or config.online_quantization is not None:
        _check_columns(config, size)


def _check_columns(config: ModelConfig, size: int) -> None:
    """Raises ConfigError: a rank's columns of a quantized matrix begin or end inside of a group.
    ModelLoadError: the format is not supported."""
    form = checkpoint_format(config, Path("config.json"))
    if form is None:
        return
    with torch.device("meta"):
        models = [
            model_class(config.architecture)(one)
            for one in (config, sharded_config(config, Rank(0, size)))
        ]
    whole, own = models
    assert isinstance(own, DecoderLM)
    cuts = rank_parts(own, config).cuts
    columns = {
        id(parameter): cuts[name].size
        for name, parameter in whole.named_parameters()
        if name in cuts and cuts[name].dim == parameter.dim() - 1 > 0
    }
    for name, target in whole.checkpoint_tensors().items():
        view = target.view if isinstance(target, RearrangedView) else target
        root = view if view._base is None else view._base
        module, _, kind = name.rpartition(".")
        scheme = form.scheme(module) if kind == "weight" and id(root) in columns else None
        if scheme is None:
            continue
        each = columns[id(root)]
        try:
            step = scheme.column_step(each * size)
        except ValueError as error:
            raise ConfigError(FIELD, size, f"{module}: {error}") from error
        if each * size > step and each % step:  # one group of a row may be cut anywhere
            reason = f"each rank has {each} columns of {module}, whose groups are of {step}"
            raise ConfigError(FIELD, size, reason)
