"""Where the adapter of a checkpoint's module goes: rows of one of the model's `Linear` layers.

The names are those of `CausalLM.checkpoint_tensors`, which say what is fused (queries, keys and
values; gate and up) and in which order its rows are stored. They are read from a model without
memory: a served one may have given its weights to other forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import (
    BankView,
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
_OLD_MIXTURE = ".block_sparse_moe."
"""In names of Mixtral's modules before version 5 of transformers; ".mlp." now."""
EXPERT_WEIGHTS = ("gate_up", "down")
"""Parameters of `Experts` that may have adapters."""
PEFT_NAMES = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""What classes of transformers call them."""
_ELSEWHERE = "another stage's "  # before a name of the whole model, which may be one here, too


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint that may have an adapter, or a parameter with the matrices of all
    experts.

    Attributes:
        linear: name of the `Linear` in `model.named_modules()`; of an expert's module that of the
            parameter of `Experts` which holds it.
        first_row, rows, columns: where its weight [rows, columns] lies in that of the `Linear`.
        arrange: stored rows [rows, ...] to rows in the order of the `Linear`; None: as stored.
        part: what a rank has of the module; None: all of it.
        here: whether this stage has the `Linear`; else `linear` is none of its names.
        expert: whose matrix it is; None: no expert's, or all experts'.
        experts: matrices of all experts together (`BankView`); 0: one matrix.
    """

    linear: str
    first_row: int
    rows: int
    columns: int
    arrange: Callable[[Tensor], Tensor] | None = None
    part: TargetPart | None = None
    here: bool = True
    expert: int | None = None
    experts: int = 0

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
        banks: by the parameter's name: those that hold all experts' matrices of a layer, as
            classes of transformers have them from version 5 on.
        refused: modules that cannot have an adapter here, and why.
        checkpoint_name: see `CausalLM`.
        sizes: [rows, columns] of each `Linear` of this stage that has a target, by name, and of one
            expert's matrix by the name of the parameter.
        experts: how many each of those parameters has, by its name.
    """

    targets: Mapping[str, Target]
    refused: Mapping[str, str]
    checkpoint_name: Callable[[str], str | None]
    sizes: Mapping[str, tuple[int, int]]
    banks: Mapping[str, Target] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    def linears(self) -> set[str]:
        """The names of the `Linear` layers of this stage that may have an adapter."""
        return {t.linear for t in self.targets.values() if t.here and t.expert is None}

    def expert_weights(self) -> set[str]:
        """The names of this stage's parameters of `Experts` that may have an adapter."""
        return {target.linear for target in self.banks.values() if target.here}

    def banks_of(self, module: str) -> dict[str, Target]:
        """The parameters with all experts' matrices that a module as an adapter calls it has, by
        the names that PEFT matches with its options; empty: it has none. PEFT nests its wrappers
        of a module's parameters, each below the other's `base_layer`."""
        called = module.replace(".base_layer", "")
        for known in (called, called.replace(".mlp.", _OLD_MIXTURE)):
            found = {
                f"{called}{name.removeprefix(known)}": target
                for name, target in self.banks.items()
                if name.rpartition(".")[0] == known
            }
            if found:
                return found
        return {}

    def own_name(self, module: str) -> str | None:
        """The name in `targets` or `refused` of a module as an adapter calls it; None if the model
        has no such module."""
        known = self.checkpoint_name(module + _WEIGHT)
        stripped = module.replace(".base_layer", "")
        others = (stripped, stripped.replace(".mlp.", _OLD_MIXTURE))
        for name in (module, (known or "").removesuffix(_WEIGHT), *others):
            if name in self.targets or name in self.refused:
                return name
        return None


def adapter_targets(
    model: CausalLM,
    config: ModelConfig,
    *,
    field: str = "enable_lora",
    value: Any = True,
    experts: bool = True,
) -> AdapterTargets:
    """Lists the modules of a model that was just loaded, before its layers are replaced.

    Args:
        model: perhaps a rank's part.
        config: of the whole model.
        field, value: the argument that wants adapters.
        experts: whether experts of mixtures may have one; none do whose weights are on the host.

    Raises:
        ConfigError: the model is of a kind that takes no adapters.
    """
    if isinstance(model, ImageCausalLM):
        raise ConfigError(field, value, "a model with images takes no adapters yet")
    if isinstance(config, TransformersConfig):  # whose code may need memory
        assert isinstance(model, TransformersForCausalLM)
        return _targets_of(model, _on_other_rows(model))
    rank = model.config.rank
    if not experts:
        reason = "an adapter of experts needs lora_experts"
    elif any(isinstance(m, Experts) and m.host_memory is not None for m in model.modules()):
        reason = "experts of which some are on the host take no adapter yet"
    else:
        reason = ""
    with torch.device("meta"):
        whole = _targets_of(model_class(config.architecture)(config), {}, reason)
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
        if isinstance(module, Experts):
            for weight in EXPERT_WEIGHTS:
                if f"{name}.{weight}" in whole.experts:
                    paths[f"{name}.{weight}"] = f"{path}.{weight}"
                    _, height, width = getattr(module, weight).shape
                    sizes[f"{path}.{weight}"] = height, width
        elif name in whole.sizes:
            assert isinstance(module, Linear)
            paths[name] = path
            height, width = module.weight.shape
            sizes[path] = height, width

    def own_target(target: Target) -> Target:
        if target.linear not in paths:
            return replace(target, here=False, linear=f"{_ELSEWHERE}{target.linear}")
        path = paths[target.linear]
        of_experts = target.linear in whole.experts
        cut = cuts.get(path if of_experts else f"{path}.weight")
        if of_experts and cut is not None:
            cut = replace(cut, dim=cut.dim - 1)  # of one expert's matrix
        return replace(_part_of(target, cut), linear=path)

    return replace(
        whole,
        targets={name: own_target(target) for name, target in whole.targets.items()},
        banks={name: own_target(target) for name, target in whole.banks.items()},
        experts={paths[n]: count for n, count in whole.experts.items() if n in paths},
        sizes=sizes,
    )


