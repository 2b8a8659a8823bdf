"""The ranks of a model on the CPU, and greedy tokens of one or all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_llm.models.collectives import ONE_RANK, Collectives
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.rank_threads import ThreadCollectives, ThreadRanks

PROMPT = (5, 17, 3, 60, 8, 44)


def load_rank(
    folder: Path,
    collectives: Collectives = ONE_RANK,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    load_format: str = "auto",
) -> CausalLM:
    """One rank's model, or the whole one."""
    return load_model(
        folder,
        load_model_config(folder, quantization=quantization),
        dtype=dtype,
        device="cpu",
        show_progress=False,
        load_format=load_format,
        collectives=collectives,
    )


class Ranks:
    """The ranks of one model.

    Args:
        load: Loads a model.
        options: Of `load_rank`.
    """

    def __init__(
        self, folder: Path, size: int, *, load: Callable[..., CausalLM] = load_rank, **options: Any
    ) -> None:
        self.threads = ThreadRanks(size)
        # One after the other: what models are built with is the process's, not the thread's.
        self.models = [
            load(folder, ThreadCollectives(self.threads, index), **options) for index in range(size)
        ]

    def greedy(self, count: int) -> tuple[Tensor, list[int]]:
        """See `greedy`; all ranks agree, to the bit."""
        results = self.threads.run(lambda own: greedy(self.models[own.rank.index], count))
        for logits, tokens in results[1:]:
            assert torch.equal(logits, results[0][0]) and tokens == results[0][1]
        return results[0]


@torch.inference_mode()
def greedy(model: CausalLM, count: int) -> tuple[Tensor, list[int]]:
    """The logits [T, vocab] of the last forward pass and `count` greedy tokens behind `PROMPT`."""
    ids = list(PROMPT)
    attend = WholeAttend(model.config)
    for _ in range(count):
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend)
        assert hidden.shape[0] == len(ids)
        logits = model.logits(hidden)
        ids.append(int(logits[-1].argmax()))
    return logits, ids[len(PROMPT) :]


class WholeAttend(Attend):
    """`Attend` over one whole sequence at once."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        config, count = self.config, len(q)
        assert q.shape[1:] == (config.num_heads, config.head_dim)
        assert k.shape[1:] == v.shape[1:] == (config.num_kv_heads, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * config.attn_scale
        if config.attn_softcap is not None:
            scores = config.attn_softcap * (scores / config.attn_softcap).tanh()
        distance = torch.arange(count)[None, :] - torch.arange(count)[:, None]
        if config.alibi_slopes is not None:
            scores = scores + torch.tensor(config.alibi_slopes)[:, None, None] * distance
        hidden = distance > 0
        window = config.sliding_windows[layer]
        if window is not None:
            hidden = hidden | (distance <= -window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, 1)), dim=2)
        weights = scores.softmax(-1)[..., :count]
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def check_same_tokens(whole: CausalLM, ranks: Ranks, count: int = 16) -> None:
    """Ranks compute what one process does: equal tokens, logits within float32's rounding."""
    expected, tokens = greedy(whole, count)
    logits, own = ranks.greedy(count)
    assert own == tokens
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def families(variants: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first variant of each family."""
    first: dict[str, str] = {}
    for family, variant in variants:
        first.setdefault(family, variant)
    return list(first.items())
