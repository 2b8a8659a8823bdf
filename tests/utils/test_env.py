"""Environment variables: those that are read, those that are flags, those of other programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hetero_llm
from hetero_llm.config.args import foreign_of, spec_of
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils import env

PACKAGE = Path(hetero_llm.__file__).parent
REPOSITORY = PACKAGE.parent
SOURCES = (".py", ".cpp", ".h", ".c", ".cc", ".cu")
NAME = re.compile(r"HETERO_LLM_([A-Z][A-Z0-9_]*[A-Z0-9])")


def names_in(folder: Path) -> set[str]:
    """What follows HETERO_LLM_ in every variable that a source names."""
    files = [path for path in folder.rglob("*") if path.suffix in SOURCES]
    assert files
    return {name for path in files for name in NAME.findall(path.read_text("utf-8"))}


def test_every_variable_of_the_package_is_a_flag_or_known_as_none() -> None:
    """A variable that is no flag and not in OWN_NAMES would end `serve` as an unknown option."""
    named = names_in(PACKAGE) | set(NAME.findall((REPOSITORY / "Makefile").read_text("utf-8")))
    assert {"CACHE_DIR", "DRAFT_TRACE", "FAULTS"} <= named
    strangers = {name for name in named if not (spec_of(name.lower()) or foreign_of(name.lower()))}
    assert strangers == set(env.OWN_NAMES)
    listed = NAME.findall((REPOSITORY / "docs" / "env.md").read_text("utf-8"))
    assert set(env.OWN_NAMES) <= set(listed)


def test_no_name_of_our_own_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.OWN_NAMES:
        monkeypatch.setenv(f"HETERO_LLM_{name}", "1")
        assert spec_of(name.lower()) is None
    assert not env.flag_variables().keys() & {name.lower() for name in env.OWN_NAMES}


def test_variables_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.other_vllm_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert env.vllm_variables() == {} and env.other_vllm_variables() == []
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert env.vllm_variables() == {"api_key": "secret", "server_dev_mode": "1"}
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert env.other_vllm_variables() == ["VLLM_USE_V1"]
    assert env.vllm_batch_invariant()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT='yes': must be 0 or 1"):
        env.vllm_batch_invariant()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "")
    assert not env.vllm_batch_invariant()


def test_names_of_angel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_ID", "CONV_TEMPLATE", "DISABLE_MEM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert env.angel_names() == env.AngelNames()
    monkeypatch.setenv("MODEL_ID", "Qwen/Qwen2-7B-Instruct")
    monkeypatch.setenv("CONV_TEMPLATE", "")
    assert env.angel_names() == env.AngelNames("Qwen/Qwen2-7B-Instruct")
