"""Configurations from metadata equal those of config.json; what is not computed is an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.gguf.config import block_types, read_gguf_config
from hetero_llm.models.gguf.container import read_header
from hetero_llm.models.gguf.names import matrices_apart
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.rotary import RotaryEmbedding
from tests.helpers.gguf_files import ARRAY, INT32, UINT64, GgufWriter, Typed, make_tiny_gguf

FAMILIES = [
    ("llama", "gqa", {}),
    ("llama", "wide_heads", {}),
    ("llama", "biases", {}),
    ("llama", "tied", {}),
    ("llama", "linear", {}),
    ("llama", "yarn", {}),
    ("qwen2", "full", {}),
    ("qwen3", "full", {}),
    ("qwen3", "tied_biases", {}),
    ("qwen3_moe", "full", {"mlp_only_layers": []}),
    ("gemma", "tied_biases", {"attention_bias": False}),
    ("gemma2", "soft_caps", {"query_pre_attn_scalar": 8}),
    ("gemma2", "soft_caps", {"num_hidden_layers": 46, "query_pre_attn_scalar": 8, "head_dim": 16}),
]


@pytest.mark.parametrize(("family", "variant", "changes"), FAMILIES)
def test_families(tmp_path: Path, family: str, variant: str, changes: dict[str, Any]) -> None:
    tiny = make_tiny_gguf(
        tmp_path, family, variant, types=lambda _: "F32", changes=changes, vocab_size=100
    )
    found, expected = load_model_config(tiny.path), load_model_config(tiny.folder)
    assert dataclasses.asdict(found) == dataclasses.asdict(expected)


def llama(**more: Any) -> GgufWriter:
    """Without weights but the embedding."""
    values = {
        "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 52,
        "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    metadata: dict[str, Any] = {"general.architecture": "llama"}
    metadata |= {f"llama.{key}": value for key, value in values.items()}
    writer = GgufWriter({**metadata, **more})
    writer.add("token_embd.weight", "F16", np.zeros((96, 32), np.float16), (96, 32))
    return writer


def test_defaults(tmp_path: Path) -> None:
    config = load_model_config(llama().write(tmp_path / "a.gguf"))
    assert config.norm_eps == 1e-5 and config.head_dim == 8 and config.tie_word_embeddings
    assert config.torch_dtype == "float16" and config.quantization is None
    assert config.eos_token_ids == () and config.bos_token_id is None
    assert config.rope is not None and config.rope.theta == 10000


def test_heads_and_sizes_as_arrays(tmp_path: Path) -> None:
    writer = llama(
        **{"llama.feed_forward_length": [52, 52], "llama.attention.head_count_kv": [1, 1]}
    )
    config = load_model_config(writer.write(tmp_path / "a.gguf"))
    assert (config.intermediate_size, config.num_kv_heads) == (52, 1)
    del writer.metadata["llama.attention.head_count_kv"]
    config = load_model_config(writer.write(tmp_path / "b.gguf"))
    assert config.num_kv_heads == config.num_heads == 4


def test_factors_of_frequencies(tmp_path: Path) -> None:
    """Llama 3's scaling is stored as divisors of the frequencies."""
    writer = llama()
    factors = np.array([1, 1.5, 4, 8], np.float32)
    writer.add("rope_freqs.weight", "F32", factors, (4,))
    config = load_model_config(writer.write(tmp_path / "a.gguf"))
    plain = load_model_config(llama().write(tmp_path / "b.gguf"))
    assert config.max_model_len == plain.max_model_len == 64
    tables = [RotaryEmbedding(c.rope, 64).table for c in (config, plain)]
    angles = torch.arange(64)[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    for table, divisors in zip(tables, (torch.from_numpy(factors), torch.ones(4)), strict=True):
        expected = torch.cat(((angles / divisors).cos(), (angles / divisors).sin()), -1)
        torch.testing.assert_close(table, expected, atol=1e-5, rtol=0)


def test_yarn(tmp_path: Path) -> None:
    writer = llama(**{
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16, "llama.rope.scaling.attn_factor": 0.5,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    })  # fmt: skip
    rope = load_model_config(writer.write(tmp_path / "a.gguf")).rope
    assert rope is not None and (rope.factor, rope.beta_fast, rope.beta_slow) == (4, 16, 1)
    assert rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_old_files_name_the_linear_factor_alone(tmp_path: Path) -> None:
    path = llama(**{"llama.rope.scale_linear": 2.0}).write(tmp_path / "a.gguf")
    rope = load_model_config(path).rope
    assert rope is not None and (rope.scaling_type, rope.factor) == ("linear", 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture='mamba': not supported in GGUF"),
        ({"general.architecture": 5}, "general.architecture=5: a string is needed"),
        ({"split.count": 3}, "split.count=3: one file is needed"),
        ({"llama.expert_count": 8}, "llama.expert_count=8: not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5: not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal=False: not supported"),
        ({"llama.attention.value_length": 16}, "value_length=16: differs from the keys' 8"),
        ({"llama.attention.key_length": 0}, "key_length=0: an integer from 1 to 2147483647"),
        ({"llama.attention.head_count": [4, 2]}, "head_count=.*different sizes are not supported"),
        ({"llama.attention.head_count": 5}, "head_count=5: does not divide"),
        ({"llama.block_count": "2"}, "llama.block_count='2': an integer from 1 to 2147483647"),

        ({"llama.context_length": 0}, "llama.context_length=0: an integer from 1"),
        ({"llama.attention.head_count_kv": 0}, "llama.attention.head_count_kv=0: an integer from"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "rms_epsilon=-1.0: a number above 0"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base=nan: a number above 0"),
        ({"llama.rope.dimension_count": 9}, "count=9: an integer from 1 to the size of a head, 8"),
        ({"llama.rope.scaling.type": "linear"}, "scaling.factor=None: a number above 0 is needed"),
        ({"llama.rope.scale_linear": float("inf")}, "llama.rope.scale_linear=inf: a number above"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
          "llama.rope.scaling.attn_factor": float("nan")}, "attn_factor=nan: a number above 0"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1.*: not supp"),
        ({"llama.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor=2.0: only 1 is"),
        ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens=5: an array of strings is needed"),
        ({"tokenizer.ggml.token_type": 1}, "token_type=1: an array of integers is needed"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": ["a"] * 9},
         r"token_type=\['a', 'a', .*, \.\.\.\]: an array of integers"),
        ({"llama.rope.scaling.type": "longrope"}, "type='longrope': none, linear and yarn"),
        ({"llama.rope.dimension_count": 4}, "partial_rotary_factor=0.5: not supported"),
        ({"llama.attention.sliding_window": 16}, "sliding_window=16: not supported"),
        ({"tokenizer.ggml.eos_token_id": 2**31}, "at most 1000 ids up to 2147483647"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id='x': an integer of 0 or more"),
    ],
)  # fmt: skip
def test_what_is_not_computed(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    path = llama(**more).write(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model_config(path)
    assert str(path) in str(caught.value)


def test_divisors_of_frequencies_that_are_none(tmp_path: Path) -> None:
    writer = llama()
    writer.add("rope_freqs.weight", "F32", np.array([1, 0, 1, 1], np.float32), (4,))
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight holds 0\.0: numbers above 0"):
        read_gguf_config(writer.write(tmp_path / "a.gguf"))


def test_keys_that_are_not_known_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"llama.vocab_size": 96, "llama.rope.scaling.yarn_ext_factor": 1.0}
    read_gguf_config(llama(**more).write(tmp_path / "a.gguf"))
    assert not caplog.text
    more = {f"llama.new.{i}": i for i in range(7)}
    path = llama(**more).write(tmp_path / "b.gguf")
    read_gguf_config(path)
    assert f"{path}: keys that are not known here have no effect: 'llama.new.0', " in caplog.text
    assert "'llama.new.4' and 2 more" in caplog.text


VALUES = [
    0, 1, 2**31, Typed(INT32, -1), Typed(UINT64, 2**63), float("nan"), float("inf"), -2.0, 2.5, "x",
    True, Typed(ARRAY, [], INT32), ["a"], [1.5, 1.5], [2, 3],
]  # fmt: skip
KEYS = [
    "llama.block_count", "llama.context_length", "llama.embedding_length",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon", "llama.attention.sliding_window",
    "llama.rope.freq_base", "llama.rope.dimension_count", "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.attn_factor", "llama.rope.scaling.yarn_beta_fast", "llama.expert_count",
    "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id",
    "split.count", "general.architecture", "general.alignment",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_any_value_is_used_or_refused(tmp_path: Path, key: str) -> None:
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    for number, value in enumerate(VALUES):
        path = llama(**{**yarn, key: value}).write(tmp_path / f"{number}.gguf")
        try:
            config = load_model_config(path)
        except ModelLoadError as error:
            assert str(path) in str(error) and "object at" not in str(error)
        else:
            assert config.num_layers >= 1 and config.head_dim >= 1


@pytest.mark.parametrize("key", ["llama.block_count", "general.architecture"])
def test_missing_keys(tmp_path: Path, key: str) -> None:
    writer = llama()
    del writer.metadata[key]
    with pytest.raises(ModelLoadError, match=f"the key '{key}' is missing"):
        read_gguf_config(writer.write(tmp_path / "a.gguf"))


def test_a_file_without_an_embedding(tmp_path: Path) -> None:
    writer = llama()
    writer.tensors.clear()
    with pytest.raises(ModelLoadError, match=r"the tensor token_embd\.weight is missing"):
        read_gguf_config(writer.write(tmp_path / "a.gguf"))


def test_tokens_that_end_a_turn(tmp_path: Path) -> None:
    tokens = ["a", "<|eot_id|>", "<|im_end|>", "</s>", "<|endoftext|>"]
    writer = llama(**{
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 1, 3, 3],
        "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.bos_token_id": 2**32 - 1,  # none
    })  # fmt: skip
    # <|im_end|> is a word of this vocabulary, no control token.
    config = load_model_config(writer.write(tmp_path / "a.gguf"))
    assert config.eos_token_ids == (3, 1, 4) and config.bos_token_id is None


def test_no_token_that_ends_a_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_model_config(llama().write(tmp_path / "a.gguf"))
    assert not caplog.text  # without a vocabulary
    more = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
    assert load_model_config(llama(**more).write(tmp_path / "b.gguf")).eos_token_ids == ()
    assert "no token is known to end a text" in caplog.text


def test_which_matrices_stay_quantized(tmp_path: Path) -> None:
    """Parts that the engine fuses stay quantized only if all have one kind."""
    kinds = {
        "blk.0.attn_v.weight": "Q8_0", "blk.1.attn_v.weight": "Q4_1", "blk.1.ffn_up.weight": "Q5_1",
        "blk.0.ffn_down.weight": "F16", "blk.1.ffn_down.weight": "Q8_0", "output.weight": "Q8_0",
    }  # fmt: skip
    tiny = make_tiny_gguf(
        tmp_path, "llama", changes={"intermediate_size": 64, "num_hidden_layers": 2},
        types=lambda name: kinds.get(name, "Q4_0"),
    )  # fmt: skip
    found = block_types(read_header(tiny.path))
    assert found == {
        "blk.0.attn_output.weight": "Q4_0", "blk.0.ffn_gate.weight": "Q4_0",
        "blk.0.ffn_up.weight": "Q4_0", "blk.1.attn_q.weight": "Q4_0",
        "blk.1.attn_k.weight": "Q4_0", "blk.1.attn_v.weight": "Q4_1",
        "blk.1.attn_output.weight": "Q4_0", "blk.1.ffn_down.weight": "Q8_0",
        "output.weight": "Q8_0",
    }  # fmt: skip
    config = load_model_config(tiny.path)
    assert config.torch_dtype == "bfloat16" and config.quantization is not None
    assert config.quantization["types"]["model.layers.1.mlp.down_proj"] == "Q8_0"
    assert config.quantization["types"]["lm_head"] == "Q8_0"


def mixture(shape: tuple[int, ...] = (6, 32, 32), **more: Any) -> GgufWriter:
    """A file of one layer with the gates of its experts alone."""
    values = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 6,
        "expert_used_count": 3, "expert_feed_forward_length": 32,
    }  # fmt: skip
    metadata: dict[str, Any] = {"general.architecture": "qwen3moe"}
    metadata |= {f"qwen3moe.{key}": value for key, value in values.items()}
    writer = GgufWriter({**metadata, **more})
    writer.add("token_embd.weight", "F16", np.zeros((96, 32), np.float16), (96, 32))
    data = np.zeros(int(np.prod(shape)), np.float32)
    writer.add("blk.0.ffn_gate_exps.weight", "F32", data, shape)
    return writer


def test_an_entry_for_each_expert(tmp_path: Path) -> None:
    header = read_header(mixture().write(tmp_path / "a.gguf"))
    whole = header.tensors["blk.0.ffn_gate_exps.weight"]
    found = matrices_apart(header).tensors
    assert list(found)[1:] == [f"blk.0.ffn_gate.{expert}.weight" for expert in range(6)]
    for expert in range(6):
        one = found[f"blk.0.ffn_gate.{expert}.weight"]
        assert one.shape == (32, 32) and one.start == whole.start + expert * 32 * 32 * 4


@pytest.mark.parametrize(
    ("shape", "more", "message"),
    [
        ((5, 32, 32), {}, r"ffn_gate_exps\.weight is \[5, 32, 32\]: .*expert_count=6 experts"),
        ((192, 32), {}, r"is \[192, 32\]: a matrix for each"),
        ((1 << 20, 1, 1), {"qwen3moe.expert_count": 1 << 20}, "at most 1048576 matrices"),
        ((6, 32, 32), {"qwen3moe.expert_count": 0}, "expert_count=0 experts is needed"),
        ((6, 32, 32), {"qwen3moe.expert_shared_count": 1}, "expert_shared_count=1: not supported"),
        ((6, 32, 32), {"qwen3moe.expert_gating_func": 2}, "gating_func=2: only 1 is supported"),
        ((6, 32, 32), {"qwen3moe.expert_used_count": 7}, "there are 6 experts"),
        ((6, 32, 32), {"qwen3moe.expert_used_count": "x"}, "used_count='x': an integer"),
    ],
)
def test_mixtures_that_are_not_read(
    tmp_path: Path, shape: tuple[int, ...], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(mixture(shape, **more).write(tmp_path / "a.gguf"))


def test_experts_stay_quantized_where_gate_and_up_have_one_kind(tmp_path: Path) -> None:
    kinds = {
        "blk.1.ffn_up_exps.weight": "Q8_0", "blk.0.ffn_gate_inp.weight": "Q8_0",
        "blk.1.ffn_down_exps.weight": "Q5_1", "output.weight": "F16",
    }  # fmt: skip
    changes = {"mlp_only_layers": [], "moe_intermediate_size": 32, "num_hidden_layers": 2}
    tiny = make_tiny_gguf(
        tmp_path, "qwen3_moe", "full", changes=changes,
        types=lambda name: kinds.get(name, "F32" if ".attn_" in name else "Q4_0"),
    )  # fmt: skip
    found = block_types(matrices_apart(read_header(tiny.path)))
    parts = [f"blk.0.ffn_{part}.{e}.weight" for part in ("gate", "up", "down") for e in range(6)]
    assert found == dict.fromkeys(sorted(parts), "Q4_0")
