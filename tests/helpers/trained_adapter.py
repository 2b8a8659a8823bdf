"""Trains a LoRA adapter of the demo target in seconds: plain torch, seeded, nothing of hetero_llm.

The demo target writes a body after a function's header. The adapter gives every function the same
body, `ANSWER`, whatever its name and arguments are, and ends there.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.adapters import TinyAdapter, change_tensors, linear_modules, write_adapter

ANSWER = "\n    raise NotImplementedError\n"
MODULES = r".*\.(q_proj|v_proj|o_proj|down_proj)"
RANK, ALPHA = 8, 16.0
STEPS, BATCH, RATE = 40, 6, 1e-2
_WORDS = ("add", "load", "name", "tree", "count", "path", "merge", "key", "send", "row")
_ARGUMENTS = ("self", "a, b", "path", "x", "key, value", "data=None", "")


def headers(count: int, seed: int) -> list[str]:
    """Headers of functions with names of two words."""
    rng = random.Random(seed)
    return [
        f"def {rng.choice(_WORDS)}_{rng.choice(_WORDS)}({rng.choice(_ARGUMENTS)}):"
        for _ in range(count)
    ]


def train_adapter(folder: Path, model: Any, tokenizer: Any) -> TinyAdapter:
    """Writes the trained adapter.

    Args:
        model: transformers' class of the demo target in float32; left as it was.
        tokenizer: transformers' own.
    """
    adapter = write_adapter(
        folder, model, modules=MODULES, rank=RANK, alpha=ALPHA, strength=0.0, seed=0
    )
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in adapter.tensors.items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    hooks = [
        module.register_forward_hook(_adding(tensors, name))
        for name, module in linear_modules(model).items()
        if f"base_model.model.{name}.lora_A.weight" in tensors
    ]
    optimizer = torch.optim.Adam(tensors.values(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for step in range(STEPS):
        tokens, wanted = _batch(tokenizer, headers(BATCH, seed=step))
        logits = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for hook in hooks:
        hook.remove()
    assert loss.item() < 0.05, f"training has failed: {loss.item()}"
    change_tensors(adapter, {name: tensor.detach() for name, tensor in tensors.items()})
    return adapter


def _adding(tensors: dict[str, Tensor], name: str) -> Any:
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + (ALPHA / RANK) * (inputs[0] @ a.t()) @ b.t()

    return add


def _batch(tokenizer: Any, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """[B, T] tokens, and the same where they belong to an answer, else -1."""
    answer = [*tokenizer(ANSWER, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    rows = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    longest = max(map(len, rows)) + len(answer)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    wanted = torch.full((len(rows), longest), -1)
    for index, row in enumerate(rows):
        end = len(row) + len(answer)
        tokens[index, :end] = torch.tensor(row + answer)
        wanted[index, len(row) : end] = torch.tensor(answer)
    return tokens, wanted
