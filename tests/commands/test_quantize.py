"""`hetero-llm quantize` writes a checkpoint that the engine serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_llm import LLM, SamplingParams
from hetero_llm.cli import main
from hetero_llm.demo_models import demo_folder

PROMPT = "def add(a, b):\n"
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def test_the_copy_gives_the_tokens_of_quantizing_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    draft = str(demo_folder("demo-draft"))
    assert main(["quantize", draft, str(out), "--format", "int4"]) == 0
    assert "MiB of weights, compressed-tensors" in capsys.readouterr().out
    texts = []
    for model, quantization in ((str(out), "compressed-tensors"), (draft, "int4")):
        with LLM(model, quantization=quantization, device="cpu", dtype="float32") as llm:
            texts.append(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert main(["quantize", "demo", str(tmp_path / "full"), "--format", "fp8"]) == 2
    assert "it exists; name a new folder" in capsys.readouterr().err
