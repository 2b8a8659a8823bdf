"""Tiny checkpoints of families whose class is remote code: the weights of a class that transformers
has, under the names, in the layout and with the config.json of the family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models.tiny_basic import GATED, rope

VOCAB_SIZE = 96
LAYERS = GATED["num_hidden_layers"]
_MHA = {**GATED, "num_key_value_heads": 4}
_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_HEADS, _DIM, _HIDDEN, _INNER = 4, 8, GATED["hidden_size"], GATED["intermediate_size"]
_OWN = {
    **{key: GATED[key] for key in _KEYS},
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def random_model(name: str, *, seed: int = 0, vocab_size: int = VOCAB_SIZE, **settings: Any) -> Any:
    """A causal model of transformers with random weights, norms and biases included."""
    config = getattr(transformers, f"{name}Config")(vocab_size=vocab_size, **settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and key.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
    return model


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Writes a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def renamed(model: nn.Module, table: Mapping[str, str]) -> dict[str, Tensor]:
    """The model's tensors with parts of their names replaced, each by the first that fits."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        old = next((old for old in table if old in name), None)
        tensors[name if old is None else name.replace(old, table[old])] = tensor.detach().clone()
    return tensors


def fuse_qkv(
    tensors: dict[str, Tensor], attention: str, name: str, join: Callable[[list[Tensor]], Tensor]
) -> None:
    """Replaces the three projections of every layer by one."""
    for layer in range(LAYERS):
        prefix = attention.format(layer)
        for kind in ("weight", "bias"):
            keys = [f"{prefix}.{letter}_proj.{kind}" for letter in "qkv"]
            if keys[0] in tensors:
                tensors[f"{prefix}.{name}.{kind}"] = join([tensors.pop(key) for key in keys])


def internlm(folder: Path, *, bias: bool = True) -> tuple[Path, Any]:
    model = random_model("Llama", **_MHA, attention_bias=bias)
    config = {**_OWN, "architectures": ["InternLMForCausalLM"], "bias": bias}
    config.update(max_position_embeddings=64, rotary={"type": "origin", "base": 10000})
    return save(folder, config, renamed(model, {})), model


def internlm2(folder: Path, *, bias: bool = True) -> tuple[Path, Any]:
    model = random_model("Llama", **GATED, attention_bias=bias)
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "self_attn": "attention",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = renamed(model, names)

    def by_group(parts: list[Tensor]) -> Tensor:
        q, k, v = (part.unflatten(0, (-1, _DIM)) for part in parts)
        heads = [x for i in range(2) for x in (q[2 * i], q[2 * i + 1], k[i], v[i])]
        return torch.cat(heads)

    fuse_qkv(tensors, "model.layers.{}.attention", "wqkv", by_group)
    config = {**_OWN, "architectures": ["InternLM2ForCausalLM"], "bias": bias}
    config.update(max_position_embeddings=64, num_key_value_heads=2)
    return save(folder, config, tensors), model


def xverse(folder: Path) -> tuple[Path, Any]:
    model = random_model("Llama", **_MHA, **rope("default"))
    config = {**_OWN, "architectures": ["XverseForCausalLM"], "rope_theta": 500.0}
    config.update(max_position_embeddings=64, max_tokenizer_truncation=64, pad_token_id=1)
    return save(folder, config, renamed(model, {})), model


def baichuan(folder: Path, *, alibi: bool = False) -> tuple[Path, Any]:
    """With ALiBi the model is only a holder of weights."""
    model = random_model("Llama", **_MHA)
    tensors = renamed(model, {})
    fuse_qkv(tensors, "model.layers.{}.self_attn", "W_pack", torch.cat)
    name = "BaichuanForCausalLM" if alibi else "BaiChuanForCausalLM"
    config = {**_OWN, "architectures": [name], "model_max_length": 64}
    return save(folder, config, tensors), model


def chatglm(folder: Path, *, bias: bool = True, multi_query: bool = True) -> tuple[Path, Any]:
    model = random_model(
        "Glm",
        **{**(GATED if multi_query else _MHA), "pad_token_id": 0},
        attention_bias=bias,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 30000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    tensors = renamed(
        model,
        {
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
        },
    )
    for name in list(tensors):
        if name.startswith("model.layers"):
            new = name.replace("model.layers", "transformer.encoder.layers")
            new = new.replace("self_attn", "self_attention").replace("o_proj", "dense")
            new = new.replace("gate_up_proj", "dense_h_to_4h")
            tensors[new.replace("down_proj", "dense_4h_to_h")] = tensors.pop(name)
    fuse_qkv(tensors, "transformer.encoder.layers.{}.self_attention", "query_key_value", torch.cat)
    tensors["transformer.rotary_pos_emb.inv_freq"] = torch.ones(2)
    config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": bias,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "ffn_hidden_size": _INNER,
        "fp32_residual_connection": False,
        "hidden_size": _HIDDEN,
        "kv_channels": _DIM,
        "layernorm_epsilon": model.config.rms_norm_eps,
        "multi_query_attention": multi_query,
        "multi_query_group_num": 2,
        "num_attention_heads": _HEADS,
        "num_layers": LAYERS,
        "original_rope": True,
        "padded_vocab_size": VOCAB_SIZE,
        "post_layer_norm": True,
        "quantization_bit": 0,
        "rmsnorm": True,
        "rope_ratio": 3,
        "seq_length": 64,
        "eos_token_id": 2,
    }
    return save(folder, config, tensors), model


def qwen(folder: Path, *, no_bias: bool = True, **extension: Any) -> tuple[Path, Any]:
    """`extension`: keys for contexts beyond the trained one; the model is then only a holder."""
    if no_bias:
        model = random_model("Qwen2", **_MHA)
    else:
        model = random_model("Llama", **_MHA, attention_bias=True, mlp_bias=True)
    tensors = renamed(
        model,
        {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    )
    parts = {
        "model.layers": "transformer.h",
        "self_attn.o_proj": "attn.c_proj",
        "self_attn": "attn",
        "gate_proj": "w2",
        "up_proj": "w1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    for name in list(tensors):
        if name.startswith("model.layers"):
            new = name
            for old, part in parts.items():
                new = new.replace(old, part)
            tensors[new] = tensors.pop(name)
    fuse_qkv(tensors, "transformer.h.{}.attn", "c_attn", torch.cat)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    config = {
        **{key: value for key, value in _OWN.items() if key != "rms_norm_eps"},
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "fp32": True,
        "intermediate_size": 2 * _INNER,
        "kv_channels": _DIM,
        "layer_norm_epsilon": model.config.rms_norm_eps,
        "no_bias": no_bias,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": 64,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "use_flash_attn": "auto",
        **extension,
    }
    return save(folder, config, tensors), model
