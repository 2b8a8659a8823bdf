"""The serving benches measure what they say, on a model small enough for any machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.engine import closed_batch, decode, gpu_suite, ttft
from bench.generation import greedy
from bench.shapes import SHAPES, Prompts, linear_sizes, start, write_config
from hetero_llm import LLM
from hetero_llm.models.layers import Linear
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class
from hetero_llm.quantization.names import ONLINE_NAMES

# Parameters that the model cards state.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    torch.set_num_threads(1)
    llm, seconds = start(SHAPES["tiny"], dtype="bfloat16", device="cpu", max_model_len=256)
    assert seconds > 0
    with llm:
        yield llm


@pytest.mark.parametrize("shape", list(PUBLISHED))
def test_shapes_have_the_published_sizes(shape: str, tmp_path: Path) -> None:
    config = load_model_config(write_config(SHAPES[shape], tmp_path))
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[shape]
    assert config.torch_dtype == "bfloat16"
    assert set(config.sliding_windows) == {None}
    scaling = "llama3" if shape.startswith("llama") else "default"
    assert config.rope is not None and config.rope.scaling_type == scaling
    assert config.qkv_bias is (shape == "qwen2.5-7b")


@pytest.mark.parametrize("shape", list(SHAPES))
def test_linear_sizes_are_the_models(shape: str, tmp_path: Path) -> None:
    config = load_model_config(write_config(SHAPES[shape], tmp_path))
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    sizes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, Linear)]
    layer, head = linear_sizes(SHAPES[shape])
    assert sizes == layer * config.num_layers + [head]


def test_prompts_are_distinct_and_in_the_vocabulary() -> None:
    prompts = Prompts(SHAPES["tiny"]["vocab_size"])
    drawn = [tuple(p) for p in prompts.draw(8, 32) + prompts.draw(8, 32)]
    assert len(set(drawn)) == 16
    assert {len(p) for p in drawn} == {32}
    assert all(3 <= i < SHAPES["tiny"]["vocab_size"] for p in drawn for i in p)
    again = Prompts(SHAPES["tiny"]["vocab_size"]).draw(8, 32)
    assert [tuple(p) for p in again] == drawn[:8]


def test_decode(tiny: LLM) -> None:
    rows = decode.measure(tiny, "tiny", [1, 3], device="cpu", sampling=True, steps=8)
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["sampling_ms"] / row["ms_per_step"] == row["sampling/greedy"] for row in rows)
    assert {row["cublas_ms"] for row in rows} == {"-"}


def test_decode_counts_steps(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def fake_seconds(llm: LLM, prompts: list[list[int]], params: object) -> float:
        count = params.max_tokens
        calls.append((len(prompts), count))
        return 5.0 + 0.25 * count

    monkeypatch.setattr(decode, "seconds", fake_seconds)
    assert decode.ms_per_step(tiny, Prompts(SHAPES["tiny"]["vocab_size"]), 2) == pytest.approx(
        250.0
    )
    assert calls[1:] == [(2, 1), (2, 129)] * 3


def test_ttft(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ttft.measure(tiny, "tiny", [64, 100, 4096])
    assert [row["prompt"] for row in rows] == [64, 100]
    assert all(row["cold_ms"] > 0 and row["hit_ms"] > 0 for row in rows)
    assert "4096 tokens and one more exceed the context of tiny" in capsys.readouterr().out
    assert ttft.context_for("tiny", [64, 100]) == 132
    assert ttft.context_for("tiny", [4090]) == 4096


def test_closed_batch(tiny: LLM) -> None:
    (row,) = closed_batch.measure(tiny, "tiny", requests=3, prompt=20, new_tokens=5, rounds=1)
    assert row["output_tok_per_s"] * row["seconds"] == pytest.approx(15)
    assert row["requests"] == "3 x (20 in, 5 out)"


def test_a_request_that_hits_the_cache_is_no_cold_one(tiny: LLM) -> None:
    prompts = Prompts(SHAPES["tiny"]["vocab_size"], seed=9).draw(1, 64)
    params = greedy(1)
    decode.seconds(tiny, prompts, params)
    with pytest.raises(AssertionError):
        decode.seconds(tiny, prompts, params)


def test_the_suite_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"suite --shape tiny --device cpu --parts ttft --lengths 32 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", words.split())
    gpu_suite.main()
    written = json.loads((tmp_path / "ttft.tiny.json").read_text())
    assert written["shape"] == "tiny" and written["ready_s"] > 0
    assert [row["prompt"] for row in written["rows"]] == [32]
    assert "ready after" in capsys.readouterr().out


def test_an_unknown_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["suite", "--parts", "decode,tftt"])
    with pytest.raises(SystemExit):
        gpu_suite.main()
    assert "'tftt': one of decode, ttft, closed" in capsys.readouterr().err


def test_the_suite_of_several_kinds_sets_them_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"suite --shape tiny --device cpu --parts ttft --lengths 32 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--quantization", "int4,none"])
    monkeypatch.setitem(gpu_suite.VLLM, ("tiny", "int4", "ttft"), {32: 0.5})
    gpu_suite.main()
    plain, ours = (
        json.loads((tmp_path / f"ttft.tiny{kind}.json").read_text()) for kind in ("", ".int4")
    )
    assert (plain["dtype"], ours["dtype"]) == ("bf16", "int4")
    assert plain["rows"][0]["vllm_cold_ms"] == "-" and ours["rows"][0]["vllm_cold_ms"] == 0.5
    table = json.loads((tmp_path / "quantized.tiny.json").read_text())["rows"]
    assert [row["quantization"] for row in table] == ["none", "int4"]
    cold = [results["rows"][0]["cold_ms"] for results in (plain, ours)]
    assert [row["ttft 32"] for row in table] == cold
    assert [row["ttft 32 over bf16"] for row in table] == [1.0, cold[1] / cold[0]]
    assert set(gpu_suite.KINDS) == {"none", *ONLINE_NAMES}
