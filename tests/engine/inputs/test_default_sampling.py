"""Sampling defaults out of generation_config.json, for `LLM` and for the server's engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import LLM, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, GenerationDefaults
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.demo_models import demo_folder
from hetero_llm.engine.inputs.default_sampling import default_sampling, with_defaults
from hetero_llm.engine.resolve import open_model
from tests.helpers.gguf_files import GgufWriter

STATED = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": None,
    "repetition_penalty": 1.05,
    "max_new_tokens": 5,
    "do_sample": True,
    "eos_token_id": [0],
}
FIELDS = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_tokens": 5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(demo_folder("demo-draft"), tmp_path / "model"))
    state(copy, STATED)
    return copy


def state(folder: Path, values: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))


def defaults(folder: Path, **given: Any) -> dict[str, Any]:
    args = resolve_engine_args({"model": str(folder), **given})
    return dict(open_model(EngineConfig.from_args(args)).default_sampling)


def test_sources(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert defaults(folder) == defaults(folder, generation_config=None) == FIELDS
    assert all("--generation-config vllm leaves them out" in line for line in caplog.messages)
    caplog.clear()
    assert defaults(folder, generation_config="vllm") == {}
    state(tmp_path / "other", {"temperature": 0.1})
    state(folder, {"do_sample": False})
    assert defaults(folder) == {} and not caplog.messages
    assert defaults(folder, generation_config=tmp_path / "other") == {"temperature": 0.1}
    (folder / "generation_config.json").unlink()
    assert defaults(folder) == {}


def test_a_gguf_file_states_some(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read(**stated: Any) -> dict[str, Any]:
        metadata = {f"general.sampling.{name}": value for name, value in stated.items()}
        path = GgufWriter(metadata).write(tmp_path / "a.gguf")
        return default_sampling(GenerationDefaults(), path)

    assert read() == {} and not caplog.messages
    found = read(temp=0.6, top_k=20, top_p=0.95, min_p=0.0, mirostat=2, penalty_last_n=64)
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    assert "no effect: 'general.sampling.mirostat', 'general.sampling.penalty" in caplog.text
    with pytest.raises(ModelLoadError, match=r"general.sampling.temp='hot': a number is needed"):
        read(temp="hot")
    with pytest.raises(ModelLoadError, match=r"a.gguf: .*top_p.*--generation-config vllm"):
        read(top_p=7.0)
    assert default_sampling(GenerationDefaults("vllm"), tmp_path / "a.gguf") == {}


def test_overrides(folder: Path) -> None:
    changed = {"temperature": 0.0, "max_new_tokens": 9, "stop_token_ids": [7]}
    assert defaults(folder, override_generation_config=changed) == {
        **FIELDS,
        "temperature": 0.0,
        "max_tokens": 9,
        "stop_token_ids": [7],
    }
    only = defaults(folder, generation_config="vllm", override_generation_config={"top_k": 3})
    assert only == {"top_k": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"generation_config": "/no/such"},
            "auto, vllm or a folder with generation_config",
        ),
        ({"override_generation_config": {"temprature": 1}}, "'temprature' is no sampling default"),
        ({"override_generation_config": {"top_p": 2.0}}, "top_p=2.0: must be at most 1"),
        ({"override_generation_config": "x"}, "must be a mapping"),
    ],
)
def test_mistakes_of_the_user(folder: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(folder, **given)


def test_mistakes_in_the_file(folder: Path) -> None:
    state(folder, {"temperature": "hot"})
    with pytest.raises(ModelLoadError, match="generation_config.json: temperature='hot'"):
        defaults(folder)
    assert defaults(folder, generation_config="vllm") == {}


def test_what_a_request_states_counts() -> None:
    assert with_defaults(FIELDS, {"temperature": 0.0, "max_tokens": None}) == {
        **FIELDS,
        "temperature": 0.0,
        "max_tokens": None,
    }
    beams = {"use_beam_search": True, "best_of": 2, "temperature": 0.0}
    assert with_defaults(FIELDS, beams) == {
        **beams,
        "repetition_penalty": 1.05,
        "max_tokens": 5,
    }


def test_llm(folder: Path) -> None:
    greedy = {"temperature": 0.0}
    with LLM(
        str(folder), override_generation_config=greedy, dtype="float32", max_model_len=64
    ) as llm:
        expected = SamplingParams(**{**FIELDS, **greedy})
        assert llm.get_default_sampling_params() == expected
        assert llm.default_sampling == {**FIELDS, **greedy}
        (left_out,) = llm.generate("def add(", use_tqdm=False)
        (stated,) = llm.generate("def add(", expected, use_tqdm=False)
        assert len(left_out.outputs[0].token_ids) == 5
        assert left_out.outputs[0].token_ids == stated.outputs[0].token_ids
        *_, streamed = llm.stream("def add(")
        assert streamed.outputs[0].token_ids == stated.outputs[0].token_ids
        (own,) = llm.generate("def add(", SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(own.outputs[0].token_ids) == 2
