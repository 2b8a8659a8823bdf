"""Writes a GGUF file of a Qwen3-MoE shape with random weights, as fast as memory is copied.

    python -m bench.made_gguf SHAPE FILE [--layers N] [--popularity zipf]

Matrices are Q4_0, the head is Q6_K, norms and routers are F32, as in llama.cpp's files of type
Q4_0; there is no tokenizer ("no_vocab"). A matrix is a window of a pool of random blocks.

Entries of the embedding have a mean above 0 and layers add little to it, so a hidden state is a
part that all tokens share and a part of the token's own. A router's row reads the first for an
expert's popularity and the second for noise, whose spread is that of a Gumbel variable: the best k
logits are then about k draws without replacement. "uniform": all experts are equally popular;
"zipf": by 1 / rank, each layer in an order of its own, which is the trace "zipf" of
`bench.engine.expert_placement`.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.shapes import MOE_SHAPES, Config

POPULARITIES = ("uniform", "zipf")
_ALIGNMENT = 32
_F32, _Q4_0, _Q6_K = 0, 2, 14
_FILE_TYPE = 2  # "mostly Q4_0"
# type -> elements of a block, its bytes
_BLOCKS = {_F32: (1, 4), _Q4_0: (32, 18), _Q6_K: (256, 210)}
_POOL_BLOCKS = 1 << 20
_STD = 0.02
_QUIET = 4
"""What layers add is made smaller by it, so that the token's own part of the state stays."""
_GUMBEL_STD = math.pi / math.sqrt(6)
_EMBEDDED = np.arange(8)
"""Numbers of the embedding's codes, less 8: mean 3.5."""
_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Tensor:
    """`shape`: rows first. `pool`: of the random blocks; "" for norms and routers."""

    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    pool: str

    @property
    def nbytes(self) -> int:
        elements, size = _BLOCKS[self.type]
        return math.prod(self.shape) // elements * size


def expert_bytes(config: Config) -> int:
    """Of the three matrices of one expert."""
    elements, size = _BLOCKS[_Q4_0]
    return 3 * config["moe_intermediate_size"] * config["hidden_size"] // elements * size


def write_gguf(path: Path, config: Config, *, seed: int = 0) -> None:
    """Writes the file; experts are equally popular.

    Args:
        config: the shape's config.json.
    """
    header, tensors = _layout(config)
    pools = _pools(config, np.random.default_rng(seed))
    with path.open("wb") as file:
        file.write(header)
        file.truncate(tensors[-1].start + tensors[-1].nbytes)
        descriptor = file.fileno()
        with ThreadPoolExecutor(_THREADS) as threads:
            seeds = np.random.SeedSequence(seed).spawn(len(tensors))
            list(threads.map(partial(_fill, descriptor, pools), tensors, seeds))
    write_routers(path, config, "uniform", seed=seed)


def write_routers(path: Path, config: Config, popularity: str, *, seed: int = 0) -> None:
    """Writes the routers of a file of `write_gguf` anew.

    Args:
        popularity: of `POPULARITIES`.
    """
    rng = np.random.default_rng([seed, POPULARITIES.index(popularity)])
    hidden, experts = config["hidden_size"], config["num_experts"]
    # Of a normalized state: the shared part, which is in every entry, and the rest's spread.
    size = math.sqrt(np.square(_EMBEDDED).mean())
    shared, own = _EMBEDDED.mean() / size, _EMBEDDED.std() / size
    with path.open("r+b") as file:
        for tensor in _layout(config)[1]:
            if not tensor.name.endswith("ffn_gate_inp.weight"):
                continue
            rows = rng.standard_normal((experts, hidden), np.float32)
            rows -= rows.mean(1, keepdims=True)
            rows *= _GUMBEL_STD / (own * math.sqrt(hidden))
            if popularity == "zipf":
                rank = rng.permutation(experts) + 1
                rows -= (np.log(rank) / (shared * hidden))[:, None].astype(np.float32)
            file.seek(tensor.start)
            file.write(rows.tobytes())


