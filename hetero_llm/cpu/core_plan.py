"""Who computes on which core, dealt out once at start where a draft worker runs, or a thread that
copies KV between device and host memory.

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
    """Logical CPUs, one for each core.

    Attributes:
        engine: of the engine's loop and all that works for it.
        draft: of the draft worker; none without one.
        shared: there is one core only, for everybody.
        copy: of the thread that copies KV, one of the engine's; None: no such thread, or nothing
            to choose.
    """

    engine: tuple[int, ...]
    draft: tuple[int, ...]
    shared: bool
    copy: int | None = None

    def words(self) -> str:
        """For the log and the start-up table."""
        if self.shared:
            return "one core for engine and draft worker alike"
        copies = "" if self.copy is None else f" (KV copies on {self.copy})"
        drafts = f", draft worker {_spans(self.draft)}" if self.draft else ""
        return f"engine {_spans(self.engine)}{copies}{drafts}"


def deal_cores(
    cpus: tuple[int, ...],
    *,
    target_on_cpu: bool,
    draft_threads: int | None,
    target_threads: int | None = None,
    copies: bool = False,
) -> CorePlan:
    """Shares cores out between the engine and a draft worker.

    Args:
        cpus: of `compute_cpus(reserve=0)`: the engine's come first.
        target_on_cpu: the engine computes, too: it gets three quarters.
        draft_threads: as the user says; None: what the engine leaves.
        target_threads: of a target on the CPU, as the user says.
        copies: a thread copies KV for the engine: it gets one of the engine's cores, which are two
            at least where the machine has three and the user does not say otherwise.

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
            least = 2 if copies and count > 2 else 1
            kept = max(least, min(_MOST_FOR_ENGINE, count // 4))
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
    engine, draft = cpus[: count - draft_threads], cpus[count - draft_threads :]
    return CorePlan(engine, draft, shared=False, copy=_copy_core(engine) if copies else None)


def deal_to_engine(cpus: tuple[int, ...]) -> CorePlan:
    """All cores for the engine of a GPU, whose KV copies have a thread, without a draft worker."""
    return CorePlan(cpus, (), shared=False, copy=_copy_core(cpus))


def _copy_core(engine: tuple[int, ...]) -> int:
    """Near the first, where the engine's loop is likely to run, and not the first if there is
    another."""
    return engine[min(len(engine), _MOST_FOR_ENGINE) - 1]


def _spans(cpus: tuple[int, ...]) -> str:
    """ "0-3,8"."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
