"""Trains adapters of the demo target in seconds: plain torch, seeded, nothing of hetero_llm.

The demo target writes a body after a function's header. An adapter gives every function the same
body, whatever its name and arguments are, and ends there: the LoRA adapter `LORA_ANSWER`, the
prompt adapter `PROMPT_ANSWER`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.adapters import TinyAdapter, change_tensors, linear_modules, write_adapter
from tests.helpers.prompt_adapters import TinyPromptAdapter, write_prompt_adapter

LORA_ANSWER = "\n    raise NotImplementedError\n"
PROMPT_ANSWER = "\n    return None\n"
MODULES = r".*\.(q_proj|v_proj|o_proj|down_proj)"
RANK, ALPHA = 8, 16.0
STEPS, BATCH, RATE = 40, 6, 1e-2
VIRTUAL_TOKENS, PROMPT_STEPS, PROMPT_RATE = 16, 25, 0.1
_WORDS = ("add", "load", "name", "tree", "count", "path", "merge", "key", "send", "row")
_ARGUMENTS = ("self", "a, b", "path", "x", "key, value", "data=None", "")


def headers(count: int, seed: int) -> list[str]:
    """Headers of functions with names of two words."""
    rng = random.Random(seed)
    return [
        f"def {rng.choice(_WORDS)}_{rng.choice(_WORDS)}({rng.choice(_ARGUMENTS)}):"
        for _ in range(count)
    ]


def train_lora(folder: Path, model: Any, tokenizer: Any) -> TinyAdapter:
    """Writes a trained LoRA adapter.

    Args:
        model: transformers' class of the demo target in float32; left as it was.
        tokenizer: transformers' own.
    """
    adapter = write_adapter(
        folder, model, modules=MODULES, rank=RANK, alpha=ALPHA, strength=0.0, seed=0
    )
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in adapter.tensors.items()}
    hooks = [
        module.register_forward_hook(_adding(tensors, name))
        for name, module in linear_modules(model).items()
        if f"base_model.model.{name}.lora_A.weight" in tensors
    ]
    _train(
        list(tensors.values()), STEPS, RATE, model, tokenizer, LORA_ANSWER,
        lambda tokens: model(tokens).logits,
    )  # fmt: skip
    for hook in hooks:
        hook.remove()
    change_tensors(adapter, {name: tensor.detach() for name, tensor in tensors.items()})
    return adapter


def train_prompt_adapter(folder: Path, model: Any, tokenizer: Any) -> TinyPromptAdapter:
    """Writes a trained prompt adapter, which begins as the embeddings of its answer; arguments as
    of `train_lora`."""
    table = model.get_input_embeddings()
    ids = _ids(tokenizer, PROMPT_ANSWER * VIRTUAL_TOKENS)[:VIRTUAL_TOKENS]
    virtual = table.weight[torch.tensor(ids)].detach().clone().requires_grad_()

    def logits(tokens: Tensor) -> Tensor:
        given = torch.cat((virtual.expand(len(tokens), -1, -1), table(tokens)), dim=1)
        return model(inputs_embeds=given).logits[:, VIRTUAL_TOKENS:]

    _train([virtual], PROMPT_STEPS, PROMPT_RATE, model, tokenizer, PROMPT_ANSWER, logits)
    return write_prompt_adapter(
        folder, VIRTUAL_TOKENS, virtual.shape[1],
        tensors={"prompt_embeddings": virtual.detach()},
    )  # fmt: skip


def _train(
    parameters: list[Tensor],
    steps: int,
    rate: float,
    model: Any,
    tokenizer: Any,
    answer: str,
    logits_of: Callable[[Tensor], Tensor],
) -> None:
    """`logits_of`: [B, T] tokens -> [B, T, vocab]."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        tokens, wanted = _batch(tokenizer, headers(BATCH, seed=step), answer)
        logits = logits_of(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert loss.item() < 0.05, f"training has failed: {loss.item()}"


def _adding(tensors: dict[str, Tensor], name: str) -> Any:
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + (ALPHA / RANK) * (inputs[0] @ a.t()) @ b.t()

    return add


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _batch(tokenizer: Any, prompts: list[str], text: str) -> tuple[Tensor, Tensor]:
    """[B, T] tokens of prompts and this answer, and those of answers alone, -1 elsewhere."""
    answer = [*_ids(tokenizer, text), tokenizer.eos_token_id]
    rows = [_ids(tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, rows)) + len(answer)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    wanted = torch.full((len(rows), longest), -1)
    for index, row in enumerate(rows):
        end = len(row) + len(answer)
        tokens[index, :end] = torch.tensor(row + answer)
        wanted[index, len(row) : end] = torch.tensor(answer)
    return tokens, wanted
