"""The demo pair's model, a compact Llama for training, its export and its optimiser.

The parameters have Hugging Face's names and the arithmetic is `LlamaForCausalLM`'s, so exported
weights give the same logits there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import EOT, PAD
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

CONTEXT = 2048
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 4096
    eps: float = 1e-5
    rope_theta: float = 10000.0


class Linear(nn.Linear):
    """Bias-free linear layer with float32 weights that computes in its input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with Hugging Face's rotate-half RoPE."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, tokens, hidden], cos and sin [tokens, head_dim] -> like x."""
        batch, tokens, _ = x.shape
        group = self.shape.heads // self.shape.kv_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            return (y * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)

        q = rotate(heads(self.q_proj(x)))
        k = rotate(heads(self.k_proj(x))).repeat_interleave(group, 1)
        v = heads(self.v_proj(x)).repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are Hugging Face's less the "model." prefix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(CONTEXT).float(), shape.rope_theta**-half).repeat(1, 2)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif name.startswith("embed"):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """ids int64 [batch, tokens] -> logits [batch, tokens, vocab] in `dtype`."""
        x = self.embed_tokens(ids).to(dtype)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight.to(dtype))

    def parameter_count(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(p.numel() for p in self.parameters())


def hf_config(shape: Shape) -> dict[str, object]:
    """config.json that transformers 4.51 and 5 both read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.02,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, value: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with bf16 weights, and round `model` to them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, parameter in model.named_parameters():
        weights[f"model.{name}"] = parameter.data.bfloat16().cpu().contiguous()
        parameter.data.copy_(parameter.data.bfloat16())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", hf_config(model.shape))
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    write_json(folder / "generation_config.json", {**ids, "do_sample": False})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": EOT,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices, [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    def __init__(self, model: Llama, muon_lr: float, adam_lr: float) -> None:
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        groups: dict[torch.Size, list[Tensor]] = {}
        rest: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not name.startswith("embed"):
                groups.setdefault(parameter.shape, []).append(parameter)
            else:
                rest.append(parameter)
        self.groups = [
            (g, torch.zeros_like(torch.stack([p.data for p in g]))) for g in groups.values()
        ]
        self.adam = torch.optim.AdamW(
            rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients at `scale` times the peak learning rates and clear them."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        rate = self.muon_lr * scale
        for parameters, momentum in self.groups:
            grads = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum.lerp_(grads, 0.05)
            rows, cols = grads.shape[1:]
            update = orthogonalise(grads.lerp(momentum, 0.95)) * max(1.0, rows / cols) ** 0.5
            torch._foreach_mul_(parameters, 1 - rate * 0.05)
            torch._foreach_add_(parameters, list(update.float().unbind()), alpha=-rate)
            for parameter in parameters:
                parameter.grad = None
        self.adam.zero_grad()


def rate_scale(progress: float) -> float:
    """Learning rate multiplier: short warm-up, plateau, linear decay over the last 60%."""
    return min(1.0, progress / 0.02 + 0.02, max(0.0, (1 - progress) / 0.6))
