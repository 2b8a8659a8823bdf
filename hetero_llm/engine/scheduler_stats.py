"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; tokens unless the name says otherwise.

    `num_drafts` counts draft trees that were verified, `num_draft_tokens` their nodes and
    `num_accepted_tokens` the nodes that the target agreed with.
    """

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_requests_finished: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count_draft(self, nodes: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += nodes
        self.num_accepted_tokens += accepted
