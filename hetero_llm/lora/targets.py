"""Where the adapter of a checkpoint's module goes: rows of one of the model's `Linear` layers.

The names are those of `CausalLM.checkpoint_tensors`, which say what is fused (queries, keys and
values; gate and up) and in which order its rows are stored. They are read from a model without
memory: a served one may have given its weights to other forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import (
    CausalLM,
    Embedding,
    Float32Linear,
    Linear,
    Product,
    RearrangedView,
)
from hetero_llm.models.multimodal import ImageCausalLM
from hetero_llm.models.registry import model_class
from hetero_llm.models.sharding import Cut, rank_parts, runs_inside, sharded_config
from hetero_llm.models.transformers_backend import TransformersForCausalLM
from hetero_llm.models.transformers_check import trial_step

_WEIGHT = ".weight"
_TRIED_TOKENS = 53
_ELSEWHERE = "another stage's "  # before a name of the whole model, which may be one here, too


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint that may have an adapter.

    Attributes:
        linear: name of the `Linear` in `model.named_modules()`.
        first_row, rows, columns: where its weight [rows, columns] lies in that of the `Linear`.
        arrange: stored rows [rows, ...] to rows in the order of the `Linear`; None: as stored.
        part: what a rank has of the module; None: all of it.
        here: whether this stage has the `Linear`; else `linear` is none of its names.
    """

    linear: str
    first_row: int
    rows: int
    columns: int
    arrange: Callable[[Tensor], Tensor] | None = None
    part: TargetPart | None = None
    here: bool = True

    @property
    def stored_size(self) -> tuple[int, int]:
        """Rows and columns of the module in the checkpoint."""
        return (self.rows, self.columns) if self.part is None else self.part.stored_size

    def own_a(self, a: Tensor) -> Tensor:
        """Of A [rank, columns as stored] those that the `Linear` has."""
        return a if self.part is None else a.narrow(1, self.part.first_column, self.columns)

    def own_b(self, b: Tensor) -> Tensor:
        """Of B [rows as stored, rank] those that the `Linear` has, in its order."""
        if self.arrange is not None:
            b = self.arrange(b)
        if self.part is None:
            return b
        return torch.cat([b[first : first + count] for first, count in self.part.rows])


@dataclass(frozen=True, slots=True)
class TargetPart:
    """Attributes:
    stored_size: rows and columns of the whole module.
    rows: which of its rows the rank has, in the order of the `Linear`: (first, count) of each run.
    first_column: of those that the rank has.
    """

    stored_size: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    first_column: int


@dataclass(frozen=True, slots=True)
class AdapterTargets:
    """All modules of a model that adapters may name.

    Attributes:
        targets: by the module's name in the checkpoint.
        refused: modules that cannot have an adapter here, and why.
        checkpoint_name: see `CausalLM`.
        sizes: [rows, columns] of each `Linear` of this stage that has a target, by name.
    """

    targets: Mapping[str, Target]
    refused: Mapping[str, str]
    checkpoint_name: Callable[[str], str | None]
    sizes: Mapping[str, tuple[int, int]]

    def linears(self) -> set[str]:
        """The names of the `Linear` layers of this stage that may have an adapter."""
        return {target.linear for target in self.targets.values() if target.here}

    def own_name(self, module: str) -> str | None:
        """The name in `targets` or `refused` of a module as an adapter calls it; None if the model
        has no such module."""
        known = self.checkpoint_name(module + _WEIGHT)
        for name in (module, (known or "").removesuffix(_WEIGHT)):
            if name in self.targets or name in self.refused:
                return name
        return None


def adapter_targets(
    model: CausalLM, config: ModelConfig, *, field: str = "enable_lora", value: Any = True
) -> AdapterTargets:
    """Lists the modules of a model that was just loaded, before its layers are replaced.

    Args:
        model: perhaps a rank's part.
        config: of the whole model.
        field, value: the argument that wants adapters.

    Raises:
        ConfigError: the model is of a kind that takes no adapters.
    """
    if isinstance(model, ImageCausalLM):
        raise ConfigError(field, value, "a model with images takes no adapters yet")
    if isinstance(config, TransformersConfig):  # whose code may need memory
        assert isinstance(model, TransformersForCausalLM)
        return _targets_of(model, _on_other_rows(model))
    rank = model.config.rank
    with torch.device("meta"):
        whole = _targets_of(model_class(config.architecture)(config), {})
        if rank.is_whole:
            return whole
        own = model_class(config.architecture)(sharded_config(config, rank))
    assert isinstance(own, DecoderLM)
    own.leave_out_other_stages()
    return _targets_of_rank(whole, own, config)


