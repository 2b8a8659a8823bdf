"""Widen a small Llama into a larger Llama shape without changing its function.

The result has the cost of the large shape and the behaviour of the small model, so a figure taken
with it must say so. With small hidden size h and large H, the first h channels of the residual
stream carry the small model's, the others zero, except for one constant channel when the
vocabulary grows:

- Norms: over H channels the mean square is h/H of the small model's, so weights are scaled by
  sqrt(h/H) and eps by h/H.
- Vocabulary: every embedding row holds a power of two c in channel h. c^2 <= eps h / 2 is taken
  out of eps, eps' = (eps h - c^2) / H, so the norms' denominators stay right. Block norms have
  weight 0 there; the final norm passes it, and the rows of padded ids in `lm_head` have a large
  negative weight on it. The final norm divides by the hidden state's rms r, which is bounded for
  any input by the weights' spectral norms; the negative weight is sized for that bound and for
  the smallest possible real logit, so that the padded ids together get less than 1e-7 of the
  probability at temperature 1, always.
- Heads: a small KV head and its query heads fill the first places of a large KV group; where the
  large groups are smaller, the KV head is repeated in as many groups as its query heads need.

What is random (normal, std 0.02): query, key, value, gate and up rows of extra heads, units and
layers; all of those matrices' columns that read unused channels; the columns of `lm_head` that
read them; embeddings of padded ids in the first h channels. What is zero: `o_proj` and
`down_proj` outside the small model's own entries (all of them in extra layers), and embeddings
and `lm_head` where they would touch the function. Unused channels of activations are therefore
zeros: matrix products bound by arithmetic can run faster than on dense data.

In float32 the logits agree up to the order of sums. In bfloat16 the constant channel is exact
(c is a power of two and nothing is ever added to it), so padded ids stay out; the norm weights
are rounded once more unless H/h is a power of four, so logits agree as two bfloat16 evaluations
do, not bit for bit.

    python tools/scale_up.py SMALL_DIR llama-3.1-8b OUT_DIR --dtype bf16 --device cuda
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOG_MARGIN = math.log(1e7)
MAX_CHANNEL_VALUE = 2.0**14
NOISE_STD = 0.02
SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Shape:
    """Sizes of the large Llama."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int


SHAPES = {
    "llama-3.1-8b": Shape(4096, 32, 14336, 32, 8, 128, 128256, 131072),
    "mistral-7b": Shape(4096, 32, 14336, 32, 8, 128, 32000, 32768),
    "llama-2-13b": Shape(5120, 40, 13824, 40, 40, 128, 32000, 4096),
    "draft-68m": Shape(768, 2, 3072, 6, 6, 128, 32000, 2048),
}


@dataclass(frozen=True)
class Small:
    """The small model.

    Attributes:
        config: its config.json.
        shape: its sizes.
        eps: its norms' epsilon.
        weights: float32 tensors by Hugging Face name, `lm_head.weight` included; on the CPU
            when loaded.
    """

    config: dict[str, object]
    shape: Shape
    eps: float
    weights: dict[str, Tensor]

    def layer(self, index: int, name: str) -> Tensor:
        """A layer's weight, such as "mlp.up_proj"."""
        return self.weights[f"model.layers.{index}.{name}.weight"]


@dataclass(frozen=True)
class Constant:
    """The constant channel.

    Attributes:
        value: c, its value in the residual stream (0: no constant channel).
        final_norm: the final norm's weight on it.
        head: the weight on it of padded rows of `lm_head`, negative.
    """

    value: float = 0.0
    final_norm: float = 0.0
    head: float = 0.0


