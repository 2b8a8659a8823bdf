"""Which cores the draft worker and the thread that copies KV get, for who starts them and who tells
of them. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_llm.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from hetero_llm.cpu.core_plan import CorePlan


def plan_cores(config: EngineConfig, *, target_on_cpu: bool) -> CorePlan | None:
    """Shares out the cores of this process; None if nobody needs one of their own: no draft worker
    and no thread that copies KV is asked for.

    Raises:
        ConfigError: there are not as many as are asked for.
    """
    draft = None if config.speculation is None else config.speculation.draft
    copies = config.offload is not None and not target_on_cpu
    drafts = draft is not None and draft.on_cpu
    if not drafts and not copies:
        return None
    from hetero_llm.cpu.core_plan import deal_cores, deal_to_engine
    from hetero_llm.utils.topology import compute_cpus

    cpus = compute_cpus(reserve=0)
    if draft is None or not drafts:
        return deal_to_engine(cpus)
    return deal_cores(
        cpus, target_on_cpu=target_on_cpu, draft_threads=draft.threads,
        target_threads=config.cpu.threads if target_on_cpu else None, copies=copies,
    )  # fmt: skip
