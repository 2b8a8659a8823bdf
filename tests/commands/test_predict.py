"""What models need, by hand-computed bytes of published shapes, and how fast they would be."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import cli
from hetero_llm.commands.machine_rates import Rates
from hetero_llm.commands.predict import ModelSizes, predict, read_sizes, step_seconds
from hetero_llm.config.expert_config import ExpertConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError

GIB = 1 << 30


@dataclass(frozen=True)
class Known:
    """A published shape, and its bytes in memory as served."""

    config: dict[str, Any]
    weights: int
    layers: int = 0
    experts: int = 0
    expert_bytes: int = 0
    kv_token: int = 0


def shape(architecture: str, model_type: str, vocab: int, hidden: int, layers: int,
          heads: tuple[int, int, int], inner: int, **rest: Any) -> dict[str, Any]:  # fmt: skip
    """Keys that all have. `heads`: of queries, of keys, size."""
    return {
        "architectures": [architecture], "model_type": model_type, "vocab_size": vocab,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": heads[2], "intermediate_size": inner,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, **rest,
    }  # fmt: skip


QWEN3 = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
KNOWN = {
    # 2 x 128256 x 4096 + 32 x (4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 14336 + 8192)
    # + 4096 = 8,030,261,248 parameters.
    "Llama-8B": Known(
        shape("LlamaForCausalLM", "llama", 128256, 4096, 32, (32, 8, 128), 14336),
        2 * 8_030_261_248, kv_token=2 * 32 * 1024 * 2,
    ),
    # Parts of a layer: attention 2048 x (4096 + 2 x 512) + 4096 x 2048, router 2048 x 128, norms
    # 2 x 2048 + 2 x 128, experts 128 x 3 x 2048 x 768: 30,532,122,624 parameters.
    "Qwen3-30B-A3B": Known(
        shape("Qwen3MoeForCausalLM", "qwen3_moe", 151936, 2048, 48, (32, 4, 128), 6144,
              moe_intermediate_size=768, **QWEN3),
        2 * 30_532_122_624, 48, 128, 2 * 3 * 2048 * 768, 2 * 48 * 512 * 2,
    ),
    # 94 x (4096 x (8192 + 2 x 512) + 8192 x 4096 + 4096 x 128 + 8448 + 128 x 3 x 4096 x 1536)
    # + 2 x 151936 x 4096 + 4096 = 235,093,634,560.
    "Qwen3-235B-A22B": Known(
        shape("Qwen3MoeForCausalLM", "qwen3_moe", 151936, 4096, 94, (64, 4, 128), 12288,
              moe_intermediate_size=1536, **QWEN3),
        2 * 235_093_634_560, 94, 128, 2 * 3 * 4096 * 1536, 2 * 94 * 512 * 2,
    ),
    # 46,702,792,704 parameters.
    "Mixtral-8x7B": Known(
        shape("MixtralForCausalLM", "mixtral", 32000, 4096, 32, (32, 8, 128), 14336,
              num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
        2 * 46_702_792_704, 32, 8, 2 * 3 * 4096 * 14336, 2 * 32 * 1024 * 2,
    ),
    # An expert: 3 x 2880 x 2880 codes of 4 bits, a bfloat16 scale for 32 of them, biases of 8,640.
    # Else, in 16 bits: attention 2880 x 5120 + 4096 x 2880, its biases 5120 + 2880, 64 sinks,
    # router 2880 x 128 + 128, norms 2 x 2880; 2 x 201088 x 2880 + 2880.
    "gpt-oss-120b": Known(
        shape("GptOssForCausalLM", "gpt_oss", 201088, 2880, 36, (64, 8, 64), 2880,
              num_local_experts=128, num_experts_per_tok=4, sliding_window=128,
              attention_bias=True, quantization_config={"quant_method": "mxfp4"}),
        36 * 128 * 14_014_080
        + 2 * (36 * (26_542_080 + 8_000 + 64 + 368_768 + 5_760) + 2 * 201088 * 2880 + 2880),
        36, 128, 12_441_600 + 2 * 777_600 + 2 * 8_640, 2 * 36 * 512 * 2,
    ),
    # 89 layers of experts and 3 dense ones: 352,797,829,024 parameters; the layer for drafts, which
    # is not loaded, is not counted.
    "GLM-4.5": Known(
        shape("Glm4MoeForCausalLM", "glm4_moe", 151552, 5120, 92, (96, 8, 128), 12288,
              moe_intermediate_size=1536, n_routed_experts=160, num_experts_per_tok=8,
              n_shared_experts=1, first_k_dense_replace=3, n_group=1, topk_group=1,
              attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1),
        2 * 352_797_829_024, 89, 160, 2 * 3 * 5120 * 1536, 2 * 92 * 1024 * 2,
    ),
}  # fmt: skip


def sizes_of(tmp_path: Path, name: str, quantization: str | None = None, **keys: Any) -> ModelSizes:
    (tmp_path / "config.json").write_text(json.dumps({**KNOWN[name].config, **keys}))
    return read_sizes(str(tmp_path), quantization=quantization)


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_of_published_shapes(tmp_path: Path, name: str) -> None:
    known, found = KNOWN[name], sizes_of(tmp_path, name)
    assert found.weights == known.weights
    assert found.kv_token == known.kv_token
    embedding = 2 * known.config["vocab_size"] * known.config["hidden_size"]
    assert found.unread == embedding
    if not known.experts:
        assert found.experts is None
        return
    assert found.experts is not None
    assert found.experts.kept_bytes < known.expert_bytes / 8  # scales and biases
    shape = (found.experts.num_layers, found.experts.num_experts, found.experts.expert_bytes)
    assert shape == (known.layers, known.experts, known.expert_bytes)
    assert found.per_token == known.config["num_experts_per_tok"]
    assert found.layers == known.config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("quantization", "keys", "expected", "note"),
    [
        ("fp8", {}, 4_718_592 + 4 * 3584, "quantization=fp8"),
        ("fp8_block", {}, 4_718_592 + 4 * 288, "quantization=fp8_block"),
        ("int4", {}, 2_359_296 + 3 * 36_864, "quantization=int4"),
        (None, {"quant_method": "fp8", "weight_block_size": [128, 128]},
         4_718_592 + 4 * 288, "8 bits"),
        (None, {"quant_method": "fp8"}, 4_718_592 + 4 * 3584, "8 bits (fp8)"),
        (None, {"quant_method": "gptq", "bits": 4, "group_size": 128},
         2_359_296 + 3 * 36_864, "4 bits"),
        (None, {"quant_method": "gptq", "bits": 8, "group_size": -1},
         4_718_592 + 3 * 3584, "8 bits"),
        (None, {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "group_size": 32}}}}, 2_359_296 + 2 * 147_456, "4 bits"),
        (None, {"quant_method": "bitsandbytes", "load_in_4bit": True},
         2_359_296 + 2 * 73_728, "4 bits"),
        (None, {"quant_method": "new"}, 9_437_184, "'new' is not known here"),
    ],
)  # fmt: skip
def test_quantized_experts(
    tmp_path: Path, quantization: str | None, keys: dict[str, Any], expected: int, note: str
) -> None:
    stored = {"quantization_config": keys} if keys else {}
    found = sizes_of(tmp_path, "Qwen3-30B-A3B", quantization, **stored)
    assert found.experts is not None and found.experts.expert_bytes == expected
    assert note in found.note


def test_a_tied_head_is_read_and_counted_once(tmp_path: Path) -> None:
    found = sizes_of(tmp_path, "Llama-8B", tie_word_embeddings=True)
    assert found.weights == KNOWN["Llama-8B"].weights - 2 * 128256 * 4096
    assert found.unread == 0


def test_a_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "some-model.json"
    path.write_text(json.dumps(KNOWN["Mixtral-8x7B"].config))
    assert read_sizes(str(path)).weights == KNOWN["Mixtral-8x7B"].weights


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such folder or file"):
        read_sizes(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="architectures"):
        read_sizes(str(tmp_path))


RATES = Rates(4e12, 50e9, 100e9, 80 * GIB, 200 * GIB, {})
"""A GPU of 80 GiB beside 200 GiB."""
ALONE = replace(RATES, gpu=0.0, link=0.0, gpu_bytes=0)


def test_a_dense_model(tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, "Llama-8B")
    found = predict(sizes, RATES)
    assert found.where == "all on the GPU" and found.plan is None and not found.problem
    # 16,060,522,496 bytes less the embedding, and 1,024 tokens of KV cache, at 4 TB/s; 32 layers.
    expected = (15_009_849_344 + 1024 * 131_072) / 4e12 + 32 * 15e-6
    assert step_seconds(sizes, RATES, 1, 1.0) == pytest.approx(expected)
    assert found.speeds[0].local == found.speeds[0].uniform == pytest.approx(1 / expected)
    on_cpu = predict(sizes, ALONE)
    assert on_cpu.where == "on the CPU alone"
    assert on_cpu.speeds[0].local == pytest.approx(100e9 / (15_009_849_344 + 1024 * 131_072))


def test_a_mixture_that_fits(tmp_path: Path) -> None:
    found = predict(sizes_of(tmp_path, "Qwen3-30B-A3B"), RATES)
    assert found.plan is not None and found.plan.mode == "resident"
    assert found.speeds[0].local == found.speeds[0].uniform


def test_experts_on_both(tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, "Mixtral-8x7B")
    found = predict(sizes, RATES)
    # 72 GiB less 2.99 of other weights, 2 for the step and 4 of KV cache, by 336 MiB each.
    assert found.plan is not None
    assert (found.plan.mode, found.plan.slots) == ("inclusive", 192)
    assert found.plan.host_bytes == 256 * 352_321_536
    assert found.where == "experts on the CPU beside the GPU"
    one, eight = found.speeds
    assert one.uniform < one.local and eight.uniform < eight.local
    # Batch 1, uniform: 2 of 8 experts in 32 layers, of which 64 of 256 are read from host memory.
    missed = 64 * 352_321_536 * 64 / 256
    rest = (sizes.read + 1024 * sizes.kv_token) / 4e12 + 32 * 15e-6 + 32 * 16e-6
    assert 1 / one.uniform == pytest.approx(missed / 100e9 + rest)


def test_gpus_that_share_layers(tmp_path: Path) -> None:
    """Two of them: each has half of every expert and of host memory, and its threads half of the
    cores' rate."""
    whole = sizes_of(tmp_path, "Qwen3-235B-A22B")
    half = read_sizes(str(tmp_path), ranks=2)
    assert whole.experts is not None and half.experts is not None
    assert half.experts.expert_bytes == whole.experts.expert_bytes // 2
    assert half.kv_token == whole.kv_token // 2 and half.read < 0.6 * whole.read
    host = replace(RATES, host_bytes=460 * GIB)
    found = predict(half, host)
    assert found.plan is not None and found.plan.mode == "inclusive"
    assert found.plan.host_bytes == whole.experts.total_bytes // 2
    one = predict(whole, host)
    assert one.plan is not None and found.plan.slots > 2 * one.plan.slots
    # Batch 1, nothing in the bank: 94 x 8 halves of experts at half of the rate.
    missed = 94 * 8 * half.experts.expert_bytes
    rest = (half.read + 1024 * half.kv_token) / 4e12 + 94 * (15e-6 + 16e-6 + 4e-6)
    assert step_seconds(half, host, 1, 0.0) == pytest.approx(missed / 50e9 + rest)
    short = predict(half, replace(host, host_bytes=380 * GIB))
    assert "several ranks need all of them there" in short.problem
    assert "of each of 2 ranks" in predict(half, replace(host, host_bytes=10 * GIB)).problem
    with pytest.raises(ConfigError, match="need GPUs"):
        predict(half, ALONE)
    with pytest.raises(ConfigError, match="does not divide the 64 attention heads"):
        read_sizes(str(tmp_path), ranks=3)