def load_small(folder: Path) -> Small:
    """Load a Hugging Face Llama folder; raises ValueError if it is not a plain Llama."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise ValueError(f"architectures: {config.get('architectures')} is not LlamaForCausalLM")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ValueError(f"{name}: models with biases can't be scaled up")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {config['hidden_act']} is not silu")
    heads = config["num_attention_heads"]
    shape = Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
    )
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: weight.float() for name, weight in load_file(file).items()}
    if "model.embed_tokens.weight" not in weights:
        raise ValueError(f"weights: no model.embed_tokens.weight in {folder}/*.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return Small(config, shape, float(config.get("rms_norm_eps", 1e-6)), weights)


def place_heads(small: Shape, big: Shape) -> tuple[list[int], list[int]]:
    """Find places for the small model's heads.

    Returns:
        For each small query head, the large query head that plays it; for each large KV head in
        use, counted from 0, the small KV head it copies.
    """
    small_group = small.heads // small.kv_heads
    big_group = big.heads // big.kv_heads
    per_head = math.ceil(small_group / big_group)
    if small.kv_heads * per_head > big.kv_heads:
        raise ValueError(
            f"kv_heads: {small.heads} query and {small.kv_heads} KV heads need "
            f"{small.kv_heads * per_head} KV heads of {big_group} query heads each, "
            f"not {big.kv_heads}"
        )
    queries = []
    for head in range(small.heads):
        kv_head, place = divmod(head, small_group)
        copy, slot = divmod(place, big_group)
        queries.append((kv_head * per_head + copy) * big_group + slot)
    return queries, [head for head in range(small.kv_heads) for _ in range(per_head)]


def check_shapes(small: Small, big: Shape) -> None:
    """Raise ValueError, naming the field, where the small model does not fit."""
    if big.heads % big.kv_heads or small.shape.heads % small.shape.kv_heads:
        raise ValueError("heads: not a multiple of kv_heads")
    if small.shape.head_dim != big.head_dim:
        raise ValueError(f"head_dim: {small.shape.head_dim} is not {big.head_dim}")
    for name in ("hidden", "layers", "intermediate", "heads", "kv_heads", "vocab"):
        have, need = getattr(big, name), getattr(small.shape, name)
        if have < need:
            raise ValueError(f"{name}: {have} is less than the small model's {need}")
    if big.vocab > small.shape.vocab and big.hidden == small.shape.hidden:
        raise ValueError("hidden: a larger vocabulary needs at least one more channel")


def logit_bound(small: Small) -> float:
    """An upper bound of |logit| over all hidden states: a normed state is at most sqrt(h) long."""
    rows = small.weights["lm_head.weight"] * small.weights["model.norm.weight"]
    return math.sqrt(small.shape.hidden) * rows.norm(dim=1).max().item()


def rms_bound(small: Small) -> float:
    """An upper bound of the final hidden state's rms over all inputs.

    Attention averages values, so its heads' outputs are no longer than a value; |silu(g)| <= |g|.
    Both are read through a norm whose output is at most sqrt(h) long before its weights.
    """
    h, heads = small.shape.hidden, small.shape.heads
    length = small.weights["model.embed_tokens.weight"].norm(dim=1).max().item()
    for i in range(small.shape.layers):

        def gain(name: str, norm: str | None = None, i: int = i) -> float:
            weight = small.layer(i, name)
            weight = weight * small.layer(i, norm) if norm else weight
            return torch.linalg.matrix_norm(weight, ord=2).item()

        value = gain("self_attn.v_proj", "input_layernorm") * math.sqrt(h * heads)
        length += gain("self_attn.o_proj") * value
        gate = gain("mlp.gate_proj", "post_attention_layernorm")
        up = gain("mlp.up_proj", "post_attention_layernorm")
        length += gain("mlp.down_proj") * gate * up * h
    return length / math.sqrt(h)


def constant_channel(small: Small, big: Shape, dtype: torch.dtype) -> Constant:
    """Size the constant channel (see the module's docstring); raises ValueError if impossible."""
    padded = big.vocab - small.shape.vocab
    if padded == 0:
        return Constant()
    budget = small.eps * small.shape.hidden
    if budget < 1e-20:
        raise ValueError(f"rms_norm_eps: {small.eps} leaves no room for the constant channel")
    value = 2.0 ** math.floor(math.log2(budget / 2) / 2)
    widen = math.sqrt(big.hidden / small.shape.hidden)
    largest = value * widen / math.sqrt(small.eps)
    final_norm = 2.0 ** math.floor(math.log2(MAX_CHANNEL_VALUE / largest))
    smallest = final_norm * value * widen / math.hypot(rms_bound(small), math.sqrt(small.eps))
    # 1.1: bfloat16 rounds the channel's value and the weight.
    head = 1.1 * (logit_bound(small) + LOG_MARGIN + math.log(padded)) / smallest
    if head > torch.finfo(dtype).max / 2 or head * MAX_CHANNEL_VALUE > 1e30:
        raise ValueError(f"dtype: a head weight of {head:.3g} for padded ids overflows {dtype}")
    return Constant(value, final_norm, -head)


class Widener:
    """Builds the large model's tensors on one device."""

    def __init__(
        self, small: Small, big: Shape, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> None:
        self.big, self.dtype, self.device = big, dtype, device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.constant = constant_channel(small, big, dtype)
        self.small = replace(small, weights={k: w.to(device) for k, w in small.weights.items()})
        self.queries, self.kv_sources = place_heads(small.shape, big)
        self.norm_scale = math.sqrt(small.shape.hidden / big.hidden)

    def noise(self, *size: int) -> Tensor:
        """Small random values."""
        out = torch.empty(*size, dtype=self.dtype, device=self.device)
        return out.normal_(0.0, NOISE_STD, generator=self.generator)

    def zeros(self, *size: int) -> Tensor:
        """Zeros."""
        return torch.zeros(*size, dtype=self.dtype, device=self.device)

    def norm(self, weight: Tensor | None, channel: float) -> Tensor:
        """Widen a norm's weight [h] to [H] with `channel` at the constant channel."""
        out = torch.ones(self.big.hidden, dtype=self.dtype, device=self.device)
        if weight is not None:
            out[: len(weight)] = (weight * self.norm_scale).to(self.dtype)
        if self.constant.value:
            out[self.small.shape.hidden] = channel
        return out

    def head_rows(self, places: list[int]) -> Tensor:
        """Row numbers, int64 [n * head_dim], of the large heads `places`."""
        dim = self.big.head_dim
        first = torch.tensor(places, device=self.device)[:, None] * dim
        return (first + torch.arange(dim, device=self.device)).flatten()

    def embeddings(self) -> Iterator[tuple[str, Tensor]]:
        """The embedding, the final norm and the head."""
        small, h, vocab = self.small, self.small.shape.hidden, self.small.shape.vocab
        embed = self.zeros(self.big.vocab, self.big.hidden)
        embed[:vocab, :h] = small.weights["model.embed_tokens.weight"].to(self.dtype)
        embed[vocab:, :h] = self.noise(self.big.vocab - vocab, h)
        head = self.noise(self.big.vocab, self.big.hidden)
        head[:vocab, :h] = small.weights["lm_head.weight"].to(self.dtype)
        head[vocab:, :h] = 0
        if self.constant.value:
            embed[:, h] = self.constant.value
            head[:vocab, h] = 0
            head[vocab:, h] = self.constant.head
        yield "model.embed_tokens.weight", embed
        yield (
            "model.norm.weight",
            self.norm(small.weights["model.norm.weight"], self.constant.final_norm),
        )
        yield "lm_head.weight", head

    def layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """One layer's weights; names lack the "model.layers.N." prefix."""
        big, small = self.big, self.small
        real = index < small.shape.layers
        h, units = small.shape.hidden, small.shape.intermediate
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.weight", self.norm(small.layer(index, name) if real else None, 0.0)
        query_rows = self.head_rows(self.queries)
        kv_rows = self.head_rows(list(range(len(self.kv_sources))))
        kv_from = self.head_rows(self.kv_sources)
        for name in ("q_proj", "k_proj", "v_proj"):
            heads, rows = (big.heads, query_rows) if name == "q_proj" else (big.kv_heads, kv_rows)
            weight = self.noise(heads * big.head_dim, big.hidden)
            if real:
                own = small.layer(index, f"self_attn.{name}").to(self.dtype)
                weight[rows, :h] = own if name == "q_proj" else own[kv_from]
            yield f"self_attn.{name}.weight", weight
        weight = self.zeros(big.hidden, big.heads * big.head_dim)
        if real:
            own = small.layer(index, "self_attn.o_proj").to(self.dtype)
            weight[:h, query_rows] = own
        yield "self_attn.o_proj.weight", weight
        for name in ("gate_proj", "up_proj"):
            weight = self.noise(big.intermediate, big.hidden)
            if real:
                weight[:units, :h] = small.layer(index, f"mlp.{name}").to(self.dtype)
            yield f"mlp.{name}.weight", weight
        weight = self.zeros(big.hidden, big.intermediate)
        if real:
            weight[:h, :units] = small.layer(index, "mlp.down_proj").to(self.dtype)
        yield "mlp.down_proj.weight", weight

    def config(self) -> dict[str, object]:
        """The large model's config.json; RoPE and special ids are the small model's."""
        big, small = self.big, self.small
        eps = (small.eps * small.shape.hidden - self.constant.value**2) / big.hidden
        dtype = str(self.dtype).removeprefix("torch.")
        changed = {
            "hidden_size": big.hidden,
            "num_hidden_layers": big.layers,
            "intermediate_size": big.intermediate,
            "num_attention_heads": big.heads,
            "num_key_value_heads": big.kv_heads,
            "head_dim": big.head_dim,
            "vocab_size": big.vocab,
            "max_position_embeddings": big.max_positions,
            "rms_norm_eps": eps,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
        kept = {k: v for k, v in small.config.items() if k != "dtype"}
        return {**kept, **changed}


def scale_up(
    small_dir: Path | str,
    shape: Shape | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Widen a small Llama, building the tensors on `device`.

    Args:
        small_dir: Hugging Face folder of the small model.
        shape: the large shape, or a name in `SHAPES`.
        dtype: of the result.
        device: where the tensors are made.
        seed: of the random filling.

    Returns:
        The large config.json and its weights by Hugging Face name.

    Raises:
        ValueError: the small model does not fit; the message begins with the field's name.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"shape: {shape!r} is none of {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    small = load_small(Path(small_dir))
    check_shapes(small, shape)
    widener = Widener(small, shape, dtype, device, seed)
    weights = dict(widener.embeddings())
    for i in range(shape.layers):
        weights |= {f"model.layers.{i}.{name}": weight for name, weight in widener.layer(i)}
    return widener.config(), weights


def write_model(
    config: dict[str, object], weights: dict[str, Tensor], small_dir: Path, out: Path
) -> None:
    """Write a Hugging Face folder: config, sharded weights with an index, tokenizer files."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[]]
    used = 0
    for name, weight in weights.items():
        if used + weight.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += weight.nbytes
    index: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: weights[n].cpu() for n in names}, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = {"total_size": sum(w.nbytes for w in weights.values())}
    mapping = {"metadata": total, "weight_map": index}
    for name, value in (("config.json", config), ("model.safetensors.index.json", mapping)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for pattern in ("tokenizer*", "special_tokens_map.json", "generation_config.json"):
        for extra in small_dir.glob(pattern):
            shutil.copy(extra, out / extra.name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("small_dir", type=Path)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", default="cpu", help="where to build the weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config, weights = scale_up(
        args.small_dir, args.shape, dtype=DTYPES[args.dtype], device=args.device, seed=args.seed
    )
    write_model(config, weights, args.small_dir, args.out_dir)
    print(f"{args.out_dir}: {sum(w.numel() for w in weights.values()):,} parameters")


if __name__ == "__main__":
    main()
