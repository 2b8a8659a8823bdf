"""`hetero_llm.__all__` is exactly what the package offers, and every name of it resolves."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import hetero_llm
from hetero_llm.core import errors

NAMES = tuple(getattr(hetero_llm, "__all__", ()))


def test_all_is_sorted_out() -> None:
    assert NAMES, "hetero_llm needs __all__"
    assert len(NAMES) == len(set(NAMES))


def test_the_reference_names_are_there() -> None:
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"} <= set(NAMES)


def test_every_error_is_exported() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.HeteroLLMError)
    }
    assert tree <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves(name: str) -> None:
    value = getattr(hetero_llm, name)
    assert not isinstance(value, types.ModuleType)
    assert getattr(hetero_llm, name) is value


def test_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert hetero_llm.__version__ == project["version"]


def test_dir_is_all() -> None:
    assert sorted(dir(hetero_llm)) == sorted(NAMES)


def test_star_import_gives_all() -> None:
    code = "from hetero_llm import *; import hetero_llm as h; assert {*h.__all__} <= {*globals()}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        hetero_llm.NoSuchName  # noqa: B018