def _part_of(target: Target, cut: Cut | None) -> Target:
    """What a rank has of a target of the whole model. `cut`: of the weight [rows, columns]."""
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


def _targets_of(model: CausalLM, others: Mapping[int, str], of_experts: str = "") -> AdapterTargets:
    """
    Args:
        others: why further weights take no adapter, by identity.
        of_experts: why experts take none; empty: they do.
    """
    owners: dict[int, str] = {}
    counts: dict[str, int] = {}
    refusals: dict[int, str] = dict(others)
    heads = {id(module) for module in model.head_modules()}
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts) and of_experts:
            refusals.update({id(parameter): of_experts for parameter in module.parameters(False)})
        elif isinstance(module, Experts):
            for name in EXPERT_WEIGHTS:
                weight = getattr(module, name)
                owners[id(weight)] = f"{path}.{name}"
                counts[f"{path}.{name}"], height, width = weight.shape
                sizes[f"{path}.{name}"] = height, width
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
    banks: dict[str, Target] = {}
    refused: dict[str, str] = {}
    for name, stored in model.checkpoint_tensors().items():
        view = stored.view if isinstance(stored, RearrangedView) else stored
        if not name.endswith(_WEIGHT) or view.dim() != 2:
            continue
        module_name = name.removesuffix(_WEIGHT)
        root = view if view._base is None else view._base
        if id(root) in refusals:
            refused[module_name] = refusals[id(root)]
            if refusals[id(root)] == of_experts:  # in the other form of transformers, too
                refused[_experts_module(module_name)] = of_experts
            continue
        if id(root) not in owners:
            refused[module_name] = "no linear layer"
            continue
        owner = owners[id(root)]
        if owner in counts:
            count, sizes_of_one = counts[owner], sizes[owner]
            bank = f"{_experts_module(module_name)}.{PEFT_NAMES[owner.rpartition('.')[2]]}"
            order = None
            if isinstance(stored, BankView):
                order = _of_one_expert(stored.order, count)
            else:
                expert, first_row = divmod(view.storage_offset() // view.shape[1], sizes_of_one[0])
                size = (int(view.shape[0]), int(view.shape[1]))
                targets[module_name] = Target(owner, first_row, *size, expert=expert)
            banks[bank] = Target(owner, 0, *sizes_of_one, arrange=order, experts=count)
            continue
        transposed = view.stride() != (view.shape[1], 1)
        height, width = reversed(view.shape) if transposed else view.shape
        arrange = stored.arrange if isinstance(stored, RearrangedView) else None
        first_row = view.storage_offset() // width
        targets[module_name] = Target(owner, first_row, height, width, arrange)
    return AdapterTargets(targets, refused, model.checkpoint_name, sizes, banks, counts)


def of_gates(bank: Target) -> bool:
    """Whether the rows of all experts' parameter are those of their gates and of their ups."""
    return bank.linear.endswith(".gate_up")


def parameter_names(name: str) -> tuple[str, str]:
    """What classes of transformers call a parameter of the checkpoint, before version 5 and now."""
    return name, name.replace(_OLD_MIXTURE, ".mlp.")


def _experts_module(name: str) -> str:
    """The module of all experts, of the name of one expert's module or of a parameter of all."""
    parent, _, last = name.rpartition(".")
    number = parent.rpartition(".")[2]
    return parent.rpartition(".")[0] if number.isdecimal() else parent


def _of_one_expert(
    order: Callable[[Tensor], Tensor] | None, experts: int
) -> Callable[[Tensor], Tensor] | None:
    """Of the order of all experts' rows, [experts * rows, anything], that of one's."""
    if order is None:
        return None

    def of_one(stored: Tensor) -> Tensor:
        numbers = torch.arange(experts * len(stored), device=stored.device).unsqueeze(1)
        return stored[order(numbers)[: len(stored), 0]]

    return of_one
