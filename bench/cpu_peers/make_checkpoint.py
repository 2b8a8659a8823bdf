"""Writes a checkpoint folder with seeded random weights and a tokenizer.

The tokenizer is there because converters want one (the benches feed token ids): it knows bytes and
letter pairs, and filler tokens bring it to the size of the vocabulary.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.shapes import CPU_SHAPES, write_config

_STD = 0.02
_SPECIAL = ("<unk>", "<s>", "</s>")


def weight_sizes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, size) of every tensor of a Llama checkpoint, in a fixed order."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = hidden // heads
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (heads * dim, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv_heads * dim, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv_heads * dim, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, heads * dim)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 tensors of a checkpoint: norms 1, the rest normal."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in weight_sizes(config):
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            values = torch.empty(size).normal_(0.0, _STD, generator=generator)
            weights[name] = values.bfloat16()
    return weights


def plain_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs of lower-case letters; every id below `vocab_size` is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    merges = [(a, b) for a in letters for b in letters]
    tokens = [*_SPECIAL, *alphabet, *(a + b for a, b in merges)][:vocab_size]
    tokens += [f"<filler{index}>" for index in range(len(tokens), vocab_size)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(a, b) for a, b in merges if a + b in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unk, bos, eos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=list(CPU_SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = CPU_SHAPES[args.shape]
    write_config(config, args.folder)
    weights = random_weights(config, args.seed)
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    plain_tokenizer(config["vocab_size"]).save_pretrained(args.folder)
    total = sum(weight.numel() for weight in weights.values())
    print(f"{args.folder}: {total / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
