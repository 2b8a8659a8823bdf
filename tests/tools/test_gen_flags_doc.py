"""docs/flags.md is what its generator writes, and leaves nothing out."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from hetero_llm.config.args import ARGS
from hetero_llm.config.args_sampling import SAMPLING_ARGS
from hetero_llm.config.args_spec import Kind
from hetero_llm.core.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen", ROOT / "tools" / "gen_flags_doc.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_document_is_current(generator: ModuleType) -> None:
    committed = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert committed == generator.render(), "run python tools/gen_flags_doc.py"


def test_every_argument_and_field_has_a_row(generator: ModuleType) -> None:
    text = generator.render()
    for spec in ARGS:
        assert f"`{spec.flag}`" in text
    for field in fields(SamplingParams):
        assert f"\n| `{field.name}` |" in text


def test_every_sampling_field_is_explained() -> None:
    assert [spec.name for spec in SAMPLING_ARGS] == [f.name for f in fields(SamplingParams)]
    assert all(spec.help for spec in SAMPLING_ARGS)
    objects = [spec.name for spec in SAMPLING_ARGS if spec.kind is Kind.PYTHON]
    later = ["logprob_token_ids", "guided_decoding", "structured_outputs"]
    assert objects == ["logits_processors", "output_kind", *later]
