"""`hetero-llm quantize` writes a checkpoint that the engine serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hetero_llm import LLM, SamplingParams
from hetero_llm.cli import main
from hetero_llm.commands.calibration_text import read_texts, sample_texts
from hetero_llm.core.errors import ConfigError
from hetero_llm.demo_models import demo_folder
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.models.quantized_writer import write_quantized
from tests.models.tiny import make_tiny_checkpoint

PROMPT = "def add(a, b):\n"
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def test_the_copy_gives_the_tokens_of_quantizing_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    draft = str(demo_folder("demo-draft"))
    arguments = ["quantize", draft, str(out), "--format", "int4", "--calibration", "none"]
    assert main(arguments) == 0
    assert "MiB of weights, compressed-tensors" in capsys.readouterr().out
    texts = []
    for model, quantization in ((str(out), "compressed-tensors"), (draft, "int4")):
        with LLM(model, quantization=quantization, device="cpu", dtype="float32") as llm:
            texts.append(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]


TEXT = "def add(a, b):\n    return a + b\n\n\n" * 40


def test_calibration_with_a_file(tmp_path: Path) -> None:
    """The same tensors as without, other elements."""
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    found = []
    for number, said in enumerate((str(file), "none")):
        out = tmp_path / str(number)
        arguments = ["quantize", "demo-draft", str(out), "--format", "int4", "--calibration", said]
        assert main([*arguments, "--calibration-tokens", "128"]) == 0
        found.append(load_file(out / "model.safetensors"))
    calibrated, nearest = found
    assert calibrated.keys() == nearest.keys()
    name = "model.layers.1.mlp.down_proj.weight_packed"
    assert calibrated[name].shape == nearest[name].shape
    assert not calibrated[name].equal(nearest[name])


def test_4_bits_are_calibrated_with_text_of_the_model_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seed decides the text, and so the file."""
    out, again = tmp_path / "out", tmp_path / "again"
    arguments = ["quantize", "demo-draft", str(out), "--format", "ifq_nf4", "--seed", "7"]
    assert main([*arguments, "--calibration-tokens", "64"]) == 0
    output = capsys.readouterr()
    assert "sampling 64 tokens" in output.err and "bitsandbytes" in output.out
    folder = demo_folder("demo-draft")
    texts = sample_texts(folder, device="cpu", tokens=64, seed=7, allow_pickle=False)
    assert texts.shape == (1, 64) and texts[0, 0] == 0  # <|endoftext|>, which begins texts
    write_quantized(folder, again, "ifq_nf4", device="cpu", texts=texts)
    files = [(path / "model.safetensors").read_bytes() for path in (out, again)]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["int4", "ifq_nf4"])
def test_columns_that_no_group_divides(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said before the model samples text, and before any weight is read."""
    changes = {"hidden_size": 64, "intermediate_size": 52, "head_dim": 16}
    folder = make_tiny_checkpoint(tmp_path / "plain", "llama", changes=changes)

    def sample(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("hetero_llm.commands.calibration_text.sample_texts", sample)
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--format", name]) == 2
    message = capsys.readouterr().err
    assert "down_proj: 52 columns" in message and "possible are fp8, fp8_block, ifq" in message
    assert not (tmp_path / "out").exists()


def test_texts_are_cut_into_pieces_of_one_length(tmp_path: Path) -> None:
    file, folder = tmp_path / "text", demo_folder("demo-draft")
    file.write_text(TEXT)
    ids = load_tokenizer(folder, mode="auto", trust_remote_code=False).encode(TEXT)

    def read(tokens: int, context: int = 2048) -> list[list[int]]:
        return read_texts(file, folder, tokens=tokens, vocab_size=4096, context=context).tolist()

    assert read(65536) == [ids[:512]] and 512 < len(ids) < 1024
    pieces = read(65536, context=64)
    assert [token for piece in pieces for token in piece] == ids[: len(ids) // 64 * 64]
    assert read(128, context=64) == [pieces[0], pieces[len(pieces) // 2]]
    lines = tmp_path / "text.jsonl"
    half = len(TEXT) // 2
    lines.write_text("".join(json.dumps({"text": t}) + "\n\n" for t in (TEXT[:half], TEXT[half:])))
    file, whole = lines, read(65536)
    assert len(whole) == 1 and whole[0][:100] == ids[:100]
    file = tmp_path / "text"
    file.write_text("x = 1")
    assert len(read(65536)) == 1


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert main(["quantize", "demo", str(tmp_path / "full"), "--format", "fp8"]) == 2
    assert "it exists; name a new folder" in capsys.readouterr().err
    for content, suffix, message in (
        (None, "", "cannot be read as text.*No such file"),
        (b"\xff\xfe\x00", "", "cannot be read as text"),
        (b"", "", "0 tokens of text"),
        (b"\n", ".jsonl", "0 tokens of text"),
        (b'{"text": "a"}\n{"text"', ".jsonl", "line 2: no JSON"),
        (b'{"prompt": "a"}', ".jsonl", 'line 1: an object with a string "text"'),
        (b"[" * 100_000, ".jsonl", "line 1: no JSON: maximum recursion depth"),
    ):
        file = tmp_path / f"calibration{suffix}"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"calibration=.*{file}.*{message}"):
            read_texts(file, demo_folder("demo-draft"), tokens=64, vocab_size=4096, context=2048)
    missing = ["--format", "int4", "--calibration", str(tmp_path / "none.txt")]
    assert main(["quantize", "demo-draft", str(tmp_path / "out"), *missing]) == 2
    assert "none.txt" in capsys.readouterr().err and not (tmp_path / "out").exists()
    few = ["--format", "int4", "--calibration-tokens", "1"]
    assert main(["quantize", "demo-draft", str(tmp_path / "out"), *few]) == 2
    assert "calibration_tokens=1: 2 or more are needed" in capsys.readouterr().err
