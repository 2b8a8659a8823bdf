"""What the arguments say about all constraints of outputs."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.constraints_config import ConstraintsConfig
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError


def config_of(**given: Any) -> ConstraintsConfig:
    return EngineConfig.from_args(resolve_engine_args({"model": "demo", **given})).constraints


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"guided_decoding_disable_fallback": True}, {}),
        ({"guided_decoding_disable_any_whitespace": True}, {"disable_any_whitespace": True}),
        (
            {"guided_decoding_disable_additional_properties": True},
            {"disable_additional_properties": True},
        ),
        ({"reasoning_parser": "qwen3"}, {"reasoning_parser": "qwen3"}),
        ({"reasoning_parser": ""}, {}),
        ({"structured_outputs_config": {}}, {}),
        (
            {
                "structured_outputs_config": {
                    "backend": "guidance",
                    "disable_fallback": True,
                    "disable_any_whitespace": True,
                    "disable_additional_properties": True,
                    "reasoning_parser": "deepseek_r1",
                    "reasoning_parser_plugin": "",
                    "enable_in_reasoning": True,
                },
                "guided_decoding_backend": "guidance",
                "reasoning_parser": "deepseek_r1",
            },
            {
                "disable_any_whitespace": True,
                "disable_additional_properties": True,
                "reasoning_parser": "deepseek_r1",
                "enable_in_reasoning": True,
            },
        ),
        ({"structured_outputs_config": {"reasoning_parser": ""}, "reasoning_parser": "qwen3"},
         {"reasoning_parser": "qwen3"}),
    ],
)  # fmt: skip
def test_arguments(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_of(**given) == ConstraintsConfig(**expected)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"backend": "regexes"}, "structured_outputs_config.backend='regexes': must be 'auto'"),
        ({"backend": ["guidance"]}, "structured_outputs_config.backend=['guidance']: must be"),
        ({"backend": "guidance"}, "structured_outputs_config.backend='guidance': contradicts "
         "guided_decoding_backend='xgrammar'"),
        ({"reasoning_parser": "qwen4"}, "structured_outputs_config.reasoning_parser='qwen4': must"),
        ({"reasoning_parser": "qwen3"}, "structured_outputs_config.reasoning_parser='qwen3': "
         "contradicts reasoning_parser='glm45'"),
        ({"reasoning_parser_plugin": "a.py"}, "structured_outputs_config.reasoning_parser_plugin="
         "'a.py': a parser of reasoning of your own is not available yet"),
        ({"disable_any_whitespace": 1}, "structured_outputs_config.disable_any_whitespace=1: must "
         "be true or false"),
        ({"whitespace": True}, "structured_outputs_config='whitespace': is no key of it; use"),
        ("guidance", "structured_outputs_config='guidance': must be a mapping"),
    ],
)  # fmt: skip
def test_mistakes(mapping: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(
            structured_outputs_config=mapping,
            guided_decoding_backend="xgrammar",
            reasoning_parser="glm45",
        )
    assert str(caught.value).startswith(message)
