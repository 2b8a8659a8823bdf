"""Arguments about experts in host memory."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, ExpertConfig
from hetero_llm.config.expert_config import experts_from_args, worker_beside_experts
from hetero_llm.core.errors import ConfigError

DEFAULTS = {
    "moe_expert_memory": "auto", "moe_cpu_experts": "auto", "moe_expert_profile": None,
    "moe_link_lane": False,
}  # fmt: skip


def config_of(**args: Any) -> ExpertConfig:
    return experts_from_args({**DEFAULTS, **args})


def test_defaults() -> None:
    config = EngineConfig.from_args(resolve_engine_args({"model": "demo", **DEFAULTS})).experts
    assert config == ExpertConfig() == config_of()


def test_values() -> None:
    config = config_of(moe_expert_memory=1.5, moe_expert_profile="/a/scores")
    assert config == ExpertConfig(3 << 29, "auto", "/a/scores")
    assert config_of(moe_cpu_experts="off").cpu_experts == "off"
    assert config_of(moe_cpu_experts="all", moe_link_lane=True).link_lane


@pytest.mark.parametrize("choice", ["off", "all"])
@pytest.mark.parametrize("name", ["moe_expert_memory", "moe_expert_profile"])
def test_contradictions(choice: str, name: str) -> None:
    value = 8.0 if name == "moe_expert_memory" else "/a"
    with pytest.raises(ConfigError, match=f"no effect with moe_cpu_experts='{choice}'") as error:
        config_of(moe_cpu_experts=choice, **{name: value})
    assert error.value.field == name


def test_nothing_is_missed_where_no_expert_is_on_the_host() -> None:
    with pytest.raises(ConfigError, match="no effect with moe_cpu_experts='off'") as error:
        config_of(moe_cpu_experts="off", moe_link_lane=True)
    assert error.value.field == "moe_link_lane"


def test_the_warning_names_both_arguments() -> None:
    assert "cpu_draft_worker=True" in worker_beside_experts()
    assert "use_lookahead=True" in worker_beside_experts()