def test_all_experts_on_the_cpu(tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, "Mixtral-8x7B")
    found = predict(sizes, RATES, ExpertConfig(cpu_experts="all"))
    assert found.plan is not None and found.plan.slots == 0
    assert found.speeds[0].local == found.speeds[0].uniform
    assert found.speeds[0].local < predict(sizes, RATES).speeds[0].uniform


def test_host_memory_that_holds_what_the_gpu_does_not(tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, "Mixtral-8x7B")
    assert sizes.experts is not None
    short = dataclasses.replace(RATES, host_bytes=sizes.experts.total_bytes - 1)
    found = predict(sizes, short)
    assert found.plan is not None and found.plan.mode == "exclusive"
    assert len(found.speeds) == 2 and not found.problem


def test_what_does_not_fit(tmp_path: Path) -> None:
    large = sizes_of(tmp_path, "GLM-4.5")
    found = predict(large, RATES)
    assert found.speeds == () and "moe_expert_memory='auto'" in found.problem
    assert "more than host memory has" in predict(large, ALONE).problem
    dense = predict(sizes_of(tmp_path, "Llama-8B"), replace(RATES, gpu_bytes=16 * GIB))
    assert dense.speeds == () and "quantization='int4'" in dense.problem


ASSUMED = [
    *("--gpu-memory", "80", "--gpu-rate", "4000", "--link-rate", "50"),
    *("--dram-rate", "100", "--host-memory", "200"),
]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes_of(tmp_path, "Mixtral-8x7B")
    assert cli.main(["doctor", str(tmp_path), *ASSUMED]) == 0
    text = capsys.readouterr().out
    for words in ("weights            86.99 GiB, 16 bits", "32 layers of 8, 2 a token",
                  "GPU reads    4000 GB/s (as given)", "192 experts on the GPU",
                  "tokens/s, uniform to local use", "Assumptions"):  # fmt: skip
        assert words in text, words
    assert text.endswith("It fits.\n")
    assert cli.main(["doctor", str(tmp_path), *ASSUMED, "-tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "of the part of each of 2 GPUs" in text and "all 256 experts on the GPU" in text
    assert cli.main(["doctor", str(tmp_path), *ASSUMED, "--host-memory", "1"]) == 1
    assert "It does not fit: moe_expert_memory" in capsys.readouterr().out


def test_the_command_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes_of(tmp_path, "Mixtral-8x7B")
    words = ["--gpu-memory", "0", "--dram-rate", "100", "--host-memory", "200"]
    assert cli.main(["doctor", str(tmp_path), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["machine"]["gpu_bytes"] == 0
    assert found["model"]["weights"] == KNOWN["Mixtral-8x7B"].weights
    assert found["prediction"]["where"] == "on the CPU alone"
    assert [speed["batch"] for speed in found["prediction"]["speeds"]] == [1, 8]


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes_of(tmp_path, "Llama-8B")
    assert cli.main(["doctor", "--gpu-memory", "80"]) == 2
    assert "gpu_memory=80.0: is for a prediction: name a model" in capsys.readouterr().err
    assert cli.main(["doctor", str(tmp_path), "--dram-rate", "0"]) == 2
    assert "dram_rate=0: must be more than 0" in capsys.readouterr().err
    assert cli.main(["doctor", str(tmp_path / "none")]) == 2
    with pytest.raises(ConfigError, match="one of fp8"):
        read_sizes(str(tmp_path), quantization="fp9")
    assert cli.main(["doctor", "--tensor-parallel-size", "2"]) == 2
    for words in (["--dram-rate", "-1"], ["-tp", "0"], ["-tp", "65"]):
        with pytest.raises(SystemExit):
            cli.main(["doctor", str(tmp_path), *words])