def _targets_of_rank(whole: AdapterTargets, own: DecoderLM, config: ModelConfig) -> AdapterTargets:
    """The targets of a rank's model.

    Args:
        own: the rank's model, perhaps without memory.
        config: of the whole model.
    """
    cuts = rank_parts(own, config).cuts if own.config.rank.size > 1 else {}
    paths: dict[str, str] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in own.named_modules():
        name = own.whole_name(path)
        if name in whole.sizes:
            assert isinstance(module, Linear)
            paths[name] = path
            height, width = module.weight.shape
            sizes[path] = height, width
    targets = {
        name: replace(
            _part_of(target, cuts.get(f"{paths[target.linear]}.weight")),
            linear=paths[target.linear],
        )
        if target.linear in paths
        else replace(target, here=False, linear=f"{_ELSEWHERE}{target.linear}")
        for name, target in whole.targets.items()
    }
    return replace(whole, targets=targets, sizes=sizes)


def _part_of(target: Target, cut: Cut | None) -> Target:
    """What a rank has of a target of the whole model. `cut`: of the `Linear`'s weight."""
    if cut is None:
        return target
    stored = (target.rows, target.columns)
    if cut.dim == 1:
        part = TargetPart(stored, ((0, target.rows),), cut.runs[0][0])
        return replace(target, columns=cut.size, part=part)
    rows = runs_inside(cut, target.first_row, target.rows)
    before = sum(count for _, count in runs_inside(cut, 0, target.first_row))
    part = TargetPart(stored, tuple(rows), 0)
    return replace(target, first_row=before, rows=sum(count for _, count in rows), part=part)


@torch.inference_mode()
def _on_other_rows(model: TransformersForCausalLM) -> dict[int, str]:
    """Why the weights of layers that do not multiply all tokens of a step take no adapter, by
    identity: found by a step of a class of transformers, whose experts may be linear layers."""
    calls: dict[int, list[int]] = {}
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    before = [linear.product for linear in linears]

    def counted(weight_id: int, product: Product) -> Product:
        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            calls.setdefault(weight_id, []).append(len(x))
            return product(x, weight, bias)

        return multiply

    for linear in linears:
        linear.product = counted(id(linear.weight), linear.product)
    try:
        trial_step(model, _TRIED_TOKENS)()
    finally:
        for linear, product in zip(linears, before, strict=True):
            linear.product = product
    reason = "its layer does not run on all tokens of a step (as experts do not)"
    return {
        id(linear.weight): reason
        for linear in linears
        if set(calls.get(id(linear.weight), ())) != {_TRIED_TOKENS}
    }


def _targets_of(model: CausalLM, others: Mapping[int, str]) -> AdapterTargets:
    """`others`: why further weights take no adapter, by identity."""
    owners: dict[int, str] = {}
    refusals: dict[int, str] = dict(others)
    heads = {id(module) for module in model.head_modules()}
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            reason = "an adapter of experts is not available yet"
            refusals.update({id(parameter): reason for parameter in module.parameters(False)})
        elif id(module) in heads or isinstance(module, (Embedding, nn.Embedding)):
            reason = "an adapter of the head or the embedding is not available yet"
            refusals.update({id(parameter): reason for parameter in module.parameters()})
        elif isinstance(module, Float32Linear):
            refusals[id(module.weight)] = "an adapter of a router in float32 is not available yet"
        elif isinstance(module, Linear) and id(module.weight) not in others:
            owners[id(module.weight)] = path
            height, width = module.weight.shape
            sizes[path] = height, width
    targets: dict[str, Target] = {}
    refused: dict[str, str] = {}
    for name, stored in model.checkpoint_tensors().items():
        view = stored.view if isinstance(stored, RearrangedView) else stored
        if not name.endswith(_WEIGHT) or view.dim() != 2:
            continue
        module_name = name.removesuffix(_WEIGHT)
        root = view if view._base is None else view._base
        if id(root) in refusals:
            refused[module_name] = refusals[id(root)]
            continue
        if id(root) not in owners:
            refused[module_name] = "no linear layer"
            continue
        transposed = view.stride() != (view.shape[1], 1)
        height, width = reversed(view.shape) if transposed else view.shape
        arrange = stored.arrange if isinstance(stored, RearrangedView) else None
        first_row = view.storage_offset() // width
        targets[module_name] = Target(owners[id(root)], first_row, height, width, arrange)
    return AdapterTargets(targets, refused, model.checkpoint_name, sizes)
