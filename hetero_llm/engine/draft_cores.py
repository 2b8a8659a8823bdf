"""Which cores the draft worker gets, for who starts it and who tells of it. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_llm.core.config import EngineConfig

if TYPE_CHECKING:
    from hetero_llm.cpu.core_plan import CorePlan


def plan_cores(config: EngineConfig, *, target_on_cpu: bool) -> CorePlan | None:
    """Shares out the cores of this process; None if no draft worker is asked for.

    Raises:
        ConfigError: there are not as many as are asked for.
    """
    draft = None if config.speculation is None else config.speculation.draft
    if draft is None or not draft.on_cpu:
        return None
    from hetero_llm.cpu.core_plan import deal_cores
    from hetero_llm.cpu.topology import compute_cpus

    return deal_cores(
        compute_cpus(reserve=0), target_on_cpu=target_on_cpu, draft_threads=draft.threads,
        target_threads=config.cpu.threads if target_on_cpu else None,
    )  # fmt: skip
