"""Scaled-up Llamas compute the small model's function."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scale_up import SHAPES, Shape, constant_channel, load_small, place_heads, scale_up, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).resolve().parents[2] / "hetero_llm" / "demo_models"
SMALL_VOCAB = 50
BIG = Shape(
    hidden=128,
    layers=4,
    intermediate=96,
    heads=8,
    kv_heads=4,
    head_dim=16,
    vocab=300,
    max_positions=256,
)


def make_small(folder: Path, scale: float = 1.0, **changes: object) -> Path:
    """Save a random Llama whose logits are spread out."""
    sizes: dict[str, object] = {
        "vocab_size": SMALL_VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            if "embed" in name:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return folder


def build(config: dict[str, object], weights: dict[str, Tensor]) -> LlamaForCausalLM:
    """A transformers model around the given weights, without copying them."""
    llama_config = LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"})
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config)
    model.load_state_dict(weights, assign=True, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(llama_config)
    return model.eval()


@torch.no_grad()
def compare(small_dir: Path, shape: Shape | str, ids: Tensor) -> tuple[float, float]:
    """Largest difference of real logits, and largest probability of all padded ids together."""
    small = AutoModelForCausalLM.from_pretrained(small_dir, dtype=torch.float32).eval()
    big = build(*scale_up(small_dir, shape, dtype=torch.float32))
    expected, got = small(ids).logits, big(ids).logits
    vocab = expected.shape[-1]
    padded = got.softmax(-1)[..., vocab:].sum(-1).max().item()
    return (got[..., :vocab] - expected).abs().max().item(), padded


LAYOUTS = {
    "same groups": ({}, BIG),
    "one group of four": ({"num_key_value_heads": 1}, replace(BIG, kv_heads=2)),
    "plain heads host groups": ({}, replace(BIG, kv_heads=8)),
    "smaller groups": ({"num_key_value_heads": 1}, replace(BIG, kv_heads=4)),
    "larger groups": ({"num_key_value_heads": 4}, replace(BIG, heads=16, kv_heads=4)),
    "uneven groups": ({"num_attention_heads": 3, "num_key_value_heads": 1}, BIG),
    "untied": ({"tie_word_embeddings": False}, BIG),
    "same vocabulary": ({}, replace(BIG, vocab=SMALL_VOCAB)),
    "same hidden": ({}, replace(BIG, hidden=48, vocab=SMALL_VOCAB)),
    "same layers": ({}, replace(BIG, layers=2)),
    "a few more channels": ({}, replace(BIG, hidden=56)),
    "small eps": ({"rms_norm_eps": 1e-8}, BIG),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_logits(name: str, tmp_path: Path) -> None:
    changes, shape = LAYOUTS[name]
    small_dir = make_small(tmp_path, **changes)
    ids = torch.randint(SMALL_VOCAB, (3, 40))
    error, padded = compare(small_dir, shape, ids)
    assert error < 1e-4
    assert padded < 1e-6


@pytest.mark.parametrize("scale", [1e-4, 30.0])
def test_padded_ids_stay_out_at_any_hidden_size(scale: float, tmp_path: Path) -> None:
    """The constant channel shrinks as the hidden state grows, and the margin covers it."""
    small_dir = make_small(tmp_path, scale=scale)
    _, padded = compare(small_dir, BIG, torch.randint(SMALL_VOCAB, (3, 40)))
    assert padded < 1e-6


def test_written_folder_generates_the_same(tmp_path: Path) -> None:
    small_dir = make_small(tmp_path / "small")
    write_model(*scale_up(small_dir, BIG, dtype=torch.float32), small_dir, tmp_path / "big")
    small = AutoModelForCausalLM.from_pretrained(small_dir, dtype=torch.float32)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype=torch.float32)
    assert big.config.vocab_size == BIG.vocab
    ids = torch.randint(1, SMALL_VOCAB, (2, 10))
    args = {"max_new_tokens": 30, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(small.generate(ids, **args), big.generate(ids, **args))


def test_same_seed_same_weights(tmp_path: Path) -> None:
    small_dir = make_small(tmp_path)
    first, again = (scale_up(small_dir, BIG, seed=1)[1] for _ in range(2))
    other = scale_up(small_dir, BIG, seed=2)[1]
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.3.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])


def test_only_output_projections_of_extra_parts_are_zero(tmp_path: Path) -> None:
    _, weights = scale_up(make_small(tmp_path), BIG)
    for name, weight in weights.items():
        if name.startswith("model.layers.3.") and "norm" not in name:
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert (weight == 0).float().mean() == (1.0 if zero else 0.0), name


def test_bf16_constant_channel_is_exact(tmp_path: Path) -> None:
    small_dir = make_small(tmp_path)
    value = constant_channel(load_small(small_dir), BIG, torch.bfloat16).value
    config, weights = scale_up(small_dir, BIG, dtype=torch.bfloat16)
    ids = torch.randint(SMALL_VOCAB, (2, 30))
    with torch.no_grad():
        out = build(config, weights)(ids, output_hidden_states=True)
    for hidden in out.hidden_states[:-1]:
        assert (hidden[..., 48] == value).all()
        assert (hidden[..., 49:] == 0).all()
    assert out.logits.float().softmax(-1)[..., SMALL_VOCAB:].sum(-1).max() < 1e-6


def test_place_heads() -> None:
    small = Shape(64, 1, 64, 4, 2, 16, 50, 64)
    assert place_heads(small, replace(small, heads=16, kv_heads=4)) == ([0, 1, 4, 5], [0, 1])
    assert place_heads(small, replace(small, heads=8, kv_heads=8)) == ([0, 1, 2, 3], [0, 0, 1, 1])
    one = replace(small, kv_heads=1)
    eight = replace(small, heads=32, kv_heads=8)
    assert place_heads(one, eight) == ([0, 1, 2, 3], [0])


@pytest.mark.parametrize(
    ("field", "shape", "changes"),
    [
        ("shape", "llama-9", {}),
        ("head_dim", replace(BIG, head_dim=32), {}),
        ("hidden", replace(BIG, hidden=32), {}),
        ("hidden", replace(BIG, hidden=48), {}),
        ("layers", replace(BIG, layers=1), {}),
        ("intermediate", replace(BIG, intermediate=40), {}),
        ("vocab", replace(BIG, vocab=40), {}),
        ("heads", replace(BIG, heads=2, kv_heads=2), {}),
        ("heads", replace(BIG, heads=6), {}),
        ("kv_heads", replace(BIG, heads=6, kv_heads=3), {"num_attention_heads": 6}),
        ("attention_bias", BIG, {"attention_bias": True}),
        ("rms_norm_eps", BIG, {"rms_norm_eps": 0.0}),
        ("architectures", BIG, {"architectures": ["GPT2LMHeadModel"]}),
        ("hidden_act", BIG, {"hidden_act": "gelu"}),
    ],
)
def test_errors_name_the_field(
    field: str, shape: Shape | str, changes: dict[str, object], tmp_path: Path
) -> None:
    path = make_small(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"^{field}: "):
        scale_up(tmp_path, shape)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("demo", Shape(512, 8, 1024, 8, 2, 128, 6000, 4096)),
        ("demo", Shape(324, 6, 768, 4, 4, 128, 5000, 2048)),
        ("demo-draft", SHAPES["draft-68m"]),
    ],
)
def test_demo_models(name: str, shape: Shape) -> None:
    prompts = np.load(DEMO / "heldout_prompts.npz", allow_pickle=False)["prompts"]
    ids = torch.from_numpy(prompts[:2, :200].astype(np.int64))
    error, padded = compare(DEMO / name, shape, ids)
    assert error < 2e-4  # sums of a few hundred terms in another order, logits up to about 30
    assert padded < 1e-6


def test_demo_draft_text(tmp_path: Path) -> None:
    draft = DEMO / "demo-draft"
    write_model(*scale_up(draft, "draft-68m", dtype=torch.float32), draft, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = []
    for folder in (draft, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        inputs = tokenizer("import os\n\n\ndef main():\n", return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        texts.append(tokenizer.decode(out[0]))
    assert texts[0] == texts[1]
