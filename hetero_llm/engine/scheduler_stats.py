"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; tokens unless the name says otherwise.

    `num_requests_begun` counts requests whose prompt is done, `num_first_tokens` what was drawn
    from the prompts' own steps.

    `num_drafts` counts draft trees that were verified, `num_hit_drafts` those with an accepted
    node, `num_draft_tokens` their nodes and `num_accepted_tokens` the nodes that the target agreed
    with and that were emitted.
    """

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_requests_begun: int = 0
    num_requests_finished: int = 0
    num_first_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_hit_drafts: int = 0

    def count_draft(self, nodes: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += nodes
        self.num_accepted_tokens += accepted
        self.num_hit_drafts += accepted > 0
