"""Who computes on which core, dealt out once at start where a draft worker runs.

Draft threads spin: a thread of somebody else's on one of their cores costs up to 25 times a step.
So the worker gets cores of its own, the engine's loop and what works for it (lookahead threads,
copies, the API's process) get the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_llm.core.errors import ConfigError

_MOST_FOR_ENGINE = 4  # of a GPU target: loop, lookahead, copies, API


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Logical CPUs, one for each core. `shared`: there is one core only, for everybody."""

    engine: tuple[int, ...]
    draft: tuple[int, ...]
    shared: bool

    def words(self) -> str:
        """For the log and the start-up table."""
        if self.shared:
            return "one core for engine and draft worker alike"
        return f"engine {_spans(self.engine)}, draft worker {_spans(self.draft)}"


def deal_cores(
    cpus: tuple[int, ...],
    *,
    target_on_cpu: bool,
    draft_threads: int | None,
    target_threads: int | None = None,
) -> CorePlan:
    """Shares cores out.

    Args:
        cpus: of `compute_cpus(reserve=0)`: the engine's come first.
        target_on_cpu: the engine computes, too: it gets three quarters.
        draft_threads: as the user says; None: what the engine leaves.
        target_threads: of a target on the CPU, as the user says.

    Raises:
        ConfigError: more threads than cores.
    """
    count = len(cpus)
    if count == 1:
        if draft_threads is not None and draft_threads > 1:
            raise ConfigError("draft_threads", draft_threads, "this process may use one core")
        return CorePlan(cpus, cpus, shared=True)
    if draft_threads is None:
        if target_threads is not None:
            kept = target_threads
        elif target_on_cpu:
            kept = count - count // 4
        else:
            kept = max(1, min(_MOST_FOR_ENGINE, count // 4))
        draft_threads = max(1, count - kept)
    if draft_threads >= count:
        reason = f"this process may use {count} cores and the engine needs one of them"
        raise ConfigError("draft_threads", draft_threads, reason)
    if target_threads is not None and target_threads > count - draft_threads:
        reason = (
            f"this process may use {count} cores, of which the draft worker has {draft_threads}: "
            f"{count - draft_threads} are left"
        )
        raise ConfigError("cpu_threads", target_threads, reason)
    return CorePlan(cpus[: count - draft_threads], cpus[count - draft_threads :], shared=False)


def _spans(cpus: tuple[int, ...]) -> str:
    """ "0-3,8"."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
