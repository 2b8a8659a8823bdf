"""`run`: the defaults and conversation templates of Angel-vLLM's page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.cli import main
from hetero_llm.commands.angel import with_angels_defaults
from hetero_llm.config.angel_templates import FOLDER
from hetero_llm.config.args import resolve_engine_args, resolve_server_args
from hetero_llm.core.errors import ConfigError
from hetero_llm.demo_models import demo_folder
from hetero_llm.utils.env import AngelNames

CONTEXT = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder("demo-draft"), tmp_path / "model"))


def added(folder: Path, names: AngelNames, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    server = {name: given.pop(name) for name in ("chat_template",) if name in given}
    found = with_angels_defaults({"model": str(folder), **given}, server, names)
    resolve_engine_args(found[0])
    resolve_server_args(found[1])
    return found


def test_context_and_names(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    longest = {"hf_overrides": {"max_position_embeddings": 9000}}
    engine, server = added(folder, AngelNames(), **longest)
    assert engine["max_model_len"] == 8192
    assert "8192 tokens of the model's 9000" in caplog.text
    assert server == {"served_model_name": ["model", str(folder)]}
    assert added(folder, AngelNames(), max_model_len=100, **longest)[0]["max_model_len"] == 100
    short = {"hf_overrides": {"max_position_embeddings": 300}}
    assert added(folder, AngelNames(), **short)[0]["max_model_len"] == 300
    _, server = added(folder, AngelNames(model_id="org/own"))
    assert server["served_model_name"] == ["org/own", str(folder)]


def test_the_memory_cache_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    added(folder, AngelNames(disable_mem_cache="true"))
    assert "DISABLE_MEM_CACHE has no effect" in caplog.text
    (folder / "ti_model_config.json").write_text("{}")
    added(folder, AngelNames())
    assert "ti_model_config.json is not read: set MODEL_ID or CONV_TEMPLATE" in caplog.text


@pytest.mark.parametrize(
    ("names", "template", "stops", "options"),
    [
        (AngelNames(conv_template="generate"), "generate", None, {}),
        (AngelNames("tencent/Hunyuan-Large"), "hunyuan", [127960, 127967], {}),
        (AngelNames("Llama-3.2-11B-Vision-Instruct"), None, None,
         {"enforce_eager": True, "max_num_seqs": 8}),
        (AngelNames("Llama-3.2-1B-Instruct"), None, None, {}),
        (AngelNames("Llama-3.1-8B-Instruct"), None, None, {}),
        (AngelNames("Qwen2.5-7B-Instruct"), None, None, {}),
        (AngelNames("Baichuan2-13B-Chat"), "baichuan2", None, {}),
        (AngelNames("Llama-2-7b-chat-hf"), "llama2", None, {}),
        (AngelNames("Meta-Llama-3-8B-Instruct"), "llama3", [128001, 128009], {}),
        (AngelNames("Qwen/Qwen2-7B-Instruct"), "qwen", [151643, 151644, 151645], {}),
        (AngelNames("own", "qwen-7b-chat"), "qwen", [151643, 151644, 151645], {}),
        (AngelNames("Qwen/Qwen2-VL-7B-Instruct"), None, None, {}),
        (AngelNames("Qwen/Qwen2-7B"), None, None, {}),
    ],
)  # fmt: skip
def test_rows_of_the_table(
    folder: Path, names: AngelNames, template: str | None, stops: Any, options: dict[str, Any]
) -> None:
    engine, server = added(folder, names)
    path = None if template is None else str(FOLDER / f"{template}.jinja")
    assert server.get("chat_template") == path
    wanted = engine.get("override_generation_config", {}).get("stop_token_ids")
    assert wanted == stops
    assert {name: engine[name] for name in engine if name in ("enforce_eager", "max_num_seqs")} == (
        options
    )


def test_what_is_given_stays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"stop_token_ids": [3], "top_k": 5}
    names = AngelNames("Qwen/Qwen2-7B-Instruct")
    engine, server = added(
        folder, names, chat_template="{{ own }}", override_generation_config=given
    )
    assert server["chat_template"] == "{{ own }}"
    assert engine["override_generation_config"] == given
    assert " adds " not in caplog.text
    engine, _ = added(folder, names, override_generation_config={"top_k": 5})
    assert engine["override_generation_config"]["top_k"] == 5
    assert "MODEL_ID=Qwen/Qwen2-7B-Instruct adds --chat-template qwen.jinja" in caplog.text


def test_mistakes(folder: Path) -> None:
    with pytest.raises(ConfigError, match="CONV_TEMPLATE='lama': must be generate, hunyuan"):
        added(folder, AngelNames(conv_template="lama"))
    for names in (AngelNames(conv_template="shennong_chat"), AngelNames("sn-7b")):
        with pytest.raises(ConfigError, match="is not public; give --chat-template"):
            added(folder, names)
        assert added(folder, names, chat_template="{{ own }}")


SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}
ANSWER = {"role": "assistant", "content": "A"}
WRITTEN = {
    "generate": "SUAU",
    "qwen": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] U [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "baichuan2": "S<reserved_106>U<reserved_107>A<reserved_106>U<reserved_107>",
    "hunyuan": "<|startoftext|>S<|extra_4|>U<|extra_0|>A<|eos|><|startoftext|>U<|extra_0|>",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir()))
def test_templates(name: str) -> None:
    jinja = pytest.importorskip("jinja2")
    template = jinja.Environment().from_string((FOLDER / f"{name}.jinja").read_text("utf-8"))
    written = template.render(
        messages=[SYSTEM, USER, ANSWER, USER],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert written == WRITTEN[name]


def test_the_command_has_the_pages_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("hetero_llm.server.serving.serve", lambda *args: started.append(args) or 0)
    monkeypatch.delenv("MODEL", raising=False)
    assert main(["run"]) == 2
    assert "/data/model" in capsys.readouterr().err
    monkeypatch.setenv("MODEL", str(folder))
    assert main(["run"]) == 0
    ((engine, server),) = started
    assert engine["model"] == str(folder) and server["port"] == 8501
    assert main(["run", "--port", "1", "--max-model-len", "64"]) == 0
    assert started[1][1]["port"] == 1 and started[1][0]["max_model_len"] == 64


def test_the_key_of_vllm_is_required_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("hetero_llm.server.serving.serve", lambda *args: started.append(args) or 0)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert main(["serve", "demo"]) == 0
    assert started[-1][1]["api_key"] == ("secret",)
    assert "requests need the API key of VLLM_API_KEY" in caplog.text
    assert "without effect here" in caplog.text and "VLLM_USE_V1" in caplog.text
    caplog.clear()
    monkeypatch.setenv("HETERO_LLM_API_KEY", "ours")
    assert main(["serve", "demo"]) == 0
    assert started[-1][1]["api_key"] == ("ours",) and "VLLM_API_KEY" not in caplog.text
    assert main(["serve", "demo", "--api-key", "flag"]) == 0
    assert started[-1][1]["api_key"] == ("flag",)
