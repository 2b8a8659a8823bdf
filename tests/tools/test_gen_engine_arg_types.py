"""The types of `LLM`'s arguments are those of the argument table."""

from __future__ import annotations

from pathlib import Path

from hetero_llm.config.args import ENGINE_ARGS
from hetero_llm.config.engine_arg_types import EngineArgTypes
from tools.gen_engine_arg_types import TARGET, render


def test_the_committed_module_is_current() -> None:
    assert Path(TARGET).read_text(encoding="utf-8") == render(), (
        "run python tools/gen_engine_arg_types.py"
    )


def test_every_argument_has_a_type() -> None:
    names = {name for spec in ENGINE_ARGS for name in (spec.name, *spec.aliases)}
    front_end = {"served_model_name", "disable_log_requests"}
    assert EngineArgTypes.__annotations__.keys() == names - {"model", "tokenizer"} | front_end
