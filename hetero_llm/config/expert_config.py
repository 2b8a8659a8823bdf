"""Which experts of a mixture stay in host memory, as the arguments say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from hetero_llm.core.errors import ConfigError

CpuExperts = Literal["auto", "off", "all"]
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Experts in host memory; without effect on models without experts and on a CPU alone.

    Attributes:
        bank_bytes: of the GPU's memory for experts; None: as many as fit.
        cpu_experts: "auto": the CPU computes what does not fit; "off": nothing; "all": all experts.
        profile: file of scores that is read at start and written at the end; None: none.
        link_lane: whether small steps may leave a part of the missed experts to the GPU.
    """

    bank_bytes: int | None = None
    cpu_experts: CpuExperts = "auto"
    profile: str | None = None
    link_lane: bool = False


def experts_from_args(args: Mapping[str, Any]) -> ExpertConfig:
    """Reads the arguments that begin with `moe_`.

    Args:
        args: The complete dict of `config.args.resolve_engine_args`.

    Raises:
        ConfigError: the values contradict each other.
    """
    memory, cpu_experts = args["moe_expert_memory"], args["moe_cpu_experts"]
    profile = args["moe_expert_profile"]
    if cpu_experts != "auto" and memory != "auto":
        held = "all" if cpu_experts == "off" else "no"
        reason = f"has no effect with moe_cpu_experts={cpu_experts!r}: the GPU has {held} experts"
        raise ConfigError("moe_expert_memory", memory, reason)
    if cpu_experts != "auto" and profile is not None:
        reason = f"has no effect with moe_cpu_experts={cpu_experts!r}: no expert changes its place"
        raise ConfigError("moe_expert_profile", profile, reason)
    if cpu_experts == "off" and args["moe_link_lane"]:
        reason = "has no effect with moe_cpu_experts='off': no expert is missed"
        raise ConfigError("moe_link_lane", True, reason)
    return ExpertConfig(
        bank_bytes=None if memory == "auto" else int(memory * _GIB),
        cpu_experts=cast("CpuExperts", cpu_experts),
        profile=profile,
        link_lane=args["moe_link_lane"],
    )


def worker_beside_experts() -> str:
    """Text of the warning if a draft worker and experts share the host."""
    return (
        "cpu_draft_worker=True is kept, but experts run on the CPU, too: both read weights from "
        "the same memory, and steps may get slower than without drafts; the lookahead cache "
        "(use_lookahead=True) needs no weights"
    )
