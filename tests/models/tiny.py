"""Tiny random checkpoints of every family, written by transformers, and a reference attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend
from tests.models import tiny_basic, tiny_gated, tiny_layer_norm, tiny_moe

VOCAB_SIZE = 96

_FAMILIES = {
    **tiny_basic.FAMILIES,
    **tiny_layer_norm.FAMILIES,
    **tiny_gated.FAMILIES,
    **tiny_moe.FAMILIES,
}

VARIANTS: list[tuple[str, str]] = [
    (family, variant) for family, (_, _, variants) in _FAMILIES.items() for variant in variants
]


def make_tiny_checkpoint(
    folder: Path,
    family: str,
    variant: str = "",
    *,
    with_tokenizer: bool = False,
    vocab_size: int = VOCAB_SIZE,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Saves a random model of `family` with transformers and returns its folder.

    Args:
        folder: Created; the checkpoint goes right into it.
        family: A key of one of the `tiny_*` files.
        variant: Of `VARIANTS`; empty for the family's first.
        with_tokenizer: Adds a byte-level tokenizer (256 bytes and 3 specials), which raises
            `vocab_size` to 259 at least.
        vocab_size: Rows of the embedding.
        max_shard_size: "20KB", for example, gives several shards and an index.
        dtype: Stored type.
        seed: Of the weights; all of them, biases and norms included, are random.
        layers: If not as many as the variant has.
        changes: Of the variant's configuration.
    """
    prefix, suffix, variants = _FAMILIES[family]
    settings = variants[variant] if variant else next(iter(variants.values()))
    if layers is not None:
        settings = {**settings, "num_hidden_layers": layers}
    settings = {**settings, **(changes or {})}
    if with_tokenizer:
        vocab_size = max(vocab_size, 259)
    config = getattr(transformers, prefix + "Config")(vocab_size=vocab_size, **settings)
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, prefix + suffix)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of a router; large enough to matter
                buffer.copy_(0.25 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if with_tokenizer:
        _save_byte_tokenizer(Path(folder))
    return Path(folder)


def reference_attention(folder: Path) -> str:
    """The name of transformers' attention to compare with. Its eager Falcon adds ALiBi twice, once
    in the mask."""
    model_type = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    return "sdpa" if model_type == "falcon" else "eager"


def rewrite_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Edits config.json of a checkpoint in place."""
    path = Path(folder) / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    for key in remove:
        raw.pop(key, None)
    path.write_text(json.dumps(raw))
    return Path(folder)


def _save_byte_tokenizer(folder: Path) -> None:
    """Ids 0, 1, 2 are <pad>, <s>, </s>; id 3 + b is byte b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


class DenseAttend(Attend):
    """Reference `Attend`: whole sequences in one forward, one row's scores at a time.

    Rows are independent: each is a chain of calls whose shapes depend on its position alone.

    Args:
        config: Of the model.
        lengths: Tokens of each sequence, in row order; their sum is T.
    """

    def __init__(self, config: ModelConfig, lengths: list[int]) -> None:
        self.config = config
        self.lengths = lengths
        self.layers_seen: list[int] = []

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        self.layers_seen.append(layer)
        config = self.config
        assert q.shape == (sum(self.lengths), config.num_heads, config.head_dim)
        assert k.shape == v.shape == (sum(self.lengths), config.num_kv_heads, config.head_dim)
        window = config.sliding_windows[layer]
        group = config.num_heads // config.num_kv_heads
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        start = 0
        for length in self.lengths:
            for i in range(length):
                first = 0 if window is None else max(0, i + 1 - window)
                keys = k[start + first : start + i + 1].float().repeat_interleave(group, dim=1)
                values = v[start + first : start + i + 1].float().repeat_interleave(group, dim=1)
                scores = (keys * q[start + i].float()).sum(-1) * config.attn_scale
                if config.attn_softcap is not None:
                    scores = config.attn_softcap * (scores / config.attn_softcap).tanh()
                if config.alibi_slopes is not None:
                    distance = torch.arange(first, i + 1).unsqueeze(1) - i
                    scores = scores + distance * torch.tensor(config.alibi_slopes)
                if sinks is not None:
                    scores = torch.cat((scores, sinks.float()[None]))
                weights = scores.softmax(0)[: len(values)]
                out[start + i] = (weights.unsqueeze(-1) * values).sum(0).to(q.dtype)
            start += length
        return out
