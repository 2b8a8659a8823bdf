"""Tiny LoRA adapters in PEFT's form, and models of transformers that have them merged.

The merged weights are computed from the written numbers by the definition of LoRA, in float32,
with the modules of transformers: nothing of hetero_llm takes part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."


@dataclass(frozen=True)
class TinyAdapter:
    """An adapter that was written.

    Attributes:
        folder: with adapter_config.json and adapter_model.safetensors.
        tensors: by the name in the file.
        deltas: what it adds to the weight [out, in] of each module of transformers, by its name.
    """

    folder: Path
    tensors: dict[str, Tensor]
    deltas: dict[str, Tensor] = field(default_factory=dict)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers below the head, as PEFT's "all-linear" has them."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    height, width = module.weight.shape
    return (height, width) if isinstance(module, Conv1D) else (width, height)


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    modules: str = ".*",
    target_modules: str | Sequence[str] | None = None,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.3,
    options: Mapping[str, Any] | None = None,
) -> TinyAdapter:
    """Writes a random adapter of a model of transformers.

    Args:
        modules: regular expression for the whole names of the adapted modules.
        target_modules: what the configuration says; None: the same expression.
        strength: size of the numbers in B.
        options: further ones of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for name, module in linear_modules(model).items():
        if not re.fullmatch(modules, name):
            continue
        inputs, outputs = sizes_of(module)
        own = _by_pattern(rank_pattern, name, rank)
        scale = _by_pattern(alpha_pattern, name, alpha) / (math.sqrt(own) if rslora else own)
        a = (torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
        b = (strength * torch.randn(outputs, own, generator=generator)).to(dtype)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b
        deltas[name] = scale * (b.float() @ a.float())
    assert tensors, "no module has such a name"
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "use_rslora": rslora,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        "target_modules": modules if target_modules is None else target_modules,
        "modules_to_save": None,
        "inference_mode": True,
        **(options or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return TinyAdapter(folder, tensors, deltas)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of transformers that hold the matrices of all experts of a layer."""
    ends = (".experts.gate_up_proj", ".experts.down_proj")
    return {name: p for name, p in model.named_parameters() if name.endswith(ends)}


def write_expert_adapter(
    folder: Path,
    model: nn.Module,
    *,
    modules: tuple[str, str, str, str] | None,
    layers: str = ".*",
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    strength: float = 0.3,
) -> TinyAdapter:
    """Writes a random adapter of all experts of a model of transformers.

    Args:
        modules: what files call the mixture and an expert's gate, up and down: each expert has an
            adapter for each of the three, as PEFT wrote them while experts were linear layers.
            None: the two parameters of all experts have one each, as `target_parameters` of PEFT.
        layers: regular expression for the parameters' names.
        strength: size of the numbers in B.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}

    def matrices(inputs: int, outputs: int, experts: int) -> tuple[Tensor, Tensor]:
        """[experts, rank, inputs] and [experts, outputs, rank]."""
        a = torch.randn(experts, rank, inputs, generator=generator) / math.sqrt(inputs)
        return a, strength * torch.randn(experts, outputs, rank, generator=generator)

    owners = {
        name: model.get_submodule(name.rpartition(".")[0]) for name in expert_parameters(model)
    }
    for name, weight in expert_parameters(model).items():
        if not re.fullmatch(layers, name):
            continue
        transposed = getattr(owners[name], "is_transposed", False)
        experts, outputs, inputs = weight.mT.shape if transposed else weight.shape
        parent, _, which = name.rpartition(".")
        if modules is None:
            a, b = matrices(inputs, outputs, experts)
            nested = f"{parent}.base_layer" if which == "gate_up_proj" else parent
            tensors[f"{PREFIX}{nested}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{PREFIX}{nested}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
            delta = b @ a
        else:
            mixture, gate, up, down = modules
            parent = parent.replace(".mlp.", f".{mixture}.")
            deltas_of_parts = []
            for part in (gate, up) if which == "gate_up_proj" else (down,):
                rows = outputs // 2 if which == "gate_up_proj" else outputs
                a, b = matrices(inputs, rows, experts)
                for expert in range(experts):
                    key = f"{PREFIX}{parent}.{expert}.{part}"
                    tensors[f"{key}.lora_A.weight"] = a[expert]
                    tensors[f"{key}.lora_B.weight"] = b[expert]
                deltas_of_parts.append(b @ a)
            delta = torch.cat(deltas_of_parts, 1)
        delta *= alpha / rank
        deltas[name] = delta.mT if transposed else delta
    save_file({name: value.contiguous() for name, value in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": []
        if modules is None
        else rf".*\.experts\.\d+\.({'|'.join(modules[1:])})",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]
        if modules is None
        else None,
        "layers_to_transform": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return TinyAdapter(folder, tensors, deltas)


def _by_pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    for key, value in (pattern or {}).items():
        if name == key or name.endswith(f".{key}"):
            return value
    return default


@torch.no_grad()
def merge(model: nn.Module, adapter: TinyAdapter) -> None:
    """Adds an adapter to the weights of a model of transformers, in place."""
    modules, parameters = linear_modules(model), dict(model.named_parameters())
    for name, delta in adapter.deltas.items():
        if name in parameters:
            parameters[name] += delta
            continue
        weight = modules[name].weight
        weight += delta.t() if isinstance(modules[name], Conv1D) else delta


def change_config(adapter: TinyAdapter, **options: Any) -> None:
    """Sets options of adapter_config.json."""
    path = adapter.folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def change_tensors(adapter: TinyAdapter, changes: Mapping[str, Tensor | None]) -> None:
    """Replaces tensors of the file, by the end of their names; None removes one, and a new name
    adds one."""
    tensors = dict(adapter.tensors)
    for name, value in changes.items():
        full = next((key for key in tensors if key.endswith(name)), name)
        tensors.pop(full, None)
        if value is not None:
            tensors[full] = value
    save_file(tensors, adapter.folder / "adapter_model.safetensors")