def _layout(config: Config) -> tuple[bytes, list[_Tensor]]:
    """The file's header, and its tensors in their order."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts, head = config["num_experts"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: list[tuple[str, int, tuple[int, ...], str]] = [
        ("token_embd.weight", _Q4_0, (config["vocab_size"], hidden), "embedding"),
        ("output_norm.weight", _F32, (hidden,), ""),
        ("output.weight", _Q6_K, (config["vocab_size"], hidden), "head"),
    ]
    for layer in range(config["num_hidden_layers"]):
        shapes += (
            (f"blk.{layer}.{name}.weight", *rest)
            for name, *rest in (
                ("attn_norm", _F32, (hidden,), ""),
                ("attn_q", _Q4_0, (heads * head, hidden), "in"),
                ("attn_k", _Q4_0, (kv_heads * head, hidden), "in"),
                ("attn_v", _Q4_0, (kv_heads * head, hidden), "in"),
                ("attn_q_norm", _F32, (head,), ""),
                ("attn_k_norm", _F32, (head,), ""),
                ("attn_output", _Q4_0, (hidden, heads * head), "out"),
                ("ffn_norm", _F32, (hidden,), ""),
                ("ffn_gate_inp", _F32, (experts, hidden), ""),
                ("ffn_gate_exps", _Q4_0, (experts, inner, hidden), "in"),
                ("ffn_up_exps", _Q4_0, (experts, inner, hidden), "in"),
                ("ffn_down_exps", _Q4_0, (experts, hidden, inner), "out"),
            )
        )
    entries, offset, found = b"", 0, []
    for name, kind, shape, pool in shapes:
        tensor = _Tensor(name, kind, shape, offset, pool)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries += _text(name) + sizes + struct.pack("<IQ", kind, offset)
        found.append(tensor)
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    pairs = list(_metadata(config))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(found), len(pairs)) + b"".join(pairs) + entries
    header += bytes(-len(header) % _ALIGNMENT)
    begin = len(header)
    return header, [
        _Tensor(one.name, one.type, one.shape, begin + one.start, one.pool) for one in found
    ]


def _metadata(config: Config) -> Iterator[bytes]:
    values: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }
    general = {"general.architecture": "qwen3moe", "general.file_type": _FILE_TYPE}
    own = {f"qwen3moe.{key}": value for key, value in values.items()}
    for key, value in {**general, **own, "tokenizer.ggml.model": "no_vocab"}.items():
        if isinstance(value, str):
            yield _text(key) + struct.pack("<I", 8) + _text(value)
        elif isinstance(value, float):
            yield _text(key) + struct.pack("<If", 6, value)
        else:
            yield _text(key) + struct.pack("<II", 4, value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pools(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """[blocks, bytes of one] uint8 by the name of a pool."""
    even = np.arange(-7, 8)
    scale = _STD / even.std()
    quiet = scale / (_QUIET * math.sqrt(2 * config["num_hidden_layers"]))
    embedding = 1 / math.sqrt(np.square(_EMBEDDED).mean())
    return {
        "in": _q4_0(rng, even, scale),
        "out": _q4_0(rng, even, quiet),
        "embedding": _q4_0(rng, _EMBEDDED, embedding),
        "head": _q6_k(rng),
    }


def _q4_0(rng: np.random.Generator, numbers: np.ndarray, scale: float) -> np.ndarray:
    """Blocks of these numbers times a scale."""
    blocks = np.empty((_POOL_BLOCKS, 18), np.uint8)
    blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    codes = rng.integers(numbers[0] + 8, numbers[-1] + 9, (2, _POOL_BLOCKS, 16), np.uint8)
    blocks[:, 2:] = codes[0] | codes[1] << 4
    return blocks


def _q6_k(rng: np.random.Generator) -> np.ndarray:
    """Blocks of numbers from -32 to 31 times `_STD`'s scale."""
    blocks = rng.integers(0, 256, (_POOL_BLOCKS // 8, 210), np.uint8)
    blocks[:, 192:208] = 1  # scales of 16 numbers each
    blocks[:, 208:] = np.array([_STD / np.arange(-32, 32).std()], np.float16).view(np.uint8)
    return blocks


def _fill(
    descriptor: int,
    pools: dict[str, np.ndarray],
    tensor: _Tensor,
    seed: np.random.SeedSequence,
) -> None:
    """Writes a tensor: ones, or matrices that begin anywhere in a pool."""
    if not tensor.pool:
        os.pwrite(descriptor, np.ones(tensor.shape, np.float32).tobytes(), tensor.start)
        return
    pool = pools[tensor.pool]
    data, size = memoryview(pool.reshape(-1)), pool.shape[1]
    count = math.prod(tensor.shape[:-2])
    each = tensor.nbytes // count
    starts = np.random.default_rng(seed).integers(0, len(pool), count) * size
    for index, start in enumerate(starts.tolist()):
        at, left = tensor.start + index * each, each
        while left:
            part = data[start : start + left]
            written = os.pwrite(descriptor, part, at)
            at, left = at + written, left - written
            start = (start + written) % len(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = [name for name, one in MOE_SHAPES.items() if one["model_type"] == "qwen3_moe"]
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--popularity", choices=POPULARITIES, default="uniform")
    args = parser.parse_args()
    config = MOE_SHAPES[args.shape]
    if args.layers:
        config = {**config, "num_hidden_layers": args.layers}
    write_gguf(args.file, config)
    write_routers(args.file, config, args.popularity)
    print(f"{args.file}: {args.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
