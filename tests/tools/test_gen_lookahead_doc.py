"""docs/lookahead_cache.md lists every key of the configuration as it is."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from hetero_llm.config.lookahead_config import KEYS, LookaheadConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "tools" / "gen_lookahead_doc.py"
    spec = importlib.util.spec_from_file_location("gen_lookahead", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_document_is_current(generator: ModuleType) -> None:
    committed = (ROOT / "docs" / "lookahead_cache.md").read_text(encoding="utf-8")
    assert committed == generator.updated(committed), "run python tools/gen_lookahead_doc.py"


def test_every_key_has_a_row_with_its_default(generator: ModuleType) -> None:
    rows = [row.split(" | ") for row in generator.render().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{key}`" for key in KEYS]
    defaults = {row[0][3:-1]: row[2].strip("` ") for row in rows}
    for field in fields(LookaheadConfig):
        expected = "" if field.default is None else str(field.default)
        assert defaults[field.name].lower() == expected.lower()
    assert all(len(row) == 4 and len(row[3]) > 15 for row in rows)
