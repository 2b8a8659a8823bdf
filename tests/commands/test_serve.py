"""Options of `hetero-llm serve`: where they come from, and which one holds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.cli import build_parser, main
from hetero_llm.commands.serve import gather
from hetero_llm.config.args import ARGS, SERVER_ARGS, Kind, Status, resolve_server_args
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils import env


def options(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *words])


def gathered(*words: str, **variables: str) -> dict[str, Any]:
    engine, server = gather(options(*words), variables)
    assert not engine.keys() & server.keys()
    return {**engine, **server}


def test_the_command_line_beats_the_variable_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: in-file\nport: 1\nhost: in-file\nmax-num-seqs: 5\nmax_model_len: 64k\n")
    found = gathered("--config", str(file), "--port", "3", port="2", host="in-variable")
    assert found == {
        "config": str(file),
        "model": "in-file",
        "port": 3,
        "host": "in-variable",
        "max_num_seqs": 5,
        "max_model_len": 64_000,
    }
    assert gathered(config=str(file))["port"] == 1
    assert gathered("named", config=str(file))["model"] == "named"


def test_lists_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text('api-key: [a, b]\nallowed-origins: \'["c", "d"]\'\n')
    assert gathered("m", "--config", str(file))["api_key"] == ["a", "b"]
    assert gathered("m", "--config", str(file))["allowed_origins"] == ["c", "d"]
    assert gathered("m", "--api-key", "a", "--api-keys", "b")["api_key"] == ["a", "b"]
    assert gathered("m", "--allowed_origins", '["*"]')["allowed_origins"] == ["*"]
    assert gathered("m", api_key="a,b")["api_key"] == ["a", "b"]
    assert gathered("m", api_key='["a,b"]')["api_key"] == ["a,b"]
    names = ("--served-model-name", "a", "org/b")
    for words in (("m", *names), ("m", *names, "--port", "1"), (*names, "--model", "m"),
                  ("m", "--served-model-name", "a", "--served_model_name", "org/b")):  # fmt: skip
        assert gathered(*words)["served_model_name"] == ["a", "org/b"], words
        assert gathered(*words)["model"] == "m"
    several = gathered("m", "--served-model-name", "a", "b", "--served-model-name", "c")
    assert several["served_model_name"] == ["a", "b", "c"]
    resolved = resolve_server_args({"api_key": ["a"], "served_model_name": "x"})
    assert resolved["api_key"] == ("a",) and resolved["served_model_name"] == ("x",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "prot=1: unknown option; did you mean 'port'"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("port: 1\n--port: 2", "unknown option"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "is given twice"),
        ("config: other.yaml", "cannot name another"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        gathered("m", "--config", str(file))


def test_other_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="options.yaml'?: cannot be read"):
        gathered("m", "--config", str(tmp_path / "options.yaml"))
    with pytest.raises(ConfigError, match="HETERO_LLM_MAX_MODEL_LENGTH=.*'max_model_len'"):
        gathered("m", max_model_length="5")
    with pytest.raises(ConfigError, match="port='x': must be an integer"):
        gathered("m", port="x")
    with pytest.raises(ConfigError, match="model=None: is required"):
        gathered("--port", "1")
    with pytest.raises(ConfigError, match="is required.*: write MODEL before it"):
        gathered("--served-model-name", "a", "m")
    with pytest.raises(ConfigError, match="contradicts the first argument"):
        gathered("a", "--model", "b")
    with pytest.raises(ConfigError, match="allowed_origins='\\['.* is not a JSON list"):
        gathered("m", "--allowed-origins", "[")
    for name, value in (("port", 65536), ("shutdown_timeout", -1.0), ("step_timeout", 0.0)):
        with pytest.raises(ConfigError, match=name):
            resolve_server_args({name: value})
    for name in ("lora_modules", "prompt_adapters"):
        found = gathered("m", f"--{name.replace('_', '-')}", "a=b", "c=d")[name]
        assert found == ["a=b", "c=d"]


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "hetero_llm.server.serving", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "demo"]) == 2
    said = capsys.readouterr().err
    assert said == "hetero-llm: error: the server needs uvicorn: pip install 'hetero-llm[server]'\n"


def test_mistakes_end_the_command_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such/folder", "--port", "0"]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "no/such/folder" in said[0]


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HETERO_LLM_PORT": "7",
        "HETERO_LLM_CPU_ISA": "avx2",  # not a flag
        "HETERO_LLM_HOST": "",
        "MODEL": "angel",
        "USE_LOOKAHEAD": "1",
        "TRUST_REMOTE_CODE": "false",
        "GPU_MEMORY_UTILIZATION": "0.5",
        "ENABLE_CACHE_OFFLOAD": "true",
        "ENABLE_HIT_CNT": "false",
    }.items():
        monkeypatch.setenv(name, value)
    ours = env.flag_variables()
    assert ours["port"] == "7" and "cpu_isa" not in ours and "host" not in ours
    found = gathered(**{**env.angel_variables(), **ours})
    assert found["model"] == "angel"
    assert found["use_lookahead"] is True and found["trust_remote_code"] is False
    assert found["gpu_memory_utilization"] == 0.5
    assert found["enable_prefix_cache_offload"] is True
    assert found["apc_offload_enable_hit_cnt"] is False


def test_every_angel_name_is_an_argument() -> None:
    known = {spec.name for spec in ARGS}
    assert set(env.ANGEL_NAMES.values()) <= known


@pytest.mark.parametrize("spec", SERVER_ARGS, ids=lambda spec: spec.name)
def test_every_flag_parses(spec: Any) -> None:
    words = {
        Kind.BOOL: (),
        Kind.INT: ("1",),
        Kind.FLOAT: ("1.5",),
        Kind.LIST: ("a",),
        Kind.STR: (str(spec.choices[0]) if spec.choices else "a",),
        Kind.PATH: ("a",),
    }[spec.kind]
    value = vars(options("m", spec.flag, *words))[spec.name]
    if spec.status is Status.EFFECTIVE:
        resolve_server_args({spec.name: value})
