"""Which cores the engine, the draft worker and the KV copy thread run on, decided once at start.

Draft threads spin: a foreign thread on one of their cores makes a step up to 25 times slower. So
the draft worker gets cores of its own; the engine's loop and its helpers (lookahead threads, KV
copies, the API's process) share the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils import topology

_MAX_ENGINE_CORES = 4  # with a GPU target: loop, lookahead, copies, API


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Logical CPUs, one for each core.

    Attributes:
        engine: CPUs of the engine's loop and its helpers.
        draft: CPUs of the draft worker; empty without one.
        shared: the process may use one core only; engine and draft worker share it.
        copy: CPU of the KV copy thread, one of `engine`; None: no such thread.
    """

    engine: tuple[int, ...]
    draft: tuple[int, ...]
    shared: bool
    copy: int | None = None

    def words(self) -> str:
        """The plan as text, for the log and the start-up table."""
        if self.shared:
            return "one core for engine and draft worker alike"
        copies = "" if self.copy is None else f" (KV copies on {self.copy})"
        drafts = f", draft worker {_format_spans(self.draft)}" if self.draft else ""
        return f"engine {_format_spans(self.engine)}{copies}{drafts}"


def plan_cores(config: EngineConfig, *, target_on_cpu: bool) -> CorePlan | None:
    """Divide the cores of this process as the configuration needs. Returns None if it asks for
    neither a draft worker nor a KV copy thread.

    Raises:
        ConfigError: the configuration asks for more threads than there are cores.
    """
    draft = None if config.speculation is None else config.speculation.draft
    copies = config.offload is not None and not target_on_cpu
    drafts = draft is not None and draft.on_cpu
    if not drafts and not copies:
        return None
    cpus = topology.compute_cpus(reserve=0)
    if draft is None or not drafts:
        return deal_to_engine(cpus)
    return deal_cores(
        cpus, target_on_cpu=target_on_cpu, draft_threads=draft.threads,
        target_threads=config.cpu.threads if target_on_cpu else None, copies=copies,
    )  # fmt: skip


def deal_cores(
    cpus: tuple[int, ...],
    *,
    target_on_cpu: bool,
    draft_threads: int | None,
    target_threads: int | None = None,
    copies: bool = False,
) -> CorePlan:
    """Divide cores between the engine and a draft worker.

    Args:
        cpus: result of `compute_cpus(reserve=0)`; the engine gets the first ones.
        target_on_cpu: the target computes on these cores, too: the engine gets three quarters.
        draft_threads: threads of the draft worker; None: one for each core the engine leaves.
        target_threads: threads of a target on the CPU; None: not configured.
        copies: a KV copy thread runs on one of the engine's cores; the engine then gets at least
            two cores if there are three and `draft_threads` does not forbid it.

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
            kept = max(least, min(_MAX_ENGINE_CORES, count // 4))
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
    """All cores for the engine of a GPU target with a KV copy thread and no draft worker."""
    return CorePlan(cpus, (), shared=False, copy=_copy_core(cpus))


def deal_to_ranks(
    cpus: Sequence[int], homes: Sequence[int | None], node_of: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Divides cores between ranks: all get as many, since the slowest one counts, and as many as
    possible of the NUMA node at which their GPU sits.

    Args:
        cpus: one of each core; those of a node follow each other.
        homes: the node of each rank's GPU; None: unknown.
        node_of: the node of each of the CPUs, as far as it is known.

    Returns:
        For each rank its CPUs in the order of `cpus`. With fewer cores than ranks all have all.
    """
    each = len(cpus) // len(homes)
    if not each:
        return (tuple(cpus),) * len(homes)
    left = list(cpus)
    dealt: list[list[int]] = [[] for _ in homes]
    for _ in range(each):  # in turn, so that ranks at one node get as many of its cores
        for own, home in zip(dealt, homes, strict=True):
            near = (cpu for cpu in left if home is not None and node_of.get(cpu) == home)
            cpu = next(near, None)
            if cpu is not None:
                own.append(cpu)
                left.remove(cpu)
    for own in dealt:
        missing = each - len(own)
        own += left[:missing]
        del left[:missing]
    order = {cpu: place for place, cpu in enumerate(cpus)}
    return tuple(tuple(sorted(own, key=order.__getitem__)) for own in dealt)


def _copy_core(engine: tuple[int, ...]) -> int:
    """A core near the first one, where the engine's loop is likely to run, but not that one if
    there is another."""
    return engine[min(len(engine), _MAX_ENGINE_CORES) - 1]


def _format_spans(cpus: tuple[int, ...]) -> str:
    """The CPUs as ranges: "0-3,8"."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
